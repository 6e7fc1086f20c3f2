"""Rules for functions that torch's module classes are written with."""

from __future__ import annotations

from typing import Any

import torch

from gradsplit.compile_core.capture.object_model.modules import ModuleValue
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to
from gradsplit.compile_core.torch_facts.bindings import log_api_usage_once


@answer_to(torch.nn.Module.__getattr__)
def _getattr(state: CaptureState, module: Value, name: Value) -> Any:
    """Called by name where a class has a ``__getattr__`` of its own."""
    if not isinstance(module, ModuleValue):
        raise TypeError(f"torch.nn.Module.__getattr__ of {module.describe()}")
    return module.registered_attribute(state, name.as_constant())


answer_to(log_api_usage_once)(lambda state, *args: None)
