"""Which nests are joined, which are not, and why."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from gradsplit.compile_core.ir.loops import Load, LoopProgram, Store
from gradsplit.compile_core.ir.pooling import WINDOW_SUMS
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from gradsplit.compile_core.lowering.nests.change_axes import simplified
from gradsplit.compile_core.lowering.nests.order_axes import simplify
from tests.lowering.codegen_nests import flat_positions, positions
from tests.lowering.lowering_harness import calls, check, compute_of, nests, trace


def _reasons(function: Callable[..., object], *inputs: torch.Tensor) -> set[str]:
    program = fuse(lower(compute_of(trace(function, *inputs))))
    return {refusal.reason for refusal in program.unfused}


def _moved_buffers(program: LoopProgram) -> tuple[int, int]:
    """Numbers of loads and stores in the single nest of a program."""
    (nest,) = nests(program)
    return sum(isinstance(s, Load) for s in nest.body), sum(isinstance(s, Store) for s in nest.body)


def test_softmax_reads_once_and_writes_once() -> None:
    assert _moved_buffers(check(lambda x: F.softmax(x * 2, -1), torch.randn(6, 8))) == (1, 1)
    assert _moved_buffers(check(lambda x: F.log_softmax(x, -1), torch.randn(2, 3, 8))) == (1, 1)
    assert _moved_buffers(check(lambda x: F.softmax(x, 0), torch.randn(6, 8))) == (1, 1)


def test_two_column_sums_share_their_loads() -> None:
    assert _moved_buffers(
        check(lambda x, y: ((x * y).sum(0), y.sum(0)), torch.randn(6, 8), torch.randn(6, 8))
    ) == (2, 2)


def test_a_column_sum_joins_the_nest_that_stores_its_argument() -> None:
    program = check(lambda x, w: ((y := x.tanh()) @ w, y.sum(0)), torch.randn(6, 8), torch.randn(8, 3))
    assert _moved_buffers(program) == (1, 2)


def test_rows_and_columns_stay_apart() -> None:
    program = check(lambda x: (x.sum(0), x.sum(1)), torch.randn(6, 8))
    assert len(nests(program)) == 2
    assert _reasons(lambda x: (x.sum(0), x.sum(1)), torch.randn(6, 8)) == {"they reduce over different axes"}


def test_a_product_between_them_keeps_nests_apart() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return y @ y + y

    program = check(function, torch.randn(6, 6))
    assert (len(nests(program)), len(calls(program))) == (2, 1)
    assert _reasons(function, torch.randn(6, 6)) == {"aten.mm.out must run between them"}


def test_other_points_keep_nests_apart() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.cumsum(0).exp()
        return y, (y + y.t()).cumsum(0)

    check(function, torch.randn(6, 6))


def test_axes_are_merged_and_sorted_by_stride() -> None:
    program = check(lambda x, y: (x + y).permute(2, 0, 1) * 2, torch.randn(3, 4, 5), torch.randn(3, 4, 5))
    (nest,) = nests(program)
    assert nest.extents == (60,)
    program = check(lambda x, y: y + x.t(), torch.randn(8, 6), torch.randn(6, 8))
    assert nests(program)[0].extents == (6, 8)


def test_cut_axes_match_merged_ones() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x + 1).tanh()
        return y.view(6, 2, 4) * w, y.sum(1)

    program = check(function, torch.randn(6, 8), torch.randn(2, 1))
    assert len(nests(program)) == 1


def test_products_take_transposed_operands_and_fill_transposed_results() -> None:
    program = check(lambda x, w: (x.t() @ w.t()).t().contiguous(), torch.randn(4, 3), torch.randn(5, 4))
    assert len(calls(program)) == 1
    program = check(lambda x, w: x.t() @ (w + 1).t(), torch.randn(4, 3), torch.randn(5, 4))
    assert (len(nests(program)), len(calls(program))) == (1, 1)


def test_addmm_leaves_its_bias_to_the_next_body() -> None:
    program = check(
        lambda x, w, b: F.relu(F.linear(x, w, b)), torch.randn(4, 3), torch.randn(5, 3), torch.randn(5)
    )
    assert [call.target for call in calls(program)] == [torch.ops.aten.mm.out]
    program = check(lambda x, w, b: F.linear(x, w, b), torch.randn(4, 3), torch.randn(5, 3), torch.randn(5))
    assert [call.target for call in calls(program)] == [torch.ops.aten.addmm.out] and not nests(program)


def test_arange_indices_become_strides() -> None:
    program = check(lambda x: F.embedding(torch.arange(4), x) * 2, torch.randn(4, 3))
    (nest,) = nests(program)
    assert nest.extents == (12,)


def test_dead_reductions_leave_parallel_axes_behind() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y * torch.ones_like(y.sum())

    (nest,) = nests(check(function, torch.randn(4, 8)))
    assert (nest.extents, nest.reduced_axes) == ((32,), 0)


def test_axes_are_merged_where_positions_walk_them_as_one() -> None:
    for nest, buffers in (flat_positions(), positions()):
        extents = (3 * 7 * 16,) if nest.name == "flat_positions" else nest.extents
        assert simplified(nest, lambda name, specs=buffers: specs[name].dtype).extents == extents
        assert simplify(nest).extents == extents


def test_parts_that_nobody_reads_any_more_are_left_out() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return (torch.cat([y, torch.triu(x), x.relu()], 0) - mean)[:3]

    program = check(function, torch.randn(17, 1), torch.randn(3, 1), torch.randn(1, 1))
    assert _moved_buffers(program) == (2, 1)


def test_parts_that_nobody_reads_any_more_are_not_joined() -> None:
    """The one part that is read goes into its reader; what the others would store, nobody reads then."""

    def function(weight: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([part.flatten(1) for part in parts], 1)
        return (joined[:, 8:16] * weight).sum(-1, keepdim=True)

    assert len(nests(check(function, torch.randn(6, 8), *(torch.randn(6, 4, 2) for _ in range(4))))) == 1


def test_windows_are_not_added_up_anew_in_each_walk_over_a_row() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(WINDOW_SUMS(x, [3, 3], [1, 1], [1, 1]), (8, 8))

    x = torch.randn(2, 3, 8, 8)
    assert len(nests(check(function, x))) == 2
    assert _reasons(function, x) == {"each walk over a row would read its windows anew"}
    assert len(nests(check(lambda x: WINDOW_SUMS(x, [3, 3], [1, 1], [1, 1]) - x, x))) == 1
