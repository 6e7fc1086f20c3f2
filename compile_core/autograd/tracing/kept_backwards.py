"""Backwards that cannot be traced stay whole in a joint trace: each becomes a kept call among traced operators.

Custom operators and ``autograd.Function`` have backwards in Python, which may look at data: at where groups of rows
end, to compute a product for each. Autograd calls them in a trace as ever. One that raises there is recorded as one
call instead, of what it would be called with: the tensors that its context holds, and the gradients that arrive.

How its gradients look is found out by a run on fake tensors, outside of the record, in which all data that are read
are zero. They may not look otherwise in a later run: it raises then.

Limits, each as if there were no such call: a context that holds more than tensors and constants; a backward that
changes what it is given, or whose run on zeros raises or leaves out a gradient that is wanted.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gradsplit.compile_core.autograd.tracing.custom_operators import keep_whole
from gradsplit.compile_core.autograd.tracing.kept_calls import KeptCalls
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.torch_facts.autograd_engine import run_instead_of_backward
from gradsplit.compile_core.torch_facts.fake_tensors import quiet_fakes
from gradsplit.compile_core.torch_facts.torch_switches import without_autocast

logger = logging.getLogger(__name__)

aten = torch.ops.aten

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, slice, type(...), pytree.TreeSpec,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.SymInt,
)  # fmt: skip

_READS_OF_MEMORY = frozenset(
    {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr, torch.Tensor.__dlpack__}
)


def keep_backwards(nodes: Iterable[Any], calls: KeptCalls, fake_mode: FakeTensorMode) -> None:
    """From now on those of the nodes whose backward is in Python, and raises in the trace, record a kept call."""

    def run(backward: Any, context: Any, *gradients: Any) -> Any:
        given = _Given(context, gradients)
        env = fake_mode.shape_env
        assumed = None if env is None else env.num_deferred_runtime_asserts
        try:
            with quiet_fakes(conditions=True), _NoMemory():
                return backward(context, *gradients)
        except Unsupported:
            raise
        except Exception as error:
            # What it has recorded is dead, unless it has had effects.
            if given.has_changed or (env is not None and env.num_deferred_runtime_asserts != assumed):
                raise
            name = type(context).__name__
            try:
                kept = _KeptBackward(name, backward, given)
                found = keep_whole(calls, fake_mode, name, kept, given.arguments, {})
            except Exception as reason:
                logger.info("%s cannot stay whole: %s", name, reason)
                raise error from None
            logger.info("%s stays whole: %s", name, error)
            return kept.with_gaps(found)

    for node in nodes:
        run_instead_of_backward(node, run)


class _Given:
    """What a backward is called with."""

    def __init__(self, context: Any, gradients: Sequence[Any]) -> None:
        self._context = context
        self._gradients = gradients
        # Of what is saved, torch itself knows the versions.
        self._others = (dict(vars(context)), gradients)
        self._versions = _versions(self._others)
        self.wanted: tuple[bool, ...] = context.needs_input_grad

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The tensors that were saved, what else the context holds, and the gradients."""
        return self._context.saved_tensors, dict(vars(self._context)), self._gradients

    @property
    def has_changed(self) -> bool:
        return _versions(self._others) != self._versions


class _Context:
    """What a backward that stays whole gets for its context."""

    def __init__(self, saved: Any, held: dict[str, Any], wanted: tuple[bool, ...]) -> None:
        vars(self).update(held)
        self.saved_tensors = saved
        self.needs_input_grad = wanted


class _KeptBackward:
    """The backward as a function of tensors, which gives the gradients that are wanted as new ones."""

    def __init__(self, name: str, backward: Any, given: _Given) -> None:
        self._name = name
        self._backward = backward
        self._wanted = given.wanted
        self._shapes: list[tuple[Any, ...]] = []
        for value in pytree.tree_leaves(given.arguments):
            if not isinstance(value, torch.Tensor) and not _is_constant(value):
                raise Unsupported("kept-backward", f"its context holds {value!r}")

    def __call__(self, saved: Any, held: dict[str, Any], gradients: Any) -> list[torch.Tensor]:
        arguments = saved, held, gradients
        tensors = [value for value in pytree.tree_leaves(arguments) if isinstance(value, torch.Tensor)]
        versions = _versions(arguments)
        context = _Context(saved, held, self._wanted)
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with _ZerosForData():
                found = self._gradients_of(context, gradients)
            if None in found:
                raise Unsupported("kept-backward", "a gradient that is wanted is None")
            self._shapes = [tuple(gradient.shape) for gradient in found]
        else:
            with without_autocast():
                found = self._gradients_of(context, gradients)
            # Autograd means zeros by none.
            found = [
                tensors[0].new_zeros(shape) if gradient is None else gradient
                for gradient, shape in zip(found, self._shapes, strict=True)
            ]
        if _versions(arguments) != versions:
            raise RuntimeError(f"{self._name} changes what it is given")
        return self._as_new(found, tensors)

    def with_gaps(self, found: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """A gradient or none for each input."""
        gradients = iter(found)
        return tuple(next(gradients) if wanted else None for wanted in self._wanted)

    def _gradients_of(self, context: _Context, gradients: Any) -> list[Any]:
        found = self._backward(context, *gradients)
        found = found if isinstance(found, tuple) else (found,)
        return [gradient for gradient, wanted in zip(found, self._wanted, strict=False) if wanted]

    def _as_new(self, found: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        taken = {tensor.untyped_storage()._cdata for tensor in given}
        results = []
        for gradient, shape in zip(found, self._shapes, strict=True):
            if len(gradient.shape) != len(shape) or any(
                isinstance(size, int) and size != other
                for size, other in zip(shape, gradient.shape, strict=True)
            ):
                raise RuntimeError(
                    f"{self._name} gives a gradient of shape {tuple(gradient.shape)}, and none of {shape} as it "
                    "did on zeros: gradsplit.disable keeps its call out of compiled code"
                )
            if gradient.untyped_storage()._cdata in taken or not TensorSpec.of(gradient).is_dense:
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            taken.add(gradient.untyped_storage()._cdata)
            results.append(gradient)
        return results


class _NoMemory(TorchFunctionMode):
    """Inside, nobody gets at the memory of a tensor: those of a trace have none, and functional ones do not say so."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS_OF_MEMORY:
            raise RuntimeError(f"{func.__name__} reads memory that a tensor of a trace does not have")
        return func(*args, **(kwargs or {}))


class _ZerosForData(TorchDispatchMode):
    """Inside, what is read of a fake tensor's data is zero, and nothing is found that is not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return (
                False
                if dtype is torch.bool
                else 0j
                if dtype.is_complex
                else 0.0
                if dtype.is_floating_point
                else 0
            )
        if func is aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        return func(*args, **(kwargs or {}))


def _versions(values: Any) -> list[int]:
    return [
        value._version
        for value in pytree.tree_leaves(values)
        if isinstance(value, torch.Tensor) and not value.is_inference()
    ]


def _is_constant(value: Any) -> bool:
    if isinstance(value, slice):
        return all(map(_is_constant, (value.start, value.stop, value.step)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(_is_constant(getattr(value, field.name)) for field in dataclasses.fields(value))
    return isinstance(value, _CONSTANTS)
