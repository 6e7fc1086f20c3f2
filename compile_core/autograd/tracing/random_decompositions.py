"""Expresses random operators in three: uniform numbers, normal numbers, and integers of a range.

The results have the distributions of torch's operators, not their numbers, and the strides of torch's results. An
operator that is given a generator keeps it, and so stays as it is. So does one whose arguments torch's kernel would
refuse when it runs. Numbers of a tensor are checked to be probabilities on CPUs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsplit.compile_core.autograd.tracing.random_order import memory_order
from gradsplit.compile_core.ir.data_checks import check_probabilities

aten = torch.ops.aten

# Below half a step of the uniform numbers; what stands for a zero of theirs, whose logarithm is infinite.
_LEAST_UNIFORM = 2.0**-25
_NOT_PROBABILITIES = (
    "Expected p_in >= 0 && p_in <= 1 to be true, but got false.  (Could this error message be improved?  If so, please "
    "report an enhancement request to PyTorch.)"
)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _filled(like: Tensor, draw: Callable[[Sequence[int]], Tensor]) -> Tensor:
    """Numbers of the shape of ``like`` that lie in memory as it does, where it lies densely."""
    found = memory_order(like)
    if found is None:
        return draw(like.shape)
    order, back = found
    return draw([like.shape[dim] for dim in order]).permute(back)


def _uniform_numbers(like: Tensor, dtype: torch.dtype) -> Tensor:
    return _filled(like, lambda size: torch.rand(size, dtype=dtype, device=like.device))


def _normal_numbers(like: Tensor, dtype: torch.dtype) -> Tensor:
    return _filled(like, lambda size: torch.randn(size, dtype=dtype, device=like.device))


def _model_of(tensor: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """What ``empty_like`` would give; the tensor itself where that is the same."""
    if all(setting is None for setting in settings.values()):
        return tensor
    return torch.empty_like(tensor, **settings)


def _rand_like(self: Tensor, **settings: Any) -> Tensor:
    like = _model_of(self, settings)
    return _uniform_numbers(like, like.dtype)


def _randn_like(self: Tensor, **settings: Any) -> Tensor:
    like = _model_of(self, settings)
    return _normal_numbers(like, like.dtype)


def _randint_like(self: Tensor, *limits: int, **settings: Any) -> Tensor:
    like = _model_of(self, settings)
    low, high = limits if len(limits) == 2 else (0, *limits)
    return _filled(like, lambda size: torch.randint(low, high, size, dtype=like.dtype, device=like.device))


def _bernoulli(self: Tensor, *, generator: Any = None) -> Any:
    return _bernoulli_of(self, self, generator=generator)


def _bernoulli_of(self: Tensor, p: Tensor | float, *, generator: Any = None) -> Any:
    if generator is not None or (not isinstance(p, Tensor) and not 0 <= p <= 1):
        return NotImplemented
    dtype = torch.float32
    if isinstance(p, Tensor):
        dtype = _compute_dtype(p.dtype)
        check_probabilities(p, _NOT_PROBABILITIES)
    return (_uniform_numbers(self, dtype) < p).to(self.dtype)


def _native_dropout(input: Tensor, p: float, train: bool | None) -> Any:
    if not 0 <= p <= 1:
        return NotImplemented
    if train is False:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    kept = _uniform_numbers(input, torch.float32) < 1 - p
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return input * kept * scale, kept


def _uniform(self: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Any:
    if generator is not None or not low <= high:
        return NotImplemented
    if (low, high) == (0, 1):
        return _uniform_numbers(self, self.dtype)
    numbers = (_uniform_numbers(self, _compute_dtype(self.dtype)) * (high - low) + low).to(self.dtype)
    return torch.where(numbers >= high, low, numbers)  # only rounding goes as far


def _normal_functional(self: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Any:
    if generator is not None:
        return NotImplemented
    return (_normal_numbers(self, _compute_dtype(self.dtype)) * std + mean).to(self.dtype)


def _normal_of_size(
    mean: float, std: float, size: Sequence[int], *, generator: Any = None, **settings: Any
) -> Any:
    if generator is not None:
        return NotImplemented
    return torch.randn(size, **settings) * std + mean


def _normal_about(mean: Tensor, std: float = 1.0, *, generator: Any = None) -> Any:
    if generator is not None:
        return NotImplemented
    return (mean + _normal_numbers(mean, _compute_dtype(mean.dtype)) * std).to(mean.dtype)


def _exponential(self: Tensor, lambd: float = 1.0, *, generator: Any = None) -> Any:
    if generator is not None:
        return NotImplemented
    uniform = _uniform_numbers(self, _compute_dtype(self.dtype))
    return (-torch.log(uniform.clamp_min(_LEAST_UNIFORM)) / lambd).to(self.dtype)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.rand_like.default: _rand_like,
    aten.randn_like.default: _randn_like,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli_of,
    aten.bernoulli.Tensor: _bernoulli_of,
    aten.native_dropout.default: _native_dropout,
    aten.uniform.default: _uniform,
    aten.normal_functional.default: _normal_functional,
    aten.normal.float_float: _normal_of_size,
    aten.normal.Tensor_float: _normal_about,
    aten.exponential.default: _exponential,
}
