"""Products with odd sides are computed longer: the same numbers and strides, and zeros where nobody looks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gradsplit
from gradsplit.compile_core import passes
from gradsplit.compile_core.autograd.partitioning.partition import partition
from gradsplit.compile_core.autograd.rewrites.pad_products import pad_products
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.ir.graphs import JointGraph
from gradsplit.compile_core.ir.loops import ExternCall, LoopProgram
from gradsplit.compile_core.ir.regions import whole_schedule
from gradsplit.compile_core.ir.verify_graphs import verify_joint, verify_partition
from gradsplit.compile_core.ir.verify_loops import verify_program
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from tests.autograd.compare_with_eager import captured, fakes
from tests.lowering.loop_evaluator import evaluate

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def graphs_of(
    program: Callable[..., Any], *inputs: Tensor, with_float32: bool = True, device_type: str = "cpu"
) -> tuple[JointGraph, JointGraph]:
    """The joint graph as it was traced, and padded."""
    plain = trace_joint(captured(program), fakes(inputs), decomposition_table("cuda"))
    after = pad_products(copy.deepcopy(plain), with_float32, device_type)
    verify_joint(after)
    return plain, after


def padded(program: Callable[..., Any], *inputs: Tensor) -> JointGraph:
    """The padded joint graph, which was found to compute what the plain one does, strides included."""
    plain, after = graphs_of(program, *inputs)
    tangents = [
        torch.randn(spec.shape, generator=torch.Generator().manual_seed(1))
        for spec in plain.signature.tangent_specs
    ]
    expected = plain.module(*inputs, *tangents)
    for mine, theirs in zip(after.module(*inputs, *tangents), expected, strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)
            assert mine.stride() == theirs.stride()
    for node, theirs in zip(outputs(after), expected, strict=True):
        assert node is None or node.meta["val"].stride() == theirs.stride()
    return after


def outputs(joint: JointGraph) -> list[Any]:
    results: Any = joint.module.graph.output_node().args[0]
    return list(results)


def sides(joint: JointGraph) -> list[tuple[int, ...]]:
    """Of every product: rows, inner side, columns."""
    found = []
    for node in joint.module.graph.nodes:
        if node.target in _PRODUCTS:
            left, right = (factor.meta["val"].shape for factor in node.args[-2:])
            found.append((*left[-2:], right[-1]))
    return found


def count(joint: JointGraph, target: Any) -> int:
    return len(list(joint.module.graph.find_nodes(op="call_function", target=target)))


def matrix(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).requires_grad_(grad)


def head(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    # A kernel writes the factors, as under autocast.
    scores = F.linear(hidden * 0.5, weight * 2, bias * 2)
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def head_inputs() -> list[Tensor]:
    target = torch.arange(640).view(4, 160) % 1003
    return [matrix(4, 160, 264, grad=True), matrix(1003, 264, grad=True), matrix(1003, grad=True), target]


def test_the_three_products_of_a_head_are_padded() -> None:
    joint = padded(head, *head_inputs())
    assert sorted(sides(joint)) == [(640, 264, 1004), (640, 1004, 264), (1004, 640, 264)]
    assert not count(joint, aten.clone.default), "nothing is copied"
    assert count(joint, aten.cat.default) == 3, (
        "weights, bias and the gradient of the scores have zeros behind"
    )


def test_what_the_forward_saves_is_padded_already() -> None:
    joint = padded(head, *head_inputs())
    graph = partition(joint)
    verify_partition(joint, graph)
    assert graph.backward is not None
    saved = {node.name: node.meta["val"] for node in graph.backward.graph.nodes if node.op == "placeholder"}
    scores = next(value for value in saved.values() if value.shape == (640, 1003))
    assert scores.stride() == (1004, 1)
    programs = [lowered(module) for module in (graph.forward, graph.backward)]
    calls = [step for program in programs for step in program.steps if isinstance(step, ExternCall)]
    assert len(calls) == 3 and all(step.target in (aten.mm.out, aten.addmm.out) for step in calls)
    inputs = head_inputs()
    known: dict[str, Any] = {
        name: tensor.detach() for name, tensor in zip(joint.primals, inputs, strict=True)
    }
    kept = [name for name in graph.saved if name not in joint.primals]
    loss, *values = evaluate(programs[0], [known[name] for name in programs[0].inputs])
    known |= {**dict(zip(kept, values, strict=True)), joint.tangents[0]: torch.ones(())}
    gradients = evaluate(programs[1], [known[name] for name in programs[1].inputs])
    exact = [tensor.double().detach().requires_grad_() for tensor in inputs[:3]]
    true = head(*exact, target=inputs[3])
    true.backward()
    assert loss is not None
    torch.testing.assert_close(loss.double(), true.detach(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(gradients, exact, strict=True):
        assert mine is not None and theirs.grad is not None
        torch.testing.assert_close(mine.double(), theirs.grad, rtol=1e-4, atol=1e-6)


def lowered(module: torch.fx.GraphModule) -> LoopProgram:
    (compute,) = whole_schedule("part", module).computes
    program = fuse(lower(compute))
    verify_program(program)
    return program


def test_scores_that_are_a_result_too_are_copied() -> None:
    def program(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(hidden, weight * 2).view(8, -1, 1003)
        return scores, scores.logsumexp(2)

    joint = padded(program, matrix(320, 300, grad=True), matrix(1003, 300, grad=True))
    assert (320, 300, 1004) in sides(joint) and count(joint, aten.clone.default) == 1
    joint = padded(program, matrix(1320, 100, grad=True), matrix(1003, 100, grad=True))
    assert (1320, 100, 1003) in sides(joint), "the copy would cost more than the product gains"


def test_an_inner_side() -> None:
    joint = padded(lambda x, w: (x.exp() @ w, w.t() @ x.t()), matrix(512, 1001), matrix(1001, 512))
    assert sides(joint) == [(512, 1004, 512), (512, 1004, 512)]
    assert count(joint, aten.cat.default) == 3, "the weights serve both products"


def test_one_matrix_with_two_odd_sides() -> None:
    """It is padded along one and along both, and read by others besides."""

    def program(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        w = w.exp()
        sums = w.sum(0), (w * 2).t().sum(1), w.view(-1).cumsum(0)
        # Where tanh is flat its gradient is what rounding leaves of a difference.
        return (x @ w / 40).tanh(), (y @ w.t()).sum(0), *sums

    joint = padded(program, matrix(512, 401, grad=True), matrix(401, 403, grad=True), matrix(512, 403))
    assert sides(joint).count((512, 404, 404)) == 3, "with it, with its transpose, and the gradient"


def test_rows_matter_where_columns_lie_together() -> None:
    joint = padded(lambda x, y: x.exp().t() @ y, matrix(512, 1001), matrix(512, 512))
    assert sides(joint) == [(1004, 512, 512)]
    joint = padded(lambda x, y: x.exp() @ y, matrix(1001, 512), matrix(512, 512))
    assert sides(joint) == [(1001, 512, 512)]


def test_batches() -> None:
    def program(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.bmm(x.sin(), y.cos())
        return torch.softmax(scores, 2), torch.baddbmm(z.sin(), x.sin(), y.cos(), alpha=2.0, beta=0.5)

    joint = padded(program, matrix(8, 301, 257), matrix(8, 257, 301), matrix(8, 301, 301))
    assert sides(joint) == [(301, 260, 304), (301, 260, 304)]


@pytest.mark.parametrize("shape", [(1003,), (1, 1003), (512, 1), (512, 1003), ()], ids=str)
def test_what_is_added_may_be_broadcast(shape: tuple[int, ...]) -> None:
    summand = torch.arange(float(torch.Size(shape).numel())).view(shape)
    joint = padded(
        lambda b, x, w: torch.addmm(b, x, w.exp()).sum(0), summand, matrix(512, 256), matrix(256, 1003)
    )
    assert sides(joint) == [(512, 256, 1004)]


def _flattened(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.exp()).view(-1).cumsum(0)


def _ranked(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.exp()).topk(3).indices


def _restrided(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.exp()).as_strided((400, 1003), (1003, 1), 1003) * 2


def _viewed(x: Tensor, w: Tensor) -> Tensor:
    parts = (x @ w.exp()).view(8, 64, 1003).transpose(1, 2).split(500, 1)
    return parts[0].sum() + parts[1][:, 2:].unsqueeze(0).exp().sum()


@pytest.mark.parametrize(
    ("program", "copies"), [(_flattened, 1), (_ranked, 1), (_restrided, 1), (_viewed, 0)]
)
def test_readers_that_need_the_strides_of_eager(program: Callable[..., Tensor], copies: int) -> None:
    joint = padded(program, matrix(512, 260), matrix(260, 1003))
    assert sides(joint) == [(512, 260, 1004)] and count(joint, aten.clone.default) == copies


def _attended(heads: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(heads, heads, heads)


def _sorted(heads: Tensor) -> Tensor:
    return heads.sort().values


def _transformed(heads: Tensor) -> Tensor:
    return torch.fft.fft(heads).real


@pytest.mark.parametrize("read", [_attended, _sorted, _transformed])
def test_readers_whose_results_lie_as_what_they_read(
    read: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied row by row, what they read lay otherwise than in eager, and their results were taken for others."""

    def program(x: Tensor, weight: Tensor) -> Tensor:
        heads = (x @ weight.t()).view(4, 128, 6, 129).transpose(1, 2)
        return read(heads).transpose(1, 2).reshape(4, 128, 774).sin()

    monkeypatch.setattr(passes, "pad_products", lambda joint, with_float32: pad_products(joint, True, "cpu"))
    x, weight = matrix(4, 128, 512), (matrix(774, 512) / 20).requires_grad_()
    compiled = gradsplit.compile(program, fullgraph=True)
    results = compiled(x, weight), program(x, weight), program(x.double(), weight.double())
    with_gradients = [(result, *torch.autograd.grad(result.square().sum(), weight)) for result in results]
    for found, plain, exact in zip(*with_gradients, strict=True):
        assert (found - exact).norm() <= 2 * (plain - exact).norm()
    padded(program, x, weight)


