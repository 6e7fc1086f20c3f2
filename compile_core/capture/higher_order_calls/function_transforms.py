"""``torch.func`` transforms and ``torch.vmap``: the function becomes a body, the call one node that transforms it.

The body is captured for arguments as the function itself sees them: under ``vmap`` one sample, without the mapped dim;
under ``grad`` and its kin tensors that require gradients.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gradsplit.compile_core.capture.higher_order_calls.bodies import body_argument, body_graph
from gradsplit.compile_core.capture.object_model.functions import FunctionValue
from gradsplit.compile_core.capture.values.base import CaptureState, PlainCall, Value
from gradsplit.compile_core.capture.values.call_rules import call_rule, decorator_rule, rule_of_each
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.mappings import DictValue
from gradsplit.compile_core.capture.values.tensors import TensorValue
from gradsplit.compile_core.ir import transform_nodes as nodes
from gradsplit.compile_core.torch_facts.bindings import broadcast_and_flatten


class TransformedValue(Value):
    """What a transform returned: a function, to be called."""

    cls = types.FunctionType

    def __init__(self, transform: Callable[..., Any], function: Value, options: dict[str, Any]) -> None:
        self.transform = transform
        self.function = function
        self.options = options

    def describe(self) -> str:
        return f"{self.transform.__name__} of {self.function.describe()}"

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        # The transforms copy the names of the function.
        if name in ("__name__", "__qualname__", "__doc__", "__module__"):
            return self.function.get_attribute(state, name)
        return super().get_attribute(state, name)

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        arguments = _Template(state, (args, kwargs))
        if self.transform is torch.vmap:
            fakes = _samples(state, arguments, self.options["in_dims"])
        else:
            fakes = [_tracked(tensor.fake) for tensor in arguments.tensors]
        return _call(state, self, arguments, (args, kwargs), fakes)


class _Template:
    """A structure of values as a template, with the tensors that it has in order, one for each place."""

    def __init__(self, state: CaptureState, values: Any) -> None:
        self.tensors: list[TensorValue] = []
        self._state = state
        args, kwargs = values
        self.structure = (
            tuple(self._replace(value) for value in args),
            {key: self._replace(value) for key, value in kwargs.items()},
        )

    def _replace(self, value: Value) -> Any:
        if isinstance(value, TensorValue):
            self.tensors.append(value)
            return nodes.Slot(len(self.tensors) - 1)
        if isinstance(value, ConstantValue):
            return value.value
        if isinstance(value, SequenceValue) and value.cls in (tuple, list):
            return value.cls(self._replace(item) for item in value.all(self._state))
        if isinstance(value, DictValue) and value.cls is dict:
            return {key: self._replace(item) for key, item in value.held(self._state).items()}
        raise self._state.unsupported(
            "transform-argument", f"{value.describe()} as an argument or result of a transformed function"
        )


def _call(
    state: CaptureState,
    made: TransformedValue,
    arguments: _Template,
    body_values: Any,
    fakes: list[torch.Tensor],
) -> Value:
    """Capture the body for ``body_values``, whose tensors are ``fakes`` inside of it, and record the call."""
    body_arguments = _Template(state, body_values)
    reverse_mode = made.transform not in (torch.vmap, torch.func.jacfwd, nodes.jvp)
    with torch.enable_grad() if reverse_mode else contextlib.nullcontext(), body_graph(state) as graph:
        pairs = zip(body_arguments.tensors, fakes, strict=True)
        inner = [body_argument(state, graph, tensor, fake) for tensor, fake in pairs]
        args, kwargs = nodes.fill(body_arguments.structure, inner)
        returned = made.function.call(
            state,
            [state.from_constant(value) for value in args],
            {key: state.from_constant(value) for key, value in kwargs.items()},
        )
        result = _Template(state, ((returned,), {}))
        module = graph.close([tensor.node for tensor in result.tensors])
    transform = nodes.Transform(
        made.transform, made.options, arguments.structure, body_arguments.structure, result.structure[0][0],
        len(arguments.tensors),
    )  # fmt: skip
    held = [state.graph.hold("body", module), state.graph.hold("transform", transform)]
    given = [tensor.node for tensor in arguments.tensors]
    return _in_structure(
        state,
        nodes.transformed,
        [*held, *given, *graph.lifted],
        lambda body, transform, *tensors: transform(body, tensors),
    )


def _in_structure(state: CaptureState, target: Any, given: list[Any], compute: Callable[..., Any]) -> Value:
    """Record a call that gives a flat tuple; what it is in the structure of what ``compute`` gives for it."""
    structure: list[pytree.TreeSpec] = []

    def example(*parts: Any) -> Any:
        leaves, spec = pytree.tree_flatten(compute(*parts))
        structure.append(spec)
        return tuple(leaves)

    leaves = state.call_tensor_nodes(target, given, example)
    return state.from_constant(pytree.tree_unflatten(state.items_of(leaves), structure[0]))


def _tracked(fake: torch.Tensor) -> torch.Tensor:
    inner = fake.detach()
    return inner.requires_grad_() if inner.is_floating_point() or inner.is_complex() else inner


def _samples(state: CaptureState, arguments: _Template, in_dims: Any) -> list[torch.Tensor]:
    """What one sample sees of each tensor; keywords are not mapped."""
    args, _ = arguments.structure
    leaves, spec = pytree.tree_flatten(args)
    in_dims = broadcast_and_flatten(list(in_dims) if isinstance(in_dims, list) else in_dims, spec)
    if in_dims is None:
        raise PlainCall("vmap: in_dims do not fit the arguments")
    dims = {
        leaf.index: dim for leaf, dim in zip(leaves, in_dims, strict=True) if isinstance(leaf, nodes.Slot)
    }
    fakes = []
    for index, tensor in enumerate(arguments.tensors):
        dim = dims.get(index)
        try:
            fakes.append(tensor.fake.view_as(tensor.fake) if dim is None else _sample(tensor.fake, dim))
        except (IndexError, TypeError) as error:
            raise PlainCall(f"vmap: {error}") from error
    return fakes


def _sample(batch: torch.Tensor, dim: int) -> torch.Tensor:
    # An empty batch has no sample, and its sum has the shape of one.
    return batch.select(dim, 0) if batch.size(dim) != 0 else batch.sum(dim, dtype=batch.dtype)


def _options(state: CaptureState, given: dict[Any, Value]) -> dict[Any, Any]:
    return {key: _option(state, value) for key, value in given.items()}


def _option(state: CaptureState, value: Value) -> Any:
    if isinstance(value, SequenceValue):
        return value.cls(_option(state, item) for item in value.all(state))
    if isinstance(value, DictValue):
        return _options(state, value.held(state))
    if isinstance(value, ConstantValue):
        return value.value
    raise state.unsupported("transform-option", f"{value.describe()} as an option of a function transform")


# Transform -> its options in their order, with their defaults.
_TRANSFORMS: dict[Callable[..., Any], dict[str, Any]] = {
    torch.vmap: {"in_dims": 0, "out_dims": 0, "randomness": "error", "chunk_size": None},
    torch.func.grad: {"argnums": 0, "has_aux": False},
    torch.func.grad_and_value: {"argnums": 0, "has_aux": False},
    torch.func.jacrev: {"argnums": 0, "has_aux": False, "chunk_size": None, "_preallocate_and_copy": False},
    torch.func.jacfwd: {"argnums": 0, "has_aux": False, "randomness": "error"},
    torch.func.hessian: {"argnums": 0},
}


@rule_of_each(*_TRANSFORMS)
def _transform(
    transform: Callable[..., Any], state: CaptureState, args: list[Value], kwargs: dict[str, Value]
) -> Value:
    defaults = _TRANSFORMS[transform]
    function, *positional = [kwargs.pop("func")] if "func" in kwargs and not args else args
    named = {**dict(zip(defaults, positional, strict=False)), **kwargs}
    if not set(named) <= set(defaults):
        raise TypeError(f"options of {transform.__name__}: {sorted(named)}")
    return TransformedValue(transform, function, {**defaults, **_options(state, named)})


@call_rule(torch.func.vjp)
def _vjp(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    function, *primals = args
    made = TransformedValue(nodes.vjp, function, _options(state, kwargs))
    return made.call(state, primals, {})


@call_rule(torch.func.jvp)
def _jvp(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    function, primals, tangents = args
    made = TransformedValue(nodes.jvp, function, _options(state, kwargs))
    if not isinstance(primals, SequenceValue):
        raise TypeError("primals are not a tuple")
    arguments = _Template(state, ((primals, tangents), {}))
    body_values = (primals.all(state), {})
    fakes = [tensor.fake.detach() for tensor in _Template(state, body_values).tensors]
    return _call(state, made, arguments, body_values, fakes)


class PullBackValue(Value):
    """The function that ``torch.func.vjp`` returned, which lives in the graph."""

    cls = types.FunctionType

    def __init__(self, node: fx.Node) -> None:
        self.node = node

    def describe(self) -> str:
        return f"a {self.cls.__name__} that the graph computes"

    def graph_argument(self, state: CaptureState) -> Any:
        return self.node

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if kwargs:
            raise state.unsupported("transform-option", "keywords of a vjp function")
        cotangents = _Template(state, (args, {}))
        held = state.graph.hold("cotangents", cotangents.structure[0])
        given = [self.node, held, *(tensor.node for tensor in cotangents.tensors)]

        def compute(function: Any, template: Any, *tensors: torch.Tensor) -> Any:
            return function(*nodes.fill(template, tensors))

        return _in_structure(state, nodes.pull_back, given, compute)


def _call_made_before(
    transform: Any, made: Any, state: CaptureState, args: list[Value], kwargs: dict[str, Value]
) -> Value:
    """A call of a function that one of the transforms made before the capture."""
    parts = inspect.getclosurevars(made).nonlocals
    inner = state.wrap(parts["func"], None)
    if isinstance(inner, FunctionValue) and inner.real is not None and not inner.is_library:
        inner = state.wrap(inner.real, state.reference_source(inner.real.__qualname__, inner.real))
    options = {name: parts[name] for name in _TRANSFORMS[transform] if name in parts}
    return TransformedValue(transform, inner, options).call(state, args, kwargs)


for _made_by in _TRANSFORMS:
    if _made_by is not torch.func.hessian:
        decorator_rule(_made_by(torch.sin))(functools.partial(_call_made_before, _made_by))
