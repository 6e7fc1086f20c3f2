"""Backwards that are asked for the gradients of certain parameters: ``backward(inputs=...)`` and ``autograd.grad``.

The engine looks for a path to what it is asked for, and a compiled program that stores a parameter's gradient has no
edge to the parameter: it would find nothing and run nothing. With an edge, every other backward would visit every
parameter. So it is noticed where all backwards pass, in the one method that starts them, which is replaced when a first
module has gradients in buckets. Where parameters of a bucket are among the inputs, the engine is asked for the anchors
of the programs that store their gradients, too: that makes it run these programs.

What is to be accumulated is stored and reduced, as by stock DDP's hooks. What ``autograd.grad`` is to return is no
business of the buckets: the programs give it as values, and it is added to what the engine has found.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.autograd.variable import Variable

from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.ir.communicator import WantedValues
from gradsplit.compile_core.torch_facts.apart_from_torch_compile import apart_from_torch_compile
from gradsplit.compile_core.torch_facts.autograd_engine import ImperativeEngine, current_graph_task_id
from gradsplit.compile_core.torch_facts.patches import is_patched, patch
from gradsplit.distributed.gradients.accumulation_nodes import hooks_came_late, put_first
from gradsplit.distributed.gradients.anchors import Anchors
from gradsplit.distributed.gradients.paths_of_backward import backward_is_whole, paths_begin_at
from gradsplit.distributed.gradients.rounds_of_backward import rounds_end_here
from gradsplit.distributed.streams import current_stream


class RequestedGradients:
    """The gradients that one backward was requested for.

    Attributes:
        as_values: the gradients are to be returned, not to be accumulated.
        anchors: what else to ask the engine for.
    """

    def __init__(
        self, parameters: Mapping[int, torch.nn.Parameter], as_values: bool, anchors: Sequence[torch.Tensor]
    ) -> None:
        self._parameters = parameters
        self._wanted = set(parameters.values())
        self._values: dict[torch.Tensor, torch.Tensor] = {}
        self._streams: set[torch.cuda.Stream] = set()
        self.as_values = as_values
        self.anchors = anchors

    def include(self, parameter: torch.Tensor) -> bool:
        return parameter in self._wanted

    def add(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """A program has computed a contribution to the gradient."""
        if value.is_cuda:
            self._streams.add(current_stream(value.device))
        before = self._values.get(parameter)
        self._values[parameter] = value if before is None else before + value

    def complete(self, found: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """What the engine has found for each of the inputs, with what programs computed."""
        self._await_other_streams()
        results = list(found)
        for position, parameter in self._parameters.items():
            value, other = self._values.get(parameter), results[position]
            if value is None:
                continue
            hooks = parameter._backward_hooks or {}  # registered after the forward
            if hooks and other is not None:
                raise CompileError(hooks_came_late("A parameter"))
            for hook in hooks.values():
                value = result if (result := hook(value)) is not None else value
            results[position] = value if other is None else other + value
        return tuple(results)

    def _await_other_streams(self) -> None:
        """Backwards run on the streams of their forwards. The engine does as much for what it has found."""
        for stream in self._streams:
            here = current_stream(stream.device)
            if stream is here:
                continue
            here.wait_stream(stream)
            for value in self._values.values():
                if value.device == stream.device:
                    value.record_stream(here)

    @contextmanager
    def known_from(self, roots: Sequence[torch.Tensor | GradientEdge]) -> Iterator[None]:
        """While this lasts, ``requested_now`` returns it in the backward that begins at ``roots``."""
        nodes = {root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots}
        numbers: list[int] = []

        def begins(*_: Any) -> None:
            numbers.append(current_graph_task_id())
            _under_way[numbers[-1]] = self

        handles = [node.register_prehook(begins) for node in nodes if node is not None]
        for handle in handles:
            put_first(handle)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for number in numbers:
                _under_way.pop(number, None)


# By the engine's number of the backward.
_under_way: dict[int, RequestedGradients] = {}
_living: weakref.WeakSet[Anchors] = weakref.WeakSet()


def requested_now() -> RequestedGradients | None:
    """What the running backward was requested for; ``None`` if it is for no parameters of buckets in particular."""
    return _under_way.get(current_graph_task_id()) if _under_way else None


def returns_values() -> bool:
    """Whether the backward that runs is for gradients of parameters of buckets and accumulates none."""
    requested = requested_now()
    return requested is not None and requested.as_values


def reduces_what_it_reaches() -> bool:
    """Whether the backward that runs is for gradients of parameters at all, though it may come to none on this rank."""
    return backward_is_whole() or requested_now() is not None


def not_requested(parameters: Mapping[str, torch.nn.Parameter]) -> frozenset[str]:
    """Those of these parameters of buckets that the backward which runs is not for."""
    requested = requested_now()
    if requested is None:
        return frozenset()
    return frozenset(name for name, parameter in parameters.items() if not requested.include(parameter))


def wanted_values(parameters: Mapping[str, torch.nn.Parameter], names: Sequence[str]) -> WantedValues:
    """For each of these parameters whose gradient the running backward returns, what adds a value to it."""
    requested = requested_now()
    if requested is None or not requested.as_values:
        return {}
    found = {name: parameters[name] for name in names if requested.include(parameters[name])}
    return {name: functools.partial(requested.add, parameter) for name, parameter in found.items()}


def watch_anchors(anchors: Anchors) -> None:
    """From now on backwards that request parameters of these run their programs, as long as the anchors live."""
    _living.add(anchors)
    watch_backwards()


def watch_backwards() -> None:
    """From now on it is known where backwards begin: the engine is replaced."""
    if not is_patched(Variable, "_execution_engine"):
        patch(Variable, "_execution_engine", _WatchedEngine(), "backwards that are for certain parameters")


class _WatchedEngine(ImperativeEngine):
    """Autograd's engine; only the start of a backward differs, and the end of one that raises."""

    @apart_from_torch_compile
    def run_backward(
        self,
        tensors: Sequence[torch.Tensor | GradientEdge],
        grad_tensors: Any,
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[torch.Tensor | GradientEdge] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        begin: Callable[..., Any] = super().run_backward

        def run(*arguments: Any) -> Any:
            with rounds_end_here(), paths_begin_at(tensors, is_whole=not inputs):
                return begin(*arguments)

        requested = _requested(inputs, as_values=not accumulate_grad) if inputs else None
        if requested is None:
            return run(
                tensors, grad_tensors, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
            )
        with requested.known_from(tensors):
            found = run(
                tensors,
                grad_tensors,
                keep_graph,
                create_graph,
                (*inputs, *requested.anchors),
                True,
                accumulate_grad,
            )
        if accumulate_grad:
            return found
        results = requested.complete(found[: len(inputs)])
        if not allow_unreachable and any(result is None for result in results):
            raise RuntimeError(
                "One of the tensors whose gradients are asked for appears to not have been used in the graph; pass "
                "allow_unused=True to get None for it"
            )
        return results


def _requested(inputs: Sequence[torch.Tensor | GradientEdge], as_values: bool) -> RequestedGradients | None:
    """``None`` if no parameters of buckets are among the inputs."""
    parameters: dict[int, torch.nn.Parameter] = {}
    anchors: list[torch.Tensor] = []
    for living in list(_living):
        mine = {k: living.parameter_of(target) for k, target in enumerate(inputs)}
        found = {k: parameter for k, parameter in mine.items() if parameter is not None}
        parameters |= found
        anchors += living.of_parameters(set(found.values()))
    return RequestedGradients(parameters, as_values, anchors) if parameters else None
