"""Corrects what torch says of fake tensors where its kernels do otherwise.

A program sees dtype and strides of its results, and a capture answers what it asks of them; so of the operators listed
here fakes are given those that the kernels give. Dtypes are the same on all devices; the strides are those of the CPU's
kernels, and corrected there alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


@contextmanager
def run_on_fakes(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Inside, operators on fake tensors give what their kernels would, for sizes that are open, too."""
    with fake_mode, _CorrectedFakes(), kernels_of_sizes(fake_mode):
        yield


def kernels_of_sizes(fake_mode: FakeTensorMode) -> AbstractContextManager[Any]:
    """Some composite operators ask for numbers where they run in C++; their forms in Python keep sizes symbolic."""
    return nullcontext() if fake_mode.shape_env is None else enable_python_dispatcher()


def with_kernels_results(function: Any) -> Any:
    """What is to run on fakes inside ``run_on_fakes`` in the place of a function."""
    return _INSTEAD.get(function, function)


class _CorrectedFakes(TorchDispatchMode):
    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return corrected(func, args, func(*args, **(kwargs or {})))


def corrected(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """``result`` of ``func(*args)``, which fake tensors or a decomposition made, as the operator's kernel gives it."""
    correct = _CORRECTIONS.get(func)
    return result if correct is None else correct(args, result)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Where nothing is dropped, torch's form in Python returns a copy. That in C++, which asks for sizes, does not."""
    drops_nothing = (p == 0 or not training) and not inplace
    return input if drops_nothing else functional.dropout(input, p, training, inplace)


def _native_dropout(input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(input, p, train)


def _dtype_of_input(args: tuple[Any, ...], loss: Tensor) -> Tensor:
    return loss.to(args[0].dtype)


def _row_major(_: tuple[Any, ...], result: Tensor) -> Tensor:
    return _in_format(result, torch.contiguous_format)


def _all_row_major(_: tuple[Any, ...], results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple([_in_format(result, torch.contiguous_format) for result in results])


def _row_major_if_complex(args: tuple[Any, ...], result: Tensor) -> Tensor:
    return _in_format(result, torch.contiguous_format) if args[0].is_complex() else result


def _normalised(args: tuple[Any, ...], results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Channels-last where the input is that; row-major where it lies in any other way."""
    return _in_format(results[0], suggest_memory_format(args[0])), *results[1:]


def _in_format(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    if tensor.device.type != "cpu" or tensor.is_contiguous(memory_format=memory_format):
        return tensor
    return tensor.clone(memory_format=memory_format)


_INSTEAD: Mapping[Any, Callable[..., Tensor]] = {functional.dropout: _dropout, torch.dropout: _native_dropout}

_CORRECTIONS: Mapping[Any, Callable[[tuple[Any, ...], Any], Any]] = {
    aten.huber_loss.default: _dtype_of_input,
    aten.soft_margin_loss.default: _dtype_of_input,
    aten.pow.Scalar: _row_major,
    aten.angle.default: _row_major_if_complex,
    aten.log_sigmoid_forward.default: _all_row_major,
    aten.native_batch_norm.default: _normalised,
    aten._native_batch_norm_legit.default: _normalised,
    aten._native_batch_norm_legit.no_stats: _normalised,
    aten._native_batch_norm_legit_no_training.default: _normalised,
    aten._native_batch_norm_legit_functional.default: _normalised,
}
