"""Which ATen operators the joint trace takes apart, and how.

Torch's own decomposition registry covers most of them; the operators named in ``_FROM_TORCH`` are taken from
it. The functions below replace those of the registry that would cost memory traffic or accuracy once they are
loops:

* losses by class index scatter in the registry; here their gradients compare the class axis with the target,
  which is pure index arithmetic and fuses;
* normalisations compute the variance in two passes, as accurate as eager's, and never divide by a variance
  twice.

What is not listed stays whole: matrix products, convolutions, attention, most pooling, sorting and random numbers run
as torch's own kernels, and the lowering has rules for the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from gradsplit.compile_core.ir.data_checks import check_probabilities
from gradsplit.compile_core.ir.tensor_spec import compute_dtype
from gradsplit.compile_core.lowering.decompositions import convolution_layouts, thin_products
from gradsplit.compile_core.lowering.decompositions.decompose_foreach import foreach_decompositions
from gradsplit.compile_core.lowering.decompositions.decompose_pooling import (
    avg_pool2d,
    avg_pool2d_backward,
    max_pool2d,
    max_pool2d_backward,
)
from gradsplit.compile_core.lowering.decompositions.embedding_gradients import embedding_dense_backward
from gradsplit.compile_core.lowering.decompositions.interpolation_gradients import INTERPOLATION_GRADIENTS

aten = torch.ops.aten

_FROM_TORCH = (
    # activations
    aten.gelu_backward, aten.silu, aten.silu_backward, aten.hardtanh, aten.hardswish,
    aten.hardsigmoid, aten.hardsigmoid_backward, aten.leaky_relu,
    aten.leaky_relu_backward, aten.elu, aten.celu, aten.selu, aten.softplus,
    aten.softplus_backward, aten.tanh_backward, aten.sigmoid_backward, aten.log_sigmoid_forward,
    aten.log_sigmoid_backward, aten.mish, aten.mish_backward, aten.glu, aten.glu_backward, aten.threshold,
    aten.threshold_backward, aten.relu6, aten.hardshrink, aten._prelu_kernel,
    aten._prelu_kernel_backward, aten.rrelu_with_noise_backward, aten.logit,
    # softmax
    aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten._log_softmax_backward_data,
    aten.logsumexp,
    # losses
    aten.mse_loss, aten.mse_loss_backward, aten.smooth_l1_loss, aten.huber_loss,
    aten.huber_loss_backward, aten.binary_cross_entropy, aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits, aten.soft_margin_loss, aten.soft_margin_loss_backward,
    # normalisation
    aten.native_group_norm, aten.native_group_norm_backward, aten.native_batch_norm,
    aten._native_batch_norm_legit, aten._native_batch_norm_legit_no_training,
    aten._native_batch_norm_legit_functional, aten.native_batch_norm_backward, aten._batch_norm_with_update,
    aten._batch_norm_with_update_functional, aten._batch_norm_no_update, aten.batch_norm_backward,
    aten._fused_rms_norm, aten._fused_rms_norm_backward,
    # arithmetic
    aten.addcmul, aten.addcdiv, aten.lerp, aten.rsub, aten.xlogy, aten.logaddexp,
    aten.nan_to_num, aten.frac, aten.sgn, aten.heaviside, aten.sinc, aten.isposinf, aten.isneginf,
    aten.deg2rad, aten.rad2deg, aten.special_entr, aten.masked_fill,
    aten.addr, aten.addmv, aten.mv, aten.dot, aten.vdot,
    # reductions
    aten.std, aten.std_mean, aten.linalg_vector_norm, aten.norm, aten.dist, aten.count_nonzero, aten.trace,
    aten.nansum,
    # shapes and indices
    aten.tril, aten.triu, aten.slice_backward, aten.select_backward, aten.diagonal_backward,
    aten.stack, aten.roll, aten.rot90, aten.expand_as,
    aten.zeros_like, aten.ones_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros, aten.ones,
    aten.eye, aten.linspace, aten.fill, aten.zero, aten.upsample_nearest2d, aten.native_dropout_backward,
)  # fmt: skip


def decomposition_table(
    device_type: str, frozen: bool = False
) -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """The table for ``make_fx(decomposition_table=...)`` when tracing for ``"cpu"`` or ``"cuda"``.

    Both kinds of device share one table: what differs between them (the dtype of saved statistics) the
    decompositions see from their arguments.
    """
    table: dict[Any, Callable[..., Any]] = dict(get_decompositions(_FROM_TORCH))
    table.update(
        {
            target: _normalisation(target._schema.name, table[target])
            for target in table
            if "_norm" in target._schema.name
        }
    )
    table[aten.linalg_vector_norm.default] = _counting_dims(table[aten.linalg_vector_norm.default])
    table[aten.binary_cross_entropy.default] = _of_probabilities(table[aten.binary_cross_entropy.default])
    table.update(foreach_decompositions())
    table.update(_OWN)
    if device_type == "cuda":
        table.update(_ON_GPUS)
    elif frozen:
        table.update(_FROZEN_ON_CPUS)
    return table


def _of_probabilities(decompose: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def checked(self: Tensor, *others: Any, **settings: Any) -> Tensor:
        check_probabilities(self, "all elements of input should be between 0 and 1")
        return decompose(self, *others, **settings)

    return checked


def _gelu(self: Tensor, *, approximate: str = "none") -> Tensor:
    x = self.to(compute_dtype(self.dtype))
    if approximate == "tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        result = 0.5 * x * (1 + torch.tanh(inner))
    else:
        result = x * 0.5 * (1 + torch.erf(x * 0.7071067811865476))
    return result.to(self.dtype)


def _softshrink(self: Tensor, lambd: float = 0.5) -> Tensor:
    """Between the bounds zero, of negative numbers, too, but NaN where there is none."""
    x = self.to(compute_dtype(self.dtype))
    between = torch.where(x.isnan(), x, 0.0)
    return torch.where(x.abs() > lambd, x - torch.sign(x) * lambd, between).to(self.dtype)


def _merged(variance: Tensor, mean: Tensor, input: Tensor, dims: list[int]) -> Tensor:
    """The variance of rows as torch's kernel for CPUs gives it: no number where the square of the mean is infinite.

    The kernel merges partial sums, one for each lane of a vector and one for elements that are left over; one of no
    elements adds the squared distance of the means times 0. (It is the mean of a lane; for that of the row to differ
    as much, the variance must be infinite, too.)
    """
    lanes, count = 32 // input.element_size(), prod(input.shape[d] for d in dims)
    has_empty = input.device.type == "cpu" and (count < lanes or count % lanes == 0)
    return variance + mean * mean * 0.0 if has_empty else variance


def _native_layer_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(input.dim() - len(normalized_shape), input.dim()))
    x = input.to(compute_dtype(input.dtype))
    mean = torch.mean(x, dims, keepdim=True)
    centered = x - mean
    variance = _merged(torch.mean(centered * centered, dims, keepdim=True), mean, input, dims)
    rstd = torch.rsqrt(variance + eps)
    result = centered * rstd
    if weight is not None:
        result = result * weight
        if bias is None and input.device.type == "cpu":  # eager adds zeros there: no result is -0.0
            result = result + 0.0
    if bias is not None:
        result = result + bias
    if input.device.type == "cpu":  # eager keeps the statistics in the input's dtype there
        mean, rstd = mean.to(input.dtype), rstd.to(input.dtype)
    return result.to(input.dtype), mean, rstd


def _native_layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dtype = compute_dtype(input.dtype)
    outer = list(range(input.dim() - len(normalized_shape)))
    dims = list(range(len(outer), input.dim()))
    grad, x = grad_out.to(dtype), input.to(dtype)
    normalized = (x - mean) * rstd
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        scaled = grad * weight if weight is not None else grad
        count = prod(normalized_shape)
        along_ones = torch.sum(scaled, dims, keepdim=True)
        along_x = torch.sum(scaled * normalized, dims, keepdim=True)
        grad_input = (rstd * (scaled - (along_ones + normalized * along_x) * (1.0 / count))).to(input.dtype)
    if output_mask[1] and weight is not None:
        grad_weight = _sum_outer(grad * normalized, outer).to(weight.dtype)
    if output_mask[2] and bias is not None:
        grad_bias = _sum_outer(grad, outer).to(bias.dtype)
    return grad_input, grad_weight, grad_bias


def _sum_outer(value: Tensor, dims: list[int]) -> Tensor:
    return torch.sum(value, dims) if dims else value


# A softmax divides once a row: a quotient an element is most of the time of a kernel over short rows.
def _softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    x = self.to(compute_dtype(self.dtype))
    result_dtype = x.dtype if half_to_float else self.dtype
    if x.numel() == 0:
        return x.to(result_dtype).clone()
    exponentials = torch.exp(x - torch.amax(x, dim, keepdim=True))
    total = torch.sum(exponentials, dim, keepdim=True)
    return (exponentials * torch.reciprocal(total)).to(result_dtype)


def _safe_softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Attention's softmax: a row in which everything is masked, by minus infinity, is 0 and not NaN."""
    result_dtype = dtype or self.dtype
    x = self.to(compute_dtype(result_dtype))
    if x.numel() == 0:
        return x.to(result_dtype).clone()
    largest = torch.amax(x, dim, keepdim=True)
    exponentials = torch.exp(x - torch.where(largest == -torch.inf, 0.0, largest))
    total = torch.sum(exponentials, dim, keepdim=True)
    return (exponentials * torch.reciprocal(torch.where(total == 0.0, 1.0, total))).to(result_dtype)


