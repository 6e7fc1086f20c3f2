"""Sums at indices as nests: what they compute, beside torch's kernels and exact sums; which are fused, and which stay
with torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import gradsplit
from gradsplit.compile_core.ir.loops import LoopProgram, combined_buffers
from gradsplit.compile_core.ir.print_loops import print_nest
from gradsplit.compile_core.ir.verify_loops import verify_program
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from gradsplit.compile_core.lowering.triton_kernels.build_triton import compile_triton_for
from gradsplit.compile_core.lowering.triton_kernels.codegen_triton import generate_triton
from tests.lowering.loop_evaluator import evaluate
from tests.lowering.lowering_harness import calls, check, compute_of, nests, trace

aten = torch.ops.aten
SM_90 = ("cuda", 90, 32)


def aggregated(h: Tensor, source: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """``[nodes, width]`` of what each node gets along its edges."""
    return torch.zeros_like(h).index_add_(0, target, h[source] * weight)


def edges(
    nodes: int = 20, count: int = 90, width: int = 8, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    places = torch.randint(nodes, (2, count))
    return [torch.randn(nodes, width).to(dtype), places[0], places[1], torch.rand(count, 1).to(dtype)]


def fused(function: Callable[..., Any], *inputs: Any) -> LoopProgram:
    """The program for a GPU."""
    return fuse(lower(compute_of(trace(function, *inputs, device_type="cuda"))))


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "index_add": lambda base, dim, places, x: base.index_add(dim, places, x.sin()),
    "index_add times a number": lambda base, dim, places, x: base.index_add(dim, places, x, alpha=3),
    "index_add_ to zeros": lambda base, dim, places, x: torch.zeros_like(base).index_add_(dim, places, x * 2),
    "index_put": lambda base, dim, places, x: aten.index_put.default(
        base, [None] * dim + [places - base.shape[dim]], x, True
    ),
    "scatter_add": lambda base, dim, places, x: base.scatter_add(dim, _expanded(places, dim, x), x + 1),
    "scatter_reduce sum": lambda base, dim, places, x: base.scatter_reduce(
        dim, _expanded(places, dim, x), x, "sum"
    ),
    "scatter_reduce amax": lambda base, dim, places, x: base.scatter_reduce(
        dim, _expanded(places, dim, x), x, "amax"
    ),
    "scatter_reduce amin": lambda base, dim, places, x: base.scatter_reduce(
        dim, _expanded(places, dim, x), x, "amin"
    ),
}  # fmt: skip


def _expanded(places: Tensor, dim: int, x: Tensor) -> Tensor:
    return places.view([-1 if d == dim else 1 for d in range(x.dim())]).expand_as(x)


DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8,
]  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("shape", [(5,), (5, 3), (2, 5, 3)])
def test_operators(name: str, shape: tuple[int, ...]) -> None:
    """Along each dim, with indices that repeat, and with none; no sum is torch's kernel."""
    for dim in range(len(shape)):
        for count in (7, 0):
            base, places = torch.randn(shape), torch.randint(shape[dim], (count,))
            x = torch.randn(*shape[:dim], count, *shape[dim + 1 :])
            program = check(lambda *args, d=dim: OPERATORS[name](args[0], d, *args[1:]), base, places, x)
            assert not calls(program)


def _exact(name: str, base: Tensor, dim: int, places: Tensor, x: Tensor) -> Tensor:
    wide = torch.float64 if base.dtype.is_floating_point else torch.int64
    return OPERATORS[name](base.to(wide), dim, places, x.to(wide))


