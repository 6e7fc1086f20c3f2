"""Corrects what torch says of fake tensors where its kernels do otherwise.

A program sees dtype and strides of its results, and a capture answers what it asks of them; so of the operators listed
here fakes are given those that the kernels give. Dtypes are the same on all devices; the strides are those of the CPU's
kernels, and corrected there alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gradsplit.compile_core.torch_facts.dispatcher import (
    enable_python_dispatcher,
    is_random_call,
    suggest_memory_format,
)
from gradsplit.compile_core.torch_facts.interpolation import interpolated
from gradsplit.compile_core.torch_facts.recurrent_networks import NETWORKS, layered
from gradsplit.compile_core.torch_facts.small_tensors import refuse_dtypes, small
from gradsplit.compile_core.torch_facts.symbolic_numbers import (
    memory_order,
    repeated_dims,
    value_at_compilation,
)
from gradsplit.compile_core.torch_facts.thread_state import disable_current_modes
from gradsplit.compile_core.torch_facts.wrapper_tensors import inner_tensors, is_wrapper_class

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default


@contextmanager
def run_on_fakes(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Inside, operators on fake tensors give what their kernels would, for sizes that are open, too."""
    with fake_mode, _CorrectedFakes(), kernels_of_sizes(fake_mode):
        yield


_fake_logger = logging.getLogger("torch._subclasses.fake_tensor")
_condition_logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")


@contextmanager
def quiet_fakes(conditions: bool = False) -> Iterator[None]:
    """Inside, torch logs no tracebacks of operators that raise on fake tensors, as plain Python is about to do.

    Args:
        conditions: nor warnings of conditions that only data decide.
    """
    loggers = [_fake_logger, *([_condition_logger] if conditions else [])]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@contextmanager
def kernels_of_sizes(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Some composite operators ask for numbers where they run in C++; their forms in Python keep sizes symbolic."""
    if fake_mode.shape_env is None:
        yield
        return
    with enable_python_dispatcher(), _corrected_forms():
        yield


def _with_states_as_given(form: Callable[..., Any]) -> Callable[..., Any]:
    """Torch 2.11's last states of an LSTM have another dim of size 1 before the batch, where there are several rows."""

    def run(sequence: Tensor, states: Any, *settings: Any) -> Any:
        output, *last = form(sequence, states, *settings)
        pairs = zip(last, states, strict=True)
        return output, *(state if state.dim() == given.dim() else state.squeeze(1) for state, given in pairs)

    return run


_AUTOGRAD, _COMPOSITE = torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd
# What takes the place of a form in Python, by operator and key. None: the kernel, which does not mind symbols; the
# forms of those, above autograd, have other values and gradients at NaN and infinity.
_FORMS_INSTEAD: Mapping[tuple[Any, Any], Callable[..., Any] | None] = {
    (aten.hardshrink.default, _AUTOGRAD): None,
    (aten.softshrink.default, _AUTOGRAD): None,
    (aten.multi_margin_loss.default, _AUTOGRAD): None,
    (aten.multilabel_margin_loss_forward.default, _AUTOGRAD): None,
    (aten.lstm.input, _AUTOGRAD): _with_states_as_given,
    (aten.lstm.input, _COMPOSITE): _with_states_as_given,
    **{
        (interpolation, key): interpolated
        for interpolation in (
            aten.upsample_linear1d.vec,
            aten.upsample_bilinear2d.vec,
            aten.upsample_trilinear3d.vec,
        )
        for key in (_AUTOGRAD, _COMPOSITE)
    },
}
_forms_lock = threading.Lock()
_forms_users = 0
_forms_replaced: dict[tuple[Any, Any], Any] = {}


@contextmanager
def _corrected_forms() -> Iterator[None]:
    """Inside, in all threads, these operators give what their kernels give."""
    global _forms_users
    with _forms_lock:
        _forms_users += 1
        if _forms_users == 1:
            for (operator, key), correct in _FORMS_INSTEAD.items():
                if key in operator.py_kernels:
                    form = _forms_replaced[operator, key] = operator.py_kernels.pop(key)
                    if correct is not None:
                        operator.py_kernels[key] = correct(form)
                    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        with _forms_lock:
            _forms_users -= 1
            if not _forms_users:
                for (operator, key), form in _forms_replaced.items():
                    operator.py_kernels[key] = form
                    operator._dispatch_cache.clear()
                _forms_replaced.clear()


def fake_mode_of(values: Iterable[Any]) -> FakeTensorMode | None:
    """The mode of the fake tensors among these values, or of those that wrappers among them hold."""
    inner = (inner for value in values if isinstance(value, Tensor) for inner in inner_tensors(value))
    return next((tensor.fake_mode for tensor in inner if isinstance(tensor, FakeTensor)), None)


def with_kernels_results(function: Any) -> Any:
    """What is to run on fakes inside ``run_on_fakes`` in the place of a function."""
    return _INSTEAD.get(function, function)


class _CorrectedFakes(TorchDispatchMode):
    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_wrapper_class, types)):
            if is_random_call(func, args, kwargs or {}):
                # Its class may turn generators to and fro for it, as DTensor does, so that ranks draw alike.
                raise UnsupportedOperatorException(func)
            return NotImplemented
        if func is _DEVICE:
            return device_of(args[0])
        if isinstance(func, OpOverload):
            # Not in a trace of a backward, where what torch says of a norm's mean, which nobody sees, is another type.
            refuse_dtypes(func, args, kwargs or {})
        return run_operator(func, args, kwargs or {})


