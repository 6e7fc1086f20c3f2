"""Every operator family: lowered and fused programs compute what the graph computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gradsplit
from gradsplit.compile_core.ir.loops import Apply, ExternCall, View
from gradsplit.compile_core.ir.verify_loops import verify_program
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.extern_rules import fallback_calls
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from tests.lowering.loop_evaluator import evaluate
from tests.lowering.lowering_harness import check, check_module, compute_of, nests, trace, trace_joint

Function = Callable[..., object]


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def _integers(*shape: int, low: int = -9, high: int = 9, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(7)).to(dtype)


UNARY: list[Function] = [
    torch.neg, torch.abs, torch.sign, torch.exp, torch.tanh, torch.sigmoid, torch.erf, torch.sin, torch.floor,
    torch.relu, torch.square, torch.expm1, torch.isnan, torch.logical_not, torch.reciprocal, torch.round,
    F.gelu, F.silu, F.softplus, F.leaky_relu, F.elu, F.hardtanh, F.hardswish, F.mish, F.logsigmoid,
    lambda x: F.gelu(x, approximate="tanh"), lambda x: x**2, lambda x: x**3, lambda x: x**-1,
    lambda x: x.abs() ** 0.5, lambda x: x.clamp(-0.5, 0.5), lambda x: x.clamp(min=0.1),
    lambda x: x.clamp(max=0.1), lambda x: x.clamp_min(0.2), lambda x: 2 - x, lambda x: x.add(1, alpha=3),
    lambda x: x.to(torch.float64), lambda x: x.to(torch.int32), lambda x: x.to(torch.bool),
    lambda x: torch.nan_to_num(x / (x > 0)), lambda x: F.threshold(x, 0.1, 5.0),
    lambda x: torch.where(x > 0, x, 0.5), lambda x: x.masked_fill(x > 0, -1.0), lambda x: F.softmax(x, -1),
    lambda x: F.log_softmax(x, 0), lambda x: torch.logsumexp(x, 1), lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: x.var(1), lambda x: x.std(0), lambda x: torch.var_mean(x, (0, 1), correction=0),
    lambda x: torch.ops.aten._safe_softmax(x.masked_fill((x > 0.5) | (x[:, :1] > 0), -torch.inf), 1),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(UNARY)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unary(number: int, dtype: torch.dtype) -> None:
    program = check(UNARY[number], _x(6, 10, dtype=dtype))
    assert not fallback_calls(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("divisor", [512.0, -0.25, 2.0**100, 3.0, 0.0, float("inf"), float("nan"), 2.0**-127])
def test_a_quotient_by_a_power_of_two_is_a_product(dtype: torch.dtype, divisor: float) -> None:
    """Bit for bit, also where results are below the least normal number."""
    least = torch.finfo(torch.float32).smallest_normal
    numbers = [0.0, -0.0, 1.0, -3.7, torch.inf, torch.nan, 3e38, least, least * 1.37, -least / 64 * 1.7]
    x = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    program = check(lambda x: x / divisor, x, tolerance=0.0)
    (found,) = evaluate(program, [x])
    assert torch.equal(found.signbit() | found.isnan(), (x / divisor).signbit() | found.isnan())
    (nest,) = nests(program)
    operations = [statement.operation for statement in nest.body if isinstance(statement, Apply)]
    assert ("div" not in operations) == (divisor in (512.0, -0.25, 2.0**100))


BINARY: list[Function] = [
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.atan2, torch.fmod,
    torch.remainder, torch.eq, torch.lt, torch.logical_and, torch.addcmul, torch.pow,
    lambda a, b: torch.div(a, b, rounding_mode="floor"), lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    lambda a, b: torch.lerp(a, b, 0.3), lambda a, b: F.mse_loss(a, b.expand_as(a)),
    lambda a, b: F.huber_loss(a, b.expand_as(a)), lambda a, b: torch.where(a > b, a, b),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BINARY)))
@pytest.mark.parametrize("shapes", [((4, 6), (4, 6)), ((4, 6), (6,)), ((4, 6), (4, 1)), ((4, 6), ())])
def test_binary(number: int, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    function = BINARY[number]
    left, right = _x(*shapes[0]).abs() + 0.5, _x(*shapes[1]).abs() + 0.3
    third = (left,) if function is torch.addcmul else ()
    check(lambda a, b, *more: function(a, b, *more), left, right, *third)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a + b, lambda a, b: a * b - 2, lambda a, b: a // 3, lambda a, b: a % 4,
        lambda a, b: a / b, lambda a, b: torch.div(a, 5, rounding_mode="trunc"), lambda a, b: a & b,
        lambda a, b: a | b, lambda a, b: a ^ b, lambda a, b: ~a, lambda a, b: a << 2, lambda a, b: a >> 1,
        lambda a, b: a > b, lambda a, b: a + 1.5, lambda a, b: (a > 0) & (b > 0),
        lambda a, b: (a > 0) + (b > 0), lambda a, b: a.sum(), lambda a, b: (a > 0).sum(0),
        lambda a, b: a.float().mean(), lambda a, b: a == 2.5, lambda a, b: (a > 0) * (b > 0),
        lambda a, b: a.prod(1), lambda a, b: torch.where(a > b, a, 1.5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers(function: Function, dtype: torch.dtype) -> None:
    low = 1 if dtype == torch.uint8 else -9
    a, b = _integers(3, 4, low=low, dtype=dtype), _integers(3, 4, low=1, dtype=dtype)
    assert not fallback_calls(check(function, a, b))


def test_mixed_dtypes_promote_as_in_eager() -> None:
    half, single, whole = _x(3, 4, dtype=torch.bfloat16), _x(4), _integers(3, 4)
    scalar = torch.tensor(2.5, dtype=torch.float64)
    check(lambda h, s, w, n: (h + s, h * w, s * n, h * n, w * n, w > n, h > s), half, single, whole, scalar)


def test_bytes_are_divided_by_negative_numbers_that_wrap_around() -> None:
    x = torch.tensor([0, 1, 100, 254, 255], dtype=torch.uint8)
    for program in (
        lambda x: (x // -1, x % -1, torch.fmod(x, -1), x // -3, x % -3),
        lambda x: (x.to(torch.int8) // -1, x.to(torch.int8) % -1),
    ):
        torch.testing.assert_close(gradsplit.compile(program, fullgraph=True)(x), program(x))


@pytest.mark.parametrize("base", [-3, -0.5, -0.0, float("-inf"), 3])
def test_powers_of_negative_numbers(base: float) -> None:
    x = torch.tensor([2.0, 3.0, 0.0, -2.0, 0.5])
    whole = torch.tensor([2, 3, 0])
    for backend in ("triton", "aot_eager", "eager"):
        compiled = gradsplit.compile(
            lambda x, whole: (base**x, pow(base, whole)), fullgraph=True, backend=backend
        )
        torch.testing.assert_close(compiled(x, whole), (base**x, base**whole), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("value", [2, 2.5, True, 300])
def test_copies_of_numbers(dtype: torch.dtype, value: float) -> None:
    check(lambda x: (x.clone().copy_(value), x + x.new_empty(4).copy_(value)), torch.ones(3, 4).to(dtype))


@pytest.mark.parametrize("loss", [F.huber_loss, F.soft_margin_loss])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_has_the_dtype_of_its_input(dtype: torch.dtype, reduction: str, loss: Function) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(x, y, reduction=reduction)

    x, y = _x(6, 10, dtype=dtype), _x(10, 6, dtype=torch.float64).t()
    assert gradsplit.compile(lambda: loss(x, y).dtype, fullgraph=True)() == dtype
    torch.testing.assert_close(gradsplit.compile(program, fullgraph=True)(x, y), program(x, y))
    check(program, x, y.to(dtype))


REDUCTIONS: list[Function] = [
    torch.sum, torch.mean, torch.amax, torch.amin, torch.max, torch.prod, torch.argmax, torch.argmin,
    lambda x: x.sum(0), lambda x: x.sum((0, 2)), lambda x: x.mean(-1, keepdim=True), lambda x: x.amax((1, 2)),
    lambda x: x.argmax(1), lambda x: x.argmin(2, keepdim=True), lambda x: x.max(1),
    lambda x: x.min(0, keepdim=True), lambda x: (x > 1).any(), lambda x: (x > -5).all(1),
    lambda x: (x > 1).any(2), lambda x: x.prod(1), lambda x: x.sum(dtype=torch.float64),
    lambda x: x.permute(2, 0, 1).sum(1), lambda x: x.transpose(0, 2).argmax(1),
    lambda x: (x * 2).view(-1).argmax(), lambda x: x.mT.argmax(None, keepdim=True), lambda x: x.norm(),
    lambda x: torch.linalg.vector_norm(x, dim=1),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REDUCTIONS)))
def test_reductions(number: int) -> None:
    assert not fallback_calls(check(REDUCTIONS[number], _x(3, 4, 5)))


VIEWS: list[Function] = [
    lambda y: y.view(12, 5), lambda y: y.reshape(-1), lambda y: y.permute(2, 0, 1),
    lambda y: y.transpose(0, 2), lambda y: y[:, 1:3], lambda y: y[1], lambda y: y[..., ::2],
    lambda y: y.unsqueeze(1), lambda y: y[:, :1].squeeze(1), lambda y: y.unsqueeze(0).expand(2, 3, 4, 5),
    lambda y: y.split(2, 1)[1], lambda y: torch.unbind(y, 2)[3], lambda y: y.permute(2, 0, 1).reshape(5, 12),
    lambda y: y.transpose(0, 1).reshape(-1), lambda y: y.flip(0, 2), lambda y: y.diagonal(0, 1, 2),
    lambda y: y.diagonal(1, 0, 1), lambda y: y.unfold(1, 2, 1), lambda y: y.chunk(2, 2)[1],
    lambda y: y.as_strided((2, 3), (20, 1), 5), lambda y: y.reshape(6, 10),
    lambda y: y.reshape(3, 2, 2, 5)[:, 1], lambda y: y.reshape(4, 15).t().reshape(3, 20),
    lambda y: y.movedim(0, -1), lambda y: y.repeat(2, 1, 1), lambda y: y.roll(1, 1),
    lambda y: y.reshape(2, 30)[:, 3:21].reshape(36), lambda y: y.tril(), lambda y: y.triu(1),
    lambda y: y[:, 1:3].reshape(-1), lambda y: y.flatten(1)[:, 4:16].view(3, 3, 4),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(VIEWS)))
def test_views_of_memory_of_bodies_and_inside_reductions(number: int) -> None:
    view = VIEWS[number]
    check(view, _x(3, 4, 5))
    check(lambda x: view(x * 2) + 1, _x(3, 4, 5))
    check(lambda x: (view(x + 1), view(x + 1) * 3), _x(3, 4, 5))
    check(lambda x: view(x * 2).sum(-1) + view(x).amax(-1), _x(3, 4, 5))


INDICES: list[Function] = [
    lambda x, i: x[i], lambda x, i: x[:, i % 4], lambda x, i: x[i, i % 4], lambda x, i: x[i, :, i % 5],
    lambda x, i: torch.index_select(x, 0, i), lambda x, i: F.embedding(i, x.view(12, 5)),
    lambda x, i: (x * 2)[i - 3], lambda x, i: torch.gather(x, 1, (i % 4).view(2, 2, 1)),
    lambda x, i: F.pad(x, (1, 2, 0, 1), value=3.0), lambda x, i: F.pad(x * 2, (-1, 2)),
    lambda x, i: torch.cat([x, x * 2, x[:1]], 0), lambda x, i: torch.cat([x, x], 2) + 1,
    lambda x, i: torch.stack([x, x + 1], 1), lambda x, i: torch.arange(5, device=x.device) * x,
    lambda x, i: torch.arange(1, 11, 2, dtype=torch.float32) * x,
    lambda x, i: torch.zeros_like(x) + torch.ones(5),
    lambda x, i: torch.slice_scatter(x, x[:, 1:3] * 2, 1, 1, 3),
    lambda x, i: torch.select_scatter(x, x[:, 0] * 2, 1, 2), lambda x, i: torch.full((3, 4, 5), 2.0) * x,
    lambda x, i: torch.linspace(0, 1, 5) * x, lambda x, i: F.one_hot(i, 4), lambda x, i: torch.eye(5)[:4] + x,
    lambda x, i: F.pad(x, (1, 1)).sum(2), lambda x, i: (x.view(12, 5) + 1)[i].view(-1),
    lambda x, i: torch.cat([x.bfloat16(), x]), lambda x, i: torch.cumsum(x * 2, 1) + 1,
    lambda x, i: torch.sort(x + 1)[0],
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(INDICES)))
def test_indices_and_creation(number: int) -> None:
    check(INDICES[number], _x(3, 4, 5), torch.tensor([2, 0, 1, 2]))


LOSSES: list[Function] = [
    lambda x, w, t: F.cross_entropy(x * w, t),
    lambda x, w, t: F.cross_entropy(x * w, t, weight=w.detach().abs()),
    lambda x, w, t: F.cross_entropy(x * w, t, ignore_index=2),
    lambda x, w, t: F.cross_entropy(x * w, t, reduction="sum"),
    lambda x, w, t: F.nll_loss(F.log_softmax(x * w, 1), t, reduction="none").sum(),
    lambda x, w, t: F.layer_norm(x, (7,), w, w).square().mean(), lambda x, w, t: F.gelu(x * w).sum(),
    lambda x, w, t: F.softmax(x * w, -1).square().sum(), lambda x, w, t: F.silu(x * w).mean(),
    lambda x, w, t: F.mse_loss(x * w, x), lambda x, w, t: F.rms_norm(x, (7,), w).sum(),
    lambda x, w, t: F.batch_norm(x * w, None, None, w, w, training=True).square().sum(),
    lambda x, w, t: F.group_norm((x * w).view(2, 4, 7).movedim(1, 2)[:, :6], 2).square().sum(),
    lambda x, w, t: (x * w)[:, 1:4].square().sum() + (x * w)[2].sum() + (x * w)[t].sum(),
    lambda x, w, t: torch.var(x * w, 1).sum() + torch.std(x * w),
    lambda x, w, t: F.pad(x * w, (1, 2)).square().sum(),
    lambda x, w, t: torch.cat([x, x * w]).square().sum() + torch.stack(list((x * w).unbind())).square().sum(),
    lambda x, w, t: F.binary_cross_entropy_with_logits(x * w, (x > 0).float()),
    lambda x, w, t: (x * w).amax(1).sum(), lambda x, w, t: (x.t() @ (x * w)).tanh().sum(),
    lambda x, w, t: F.embedding(t, x * w).square().sum(), lambda x, w, t: F.smooth_l1_loss(x * w, x),
    lambda x, w, t: (x * w).logsumexp(0).sum(), lambda x, w, t: F.glu(x[:, :6] * w[:6]).sum(),
    lambda x, w, t: F.normalize(x * w).sum(),
    lambda x, w, t: F.conv1d((x * w).view(2, 4, 7), w.view(1, 1, 7)[:, :, :3].expand(4, 4, 3)).square().sum(),
    lambda x, w, t: F.max_pool1d((x * w).view(2, 4, 7), 2).sum(),
    lambda x, w, t: (x * w).repeat(2, 2).square().sum(),
    lambda x, w, t: F.kl_div(F.log_softmax(x * w, 1), F.softmax(x, 1), reduction="batchmean"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(LOSSES)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward(number: int, dtype: torch.dtype) -> None:
    def gradients(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        loss = LOSSES[number](x, w, t)
        return loss, *torch.autograd.grad(loss, (x, w), allow_unused=True, materialize_grads=True)

    x, w = _x(8, 7, dtype=dtype), _x(7, dtype=dtype)
    target = _integers(8, low=0, high=7)
    # 16-bit graphs round after every operator and ours rarely do, hence the wide tolerance
    check_module(
        trace_joint(gradients, x, w, target), (x, w, target), 1e-4 if dtype == torch.float32 else 0.1
    )


def test_scalars_size_one_and_empty_tensors() -> None:
    check(lambda s, o, e: (s * 2, o + s, e * 2, e.sum(), e.sum(0), o.sum()), _x(), _x(1, 1), _x(0, 3))
    check(lambda e: (e.view(3, 0), torch.cat([e, e]), e.amax(1)), _x(0, 3))
    check(lambda e: (e.sum(1), e.mean(1), e.prod(1), (e > 0).any(1), (e > 0).all(1)), _x(3, 0))
    check(
        lambda x, e: torch.slice_scatter(x, (e + x[:, :0, :4]).reshape(2, 0, 6), 1, 0, 0),
        _x(2, 1, 6),
        _x(2, 0, 4),
    )


def test_constants_of_the_graph() -> None:
    table, scalar = torch.tensor([1.0, 2.0, 3.0]), torch.tensor(4.0)
    module = trace(lambda x, t, s: x * t + s, _x(2, 3), table, scalar)
    graph = module.graph
    for node, constant in zip(list(graph.nodes)[1:3], (table, scalar), strict=True):
        setattr(module, f"constant_{node.name}", constant)
        with graph.inserting_before(node):
            attribute = graph.create_node("get_attr", f"constant_{node.name}")
        attribute.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(attribute)
        graph.erase_node(node)
    module.recompile()
    program = check_module(module, [_x(2, 3)])
    assert len(program.constants) == 1  # the scalar is part of the code


def test_random_numbers_stay_torch_kernels() -> None:
    program = check(lambda x: torch.rand_like(x) * 0 + x, _x(3, 4))
    assert [type(step) for step in program.steps].count(ExternCall) == 1
    assert not fallback_calls(program) and len(nests(program)) == 1


def test_dropout_draws_eagers_mask() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.dropout(x * 2, 0.5)
        return hidden, F.dropout(hidden.sum(0) + 1, 0.25)

    module = trace(function, _x(6, 8))
    torch.manual_seed(3)
    expected = function(_x(6, 8))
    program = fuse(lower(compute_of(module)))
    verify_program(program)
    torch.manual_seed(3)
    torch.testing.assert_close(evaluate(program, [_x(6, 8)]), list(expected))
    assert not fallback_calls(program)


def test_extrema_of_truth_values() -> None:
    check(lambda x: ((x > 0).amax(1), (x > 0).amin(0), (x > 0).max()), _x(3, 4))


def test_an_operator_without_a_rule_is_called_and_counted() -> None:
    program = check(lambda x: torch.cumsum(x * 2, 0) + 1, _x(3, 4))
    assert [call.target for call in fallback_calls(program)] == [torch.ops.aten.cumsum.default]


def test_complex_numbers_pass_through_torch() -> None:
    check(lambda x: torch.view_as_real(torch.view_as_complex(x * 2) * 1j).sum(-1), _x(3, 2))


@pytest.mark.parametrize(
    "program",
    [
        lambda z: z.conj().imag[1:] + 1,
        lambda z: torch.cat([z.mH.imag, torch._neg_view(z.real)]).sum(0),
        lambda z: (z * 1).conj().imag.mul_(3),
    ],
)
def test_imaginary_parts_of_conjugates(program: Any) -> None:
    """Torch makes them views of memory that holds the negative."""
    z = torch.randn(3, 3, dtype=torch.complex64)
    torch.testing.assert_close(gradsplit.compile(program, fullgraph=True)(z), program(z))


@pytest.mark.parametrize("make", [torch.conj, lambda z: z.conj().imag])
def test_inputs_whose_memory_holds_something_else(make: Any) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x[0] = 2
        return x.real * 3 + x.real.sum()

    ours, plain = (make(torch.arange(6).view(2, 3) * (1 + 2j)) for _ in range(2))
    torch.testing.assert_close(gradsplit.compile(program)(ours), program(plain))
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: (x * 2).chunk(2)[1].as_strided((2, 2), (1, 2), 0) + 1,
        lambda x: (x * 2)[1:].as_strided((2, 2), (1, 2), 1) + 1,
        lambda x: (x * 2).t()[1:].t().as_strided((2, 2), (1, 2)).sum(0),
        lambda x: (x @ x.t())[1:, 1:].as_strided((2, 2), (4, 1), 2) + 1,
    ],
)
def test_strides_reach_beyond_a_view(program: Any) -> None:
    check(program, _x(4, 3))


@pytest.mark.parametrize(
    "program",
    [
        lambda z: z.std(),
        lambda z: z.mT.var(0, correction=0, keepdim=True),
        lambda z: torch.var_mean(z, 1),
        lambda z: torch.addmm(z, z, z, beta=2j, alpha=1 - 3j),
    ],
)
def test_operators_that_have_loops_for_real_numbers_alone(program: Any) -> None:
    z = torch.randn(3, 3, dtype=torch.complex64)
    torch.testing.assert_close(gradsplit.compile(program, fullgraph=True)(z), program(z))


def test_a_complex_tensor_like_one_that_is_not_needed() -> None:
    """The gradient subtracts a square from ones that are made like it."""
    z = torch.randn(3, 3, dtype=torch.complex64, requires_grad=True)
    found, expected = (run(z) for run in (gradsplit.compile(torch.atanh), torch.atanh))
    gradients = [torch.autograd.grad(result.abs().sum(), z) for result in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_constants_wrap_as_tensors_of_their_dtype_do() -> None:
    small = _integers(2, 3, low=0, dtype=torch.uint8)
    check(lambda x: (torch.full_like(x, -1) / 2, torch.full_like(x, 200) + torch.full_like(x, 100)), small)


def test_signs_of_truth_values() -> None:
    check(lambda x: torch.sign(x > 0), _x(3, 4))


def test_a_mask_of_attention_keeps_the_gaps_between_its_rows() -> None:
    """Torch pads rows to whole pieces of memory and attends with a part of them; its kernel refuses other strides."""

    def attend(query: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        mask = F.pad(table.exp(), (0, 3))[..., :5].expand(2, 3, 5, 5)
        attention = torch.ops.aten._scaled_dot_product_efficient_attention
        return attention(query, query, query, mask, True)[0]

    module = trace(attend, torch.randn(2, 3, 5, 8), torch.randn(3, 5, 5))
    program = fuse(lower(compute_of(module)))
    (call,) = (step for step in program.steps if isinstance(step, ExternCall))
    mask = call.arguments[3]
    assert isinstance(mask, View) and mask.stride == (0, 40, 8, 1)
    assert program.buffers[mask.buffer].shape == (3, 5, 8)


def test_parts_of_one_tensor_attend_to_one_another() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        attention = torch.ops.aten._scaled_dot_product_efficient_attention
        return attention(*x.exp().view(2, 5, 3, 3, 8).transpose(1, 3).unbind(2), None, True)[0]

    program = fuse(lower(compute_of(trace(attend, torch.randn(2, 5, 72)))))
    (call,) = (step for step in program.steps if isinstance(step, ExternCall))
    views = [view for view in call.arguments if isinstance(view, View)]
    assert [(view.buffer, view.stride) for view in views] == [("exp", (360, 8, 72, 1))] * 3


@pytest.mark.parametrize(
    ("device_type", "columns", "is_held"),
    [("cuda", 32_768, False), ("cuda", 64, True), ("cpu", 32_768, True)],
)
def test_capped_logits_are_computed_again_on_a_gpu(device_type: str, columns: int, is_held: bool) -> None:
    def losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        capped = (torch.tanh(logits / 30) * 30).float()
        return torch.logsumexp(capped, 1) - capped.gather(1, labels[:, None])[:, 0]

    logits, labels = torch.empty(1024, columns, dtype=torch.bfloat16), torch.zeros(1024, dtype=torch.int64)
    program = fuse(lower(compute_of(trace(losses, logits, labels, device_type=device_type))))
    shapes = [spec.shape for name, spec in program.buffers.items() if name not in program.inputs]
    assert ((1024, columns) in shapes) == is_held


def test_nests_that_nobody_reads_are_left_out() -> None:
    """The position of the largest of one is 0, whatever it is."""
    program = check(lambda x: (x.var().argmax(), x.sum(1)), _x(3, 4))
    assert sorted(origin for nest in nests(program) for origin in nest.origins) == ["argmax", "sum_2"]


def test_a_new_value_goes_where_the_input_is() -> None:
    """Also where its readers wanted it row by row, and got a copy."""

    def function(x: torch.Tensor) -> torch.Tensor:
        first = x.argmin()
        x.neg_()
        return first

    given = torch.arange(12.0).view(4, 3)[::2]
    program = fuse(lower(compute_of(trace(function, given))))
    evaluate(program, [given])
    assert given.tolist() == [[0, -1, -2], [-6, -7, -8]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_integers_are_compared_as_rounded_to_16_bits(dtype: torch.dtype) -> None:
    numbers = torch.arange(2040, 2060)
    check(lambda x, n: (x >= n, x == n + 1, x < 2051), numbers.to(dtype), numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_integers_are_rounded_to_16_bits_before_they_are_operands(dtype: torch.dtype) -> None:
    numbers = torch.arange(2040, 2060)
    check(lambda x, n: (n - x, torch.where(n > 0, n, x) - x), numbers.to(dtype), numbers)
    check(lambda x: (x % 2051, torch.fmod(x, 2051), torch.remainder(x, -2051)), numbers.to(dtype))


@pytest.mark.parametrize("times_zero", [lambda product: product * 0.0, lambda product: product / torch.inf])
def test_a_product_times_zero_is_no_number_where_it_is_infinite(times_zero):
    def program(x):
        return times_zero(x @ x)

    x = torch.tensor([[1.0, torch.inf], [2.0, 3.0]])
    torch.testing.assert_close(gradsplit.compile(program)(x), program(x), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_what_an_integer_does_not_hold(dtype):
    """Torch leaves it open; what its kernels for CPUs make of it does not depend on what a compiler can foresee."""

    def program(mask):
        return (mask / 0).to(dtype)

    mask = torch.arange(20) % 3 == 0
    assert torch.equal(gradsplit.compile(program)(mask), program(mask))


@pytest.mark.parametrize("size", [(1,), (5,), (), (1, 5), (3, 1)])
def test_what_is_added_to_a_product(size):
    check(
        lambda bias, x: torch.addmm(bias, x, x[:1].t().expand(4, 5)) + 1, torch.randn(size), torch.randn(3, 4)
    )


def test_a_reduction_that_nothing_reads_leaves_no_axis():
    """A kernel would store to one element at each of its points."""

    def program(x, y):
        return torch.where(x.max(-1, keepdim=True).indices != 0, y, y)

    arguments = torch.randn(3, 7), torch.randn(())
    found = gradsplit.compile(program, options={"verify": True})(*arguments)
    assert torch.equal(found, program(*arguments))
