"""Pointwise operators: how one element of the result is computed.

The dtype in which an operator computes follows from its kind. Most compute in the dtype of their result
(which the graph's fake value has, with torch's promotion already applied); comparisons in the promotion of
their operands; logical operators on truth values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradsplit.compile_core.lowering.graph_to_loops.lower_values import Argument, Emitter, LazyTensor

aten = torch.ops.aten
prims = torch.ops.prims

# (emitter, operands as values of the compute dtype, compute dtype) -> value
Compute = Callable[[Emitter, Sequence[int], torch.dtype], int]

RESULT, OPERANDS, TRUTH = "result", "operands", "truth"


@dataclass(frozen=True)
class ScalarRule:
    """How a pointwise operator computes.

    Attributes:
        compute: emits the operation.
        kind: what the compute dtype is: that of the result, the promotion of the operands, or bool.
        operands: how many leading arguments are operands; the others are settings that ``specialise`` has
            seen.
        cost: scalar operations; ``transcendental`` of them are expensive ones.
        conditional: whether the first operand is a truth value whatever the others are.
        rounds_numbers: whether torch's kernels take numbers as elements of the operands' dtype, and not unrounded.
    """

    compute: Compute
    kind: str = RESULT
    operands: int = 1
    cost: int = 1
    transcendental: int = 0
    conditional: bool = False
    rounds_numbers: bool = False


# what arithmetic means on bool
_ON_BOOL = {
    "add": "logical_or", "mul": "logical_and", "maximum": "logical_or", "minimum": "logical_and",
    "bitwise_and": "logical_and", "bitwise_or": "logical_or", "bitwise_xor": "logical_xor",
    "bitwise_not": "logical_not",
}  # fmt: skip


def _simple(name: str, operands: int, kind: str = RESULT, transcendental: int = 0) -> ScalarRule:
    def compute(emitter: Emitter, values: Sequence[int], dtype: torch.dtype) -> int:
        if kind != RESULT:
            return emitter.apply(name, values, torch.bool)
        return emitter.apply(_ON_BOOL.get(name, name) if dtype == torch.bool else name, values, dtype)

    rounds_numbers = kind == OPERANDS or name in ("remainder", "fmod")
    return ScalarRule(compute, kind, operands, 1, transcendental, rounds_numbers=rounds_numbers)


def _power(emitter: Emitter, values: Sequence[int], dtype: torch.dtype) -> int:
    base, exponent = values
    known = emitter.constant_of(exponent)
    if known == 1:
        return base
    if known == 2:
        return emitter.apply("mul", (base, base), dtype)
    if known == 3:
        return emitter.apply("mul", (emitter.apply("mul", (base, base), dtype), base), dtype)
    if dtype.is_floating_point:
        if known == 0.5:
            return emitter.apply("sqrt", (base,), dtype)
        if known == -0.5:
            return emitter.apply("rsqrt", (base,), dtype)
        if known == -1:
            return emitter.apply("reciprocal", (base,), dtype)
        if known == -2:
            return emitter.apply("reciprocal", (emitter.apply("mul", (base, base), dtype),), dtype)
    return emitter.apply("pow", (base, exponent), dtype)


def _truncating_division(emitter: Emitter, values: Sequence[int], dtype: torch.dtype) -> int:
    if dtype.is_floating_point:
        return emitter.apply("trunc", (emitter.apply("div", values, dtype),), dtype)
    return emitter.apply("trunc_div", values, dtype)


def _sign(emitter: Emitter, values: Sequence[int], dtype: torch.dtype) -> int:
    return values[0] if dtype == torch.bool else emitter.apply("sign", values, dtype)


def _relu(emitter: Emitter, values: Sequence[int], dtype: torch.dtype) -> int:
    return emitter.apply("maximum", (values[0], emitter.constant(0, dtype)), dtype)


def _identity(_: Emitter, values: Sequence[int], __: torch.dtype) -> int:
    return values[0]


def _clamp(emitter: Emitter, values: Sequence[int], dtype: torch.dtype, low: bool, high: bool) -> int:
    result = values[0]
    if low:
        result = emitter.apply("maximum", (result, values[1]), dtype)
    if high:
        result = emitter.apply("minimum", (result, values[-1]), dtype)
    return result


_UNARY = (
    "neg", "abs", "reciprocal", "floor", "ceil", "round", "trunc", "bitwise_not",
)  # fmt: skip
_UNARY_TRANSCENDENTAL = (
    "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
    "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "sigmoid", "lgamma",
)  # fmt: skip
_BINARY = ("add", "sub", "mul", "div", "remainder", "fmod", "bitwise_and", "bitwise_or", "bitwise_xor")
_BINARY_TENSORS = ("maximum", "minimum", "copysign", "hypot", "nextafter", "atan2")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def _overloads(packet: Any, names: Sequence[str]) -> list[torch._ops.OpOverload]:
    return [getattr(packet, name) for name in names if name in packet.overloads()]


def _table() -> Mapping[torch._ops.OpOverload, ScalarRule]:
    table: dict[torch._ops.OpOverload, ScalarRule] = {}
    for name in _UNARY:
        table[getattr(aten, name).default] = _simple(name, 1)
    for name in _UNARY_TRANSCENDENTAL:
        table[getattr(aten, name).default] = _simple(name, 1, transcendental=1)
    for name in (*_BINARY, *_BINARY_TENSORS):
        for target in _overloads(getattr(aten, name), ("Tensor", "Scalar", "default")):
            table[target] = _simple(name, 2, transcendental=int(name in ("hypot", "atan2")))
    for name in _COMPARISONS:
        for target in _overloads(getattr(aten, name), ("Tensor", "Scalar")):
            table[target] = _simple(name, 2, OPERANDS)
    for name in ("logical_and", "logical_or", "logical_xor"):
        table[getattr(aten, name).default] = _simple(name, 2, TRUTH)
    table[aten.logical_not.default] = _simple("logical_not", 1, TRUTH)
    for name in ("isnan", "isinf"):
        table[getattr(aten, name).default] = _simple(name, 1, OPERANDS)
    for target in (aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar):
        table[target] = ScalarRule(
            _power, operands=2, cost=2, transcendental=int(target is not aten.pow.Tensor_Scalar)
        )
    for target in (aten.__lshift__.Scalar, aten.__lshift__.Tensor, aten.bitwise_left_shift.Tensor):
        table[target] = _simple("shift_left", 2)
    for target in (aten.__rshift__.Scalar, aten.__rshift__.Tensor, aten.bitwise_right_shift.Tensor):
        table[target] = _simple("shift_right", 2)
    for name, short in (("__and__", "bitwise_and"), ("__or__", "bitwise_or"), ("__xor__", "bitwise_xor")):
        for target in _overloads(getattr(aten, name), ("Tensor", "Scalar")):
            table[target] = _simple(short, 2)
    for target in (aten.floor_divide.default, *_overloads(aten.floor_divide, ("Scalar",))):
        table[target] = _simple("floor_div", 2)
    table[aten.square.default] = ScalarRule(
        lambda emitter, v, dtype: emitter.apply("mul", (v[0], v[0]), dtype)
    )
    table[aten.sign.default] = ScalarRule(_sign)
    table[aten.relu.default] = ScalarRule(_relu)
    for target in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar):
        table[target] = replace(_simple("where", 3), conditional=True)
    for target in (
        aten.clone.default,
        aten.lift_fresh_copy.default,
        aten.contiguous.default,
        aten.positive.default,
    ):
        table[target] = ScalarRule(_identity, cost=0)
    return table


SCALAR_RULES = _table()
CONVERSIONS = frozenset(
    {aten._to_copy.default, aten.to.dtype, prims.convert_element_type.default, aten.type_as.default}
)
_CLAMPS = frozenset({aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_max.default,
                     aten.clamp_min.Tensor, aten.clamp_max.Tensor})  # fmt: skip


def is_pointwise(target: Any) -> bool:
    return target in SCALAR_RULES or target in CONVERSIONS or target in _CLAMPS or target in (
        aten.div.Tensor_mode, aten.div.Scalar_mode,
    )  # fmt: skip


def scalar_rule(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[ScalarRule, list[Argument]] | None:
    """The rule for one call and its operands; ``None`` if this call has no rule."""
    if target in CONVERSIONS:
        return ScalarRule(_identity, cost=0), [args[0]]
    if target in _CLAMPS:
        low = args[1] if len(args) > 1 else kwargs.get("min")
        high = args[2] if len(args) > 2 else kwargs.get("max")
        if "clamp_max" in str(target):
            low, high = None, low if low is not None else high
        operands = [operand for operand in (args[0], low, high) if operand is not None]
        if target is aten.clamp.default and any(isinstance(o, float) and o != o for o in operands[1:]):
            return (
                None  # torch's kernels differ in what they make of such a bound, with version and processor
            )
        has_low, has_high = low is not None, high is not None

        def compute(emitter: Emitter, values: Sequence[int], dtype: torch.dtype) -> int:
            return _clamp(emitter, values, dtype, has_low, has_high)

        return ScalarRule(compute, operands=len(operands)), operands
    if target in (aten.div.Tensor_mode, aten.div.Scalar_mode):
        mode = kwargs.get("rounding_mode")
        if mode == "floor":
            return _simple("floor_div", 2), list(args[:2])
        if mode == "trunc":
            return ScalarRule(_truncating_division, operands=2, cost=2), list(args[:2])
        target = aten.div.Tensor
    rule = SCALAR_RULES.get(target)
    if rule is None or len(args) < rule.operands:
        return None
    operands = list(args[: rule.operands])
    alpha = kwargs.get("alpha", 1)
    if alpha != 1 and target in (aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar):
        rule = _with_alpha(rule, alpha)
    return rule, operands


def _with_alpha(rule: ScalarRule, alpha: float) -> ScalarRule:
    """``a + alpha * b``."""

    def compute(emitter: Emitter, values: Sequence[int], dtype: torch.dtype) -> int:
        scaled = emitter.apply("mul", (values[1], emitter.constant(alpha, dtype)), dtype)
        return rule.compute(emitter, (values[0], scaled), dtype)

    return replace(rule, compute=compute, cost=2)


def operand_dtype(rule: ScalarRule, operands: Sequence[Argument], result: torch.dtype) -> torch.dtype:
    """The dtype in which eager computes a call; kernels compute in ``compute_dtype`` of it."""
    if rule.kind == TRUTH:
        return torch.bool
    if rule.kind == RESULT:
        return result
    # 0-d tensors and Python numbers promote weakly, so stand-ins of the right rank ask torch itself
    stand_ins: list[Any] = [
        torch.empty((1,) * min(len(operand.shape), 1), dtype=operand.dtype, device="meta")
        if isinstance(operand, LazyTensor)
        else operand
        for operand in operands
    ]
    if len(stand_ins) == 1:
        return stand_ins[0].dtype
    return torch.result_type(stand_ins[0], stand_ins[1])
