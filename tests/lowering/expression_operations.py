"""The operations of random expressions: what each computes, how it rounds, and which settings fit its arguments.

Each works on tensors of any dtype that torch takes, so that an expression can be run in float64 as well. Operations
that change tensors in place make what they change themselves, or change a leaf.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten

# How the result of an operation differs from the mathematical one: not at all, by a rounding of the result, or as if
# its arguments were rounded, too.
EXACT, ROUNDS, ACCUMULATES = "exact", "rounds", "accumulates"

FLOATS = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

Settings = tuple[Any, ...] | None


@dataclass(frozen=True)
class Operation:
    """See the file's head.

    Attributes:
        function: takes ``arity`` tensors, then the settings.
        rounding: ``EXACT``, ``ROUNDS`` or ``ACCUMULATES``.
        choose: settings for these tensors, ``None`` if the operation does not fit them.
        in_place: it changes its first argument, which must be a leaf.
    """

    function: Callable[..., Tensor]
    rounding: str
    arity: int
    choose: Callable[..., Settings]
    in_place: bool = False


OPERATIONS: dict[str, Operation] = {}
# Names by family; families are drawn with equal probability unless they are named twice.
FAMILIES: dict[str, list[str]] = {}


def _nothing(*_: Any) -> Settings:
    return ()


def _add(
    family: str,
    name: str,
    function: Callable[..., Any],
    rounding: str = ROUNDS,
    arity: int = 1,
    choose: Callable[..., Settings] = _nothing,
    in_place: bool = False,
) -> None:
    assert name not in OPERATIONS
    OPERATIONS[name] = Operation(function, rounding, arity, choose, in_place)
    FAMILIES.setdefault(family, []).append(name)


# ---- pointwise --------------------------------------------------------------------------------------------------

for _name in ("tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "erf", "expm1", "log1p", "reciprocal", "exp2", "log2",
              "atan", "asinh", "square", "erfc", "log10", "sinh", "tan"):  # fmt: skip
    _add("unary", _name, getattr(torch, _name))
for _name in (
    "gelu",
    "silu",
    "softplus",
    "elu",
    "mish",
    "logsigmoid",
    "hardswish",
    "hardsigmoid",
    "selu",
    "softsign",
):
    _add("activation", _name, getattr(F, _name))
for _name in ("neg", "abs", "sign", "floor", "ceil", "round", "trunc", "isnan", "isinf", "isfinite", "logical_not",
              "bitwise_not", "nan_to_num", "positive", "clone", "relu"):  # fmt: skip
    _add("exact unary", _name, getattr(torch, _name), EXACT)
# The sign of what is no number is left to the order of operands.
_add("exact unary", "signbit", lambda x: torch.signbit(x) & (x == x), EXACT)
_add("unary", "sin", lambda x: torch.sin(x.clamp(-1e4, 1e4)))
_add("unary", "cos", lambda x: torch.cos(x.clamp(-1e4, 1e4)))
# Below -1, 1 + tanh cancels.
_add("activation", "gelu_tanh", lambda x: F.gelu(x.clamp(min=-1), approximate="tanh"))
_add("activation", "leaky_relu", lambda x: F.leaky_relu(x, 0.1))
_add("activation", "relu6", F.relu6, EXACT)
_add("activation", "hardtanh", lambda x: F.hardtanh(x, -0.5, 0.75), EXACT)


def _number(rng: random.Random, x: Tensor) -> Settings:
    return (rng.choice([0, 1, 2, -1, 3, 0.5, -1.5, 0.1, True]),)


def _divisor(rng: random.Random, x: Tensor) -> Settings:
    return (rng.choice([2, -3, 7, 0.5, -1.25] if x.dtype.is_floating_point else [2, -3, 7]),)


_add("scalar", "add_number", lambda x, n: x + n, choose=_number)
_add("scalar", "number_minus", lambda x, n: n - x, choose=_number)
_add("scalar", "mul_number", lambda x, n: x * n, choose=_number)
_add("scalar", "div_number", lambda x, n: x / n, choose=_divisor)
_add("scalar", "number_over", lambda x, n: n / x, choose=_number)
_add("scalar", "floor_divide_number", lambda x, n: x // n, choose=_divisor)
_add("scalar", "remainder_number", lambda x, n: x % n, choose=_divisor)
_add("scalar", "fmod_number", lambda x, n: torch.fmod(x, n), choose=_divisor)
_add(
    "scalar",
    "pow_number",
    lambda x, n: x**n,
    choose=lambda rng, x: (rng.choice([2, 3, -1, 0.5, 0, 1, -2, 1.7, 4]),),
)
_add("scalar", "number_pow", lambda x, n: n**x, choose=lambda rng, x: (rng.choice([2, 0.5, 1.7]),))
_add("scalar", "compare_number", lambda x, name, n: getattr(torch, name)(x, n), EXACT,
     choose=lambda rng, x: (rng.choice(["lt", "le", "gt", "ge", "eq", "ne"]), rng.choice([0, 1, 0.5, -1])))  # fmt: skip
_add("scalar", "clamp", lambda x, low, high: x.clamp(low, high), EXACT,
     choose=lambda rng, x: rng.choice([(-1, 1), (None, 0.5), (0, None), (1, -1), (-0.25, 3)]))  # fmt: skip
_add("scalar", "masked_fill_number", lambda x, n: x.masked_fill(x > 0, n), EXACT,
     choose=lambda rng, x: (rng.choice([0, -1, float("-inf"), 2]),))  # fmt: skip


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype.is_floating_point and not dtype.is_floating_point and dtype != torch.bool:
        # What is out of range has no defined conversion.
        x = torch.nan_to_num(x, 7.0, 50.0, 0.0).clamp(0 if dtype == torch.uint8 else -100, 100)
    return x.to(dtype)


_add("cast", "cast", _cast, choose=lambda rng, x: (rng.choice([*FLOATS, *INTEGERS, torch.bool]),))
_add("cast", "cast_float", _cast, choose=lambda rng, x: (rng.choice(FLOATS),))
_add("cast", "cast_and_back", lambda x, dtype: x.to(dtype).to(x.dtype), choose=lambda rng, x: (
    (rng.choice(FLOATS),) if x.dtype.is_floating_point else None))  # fmt: skip


def _broadcast(rng: random.Random, *tensors: Tensor) -> Settings:
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return () if prod(shape) <= max(4000, *(tensor.numel() for tensor in tensors)) else None


def _both_integers(rng: random.Random, x: Tensor, y: Tensor) -> Settings:
    return None if x.dtype.is_floating_point or y.dtype.is_floating_point else _broadcast(rng, x, y)


def _both_numbers(rng: random.Random, x: Tensor, y: Tensor) -> Settings:
    return None if torch.bool in (x.dtype, y.dtype) else _both_integers(rng, x, y)


def _floats(rng: random.Random, x: Tensor) -> Settings:
    return () if x.dtype.is_floating_point else None


def _dense(rng: random.Random, x: Tensor, *_: Tensor) -> Settings:
    """For changes of a leaf: no two of its elements are one."""
    return None if any(size > 1 and not step for size, step in zip(x.shape, x.stride(), strict=True)) else ()


for _name in ("add", "sub", "mul", "div"):
    _add("binary", _name, getattr(torch, _name), arity=2, choose=_broadcast)
for _name in ("atan2", "fmod", "remainder", "floor_divide", "hypot", "xlogy", "logaddexp"):
    _add("rare binary", _name, getattr(torch, _name), arity=2, choose=_broadcast)
_add("rare binary", "pow", lambda x, y: torch.pow(x.abs(), y), arity=2, choose=_broadcast)
_add(
    "rare binary", "trunc_divide", lambda x, y: torch.div(x, y, rounding_mode="trunc"), ROUNDS, 2, _broadcast
)
_add("rare binary", "add_alpha", lambda x, y: torch.add(x, y, alpha=2), ACCUMULATES, 2, _broadcast)
_add("rare binary", "squared_difference", lambda x, y: (x - y) ** 2, ACCUMULATES, 2, _broadcast)
for _name in ("maximum", "minimum", "fmax"):
    _add("extremum", _name, getattr(torch, _name), EXACT, 2, _broadcast)
_add("extremum", "copysign", lambda x, y: torch.copysign(x, y.masked_fill(y != y, 1)), EXACT, 2, _broadcast)
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or", "logical_xor"):
    _add("comparison", _name, getattr(torch, _name), EXACT, 2, _broadcast)
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    _add("bits", _name, getattr(torch, _name), EXACT, 2, _both_integers)
_add("bits", "shift_left", lambda x, y: x << (y & 7), EXACT, 2, _both_numbers)
_add("bits", "shift_right", lambda x, y: x >> (y & 7), EXACT, 2, _both_numbers)
_add("activation", "threshold", lambda x: F.threshold(x, 0.25, 3.0), EXACT, choose=_floats)
_add("where", "where", lambda c, x, y: torch.where(c != 0, x, y), EXACT, 3, _broadcast)
_add("where", "where_number", lambda c, x: torch.where(c != 0, x, 0.5), EXACT, 2, _broadcast)
_add("where", "masked_fill", lambda x, c: x.masked_fill(c != 0, 2), EXACT, 2, _broadcast)
_add("where", "lerp", lambda x, y: torch.lerp(x, y, 0.3), ACCUMULATES, 2, _broadcast)
_add("where", "addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=2), ACCUMULATES, 3, _broadcast)
_add("where", "addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=2), ACCUMULATES, 3, _broadcast)
_add("where", "clamp_tensors", lambda x, y, z: torch.clamp(x, y, z), EXACT, 3, _broadcast)

# ---- views ------------------------------------------------------------------------------------------------------


def _dim(rng: random.Random, x: Tensor) -> int:
    return rng.randrange(-x.dim(), x.dim())


def _a_dim(rng: random.Random, x: Tensor, *_: Tensor) -> Settings:
    return (_dim(rng, x),) if x.dim() else None


def _permutation(rng: random.Random, x: Tensor) -> Settings:
    return (tuple(rng.sample(range(x.dim()), x.dim())),)


def _factors(rng: random.Random, x: Tensor) -> Settings:
    count, shape = x.numel(), []
    while count > 1 and len(shape) < 4:
        shape.append(rng.choice([n for n in range(1, count + 1) if count % n == 0]))
        count //= shape[-1]
    shape += [count] if count != 1 or rng.random() < 0.3 else []
    rng.shuffle(shape)
    return (tuple(shape),)


def _joined(rng: random.Random, x: Tensor) -> Settings:
    if x.dim() < 2:
        return None
    first = rng.randrange(x.dim() - 1)
    return first, rng.randrange(first + 1, x.dim())


def _slice(rng: random.Random, x: Tensor, *_: Tensor) -> Settings:
    if not x.dim():
        return None
    dim = rng.randrange(x.dim())
    start = rng.randint(0, x.shape[dim])
    end = rng.choice([rng.randint(start, x.shape[dim]), x.shape[dim]])
    return dim, start, end, rng.choice([1, 1, 2, 3])


def _sliced(x: Tensor, dim: int, start: int, end: int, step: int) -> Tensor:
    return x[(slice(None),) * dim + (slice(start, end, step),)]


def _select(rng: random.Random, x: Tensor, *_: Tensor) -> Settings:
    if not x.numel() or not x.dim():
        return None
    dim = _dim(rng, x)
    return dim, rng.randrange(-x.shape[dim], x.shape[dim])


def _expansion(rng: random.Random, x: Tensor) -> Settings:
    shape = [rng.choice([1, 3, 4]) if size == 1 else size for size in x.shape]
    return (tuple([rng.choice([1, 2, 5])] * rng.randint(0, 1) + shape),)


_add("view", "permute", lambda x, order: x.permute(order), EXACT, choose=_permutation)
_add("view", "reshape", lambda x, shape: x.reshape(shape), EXACT, choose=_factors)
_add("view", "flatten", lambda x, first, last: x.flatten(first, last), EXACT, choose=_joined)
_add("view", "slice", _sliced, EXACT, choose=_slice)
_add("view", "select", lambda x, dim, index: x.select(dim, index), EXACT, choose=_select)
_add("view", "expand", lambda x, shape: x.expand(shape), EXACT, choose=_expansion)
_add("view", "unsqueeze", lambda x, d: x.unsqueeze(d), EXACT, 1, lambda rng, x: (rng.randint(0, x.dim()),))
_add("view", "squeeze", lambda x, dim: x.squeeze(dim), EXACT, choose=_a_dim)
_add("view", "squeeze_all", lambda x: x.squeeze(), EXACT)
_add("view", "transpose", lambda x, one, other: x.transpose(one, other), EXACT,
     choose=lambda rng, x: (_dim(rng, x), _dim(rng, x)) if x.dim() else None)  # fmt: skip
_add("view", "chunk", lambda x, dim, number: x.chunk(2, dim)[number], EXACT,
     choose=lambda rng, x: (_dim(rng, x), rng.randint(0, 1)) if x.dim() else None)  # fmt: skip
_add("view", "diagonal", lambda x, offset: x.diagonal(offset), EXACT,
     choose=lambda rng, x: (rng.randint(-1, 1),) if x.dim() > 1 else None)  # fmt: skip
_add("view", "unfold", lambda x, dim, size, step: x.unfold(dim, size, step), EXACT,
     choose=lambda rng, x: (_dim(rng, x), rng.randint(1, 3), rng.randint(1, 3)) if x.dim() else None)  # fmt: skip
_add("copying view", "flip", lambda x, dim: x.flip(dim), EXACT, choose=_a_dim)
_add("copying view", "roll", lambda x, shift, dim: x.roll(shift, dim), EXACT,
     choose=lambda rng, x: (rng.randint(-3, 3), _dim(rng, x)) if x.dim() else None)  # fmt: skip
_add("copying view", "repeat", lambda x, counts: x.repeat(counts), EXACT,
     choose=lambda rng, x: (tuple(rng.choice([1, 1, 2]) for _ in range(x.dim())),))  # fmt: skip
_add("copying view", "repeat_interleave", lambda x, dim: x.repeat_interleave(2, dim), EXACT, choose=_a_dim)
_add("copying view", "contiguous", lambda x: x.contiguous(), EXACT)
_add("copying view", "tril", lambda x, k: x.tril(k), EXACT, choose=lambda rng, x: (rng.randint(-1, 2),))
_add("copying view", "triu", lambda x, k: x.triu(k), EXACT, choose=lambda rng, x: (rng.randint(-1, 2),))
_add("copying view", "pad", lambda x, pads: F.pad(x, pads, value=0.5), EXACT,
     choose=lambda rng, x: (tuple(rng.randint(-1, 2) for _ in range(2 * rng.randint(1, x.dim()))),)
     if x.dim() else None)  # fmt: skip
_add("copying view", "pad_reflect", lambda x: F.pad(x, (1, 1), mode="reflect"), EXACT)
_add("copying view", "diag_embed", torch.diag_embed, EXACT)

# ---- reductions -------------------------------------------------------------------------------------------------


def _dims(rng: random.Random, x: Tensor) -> Settings:
    count = rng.randint(0 if not x.dim() else 1, x.dim())
    return tuple(rng.sample(range(x.dim()), count)), rng.random() < 0.5


def _dim_and_keep(rng: random.Random, x: Tensor) -> Settings:
    return (_dim(rng, x), rng.random() < 0.5) if x.dim() and x.numel() else None


def _squares_fit(rng: random.Random, x: Tensor, *_: Tensor) -> Settings:
    """Where squares overflow, a result depends on how its sums are written; some of eager's are float64."""
    if not x.dtype.is_floating_point:
        return ()
    most = torch.finfo(torch.promote_types(x.dtype, torch.float32)).max
    return () if (~x.isfinite() | (x.abs() < 1e-3 * most**0.5)).all() else None