def test_products_with_sizes_that_depend_on_data_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether what reads them finds them contiguous depends on these sizes then: the graph ended at the data."""

    def program(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        is_chosen = x[:, 0] > 0
        scores = F.linear(x[is_chosen] * 0.5, weight * 2)
        return F.cross_entropy(scores, target[is_chosen]) + scores.sort(1).values[:, :5].mean()

    monkeypatch.setattr(passes, "pad_products", lambda joint, with_float32: pad_products(joint, True, "cpu"))
    given = [matrix(4096, 264, grad=True), matrix(1003, 264, grad=True), torch.arange(4096) % 1003]
    compiled = gradsplit.compile(program)
    losses = compiled(*given), program(*given)
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
    for found, expected in zip(*(torch.autograd.grad(loss, given[:2]) for loss in losses), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not compiled.break_reasons


def test_what_is_no_number_stays_in_its_row() -> None:
    x = matrix(512, 260)
    x[3, 5], x[7, 7] = float("nan"), float("inf")
    joint = padded(lambda x, w: (x @ w.exp()).softmax(1) @ w.exp().t(), x, matrix(260, 1003))
    assert sides(joint) == [(512, 260, 1004), (512, 1004, 260)]


def test_what_is_left_alone() -> None:
    def unpadded(program: Callable[..., Any], *inputs: Tensor, **settings: Any) -> bool:
        plain, after = graphs_of(program, *inputs, **settings)
        return sides(plain) == sides(after)

    x, w = matrix(512, 256), matrix(256, 1003)
    assert not unpadded(lambda x, w: (x @ w.exp()).sum(0), x, w)
    assert unpadded(lambda x, w: (x @ w.exp()).sum(0), x, w, with_float32=False)
    assert not unpadded(lambda x, w: (x @ w.exp()).sum(0), x.half(), w.half(), with_float32=False)
    assert unpadded(lambda x, w: (x @ w.exp()).sum(0), x, w, device_type="cuda")
    assert unpadded(lambda x, w: (x @ w.exp()).sum(0), x, matrix(256, 1004)), "sides are even"
    assert unpadded(lambda x, w: (x @ w.exp()).sum(0), x[:100], w), "too small"
    assert unpadded(lambda x, w: (x[:100] @ w[:, :-1]).sum(0), x, matrix(256, 9004)), (
        "the weights would be copied"
    )


def test_sides_that_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of rows differs between calls, and is part of nothing that is padded."""
    padded_sides = []

    def pad(joint: JointGraph, with_float32: bool) -> JointGraph:
        joint = pad_products(joint, True, "cpu")
        padded_sides.extend(sides(joint))
        return joint

    monkeypatch.setattr(passes, "pad_products", pad)
    inputs = head_inputs()
    for tensor in (inputs[0], inputs[3]):
        gradsplit.mark_dynamic(tensor, 1)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs[:3]]
    head(*exact, target=inputs[3]).backward()
    gradsplit.compile(head, fullgraph=True)(*inputs).backward()
    for mine, theirs in zip(inputs, exact, strict=False):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6)
    assert any(isinstance(side, torch.SymInt) for found in padded_sides for side in found)
    assert len(padded_sides) == 3 and all(1003 not in found for found in padded_sides)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_head_over_an_odd_vocabulary_on_a_gpu(dtype: torch.dtype, tmp_path: Path) -> None:
    """Loss, scores and gradients against float64, and the paddings in what was compiled."""
    hidden = torch.randn(4, 200, 256, device="cuda", requires_grad=True)
    weight = (torch.randn(1003, 256, device="cuda") / 16).requires_grad_()
    target = torch.randint(0, 1003, (4, 200), device="cuda")

    def scores_and_loss(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(hidden, weight)
        return F.cross_entropy(scores.float().flatten(0, 1), target.flatten()), scores

    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    loss, scores = scores_and_loss(*exact)
    loss.backward()
    with torch.autocast("cuda", dtype):
        loss, found = gradsplit.compile(scores_and_loss, options={"trace_folder": tmp_path})(hidden, weight)
    loss.backward()
    assert found.is_contiguous()
    for one, other in ((found, scores), (hidden.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        assert one is not None and other is not None
        assert (one.double() - other).norm() <= 1e-2 * other.norm()
    texts = {path.name.split(".", 1)[1]: path.read_text() for path in tmp_path.glob("*.loops.txt")}
    assert "@(1008,1)" in texts["forward.loops.txt"] and "@(1008,1)" in texts["backward.loops.txt"]