def device_of(tensor: Any) -> torch.device:
    """What a mode gives for ``prim.device``, which torch asks it for as often as for operators; and each mode below."""
    return tensor.fake_device if type(tensor) is FakeTensor else tensor.device


def run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator gives for fake tensors, as its kernel would."""
    if not isinstance(func, OpOverload):
        return func(*args, **kwargs)  # a higher-order one, which has no kernel
    if func._schema.is_mutable and torch.Tag.inplace_view not in func.tags and args:
        _refuse_repeated(func, args[0])
    like = _LIKE.get(func)
    return corrected(func, args, func(*args, **kwargs) if like is None else like(args))


def _refuse_repeated(func: Any, changed: Any) -> None:
    """Raises what kernels raise that would write one element several times; fake tensors let them."""
    alias = func._schema.arguments[0].alias_info
    if alias is None or not alias.is_write or not isinstance(changed, Tensor):
        return
    if repeated_dims(changed.shape, changed.stride()):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def corrected(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """``result`` of ``func(*args)``, which fake tensors or a decomposition made, as the operator's kernel gives it."""
    correct = _CORRECTIONS.get(func)
    if correct is not None:
        return correct(args, result)
    return _walked_at_once(args, result) if torch.Tag.pointwise in func.tags else result


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Where nothing is dropped, torch's form in Python returns a copy. That in C++, which asks for sizes, does not."""
    is_empty = any(isinstance(size, int) and size == 0 for size in input.shape)
    drops_nothing = (p == 0 or not training or is_empty) and not inplace
    return input if drops_nothing else functional.dropout(input, p, training, inplace)