def _dims_of_squares(rng: random.Random, x: Tensor) -> Settings:
    return None if _squares_fit(rng, x) is None else _dims(rng, x)


for _name in ("var", "std", "sum", "mean", "nansum"):
    _add("reduction", _name, lambda x, dims, keep, name=_name: getattr(torch, name)(x, dims, keepdim=keep),
         ACCUMULATES, choose=_dims_of_squares if _name in ("var", "std") else _dims)  # fmt: skip
_add("reduction", "var_biased", lambda x, dims, keep: torch.var(x, dims, correction=0, keepdim=keep),
     ACCUMULATES, choose=_dims_of_squares)  # fmt: skip
for _name in ("amax", "amin", "any", "all"):
    _add("exact reduction", _name, lambda x, dims, keep, name=_name: getattr(torch, name)(x, dims, keepdim=keep),
         EXACT, choose=_dims)  # fmt: skip
for _name in ("argmax", "argmin"):
    _add("exact reduction", _name, lambda x, dim, keep, name=_name: getattr(torch, name)(x, dim, keepdim=keep),
         EXACT, choose=_dim_and_keep)  # fmt: skip
    _add("exact reduction", f"{_name}_flat", lambda x, name=_name: getattr(torch, name)(x), EXACT)
for _name in ("max", "min"):
    for _part in (0, 1):
        _add("exact reduction", f"{_name}_{_part}",
             lambda x, dim, keep, name=_name, part=_part: getattr(torch, name)(x, dim, keepdim=keep)[part],
             EXACT, choose=_dim_and_keep)  # fmt: skip
