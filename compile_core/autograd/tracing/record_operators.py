"""Records what a function of tensors does as a graph of functional ATen operators.

Three things lie on top of one another. Autograd is outermost, as ever, so that gradients may be asked for inside the
function. Below it functionalization turns mutation and views into pure operators. What is left arrives here, one
operator at a time: it is decomposed, or else run on fake tensors and written down as a node.

Source: the same layers as ``make_fx`` under torch's AOTAutograd, without what only other users of those need (proxies
that can be computed with, constants followed through the program, tensor subclasses): that took half of a trace.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as node_metadata
from torch.fx.experimental.proxy_tensor import snapshot_fake
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode

from gradsplit.compile_core.autograd.operators.joint_arrival import JOINT_ARRIVAL
from gradsplit.compile_core.autograd.tracing import functional_batch_norm, random_order, recurrent_layers
from gradsplit.compile_core.autograd.tracing.captured_nodes import CapturedNodes
from gradsplit.compile_core.autograd.tracing.number_recorder import NumberOperations, NumberRecorder
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.data_checks import CHECK, text_of_check
from gradsplit.compile_core.ir.numbers import SYMBOLIC_NUMBERS
from gradsplit.compile_core.torch_facts.autograd_engine import current_autograd_node
from gradsplit.compile_core.torch_facts.dispatcher import (
    disable_functionalization,
    enable_functionalization,
    from_functional,
    has_kernel_for_key,
    is_check,
    is_functional,
    mirror_autograd_meta,
    sync,
    to_functional,
    without_functionalization,
)
from gradsplit.compile_core.torch_facts.fake_tensors import corrected, device_of, run_operator
from gradsplit.compile_core.torch_facts.lazy_modules import lazy_module
from gradsplit.compile_core.torch_facts.symbolic_numbers import Assertions, forgotten_if_undecided
from gradsplit.compile_core.torch_facts.thread_state import disable_current_modes

# torch exports these without declaring them.

aten = torch.ops.aten

Decompositions = Mapping[Any, Callable[..., Any]]

_OF_EVERY_TRACE = {
    **random_order.DECOMPOSITIONS,
    **functional_batch_norm.DECOMPOSITIONS,
    **recurrent_layers.DECOMPOSITIONS,
}

_DEVICE = torch.ops.prim.device.default
# They ask about a tensor and compute nothing.
_QUESTIONS = frozenset(
    {
        aten.size.default, aten.stride.default, aten.numel.default, aten.storage_offset.default,
        aten.sym_size.default, aten.sym_stride.default, aten.sym_numel.default, aten.sym_storage_offset.default,
    }
)  # fmt: skip

_PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
_QUOTIENTS = frozenset({aten.div.Tensor, aten.div.Scalar})
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})


def record(
    function: Callable[..., Sequence[Any]],
    inputs: Sequence[Any],
    seeds: Sequence[torch.Tensor],
    decompositions: Decompositions,
    fake_mode: FakeTensorMode,
    operations: NumberOperations | None = None,
    captured: CapturedNodes | None = None,
) -> fx.GraphModule:
    """The operators below autograd of ``function(recorder, *inputs, *seeds)``, as a graph.

    Args:
        function: is called once, with functional tensors that stand for ``inputs`` and ``seeds``; what it changes in
            place, it changes in those alone. It may ask ``recorder`` about tensors.
        inputs: fake tensors, leaves where they require gradients, and symbolic numbers.
        seeds: fake tensors, the gradients of results.
        decompositions: operator -> function that expresses it in others, or returns ``NotImplemented``.
        fake_mode: their mode, which must be on.
        operations: what the program did with numbers.
        captured: which node of a captured graph runs.

    Returns:
        A module with one placeholder for each input and seed, and the results of ``function`` as a tuple. Nodes have
        their fake result in ``meta["val"]``, and what ``torch.fx.traceback.annotate`` said of them in
        ``meta["custom"]``.
    """
    table = {**_OF_EVERY_TRACE, **decompositions}
    recorder = OperatorRecorder(table, fake_mode, operations or NumberOperations(), captured)
    placeholders = [recorder.placeholder(given) for given in inputs]
    placeholders += [recorder.placeholder(seed, is_seed=True) for seed in seeds]
    enable_functionalization(reapply_views=True)
    try:
        with recorder:
            results = [_unwrapped(result) for result in function(recorder, *map(_wrapped, placeholders))]
    finally:
        disable_functionalization()
    return recorder.finish(results)


def _wrapped(given: Any) -> Any:
    if not isinstance(given, torch.Tensor):
        return given
    functional = to_functional(given)
    mirror_autograd_meta(given, functional)
    return functional


def _unwrapped(result: Any) -> Any:
    if not isinstance(result, torch.Tensor) or not is_functional(result):
        return result
    sync(result)
    return from_functional(result)


@contextmanager
def outside_of_recording() -> Iterator[None]:
    """For what a recorded function does that is no part of the record, such as recording another function."""
    with without_functionalization(), disable_current_modes():
        yield


class OperatorRecorder(TorchDispatchMode):
    """The mode that makes the nodes; see ``record``."""

    supports_higher_order_operators = True

    def __init__(
        self,
        decompositions: Decompositions,
        fake_mode: FakeTensorMode,
        operations: NumberOperations,
        captured: CapturedNodes | None,
    ) -> None:
        super().__init__()
        self._captured = captured
        self._fake_mode = fake_mode
        self._decompositions = decompositions
        self._graph = fx.Graph()
        self._root = torch.nn.Module()
        self._numbers = NumberRecorder(self._graph, operations)
        self._placeholders = 0
        # By identity. The tensor is kept, so that no other one takes its identity.
        self._nodes: dict[int, tuple[torch.Tensor, fx.Node]] = {}
        # Which of them torch would hold without memory.
        self._zeros: set[int] = set()
        self._assertions = Assertions()
        if fake_mode.shape_env is not None:
            self._assertions.take_new(fake_mode.shape_env)
        self._from_seeds: set[fx.Node] = set()

    def placeholder(self, given: Any, is_seed: bool = False) -> Any:
        node = self._graph.placeholder(f"input_{self._placeholders}")
        self._placeholders += 1
        if isinstance(given, torch.Tensor):
            self._name(given, node)
        else:
            node.meta["val"] = given
        self._numbers.add_input(given, node)
        if is_seed:
            self._from_seeds.add(node)
        return given

    def comes_from_seeds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the function is computed from any of the seeds."""
        found = self._nodes.get(id(_unwrapped(tensor)))
        return found is not None and found[1] in self._from_seeds

    def is_without_memory(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the function is zeros that torch would hold without memory."""
        return id(_unwrapped(tensor)) in self._zeros

    def write_checks(self) -> None:
        """Write what has been assumed of numbers that depend on data since this was last done.

        Raises:
            Unsupported: nothing in the graph says what such a number is.
        """
        env = self._fake_mode.shape_env
        for condition in [] if env is None else self._assertions.take_new(env):
            arguments = (self._numbers.condition(condition), text_of_check(str(condition)))
            node = self._graph.create_node("call_function", CHECK, arguments, {}, "check")
            node.meta["val"] = None

    def finish(self, results: Sequence[Any]) -> fx.GraphModule:
        self.write_checks()
        self._graph.output(tuple(self._argument(result) for result in results))
        return lazy_module(self._root, self._graph, "joint")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:
            return device_of(args[0])
        if func in _QUESTIONS:
            return func(*args, **kwargs)
        if func is not aten._efficientzerotensor.default and not (
            self._zeros and self._gives_zeros(func, args)
        ):
            return self._record(func, args, kwargs)
        if _passes_on(func):
            result = self._record(func, args, kwargs)
        else:
            # Zeros without memory, as the gradient of sgn: torch's fallback for them crashes on tensors without data.
            like = func(*args, **kwargs)
            with self:
                result = aten.zeros.default([*like.shape], dtype=like.dtype, device=like.device)
        self._zeros.add(id(result))
        return result

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten.unfold_backward.default and current_autograd_node() is None:
            _check_windows(*args)
        decompose = self._decompositions.get(func)
        if decompose is not None:
            # A form that asks for sizes is of no use where these depend on data; what it has recorded is dead.
            with suppress(GuardOnDataDependentSymNode), self._unchecked_if_undecided(), self:
                result = decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return corrected(func, args, result)
        elif _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten.lift_fresh.default:
            # Whoever lifts a constant may change the result, but must not change the constant of the graph.
            func = aten.lift_fresh_copy.default
        self.write_checks()
        arguments = tuple([self._argument(value) for value in args])
        keywords = {key: self._argument(value) for key, value in kwargs.items()}
        result = run_operator(func, args, kwargs)
        node = self._graph.create_node("call_function", func, arguments, keywords, _name_of(func))
        self._mark(node)
        self._take(result, node)
        return result

    @contextmanager
    def _unchecked_if_undecided(self) -> Iterator[None]:
        """Where what is recorded inside leads to a question about data, nothing is checked of it, nor assumed."""
        last = next(iter(reversed(self._graph.nodes)), None)
        try:
            with forgotten_if_undecided(self._fake_mode.shape_env):
                yield
        except GuardOnDataDependentSymNode:
            for node in [*itertools.takewhile(lambda node: node is not last, reversed(self._graph.nodes))]:
                if is_check(node):
                    self._graph.erase_node(node)
            raise

    def _gives_zeros(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether torch computes nothing, since its zeros without memory stay that: times infinity, too."""
        zeros = [id(value) in self._zeros for value in args]
        if func in _PRODUCTS:
            return any(zeros)
        if func in _SUMS:
            return all(zeros[:2])
        return zeros[:1] == [True] and (func in _QUOTIENTS or _passes_on(func))

    def _take(self, result: Any, node: fx.Node) -> None:
        if isinstance(result, torch.Tensor):
            self._name(result, node)
        elif isinstance(result, (tuple, list)):
            node.meta["val"] = type(result)(
                snapshot_fake(item) if isinstance(item, torch.Tensor) else item for item in result
            )
            for position, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    element = self._graph.create_node("call_function", operator.getitem, (node, position))
                    self._mark(element)
                    self._name(item, element)
        else:
            node.meta["val"] = result
            if isinstance(result, SYMBOLIC_NUMBERS):
                self._numbers.add_result(result, node)

    def _name(self, tensor: torch.Tensor, node: fx.Node) -> None:
        node.meta["val"] = snapshot_fake(tensor)
        self._nodes[id(tensor)] = (tensor, node)
        self._numbers.note(tensor, node)

    def _mark(self, node: fx.Node) -> None:
        if not self._from_seeds.isdisjoint(node.all_input_nodes):
            self._from_seeds.add(node)
        annotation = node_metadata.current_meta.get("custom")  # torch exchanges the whole dictionary at times
        if annotation:
            node.meta["custom"] = dict(annotation)
        if self._captured is not None:
            self._captured.mark(node)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found = self._nodes.get(id(value))
            return found[1] if found is not None else self._constant(value)
        if isinstance(value, SYMBOLIC_NUMBERS):
            return self._numbers.argument(value)
        if isinstance(value, (tuple, list)):
            kind = tuple if isinstance(value, torch.Size) else type(value)
            return kind([self._argument(item) for item in value])
        return value

    def _constant(self, tensor: torch.Tensor) -> fx.Node:
        """A tensor that the function did not get and did not compute."""
        name = f"_tensor_constant{sum(1 for _ in self._root.buffers())}"
        self._root.register_buffer(name, tensor, persistent=False)
        node = self._graph.get_attr(name)
        node.meta["val"] = self._fake_mode.from_tensor(tensor, static_shapes=True)
        self._nodes[id(tensor)] = (tensor, node)
        return node


def _passes_on(func: Any) -> bool:
    """Whether the result has the values of the first argument."""
    return func is JOINT_ARRIVAL or getattr(func, "is_view", False)


def _check_windows(_: Any, sizes: Sequence[Any], dim: int, size: int, step: int) -> None:
    """Refuses what functionalization makes of changed windows where they leave a gap: zeros lie there then."""
    if size != step or sizes[dim] % step:
        raise Unsupported("changed-windows", "windows that unfold made, with gaps, are changed in place")


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether autograd would have decomposed it; below autograd, as inside a decomposition, nobody did."""
    return (
        isinstance(func, torch._ops.OpOverload)
        and has_kernel_for_key(func.name(), "CompositeImplicitAutograd")
        and not any(has_kernel_for_key(func.name(), key) for key in ("CPU", "CUDA"))
    )


@functools.cache
def _name_of(func: Any) -> str:
    return getattr(func, "overloadpacket", func).__name__