def _log_softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    x = self.to(compute_dtype(self.dtype))
    result_dtype = x.dtype if half_to_float else self.dtype
    if x.numel() == 0:
        return x.to(result_dtype).clone()
    shifted = x - torch.amax(x, dim, keepdim=True)
    return (shifted - torch.log(torch.sum(torch.exp(shifted), dim, keepdim=True))).to(result_dtype)


def _counting_dims(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Torch's form of a norm; up to torch 2.12 it keeps a dim of size 1 that is counted from the end."""

    def run(self: Tensor, ord: float = 2, dim: list[int] | None = None, *rest: Any, **named: Any) -> Tensor:
        counted = [each % max(self.dim(), 1) for each in dim] if dim is not None else None
        return norm(self, ord, counted, *rest, **named)

    return run


_normalisation_of = ContextVar("_normalisation_of", default="")


def _normalisation(name: str, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's form of an operator whose kernel takes the mean of a sum, though the form asks ``var_mean`` for it."""

    @functools.wraps(decomposition)
    def run(*arguments: Any, **named: Any) -> Any:
        token = _normalisation_of.set(name)
        try:
            return decomposition(*arguments, **named)
        finally:
            _normalisation_of.reset(token)

    return run


def _var_mean(
    self: Tensor,
    dim: list[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
    stepwise: bool = True,
) -> Any:
    if self.is_complex():
        return NotImplemented
    dims = [d % self.dim() for d in dim] if dim else list(range(self.dim()))
    count = prod(self.shape[d] for d in dims)
    x = self.to(compute_dtype(self.dtype))
    mean = torch.mean(x, dims, keepdim=True)
    if _normalisation_of.get():
        centered = x - mean
    else:
        # Of equal values it is exactly 0, on which the gradient of a standard deviation relies. A mean may be rounded.
        shifted = x - x[tuple(slice(1) if d in dims else slice(None) for d in range(x.dim()))]
        centered = shifted - torch.mean(shifted, dims, keepdim=True)
    squares = torch.sum(centered * centered, dims, keepdim=True)
    divisor = max(count - (1 if correction is None else correction), 0)
    variance = squares / divisor
    if _normalisation_of.get() == "aten::native_group_norm":
        variance = _merged(variance, mean, self, dims)
    if stepwise and not _normalisation_of.get() and count > 1 and self.device.type == "cpu":
        # The kernel's mean + (x - mean) / n is NaN after a first infinity.
        last = x[tuple(slice(-1, None) if d in dims else slice(None) for d in range(x.dim()))]
        only_last = last.isinf() & (torch.sum(x.isinf(), dims, keepdim=True) == 1)
        mean = torch.where(mean.isinf() & ~only_last, torch.nan, mean)
    if not keepdim:
        shape = [size for d, size in enumerate(self.shape) if d not in dims]
        mean, variance = mean.reshape(shape), variance.reshape(shape)
    return variance.to(self.dtype), mean.to(self.dtype)


def _var(
    self: Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    both = _var_mean(self, dim, correction=correction, keepdim=keepdim, stepwise=False)
    return both if both is NotImplemented else both[0]


_NONE, _MEAN = 0, 1  # reductions of losses


def _class_weights(
    self: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Which samples count, targets with a valid class in the place of ignored ones, and each sample's weight.

    What an ignored row holds may be infinite or no number, so that a weight of 0 would not leave it out.
    """
    valid = target != ignore_index
    safe = torch.where(valid, target, 0)
    dtype = compute_dtype(self.dtype)
    weights = aten.index(weight, [safe]).to(dtype) if weight is not None else 1.0
    return valid, safe, torch.where(valid, weights, torch.zeros((), dtype=dtype, device=self.device))


def _nll_loss_forward(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    class_dim = 0 if self.dim() < 2 else 1
    valid, safe, weights = _class_weights(self, target, weight, ignore_index)
    picked = torch.gather(self, class_dim, safe.unsqueeze(class_dim)).squeeze(class_dim)
    losses = torch.where(valid, -picked.to(compute_dtype(self.dtype)) * weights, 0.0)
    total = torch.sum(weights)
    if reduction == _NONE and self.dim() > 1:
        return losses.to(self.dtype), torch.zeros((), dtype=self.dtype, device=self.device)
    loss = torch.sum(losses)
    if reduction == _MEAN:
        loss = loss / total
    return loss.to(self.dtype), total.to(self.dtype)


def _nll_loss_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    class_dim = 0 if self.dim() < 2 else 1
    valid, safe, weights = _class_weights(self, target, weight, ignore_index)
    grad = grad_output / total_weight if reduction == _MEAN else grad_output
    slope = torch.where(valid, -(grad * weights), 0.0)
    classes = torch.arange(self.shape[class_dim], device=self.device)
    classes = classes.view([-1] + [1] * (self.dim() - class_dim - 1))
    hit = safe.unsqueeze(class_dim) == classes
    return torch.where(hit, slope.unsqueeze(class_dim), 0.0).to(self.dtype)


# Chooses as the kernels do, what is no number last; the registry's form makes 0 of its gradient.
def _smooth_l1_loss_backward(
    grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, beta: float
) -> Tensor:
    x = (self - target).to(compute_dtype(self.dtype))
    slope = grad_output * (1.0 / max(x.numel(), 1)) if reduction == _MEAN else grad_output
    inner = torch.where(x >= beta, slope, slope * x / beta)
    return torch.where(x <= -beta, -slope, inner).to(self.dtype)


# Of an infinite exponential the kernel's quotient is no number; the registry's form has a sigmoid instead.
def _soft_margin_loss_backward(grad_output: Tensor, self: Tensor, target: Tensor, reduction: int) -> Tensor:
    wide = compute_dtype(self.dtype)
    power = torch.exp(-target.to(wide) * self.to(wide))
    scale = -1.0 / max(self.numel(), 1) if reduction == _MEAN else -1.0
    return (scale * target * power / (power + 1) * grad_output).to(self.dtype)


# Torch's kernels of these treat what is no number one way in whole vectors and another in the rest of a tensor, and the
# registry's forms take the latter; these take that of vectors.
def _hardtanh_backward(grad_output: Tensor, self: Tensor, min_val: float, max_val: float) -> Tensor:
    return torch.where((self > min_val) & (self < max_val), grad_output, 0.0)


def _hardswish_backward(grad_output: Tensor, self: Tensor) -> Tensor:
    grad, x = grad_output.to(compute_dtype(self.dtype)), self.to(compute_dtype(self.dtype))
    inner = torch.where(x >= 3, grad, grad * (x / 3 + 0.5))
    return torch.where(x <= -3, 0.0, inner).to(self.dtype)


def _elu_backward(
    grad_output: Tensor,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
    self_or_result: Tensor,
) -> Tensor:
    dtype = compute_dtype(self_or_result.dtype)
    grad, x = grad_output.to(dtype), self_or_result.to(dtype)
    curve = x + alpha * scale if is_result else torch.exp(x * input_scale) * (alpha * scale)
    return torch.where(x > 0, grad * scale, grad * input_scale * curve).to(self_or_result.dtype)


def _stack(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim % (tensors[0].dim() + 1))


_OWN: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.gelu.default: _gelu,
    aten.softshrink.default: _softshrink,
    aten.native_layer_norm.default: _native_layer_norm,
    aten.native_layer_norm_backward.default: _native_layer_norm_backward,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten._safe_softmax.default: _safe_softmax,
    aten.var_mean.correction: _var_mean,
    aten.var.correction: _var,
    aten.nll_loss_forward.default: _nll_loss_forward,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.nll_loss2d_forward.default: _nll_loss_forward,
    aten.nll_loss2d_backward.default: _nll_loss_backward,
    aten.smooth_l1_loss_backward.default: _smooth_l1_loss_backward,
    aten.soft_margin_loss_backward.default: _soft_margin_loss_backward,
    aten.hardtanh_backward.default: _hardtanh_backward,
    aten.hardswish_backward.default: _hardswish_backward,
    aten.elu_backward.default: _elu_backward,
    aten.stack.default: _stack,
    aten._neg_view.default: aten.neg.default,  # loops read memory as it is, without the view's bit
    aten.embedding_dense_backward.default: embedding_dense_backward,
    aten.avg_pool2d.default: avg_pool2d,
    aten.avg_pool2d_backward.default: avg_pool2d_backward,
    aten.max_pool2d_with_indices.default: max_pool2d,
    aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
}

_ON_GPUS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.convolution.default: convolution_layouts.convolution,
    aten.convolution_backward.default: convolution_layouts.convolution_backward,
    aten.view.default: convolution_layouts.view,
    aten.mm.default: thin_products.mm,
    aten.addmm.default: thin_products.addmm,
    aten.avg_pool2d.default: functools.partial(avg_pool2d, tiles_only=False),
    aten.avg_pool2d_backward.default: functools.partial(avg_pool2d_backward, tiles_only=False),
    **INTERPOLATION_GRADIENTS,
}
_FROZEN_ON_CPUS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.convolution.default: convolution_layouts.frozen_convolution,
    aten.view.default: convolution_layouts.view,
}