_add("reduction", "prod", lambda x, dim, keep: torch.prod(x, dim, keep), ACCUMULATES, 1, _dim_and_keep)
_add("reduction", "sum_all", torch.sum, ACCUMULATES)
_add("reduction", "sum_dtype", lambda x, dim, dtype: torch.sum(x, dim, dtype=dtype), ACCUMULATES,
     choose=lambda rng, x: (_dim(rng, x), rng.choice([torch.float32, torch.float64])) if x.dim() else None)  # fmt: skip
_add(
    "reduction", "logsumexp", lambda x, dims, keep: torch.logsumexp(x, dims, keep), ACCUMULATES, choose=_dims
)
_add(
    "reduction",
    "norm",
    lambda x, dims, keep: torch.linalg.vector_norm(x, 2, dims, keep),
    ACCUMULATES,
    choose=_dims,
)
_add("reduction", "norm_1", lambda x, dims, keep: torch.linalg.vector_norm(x, 1, dims, keep), ACCUMULATES,
     choose=_dims)  # fmt: skip
_add("exact reduction", "norm_inf", lambda x, dims, keep: torch.linalg.vector_norm(x, float("inf"), dims, keep),
     EXACT, choose=_dims)  # fmt: skip
_add("exact reduction", "count_nonzero", lambda x, dim: torch.count_nonzero(x, dim), EXACT, choose=_a_dim)
_add("reduction", "cumsum", lambda x, dim: x.cumsum(dim), ACCUMULATES, choose=_a_dim)


