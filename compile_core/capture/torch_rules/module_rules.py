"""Rules for functions that torch's module classes are written with."""

from __future__ import annotations

import torch

from gradsplit.compile_core.capture.object_model.modules import ModuleValue
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import call_rule
from gradsplit.compile_core.capture.values.constants import ConstantValue


@call_rule(torch.nn.Module.__getattr__)
def _getattr(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """Called by name where a class has a ``__getattr__`` of its own."""
    module, name = args
    if not isinstance(module, ModuleValue):
        raise TypeError(f"torch.nn.Module.__getattr__ of {module.describe()}")
    return module.registered_attribute(state, name.as_constant())


@call_rule(torch._C._log_api_usage_once)
def _log_api_usage(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return ConstantValue(None)