def _native_dropout(input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(input, p, train)


def _dtype_of_input(args: tuple[Any, ...], loss: Tensor) -> Tensor:
    return loss.to(args[0].dtype)


def _dtype_of_target(args: tuple[Any, ...], loss: Tensor) -> Tensor:
    """The kernel changes a tensor made of the targets in place."""
    return loss.to(args[1].dtype) if args[1].is_floating_point() else loss


def _row_major(_: tuple[Any, ...], result: Tensor) -> Tensor:
    return _in_format(result, torch.contiguous_format)


def _all_row_major(_: tuple[Any, ...], results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple([_in_format(result, torch.contiguous_format) for result in results])


def _row_major_if_complex(args: tuple[Any, ...], result: Tensor) -> Tensor:
    return _in_format(result, torch.contiguous_format) if args[0].is_complex() else result


def _channels_last_or_row_major(args: tuple[Any, ...], result: Tensor) -> Tensor:
    return _in_format(result, suggest_memory_format(args[0]))


def _normalised(args: tuple[Any, ...], results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return _channels_last_or_row_major(args, results[0]), *results[1:]


def _as_input(args: tuple[Any, ...], loss: Tensor) -> Tensor:
    loss = _dtype_of_input(args, loss)
    return _as(torch.empty_like(args[0]), loss) if loss.shape == args[0].shape else loss


def _elementwise(args: tuple[Any, ...], result: Tensor) -> Tensor:
    """As all kernels of two tensors lie that walk over elements, on every device; forms in Python take turns."""
    if not any(isinstance(value, Tensor) for value in args[:2]):
        return result  # torch.div(7, 2) is a tensor without dims
    return _walked_at_once(args, _as(torch.eq(args[0], args[1]), result))


def _walked_at_once(args: tuple[Any, ...], result: Any) -> Any:
    """Kernels walk over all tensors at once, and order dims by their strides. They give a dim that a tensor lacks none,
    forms in Python that of one element; and where these take turns, a tensor between lies otherwise than those given,
    which matters where none of them has a stride in each dim."""
    if not isinstance(result, Tensor) or result.dim() < 2:
        return result
    tensors = [value for value in args if isinstance(value, Tensor)]
    walk = {2: torch.eq, 3: torch.where}.get(len(tensors))
    shape = [value_at_compilation(size) for size in result.shape]
    if walk is None or 0 in shape:
        return result
    lacks_dims = 1 in shape and any(0 < tensor.dim() < len(shape) for tensor in tensors)
    if not lacks_dims and any(_has_each_stride(tensor, shape) for tensor in tensors):
        return result
    with disable_current_modes():
        plain = walk(*(small(tensor, torch.bool) for tensor in tensors))
    return result if memory_order(plain.stride()) == memory_order(result.stride()) else _as(plain, result)


def _has_each_stride(tensor: Tensor, shape: Sequence[int]) -> bool:
    sizes = [value_at_compilation(size) for size in tensor.shape]
    return sizes == shape and not repeated_dims(sizes, tensor.stride())


def _as(other: Tensor, result: Tensor) -> Tensor:
    order, back = memory_order(other.stride())
    return result.permute(order).contiguous().permute(back)


def _viewed(args: tuple[Any, ...], result: Tensor) -> Tensor:
    """Kernels give dims of one element strides of their own, by which convolutions choose how their result lies."""
    given = args[0]
    if given._has_symbolic_sizes_strides or result._has_symbolic_sizes_strides or 1 not in result.shape:
        return result
    with disable_current_modes():
        plain = torch.empty_strided(given.shape, given.stride(), device="meta").view(result.shape)
    same = plain.stride() == result.stride()
    return result if same else result.as_strided(result.shape, plain.stride())


def _norm(args: tuple[Any, ...], result: Tensor) -> Tensor:
    """Torch 2.11's form in Python keeps dims of one element."""
    given, _, dims, keeps = [*args, None, None, None][:4]
    if keeps or not result.dim() or result.dim() < given.dim():
        return result
    return result.squeeze(tuple(dims or range(result.dim())))


def _scattered(_: tuple[Any, ...], result: Tensor) -> Tensor:
    """A copy of an expanded tensor has memory for each element."""
    return result.clone() if repeated_dims(result.shape, result.stride()) else result


def _as_run(func: Any) -> Callable[[tuple[Any, ...], Tensor], Tensor]:
    """Lays a result as the kernel itself lays that of small tensors whose dims lie in the same order."""

    def correct(args: tuple[Any, ...], result: Tensor) -> Tensor:
        tensors = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
        sizes = [value_at_compilation(size) for tensor in tensors for size in tensor.shape]
        if result.device.type != "cpu" or result.dim() < 2 or 0 in sizes:
            return result
        with disable_current_modes():
            plain = func(*tree_map_only(Tensor, small, args))
        return result if memory_order(plain.stride()) == memory_order(result.stride()) else _as(plain, result)

    return correct


def _index(args: tuple[Any, ...]) -> Tensor:
    """Torch takes the shape of an index without dims for that of all."""
    source, indices = args
    tensors = [index for index in indices if index is not None]
    if len(tensors) > 1 and not any(index.dtype in (torch.bool, torch.uint8) for index in tensors):
        expanded = iter(torch.broadcast_tensors(*tensors))
        indices = [None if index is None else next(expanded) for index in indices]
    return _laid_index(args, aten.index.Tensor(source, indices))


_laid_index = _as_run(aten.index.Tensor)


def _select(args: tuple[Any, ...]) -> Tensor:
    """Torch up to 2.11 finds an index in a dim of no elements."""
    given, dim, index = args
    if given.dim() and value_at_compilation(given.shape[dim]) == 0:
        raise IndexError(
            f"select(): index {index} out of range for tensor of size {[*given.shape]} at dimension {dim}"
        )
    return aten.select.int(given, dim, index)


def _margin_loss(args: tuple[Any, ...], loss: Tensor) -> Tensor:
    """The loss of a sample alone has no dims, and weights of another type are none of no samples only."""
    loss = loss.to(args[0].dtype)
    return loss.reshape(()) if args[1].dim() == 0 else loss


def _multilabel_margin_loss(args: tuple[Any, ...], results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results[0].reshape(()) if args[1].dim() <= 1 else results[0], *results[1:]


def _real_fourier(args: tuple[Any, ...], result: Tensor) -> Tensor:
    """MKL's results: the other dims in the order of the input's memory, then those that are transformed."""
    if result.device.type != "cpu" or not torch.backends.mkl.is_available():
        return result
    input, dims = args[0], [dim % args[0].dim() for dim in args[1]]

    def outermost_first(some: Sequence[int]) -> list[int]:
        return sorted(some, key=lambda dim: -value_at_compilation(input.stride(dim)))

    others = [dim for dim in range(input.dim()) if dim not in dims]
    order = [*outermost_first(others), *outermost_first(dims[:-1]), dims[-1]]
    return result.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])


def _depends_on_data(_: tuple[Any, ...], result: Any) -> Any:
    """Torch up to 2.11 runs the kernel on zeros, and takes that result's size."""
    raise DynamicOutputShapeException(aten._unique.default)


def _with_positions(_: tuple[Any, ...], results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Torch up to 2.11 says that positions and counts of no values are such values."""
    return results[0], *(result.to(torch.int64) for result in results[1:])


def _in_format(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    if tensor.device.type != "cpu" or tensor.is_contiguous(memory_format=memory_format):
        return tensor
    return tensor.clone(memory_format=memory_format)


def _like_second(args: tuple[Any, ...]) -> Tensor:
    return torch.empty_like(args[1], memory_format=torch.contiguous_format)


# Of these torch does not know what they give, most for sizes that are symbols.
_LIKE: Mapping[Any, Callable[[tuple[Any, ...]], Tensor]] = {
    aten.hardshrink_backward.default: lambda args: torch.mul(args[0], args[1]),
    aten.softshrink_backward.default: lambda args: torch.mul(args[0], args[1]),
    aten.multi_margin_loss_backward.default: _like_second,
    aten.multilabel_margin_loss_backward.default: _like_second,
    aten.index.Tensor: _index,
    aten.select.int: _select,
}

_INSTEAD: Mapping[Any, Callable[..., Any]] = {
    functional.dropout: _dropout,
    torch.dropout: _native_dropout,
    **{network: layered(network, False) for network in NETWORKS},
}

_OF_TWO = (
    aten.complex.default, aten.heaviside.default, aten.logaddexp.default, aten.logaddexp2.default,
    aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default, aten.special_xlog1py.default,
    aten.xlogy.Tensor, aten.copysign.Tensor, aten.floor_divide.default, aten.div.Tensor_mode,
)  # fmt: skip
_CORRECTIONS: Mapping[Any, Callable[[tuple[Any, ...], Any], Any]] = {
    aten.huber_loss.default: _as_input,
    aten.binary_cross_entropy.default: _as_input,
    aten.binary_cross_entropy_with_logits.default: _dtype_of_target,
    aten.soft_margin_loss.default: _dtype_of_input,
    aten.pow.Scalar: _row_major,
    aten.angle.default: _row_major_if_complex,
    aten.log_sigmoid_forward.default: _all_row_major,
    aten._fft_r2c.default: _real_fourier,
    aten._unique.default: _depends_on_data,
    aten._unique2.default: _with_positions,
    aten.unique_dim.default: _with_positions,
    aten.unique_consecutive.default: _with_positions,
    aten.isin.Tensor_Tensor: _row_major,
    aten.isin.Tensor_Scalar: _row_major,
    aten.nll_loss2d_forward.default: _all_row_major,
    aten._softmax.default: _row_major,
    aten._safe_softmax.default: _row_major,
    aten.native_layer_norm.default: _all_row_major,
    aten._log_softmax.default: _row_major,
    aten.poisson.default: _row_major,
    aten.normal.Tensor_Tensor: _row_major,
    aten.normal.float_Tensor: _row_major,
    aten._standard_gamma.default: _row_major,
    aten.rrelu_with_noise.default: _row_major,
    aten.rrelu_with_noise_functional.default: _all_row_major,
    aten.multi_margin_loss.default: _margin_loss,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    aten.ldexp.Tensor: _as_run(aten.ldexp.Tensor),
    aten.view.default: _viewed,
    aten._unsafe_view.default: _viewed,
    aten.slice_scatter.default: _scattered,
    aten.select_scatter.default: _scattered,
    aten.diagonal_scatter.default: _scattered,
    aten.mv.default: _dtype_of_target,
    aten.linalg_vector_norm.default: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.norm.ScalarOpt_dim_dtype: _norm,
    **dict.fromkeys(_OF_TWO, _elementwise),
    aten.rsub.Tensor: lambda args, result: _walked_at_once((args[1], args[0]), result),
    aten.channel_shuffle.default: _channels_last_or_row_major,
    aten.max_unpool2d.default: _channels_last_or_row_major,
    aten.reflection_pad3d.default: _channels_last_or_row_major,
    aten.replication_pad3d.default: _channels_last_or_row_major,
    aten._batch_norm_with_update.default: _normalised,
    aten._batch_norm_with_update_functional.default: _normalised,
    aten.native_batch_norm.default: _normalised,
    aten._native_batch_norm_legit.default: _normalised,
    aten._native_batch_norm_legit.no_stats: _normalised,
    aten._native_batch_norm_legit_no_training.default: _normalised,
    aten._native_batch_norm_legit_functional.default: _normalised,
}