def _moderate_floats(rng: random.Random, x: Tensor, y: Tensor) -> Settings:
    """Where float64 itself does not cancel to nothing."""
    return () if all(t.dtype.is_floating_point and (t.abs() < 9).all() for t in (x, y)) else None


for _name in ("softmax", "log_softmax"):
    _add("norm", _name, lambda x, dim, name=_name: getattr(torch, name)(x, dim), ACCUMULATES, choose=_a_dim)
_add(
    "norm",
    "softmax_float",
    lambda x, dtype, dim: torch.softmax(x, dim, dtype=dtype),
    ACCUMULATES,
    choose=lambda rng, x: (torch.float32, _dim(rng, x)) if x.dim() else None,
)
_add("norm", "layer_norm", lambda x: F.layer_norm(x, x.shape[-1:]), ACCUMULATES, choose=_squares_fit)
_add("norm", "layer_norm_weight", lambda x, w: F.layer_norm(x, x.shape[-1:], w.flatten()[:1].expand(x.shape[-1])),
     ACCUMULATES, 2, _squares_fit)  # fmt: skip
_add("norm", "rms_norm", lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5), ACCUMULATES,
     choose=_squares_fit)  # fmt: skip
_add("norm", "group_norm", lambda x: F.group_norm(x, 1), ACCUMULATES, choose=_squares_fit)
_add(
    "norm",
    "batch_norm",
    lambda x: F.batch_norm(x, None, None, training=True),
    ACCUMULATES,
    choose=_squares_fit,
)
_add("norm", "normalize", lambda x, dim: F.normalize(x, dim=dim), ACCUMULATES, choose=_a_dim)
_add("norm", "softmax_backward", lambda g, x: aten._softmax_backward_data(g, torch.softmax(x, -1), -1, x.dtype),
     ACCUMULATES, 2, _moderate_floats)  # fmt: skip
