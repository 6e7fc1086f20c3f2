"""``torch.func.functional_call``: a module called with other tensors in the places of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.utils import stateless

from gradsplit.compile_core.capture.object_model.modules import ModuleValue
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.mappings import DictValue
from gradsplit.compile_core.capture.values.tensors import TensorValue


@answer_to(torch.func.functional_call, stateless.functional_call)
def _functional_call(
    state: CaptureState,
    module: Value,
    parameter_and_buffer_dicts: Value,
    args: Value | None = None,
    kwargs: Value | None = None,
    *,
    tie_weights: Value | None = None,
    strict: Value | None = None,
) -> Any:
    if not isinstance(module, ModuleValue) or tie_weights is not None or strict is not None:
        raise state.unsupported("functional-call", "functional_call of no module, or with options")
    given = _given(state, parameter_and_buffer_dicts)
    _check_not_tied(state, module, given)
    if args is None:
        positional: list[Value] = []
    else:
        positional = args.all(state) if isinstance(args, SequenceValue) and args.cls is tuple else [args]
    named = {} if kwargs is None or isinstance(kwargs, ConstantValue) else _entries(state, kwargs)
    with ExitStack() as stack:
        for path, value in given.items():
            stack.enter_context(_replaced(state, module, path, value))
        return module.call(state, positional, named)


def _entries(state: CaptureState, value: Value) -> dict[str, Value]:
    if not isinstance(value, DictValue):
        raise state.unsupported("functional-call", f"functional_call with {value.describe()}")
    return value.held(state)


def _given(state: CaptureState, value: Value) -> dict[str, Value]:
    given: dict[str, Value] = {}
    for part in (
        value.all(state) if isinstance(value, SequenceValue) and value.cls in (tuple, list) else [value]
    ):
        given |= _entries(state, part)
    return given


def _check_not_tied(state: CaptureState, module: ModuleValue, given: dict[str, Value]) -> None:
    """A tensor under several names is replaced under all of them; that has no rule."""
    names = [*module.real.named_parameters(remove_duplicate=False)]
    names += module.real.named_buffers(remove_duplicate=False)
    replaced = {id(tensor) for name, tensor in names if name in given}
    if sum(id(tensor) in replaced for _, tensor in names) != len(replaced):
        raise state.unsupported(
            "functional-call", "functional_call that replaces a tensor with several names"
        )


@contextmanager
def _replaced(state: CaptureState, module: ModuleValue, path: str, value: Value) -> Iterator[None]:
    prefix, _, name = path.rpartition(".")
    owner: Value = module
    for part in prefix.split(".") if prefix else ():
        owner = owner.get_attribute(state, part)
    known = isinstance(owner, ModuleValue) and isinstance(owner.table_entry(state, name), TensorValue)
    if not isinstance(owner, ModuleValue) or not known or not isinstance(value, TensorValue):
        raise state.unsupported(
            "functional-call", f"functional_call that replaces {path!r} by {value.describe()}"
        )
    before = owner.replaced
    owner.replaced = {**before, name: value}
    try:
        yield
    finally:
        owner.replaced = before
        if name in owner.changes:
            raise state.unsupported("functional-call", f"a store to {path!r}, which functional_call replaces")
