"""``torch.optim``: what its decorators mean, so that a step is captured as the loop over parameters that it is.

The functions of ``torch.optim`` are wrapped for torch's own compiler and for its profiler. Here each wrapper is
replaced by what it does to values: gradients are switched, the rest is called.

``torch.compiler.is_compiling()`` is false inside of ``torch.optim``: there it selects other arithmetic (powers of
a float32 step count instead of Python's floats), and a captured step must give what a plain one gives.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.optim.optimizer as library

from gradsplit.compile_core.capture.torch_rules.modes import grad_mode
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to, decorator_rule
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import ListValue, SequenceValue
from gradsplit.compile_core.capture.values.mappings import new_dict
from gradsplit.compile_core.torch_facts.bindings import disable_torch_compile, group_by_device_and_dtype
from gradsplit.compile_core.torch_facts.optimizers import (
    group_tensors,
    use_grad_for_differentiable,
)

_SCOPE = "torch.optim."


answer_to(torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling)(
    lambda state: not state.calling_module().startswith(_SCOPE)
)


@decorator_rule(disable_torch_compile(lambda: None))
def _disable_compiler(
    decorated: Any, state: CaptureState, args: list[Value], kwargs: dict[str, Value]
) -> Value:
    """Parts of optimizers are excluded from torch's compiler for its own reasons; everything else that is
    excluded stays so."""
    function = inspect.getclosurevars(decorated).nonlocals["fn"]
    if not str(function.__module__).startswith(_SCOPE):
        raise state.unsupported("disabled", f"{function.__qualname__} is excluded from compilation")
    return state.wrap(function, None).call(state, args, kwargs)


@decorator_rule(use_grad_for_differentiable(lambda: None))
def _use_grad(decorated: Any, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """A step runs with gradients only where the optimizer is differentiable."""
    defaults = args[0].get_attribute(state, "defaults")
    differentiable = defaults.get_item(state, ConstantValue("differentiable")).truth(state)
    function = inspect.getclosurevars(decorated).nonlocals["func"]
    with grad_mode(state, differentiable):
        return state.wrap(function, None).call(state, args, kwargs)


# Warns and raises about the recording of graphs of an accelerator, which a captured step has no part in.
for _name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
    if hasattr(library.Optimizer, _name):
        answer_to(getattr(library.Optimizer, _name))(lambda state, *args, **kwargs: None)


@answer_to(group_tensors, group_by_device_and_dtype)
def _group_tensors(state: CaptureState, lists: Value, with_indices: Value | None = None) -> Any:
    """Lists of tensors side by side, cut into groups by the device and dtype of the first list."""
    columns = [state.items_of(column) for column in state.items_of(lists)]
    groups: dict[Any, list[int]] = {}
    for index, tensor in enumerate(columns[0]):
        key = tuple(tensor.get_attribute(state, name).as_constant() for name in ("device", "dtype"))
        groups.setdefault(key, []).append(index)
    pairs: list[tuple[Value, Value]] = []
    for key, indices in groups.items():
        picked: list[Any] = [ListValue([column[k] for k in indices if column]) for column in columns]
        wanted = with_indices is not None and with_indices.truth(state)
        places = ListValue([ConstantValue(k) for k in indices if wanted])
        pairs.append((state.from_constant(key), SequenceValue([ListValue(picked), places], tuple)))
    return new_dict(pairs, state)