_add(
    "norm",
    "cross_entropy",
    lambda x, t: F.cross_entropy(x, t.reshape(-1)[: x.shape[0]].long() % x.shape[1]),
    ACCUMULATES,
    2,
    lambda rng, x, t: () if x.dim() == 2 and t.numel() and not t.dtype.is_floating_point else None,
)
_add("norm", "max_pool", lambda x: F.max_pool2d(x, 2), EXACT)
_add("norm", "avg_pool", lambda x: F.avg_pool2d(x, 2, padding=1), ACCUMULATES)

# ---- combinations -----------------------------------------------------------------------------------------------


def _cat_dim(rng: random.Random, x: Tensor, y: Tensor) -> Settings:
    dims = [d for d in range(x.dim()) if all(x.shape[o] == y.shape[o] for o in range(x.dim()) if o != d)]
    return (rng.choice(dims),) if x.dim() == y.dim() and dims else None


def _as_indices(index: Tensor, size: int) -> Tensor:
    """Any integers as indices, some of them from the end."""
    # Not a number, which would be one that the trace cannot know.
    index = (index if index.dim() else index.view(1)).to(torch.int64).remainder(size)
    return torch.where(index % 2 == 0, index - size, index)


def _integers(rng: random.Random, x: Tensor, index: Tensor) -> Settings:
    return () if not index.dtype.is_floating_point and x.dim() and x.shape[0] else None


