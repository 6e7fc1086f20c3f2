"""Functions that functionalization does not know, in a joint trace: each call becomes a kept call.

A user's operator that writes to tensors works there on copies of these and returns them beside its results; the trace
then changes the tensors by what the call returns. A draw from a generator of the program takes its state and returns
the next one.

Limits, each an ``Unsupported``: an operator under autograd, whose rules for gradients speak of tensors that change; one
that returns anything but new tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from gradsplit.compile_core.autograd.tracing.kept_calls import KeptCalls
from gradsplit.compile_core.autograd.tracing.record_operators import outside_of_recording
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.generator_draws import with_generator
from gradsplit.compile_core.ir.kept_calls import KeptCall
from gradsplit.compile_core.ir.tensor_spec import TensorSpec


def functional_custom_operators(
    module: GraphModule, calls: KeptCalls, fake_mode: FakeTensorMode
) -> Mapping[Any, Callable[..., Any]]:
    """What is run in the place of those of them that the program calls."""
    targets = {
        node.target
        for graph in (inner.graph for inner in module.modules() if isinstance(inner, GraphModule))
        for node in graph.nodes
        if isinstance(node.target, OpOverload)
    }
    return {
        target: _Functional(target, calls, fake_mode).call
        for target in targets
        if target._schema.is_mutable and target.namespace not in ("aten", "prims", "prim")
    }


class _Functional:
    """Calls ``operator`` as a function without side effects, and has the side effects itself."""

    def __init__(self, operator: OpOverload, calls: KeptCalls, fake_mode: FakeTensorMode) -> None:
        self._operator = operator
        self._calls = calls
        self._fake_mode = fake_mode

    def call(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._operator(*args, **kwargs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise Unsupported(
                "custom-operator-gradient", f"{self._operator} changes its arguments and is differentiated"
            )
        written = self._written(args, kwargs, tensors)
        name = self._operator.__name__
        outputs = keep_whole(self._calls, self._fake_mode, name, self._operator, args, kwargs, written)
        for k, new in zip(written, outputs[len(outputs) - len(written) :], strict=True):
            tensors[k].copy_(new)
        results = outputs[: len(outputs) - len(written)]
        returns = len(self._operator._schema.returns)
        return None if returns == 0 else results[0] if returns == 1 else tuple(results)

    def _written(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]
    ) -> list[int]:
        """Positions of the tensors that the schema says are changed."""
        changed: set[int] = set()
        schema = self._operator._schema
        if any(value.alias_info is not None for value in schema.returns):
            raise Unsupported("custom-operator-result", f"{self._operator} returns what it was given")
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            changed |= {id(leaf) for leaf in pytree.tree_leaves(value)}
        return [k for k, tensor in enumerate(tensors) if id(tensor) in changed]


def keep_whole(
    calls: KeptCalls,
    fake_mode: FakeTensorMode,
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    written: Sequence[int] = (),
) -> list[torch.Tensor]:
    """Record a call of a function that returns new tensors, on whatever structure of tensors and constants.

    Args:
        written: positions among the tensors of those that the function changes.

    Returns:
        The function's results, then what became of the tensors that it changes; none has a history.

    Raises:
        Unsupported: an argument is a number that differs between calls, or the function returns more than tensors.
    """
    values, structure = pytree.tree_flatten((args, kwargs))
    if any(isinstance(value, (torch.SymFloat, torch.SymBool)) for value in values):
        raise Unsupported("number-in-kept-call", f"{name} takes a number that differs between calls")
    places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
    counts = [place for place, value in enumerate(values) if isinstance(value, torch.SymInt)]
    tensors: list[torch.Tensor] = [values[place] for place in places]
    constants = [None if isinstance(value, (torch.Tensor, torch.SymInt)) else value for value in values]

    def filled(tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> list[torch.Tensor]:
        passed = [tensor.clone() if k in written else tensor for k, tensor in enumerate(tensors)]
        given = list(constants)
        for place, value in zip((*places, *counts), (*passed, *numbers), strict=True):
            given[place] = value
        positional, named = pytree.tree_unflatten(given, structure)
        return [*_tensors(function(*positional, **named)), *(passed[k] for k in written)]

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        return filled(given[: len(places)], [int(count) for count in given[len(places) :]])

    like = [TensorSpec.of(tensor) for tensor in tensors]
    with outside_of_recording(), fake_mode:
        examples = filled([spec.empty() for spec in like], [values[place] for place in counts])
    tensors += [torch.full((), values[place], dtype=torch.int64, device="cpu") for place in counts]
    return calls.call(KeptCall(name, run, [TensorSpec.of(example) for example in examples]), tensors)


def drawing_by_state(
    calls: KeptCalls, fake_mode: FakeTensorMode
) -> Mapping[Any, Callable[..., tuple[torch.Tensor, ...]]]:
    """What is run in the place of calls with a generator of the program's."""

    def draw(*given: Any) -> tuple[torch.Tensor, ...]:
        if isinstance(given[2], FakeTensor):
            return with_generator(*given)
        return tuple(keep_whole(calls, fake_mode, given[0], with_generator, given, {}))

    return {with_generator: draw}


def _tensors(results: Any) -> list[torch.Tensor]:
    found = [] if results is None else [results] if isinstance(results, torch.Tensor) else list(results)
    if not all(isinstance(result, torch.Tensor) for result in found):
        raise Unsupported(
            "kept-call-result", "a function that is called as a whole returns more than tensors"
        )
    return found