@pytest.mark.parametrize("name", OPERATORS)
def test_dtypes(name: str) -> None:
    """Nowhere further from exact sums than eager is; integers wrap as eager's do."""

    def all_of_them(places: Tensor, *pairs: Tensor) -> list[Tensor]:
        return [OPERATORS[name](base, 0, places, x) for base, x in zip(pairs[::2], pairs[1::2], strict=True)]

    dtypes = [dtype for dtype in DTYPES if dtype.is_floating_point or "add" in name or "sum" not in name]
    dtypes = [dtype for dtype in dtypes if dtype.is_floating_point or name != "index_add"]
    places = torch.randint(6, (300,))
    pairs = [(torch.randn(size, 5) * 30).to(dtype) for dtype in dtypes for size in (6, 300)]
    found = gradsplit.compile(all_of_them, fullgraph=True)(places, *pairs)
    for mine, theirs, base, x in zip(
        found, all_of_them(places, *pairs), pairs[::2], pairs[1::2], strict=True
    ):
        assert mine.dtype == theirs.dtype
        if not mine.dtype.is_floating_point:
            assert torch.equal(mine, theirs)
            continue
        exact = _exact(name, base, 0, places, x)
        bound = (theirs.double() - exact).abs().max() + torch.finfo(mine.dtype).eps * exact.abs().max()
        assert (mine.double() - exact).abs().max() <= bound


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_random_shapes(data: st.DataObject) -> None:
    """Whole programs as kernels: any dim, any number of places, several sums that share what they read."""
    rank = data.draw(st.integers(1, 3))
    shape = [data.draw(st.sampled_from([1, 2, 5, 33, 70])) for _ in range(rank)]
    dim, count = data.draw(st.integers(0, rank - 1)), data.draw(st.sampled_from([1, 4, 40, 600]))
    names = data.draw(st.lists(st.sampled_from(list(OPERATORS)), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))

    def program(base: Tensor, places: Tensor, x: Tensor) -> list[Tensor]:
        return [OPERATORS[name](base, dim, places, x) for name in names]

    base, places = torch.randn(shape).to(dtype), torch.randint(shape[dim], (count,))
    x = torch.randn(*shape[:dim], count, *shape[dim + 1 :]).to(dtype)
    found = gradsplit.compile(program, fullgraph=True)(base, places, x)
    for name, mine, theirs in zip(names, found, program(base, places, x), strict=True):
        exact = _exact(name, base, dim, places, x)
        bound = (theirs.double() - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
        assert (mine.double() - exact).abs().max() <= bound, name


def test_gradients_of_gathers() -> None:
    def loss(h: Tensor, places: Tensor, columns: Tensor) -> Tensor:
        rows = h[places] * 2 + h.index_select(0, places).sin() + nn.functional.embedding(places, h)
        return (rows.exp() + h[places, 0].unsqueeze(1)).sum() + torch.gather(h, 1, columns).square().sum()

    h, places = torch.randn(9, 5), torch.tensor([[0, 8, 8], [8, 1, 0]]).flatten()
    columns = torch.randint(5, (9, 7))
    grads = []
    for run in (loss, gradsplit.compile(loss, fullgraph=True)):
        given = h.clone().requires_grad_()
        run(given, places, columns).backward()
        grads.append(given.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_a_print(golden: Callable[[str, str], None]) -> None:
    """Gather, product and sum are one nest; what is added up in 32 bits is rounded where it is read."""
    program = fused(lambda *graph: aggregated(*graph).relu(), *edges(dtype=torch.bfloat16))
    assert not calls(program)
    golden("lowering/aggregated.txt", "".join(print_nest(nest) + "\n" for nest in nests(program)))


def test_kernels_of_a_print_compile(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program = fused(aggregated, *edges(100, 1000, 64, torch.bfloat16))
    asm = [
        compile_triton_for(generate_triton(nest, program.buffers), SM_90, tmp_path).asm
        for nest in nests(program)
    ]
    assert "atom.global.gpu.relaxed.add.v4.f32" in asm[1]["ptx"], "four neighbours at once"


def test_values_in_memory_stay_with_torch_on_a_gpu() -> None:
    """Its kernel is given them as they are; here they are the rows' own, a product's, and what others read."""
    h, _, target, _ = edges()
    rows = torch.randn(90, 8)

    def given(h: Tensor, target: Tensor, rows: Tensor) -> Tensor:
        return h.index_add(0, target, rows)

    def multiplied(h: Tensor, target: Tensor, rows: Tensor) -> Tensor:
        return h.index_add(0, target, rows @ rows[:8])

    def read_twice(h: Tensor, target: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return h.index_add(0, target, rows.exp()), rows.exp()

    for program in (given, multiplied, read_twice):
        targets = [call.target for call in calls(fused(program, h, target, rows))]
        assert aten.index_add_.default in targets or program is read_twice, targets
    assert not calls(fused(lambda h, target, rows: h.index_add(0, target, rows.exp()), h, target, rows))
    assert not calls(fused(lambda h, target, rows: h.index_put((target,), rows, True), h, target, rows))


def test_extrema_stay_with_torch_on_a_gpu() -> None:
    h, _, target, _ = edges()
    program = fused(
        lambda h, target, x: h.scatter_reduce(0, target.unsqueeze(1).expand(-1, 8), x.exp(), "amax"),
        h, target, torch.randn(90, 8),
    )  # fmt: skip
    assert len(calls(program)) == 1


def test_truth_values_stay_with_torch() -> None:
    h, _, target, _ = edges()
    assert calls(check(lambda h, t: (h > 0).index_add(0, t, h[t] > 0), h, target))
    assert calls(
        check(lambda h, t: h.index_put((t > 5,), h.new_ones(()), accumulate=True), h, torch.arange(20))
    )
    assert calls(check(lambda h, t: h.index_put((t,), h[t]), h, torch.arange(20))), "it overwrites"


def test_determinism_is_torchs() -> None:
    """A change of the setting is seen by the next call."""
    inputs = edges()
    compiled, counts = gradsplit.compile(aggregated, fullgraph=True), []
    for enabled in (False, True, False):
        torch.use_deterministic_algorithms(enabled)
        try:
            torch.testing.assert_close(compiled(*inputs), aggregated(*inputs))
            counts.append(len(calls(check(aggregated, *inputs))))
        finally:
            torch.use_deterministic_algorithms(False)
    assert counts == [0, 1, 0]


@pytest.mark.parametrize("wrong", [-1, 20, 10**12])
def test_an_index_out_of_range_raises_what_eager_does(wrong: int) -> None:
    h, source, target, weight = edges()
    target[7] = wrong
    with pytest.raises(RuntimeError) as expected:
        aggregated(h, source, target, weight)
    with pytest.raises(RuntimeError) as found:
        gradsplit.compile(aggregated)(h, source, target, weight)
    assert str(found.value) == str(expected.value)


def test_two_sums_in_one_buffer_and_one_that_reads_it() -> None:
    """None of these may be one kernel: each needs what the one before has added up."""

    def program(h: Tensor, source: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        first = h.sin().index_add(0, target, h[source] * weight)
        both = first.index_add(0, source, h[target] * weight)
        return both, both[source] - h[source]

    found = check(program, *edges())
    assert not calls(found)
    assert sum(bool(combined_buffers(nest)) for nest in nests(found)) == 2


def test_sums_of_rows_are_added_in_the_kernel_that_sums_them() -> None:
    program = check(
        lambda h, source, target, weight: h.new_zeros(20).index_add(
            0, target, (h[source] * h[target]).sum(1)
        ),
        *edges(),
    )
    assert [nest.reduced_axes for nest in nests(program)] == [0, 1]


class GraphNetwork(nn.Module):
    """Layers that gather along edges, weigh, add up at nodes and multiply."""

    def __init__(self, width: int, depth: int, norm: bool, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) if norm else nn.Identity() for _ in range(depth))
        self.kind = kind

    def forward(self, h: Tensor, source: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        count = torch.zeros_like(h[:, :1]).index_add(0, target, torch.ones_like(weight))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            message = (
                (h[source] - h[target]).relu() * weight if self.kind == "differences" else h[source] * weight
            )
            if self.kind == "attention":
                scores = (h[source] * h[target]).mean(1, keepdim=True).exp()
                total = torch.zeros_like(h[:, :1]).index_add(0, target, scores)
                message = message * (scores / total[target])
            h = norm(layer(torch.zeros_like(h).index_add_(0, target, message) / (count + 1))).relu() + h
        return h.square().mean()


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    nodes=st.integers(1, 40), count=st.integers(1, 200), width=st.sampled_from([1, 3, 16, 40]),
    depth=st.integers(1, 3), norm=st.booleans(), kind=st.sampled_from(["sums", "differences", "attention"]),
)  # fmt: skip
def test_graph_networks(nodes: int, count: int, width: int, depth: int, norm: bool, kind: str) -> None:
    """Loss and gradients are as near to those of float64 as eager's."""
    torch.manual_seed(nodes * 1000 + count)
    model, inputs = GraphNetwork(width, depth, norm, kind), edges(nodes, count, width)
    inputs[0] = inputs[0] / width
    results = []
    for call, dtype in (
        (model, torch.float64),
        (model, torch.float32),
        (gradsplit.compile(model), torch.float32),
    ):
        model.to(dtype)
        given = tree_map(lambda x, dtype=dtype: x.to(dtype) if x.is_floating_point() else x, inputs)
        leaves = [given[0].requires_grad_(), given[3].requires_grad_(), *model.parameters()]
        loss = call(*given)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for exact, eager, mine in zip(*results, strict=True):
        scale = exact.abs().max() * 1e-5 + 1e-7
        assert (mine - exact).abs().max() <= 4 * (eager - exact).abs().max() + scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_added_up_in_their_destination(dtype: torch.dtype) -> None:
    """Unless it is of 16-bit floats, which the sums are rounded to at the end."""
    inputs = edges(dtype=dtype)
    module = trace(aggregated, *inputs)
    program = fuse(lower(compute_of(module, {"result_0": "place"})))
    verify_program(program)
    place = torch.full_like(inputs[0], torch.nan)
    (result,) = evaluate(program, inputs, [place])
    assert result is not None and result.data_ptr() == place.data_ptr()
    exact = aggregated(*(x.double() if x.is_floating_point() else x for x in inputs))
    torch.testing.assert_close(place, exact.to(dtype))
    sums = frozenset[str]().union(*map(combined_buffers, nests(program)))
    assert (sums == set(program.destinations)) == (dtype == torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["sums", "differences", "attention"])
def test_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    model = GraphNetwork(64, 2, True, kind).cuda()
    inputs = [tensor.cuda() for tensor in edges(500, 6000, 64)]
    results = []
    for call, wanted in (
        (model, torch.float64),
        (model, dtype),
        (gradsplit.compile(model, fullgraph=True), dtype),
    ):
        model.to(wanted)
        given = [tensor.to(wanted) if tensor.is_floating_point() else tensor for tensor in inputs]
        leaves = [given[0].requires_grad_(), *model.parameters()]
        loss = call(*given)
        results.append(
            [loss.detach().double(), *(grad.double() for grad in torch.autograd.grad(loss, leaves))]
        )
    for exact, eager, mine in zip(*results, strict=True):
        bound = 2 * (eager - exact).norm() + torch.finfo(dtype).eps * exact.norm()
        assert (mine - exact).norm() <= bound