def _integers_and_dim(rng: random.Random, x: Tensor, index: Tensor) -> Settings:
    return None if index.dtype.is_floating_point or not x.numel() else _a_dim(rng, x)


def _gather(x: Tensor, index: Tensor, dim: int) -> Tensor:
    shape = [1 if d == dim % x.dim() else size for d, size in enumerate(x.shape)]
    rows = index.reshape(-1)[:3].to(torch.int64).remainder(x.shape[dim])
    shape[dim % x.dim()] = -1
    places = rows.view([-1 if d == dim % x.dim() else 1 for d in range(x.dim())])
    return x.gather(
        dim, places.expand([-1 if d == dim % x.dim() else size for d, size in enumerate(x.shape)])
    )


def _places(x: Tensor, index: Tensor, dim: int) -> tuple[Any, ...]:
    return (slice(None),) * (dim % x.dim()) + (_as_indices(index.reshape(-1)[:5], x.shape[dim]),)


_add("cat", "cat", lambda x, y, dim: torch.cat([x, y], dim), EXACT, 2, _cat_dim)
_add("cat", "cat_self", lambda x, dim: torch.cat([x, x.flip(dim), x * 2], dim), EXACT, 1, _a_dim)
_add("cat", "stack", lambda x, y, dim: torch.stack([x, y], dim), EXACT, 2,
     lambda rng, x, y: (rng.randint(0, x.dim()),) if x.shape == y.shape else None)  # fmt: skip
_add("cat", "cat_of_parts", lambda x, dim: torch.cat([part * 2 for part in reversed(x.chunk(3, dim))], dim), EXACT,
     1, _a_dim)  # fmt: skip
_add("index", "index", lambda x, i: x[_as_indices(i, x.shape[0])], EXACT, 2,
     lambda rng, x, i: _integers(rng, x, i) if i.numel() * x.numel() <= 20000 else None)  # fmt: skip
_add("index", "index_dim", lambda x, i, dim: x[_places(x, i, dim)], EXACT, 2, _integers_and_dim)
_add("index", "index_select", lambda x, i, dim: x.index_select(dim, i.reshape(-1)[:5].long() % x.shape[dim]), EXACT,
     2, _integers_and_dim)  # fmt: skip
_add("index", "gather", _gather, EXACT, 2, _integers_and_dim)
_add("index", "embedding", lambda i, w: F.embedding(i.long() % w.shape[0], w), EXACT, 2,
     lambda rng, i, w: _integers(rng, w, i) if w.dim() == 2 and i.numel() * w.shape[1] <= 20000 else None)  # fmt: skip
_add("index", "index_put_add", lambda x, i, dim: x.index_put(_places(x, i, dim)[-1:], x[:1] + 1, accumulate=True),
     ACCUMULATES, 2, lambda rng, x, i: (0,) if _integers(rng, x, i) is not None else None)  # fmt: skip
_add("index", "index_add", lambda x, i: x.index_add(0, i.reshape(-1)[: x.shape[0]].long() % x.shape[0],
     x[: i.numel()]), ACCUMULATES, 2, _integers)  # fmt: skip
_add("index", "one_hot", lambda i: F.one_hot(i.long() % 5, 5), EXACT, 1,
     lambda rng, i: None if i.dtype.is_floating_point else ())  # fmt: skip
_add("index", "embedding_backward", lambda g, i: aten.embedding_dense_backward(
     g.reshape(g.shape[0], -1), i.reshape(-1)[: g.shape[0]].long() % 7, 7, 3, False), ACCUMULATES, 2,
     lambda rng, g, i: () if not i.dtype.is_floating_point and g.dim() and i.numel() >= len(g)
     and g.dtype.is_floating_point else None)  # fmt: skip
_add("product", "matmul", lambda x: x.flatten(1) @ x.flatten(1).t(), ACCUMULATES, 1,
     lambda rng, x: () if x.dim() > 1 and x.dtype.is_floating_point else None)  # fmt: skip
_add("product", "matmul_two", lambda x, y: x @ y, ACCUMULATES, 2,
     lambda rng, x, y: () if x.dim() > 1 and y.dim() > 1 and x.shape[-1] == y.shape[-2] and x.dtype == y.dtype
     and x.dtype.is_floating_point else None)  # fmt: skip
_add("creation", "positions", lambda x, dim: x + torch.arange(x.shape[dim], device=x.device).view(
     [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]), ROUNDS, 1, _a_dim)  # fmt: skip
_add("creation", "full_like", lambda x, n: torch.full_like(x, n), EXACT, 1, _number)
_add("creation", "full", lambda x, n: torch.full((3, *x.shape), n, device=x.device), EXACT, 1, _number)
_add("creation", "causal", lambda x: x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1),
     float("-inf")), EXACT)  # fmt: skip

# ---- changes in place -------------------------------------------------------------------------------------------


def _after(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    y = x.clone()
    change(y)
    return y


_add(
    "in place",
    "set_slice",
    lambda x, y, *where: _after(x, lambda z: _sliced(z, *where).copy_(y)),
    ROUNDS,
    2,
    _slice,
)
_add("in place", "set_slice_to_number", lambda x, *where: _after(x, lambda z: _sliced(z, *where).fill_(3)), EXACT, 1,
     _slice)  # fmt: skip
_add(
    "in place",
    "scale_slice",
    lambda x, *where: _after(x, lambda z: _sliced(z, *where).mul_(2)),
    EXACT,
    1,
    _slice,
)
_add("in place", "set_selected", lambda x, y, dim, i: _after(x, lambda z: z.select(dim, i).copy_(y)), ROUNDS, 2,
     _select)  # fmt: skip
_add("in place", "add_", lambda x, y: _after(x, lambda z: z.add_(y)), ROUNDS, 2)
_add("in place", "mul_", lambda x, y: _after(x, lambda z: z.mul_(y)), ROUNDS, 2)
_add("in place", "copy_", lambda x, y: _after(x, lambda z: z.copy_(_cast(y, z.dtype))), ROUNDS, 2)
_add("in place", "transposed_neg_", lambda x, dim: _after(x, lambda z: z.transpose(0, dim).select(0, 0).neg_()), EXACT,
     1, _a_dim)  # fmt: skip
_add("in place", "zero_diagonal", lambda x: _after(x, lambda z: z.diagonal().zero_()), EXACT)
_add("in place", "masked_fill_", lambda x, c: _after(x, lambda z: z.masked_fill_(c != 0, 1)), EXACT, 2)
_add("in place", "index_put_", lambda x, i, dim: _after(x, lambda z: z.__setitem__(_places(z, i, dim), 2)), EXACT, 2,
     _integers_and_dim)  # fmt: skip
_add(
    "in place",
    "clamp_after_view",
    lambda x: _after(x.contiguous(), lambda z: (z.view(-1).clamp_(max=1), z.add_(1))),
    ROUNDS,
)
_add("leaf", "leaf_neg_", lambda x: x.neg_(), EXACT, choose=_dense, in_place=True)
_add("leaf", "leaf_double_", lambda x: x.mul_(2), EXACT, choose=_dense, in_place=True)
_add("leaf", "leaf_copy_", lambda x, y: x.copy_(_cast(y, x.dtype)), ROUNDS, 2, _dense, in_place=True)
_add("leaf", "leaf_fill_slice_", lambda x, *where: (_sliced(x, *where).fill_(2), x)[1], EXACT,
     choose=lambda rng, x: None if _dense(rng, x) is None else _slice(rng, x), in_place=True)  # fmt: skip
