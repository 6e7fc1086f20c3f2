"""Numbers and sizes that depend on data stay in a graph without being asked, where the program needs no value of one;
where it does, the graph ends where the data were read, as often as without."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

import gradsplit
from gradsplit.compile_core.capture import capture
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.ir.data_reads import DataEnds
from gradsplit.compile_core.lowering.decompositions import decomposition_table
from tests.capture.same_as_plain import assert_same, run_once, twin_of

BACKENDS = ["eager", "aot_eager", "triton"]
DATA = [[1, -1, 2, -3, 4], [1, 1, 1, -1, -1], [-1, 3, -2, -1, -1], [1, 2, 3, 4, 5]]


def check(program: Any, datas: Any, backend: str, **settings: Any) -> Any:
    """What the compiled program gives, and its gradients, are those of plain Python for each of ``datas``."""
    made = gradsplit.compile(program, backend=backend, **settings)
    for data in datas:
        x = torch.tensor(data, dtype=torch.float32, requires_grad=True)
        expected, found = run_once(program, (x,), 0), run_once(made, (twin_of(x),), 0)
        assert_same(expected[0], found[0], "results")
        assert_same(expected[2], found[2], "gradients")
    return made


def masked(x):
    return x[x > 0].sin() * 3, torch.masked_select(x, x < 3).cos()


def indices(x):
    (found,) = torch.where(x > 0)
    return torch.zeros_like(x).index_add(0, found, x[found] * 2), (x > 0).nonzero()


def numbers(x):
    n = (x > 0).sum()
    return x * n.item() + int(n), x.new_zeros(int(n)), torch.arange(n), x / float(x.detach().max())


def split(x):
    positive = (x.detach() > 0).long()
    ordered = x[positive.argsort(stable=True)]
    first, second = ordered.split(torch.stack([(1 - positive).sum(), positive.sum()]).tolist())
    return first.sin(), second.exp()


def between(x):
    ends = (x.detach() > 0).long().sum(0, keepdim=True).cumsum(0)
    start, end = ends[0] // 2, ends[0]
    out = torch.zeros_like(x)
    out[start:end] = x[start:end].sin()
    return out, x[:end], x[None, start:] * 2


def repeated(x):
    return x.repeat_interleave((x.detach() > 0).long() + 1) * 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", [masked, indices, numbers, split, between, repeated])
def test_what_only_computes_is_one_graph(program, backend, caplog) -> None:
    with caplog.at_level(logging.WARNING, "gradsplit"):
        made = check(program, DATA, backend, fullgraph=True)
    assert len(made.entries) == 1 and not caplog.records


def loops(x):
    n = (x > 0).sum().item()
    y = x * n
    return [y + step for step in range(n)]


def branches(x):
    n = int(x.detach().sum())
    return x.sin() * n if n > 3 else x.cos()


def shown(x):
    chosen = x[x > 0]
    return chosen * 2, f"{len(chosen)} of {len(x)}"


@pytest.mark.parametrize("program", [loops, branches, shown])
def test_a_value_that_is_needed_ends_the_graph_where_it_was_read(program) -> None:
    made = check(program, DATA, "eager")
    (reason,) = made.break_reasons
    assert reason.location.line == program.__code__.co_firstlineno + 1
    asked_for = CompiledFunction(program, lambda graph, inputs: graph.module)
    for data in DATA:
        asked_for(torch.tensor(data, dtype=torch.float32))
    assert len(made.entries) == len(asked_for.entries)
    assert len(made._form.code.continuations) == len(asked_for._form.code.continuations)


def test_places_that_end_graphs_are_found_once(monkeypatch) -> None:
    ends = DataEnds(changes_last=False)
    for data in DATA[:2]:
        captured = capture(loops, (torch.tensor(data, dtype=torch.float32),), data_ends=ends)
        assert captured.break_reason is not None
        assert len(ends.places) == 1


def summed(x):
    chosen = x[x > 0]
    return chosen + x[x < 0], chosen.sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_assumed_and_fails_ends_graphs_from_then_on(backend, caplog) -> None:
    """Lengths that are added are equal, or one of them is 1."""
    with caplog.at_level(logging.WARNING, "gradsplit"):
        made = check(summed, [[1, 2, -1, -2]], backend)
        assert not made.break_reasons and not caplog.records
        check_again = [[1, 2, 3, -1], [1, 2, -1, -2], [1, -1, -2, -3], [2, 3, -1, -1]]
        for data in check_again:
            x = torch.tensor(data, dtype=torch.float32)
            assert_same(made(x), summed(x), "results")
    assert made.break_reasons
    assert sum("which plain Python did not" in record.message for record in caplog.records) == 1


def unless_empty(x):
    chosen = x[x > 0]
    if chosen.numel() == 0:
        return x.cos()
    return x * chosen.max()


def test_nothing_is_taken_to_be_empty_until_it_is(caplog) -> None:
    with caplog.at_level(logging.WARNING, "gradsplit"):
        made = check(unless_empty, [[1, 2, -1], [-1, -1, 3]], "aot_eager", fullgraph=False)
        assert len(made.entries) == 1 and not made.break_reasons and not caplog.records
        for data in ([-1.0, -2, -3], [1.0, 2, -1], [-1.0, -2, -3]):
            assert_same(made(torch.tensor(data)), unless_empty(torch.tensor(data)), "results")
    assert made.break_reasons
    assert sum("which plain Python did not" in record.message for record in caplog.records) == 1


def test_with_fullgraph_each_such_call_is_plain(caplog) -> None:
    made = gradsplit.compile(summed, backend="eager", fullgraph=True)
    with caplog.at_level(logging.WARNING, "gradsplit"):
        for data in ([1.0, 2, -1, -2], [1.0, 2, 3, -1], [1.0, 2, 3, -1]):
            assert_same(made(torch.tensor(data)), summed(torch.tensor(data)), "results")
    assert len(made.entries) == 1
    assert sum("which plain Python did not" in record.message for record in caplog.records) == 2


@pytest.mark.parametrize("data", [[0, 9], [3, 1], [-2, 3], [6, 7]])
def test_ends_of_slices_that_lie_elsewhere(data) -> None:
    def program(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return x[ends[0] : ends[1]] * 2

    made = gradsplit.compile(program, backend="aot_eager")
    x = torch.arange(7.0)
    for ends in ([1, 4], data, [2, 3], data):
        assert_same(made(x, torch.tensor(ends)), program(x, torch.tensor(ends)), "results")


def test_what_no_stage_has_a_rule_for_is_captured_again(caplog) -> None:
    """Torch asks for the length where the gradient of ``cumsum`` is computed."""
    with caplog.at_level(logging.WARNING, "gradsplit"):
        made = check(lambda x: x[x > 0].cumsum(0) * 2, DATA[:2], "triton")
    assert made.break_reasons
    assert not any("torch's own kernels" in record.message for record in caplog.records)


def packed(x):
    y = x[x.detach() > 0]
    for _ in range(20):
        y = (y * 0.5).sin()
    return y


def test_where_most_has_such_sizes_kernels_are_generated_for_them() -> None:
    for backend, settings in (("triton", {}), ("triton", {"fullgraph": True}), ("aot_eager", {})):
        made = check(packed, DATA[:2], backend, **settings)
        assert bool(made.break_reasons) == (backend == "triton" and not settings)


def test_backends_of_users_get_no_such_graphs() -> None:
    made = gradsplit.compile(masked, backend=lambda module, inputs: module)
    assert_same(made(torch.ones(3)), masked(torch.ones(3)), "results")
    assert made.break_reasons


def test_explain_tells_the_same() -> None:
    assert gradsplit.explain(masked)(torch.ones(3)).graph_break_count == 0
    assert gradsplit.explain(loops)(torch.ones(3)).graph_break_count == 1


def clamped(x):
    y = x.exp()
    if not torch.isfinite(y).all():
        y = y.clamp(max=1e30)
    if torch.isinf(y).any() or y.isnan().any():
        y = y * 0
    return y * 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_are_taken_to_be_finite_until_they_are_not(backend, caplog) -> None:
    with caplog.at_level(logging.WARNING, "gradsplit"):
        made = check(clamped, [[1, 2], [0, -1]], backend)
        assert len(made.entries) == 1 and not made.break_reasons and not caplog.records
        for data in ([1.0, 200], [2.0, 3], [float("nan"), 1], [300.0, 400]):
            assert_same(made(torch.tensor(data)), clamped(torch.tensor(data)), "results")
    assert made.break_reasons
    assert sum("which plain Python did not" in record.message for record in caplog.records) == 1


def positions(x):
    places = torch.arange(0, x.shape[0], dtype=torch.int64, device=x.device).to(x.dtype)
    pooled = torch.cat([places.new_tensor([-1]), places[1:-1][::2]], 0)
    far, near = pooled[0] - places[0] + 2 * pooled.shape[0], pooled[0] - places[-1]
    return torch.arange(far, near - 1, -2, dtype=torch.long, device=x.device) * x.sum()


def changed_positions(x):
    places = torch.arange(0, x.shape[0])
    places[1:].add_(1)
    return torch.arange(places[0] + 1, places[-1]) * x.sum()


@pytest.mark.parametrize("program", [positions, changed_positions])
def test_ends_of_ranges_that_the_program_makes_of_constants(program) -> None:
    """As relative positions are, in tensors of several elements."""
    check(program, [[1, 2, 3, 4, 5, 6], [3, 1, 2, 5, 4, 6]], "eager", fullgraph=program is positions)


def padded(x):
    padding = x < 0
    has_padding = padding.flatten().any().item()
    if has_padding:
        x = x.masked_fill(padding, 7.0)
    y = x.exp()
    if not has_padding and torch.all(y > 0):
        y = y + 1
    if padding.any():
        y = y * 3
    return y * 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_questions_of_all_elements_are_taken_to_be_answered_as_usual(backend, caplog) -> None:
    """Until a call says otherwise, which is right as well."""
    with caplog.at_level(logging.WARNING, "gradsplit"):
        made = check(padded, [[1, 2], [3, 4]], backend)
        assert len(made.entries) == 1 and not made.break_reasons and not caplog.records
        for data in ([1.0, 2], [-1.0, 2], [0.0, 1], [-3.0, -1], [2.0, float("nan")]):
            assert_same(made(torch.tensor(data)), padded(torch.tensor(data)), "results")
    assert made.break_reasons
    assert sum("which plain Python did not" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_input_that_was_changed_before_is_changed_once(backend) -> None:
    """What is traced changes its inputs last. Where the captured graph itself runs, nothing is assumed after a change,
    as the call could not be made again."""

    def program(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen.add_(1)
        if not torch.isfinite(x).all():
            x = x.clamp(max=1e30)
        return x * 2

    made, seen = gradsplit.compile(program, backend=backend), torch.zeros(1)
    for data in ([1.0, 2], [1.0, float("inf")], [1.0, 2]):
        assert_same(made(torch.tensor(data), seen), program(torch.tensor(data), torch.zeros(1)), "results")
        if seen.item() == 1:
            assert bool(made.break_reasons) == (backend == "eager")
    assert seen.item() == 3 and made.break_reasons


def test_what_a_form_assumes_is_checked_before_changes(monkeypatch) -> None:
    """As what the program asks is: else the call could not be made again."""

    def assuming(x: torch.Tensor) -> Any:
        torch._check(x.shape[0] < 3)
        return x * -1

    monkeypatch.setitem(decomposition_table._OWN, torch.ops.aten.neg.default, assuming)

    def program(x: torch.Tensor, seen: torch.Tensor) -> Any:
        chosen = x[x > 0]
        seen.add_(1)
        return x.sin().cos().exp() * x.sigmoid(), -torch.dropout(chosen, 0.5, True)

    options = {"fallback_random": True}
    made, seen = gradsplit.compile(program, options=options, dynamic=False), torch.zeros(1)
    for data in DATA[1:]:
        results = []
        for each, counter in ((made, seen), (program, torch.zeros(1))):
            torch.manual_seed(0)
            results.append(each(torch.tensor(data, dtype=torch.float32), counter))
        assert_same(*results, "results")
    assert seen.item() == len(DATA[1:])


def test_a_form_that_is_given_up_assumes_nothing(caplog) -> None:
    """That of a variance subtracts the first row, and is of no use where the number of rows depends on data."""

    def program(x: torch.Tensor) -> Any:
        return x.sin().cos().exp().tanh() * x.sigmoid(), x[x > 0].var(0)

    with caplog.at_level(logging.WARNING, "gradsplit"):
        check(program, [DATA[0], DATA[1], DATA[3]], "triton")
    assert not any("which plain Python did not" in record.message for record in caplog.records)


def normalised(x, norm, inner):
    x = norm(x)
    chosen = x[x[:, 0] > 0]
    if chosen.numel() == 0:
        return x * 0
    return inner(x) + chosen.exp().sum(0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_running_statistics_before_a_check_that_fails(backend) -> None:
    """Batch norms before it and behind it count such a call once."""
    torch.manual_seed(0)
    norms = [torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)]
    plain, made = copy.deepcopy(norms), gradsplit.compile(normalised, backend=backend)
    for factor in (1.0, 2.0, 0.0, 3.0):
        x = torch.randn(6, 3) * factor
        results = [made(x, *norms), normalised(x, *plain)]
        assert_same(*results, "results")
        for norm, expected in zip(norms, plain, strict=True):
            assert_same(norm.state_dict(), expected.state_dict(), "statistics")
            gradients = [
                torch.autograd.grad(result.square().sum(), each.weight, retain_graph=True, allow_unused=True)
                for result, each in zip(results, (norm, expected), strict=True)
            ]
            assert_same(*gradients, "gradients")
        assert bool(made.break_reasons) == (backend == "eager" or norms[0].num_batches_tracked > 3)


def reported(x):
    bad = x > 100
    if bad.any():
        place = torch.where(bad)[0][0]
        torch._assert(False, f"too large: {x[place].tolist()}")
    return x * 2


def test_a_branch_that_asserts_false_is_taken_to_be_an_error() -> None:
    made = check(reported, DATA, "eager", fullgraph=True)
    with pytest.raises(AssertionError, match="too large: 200"):
        made(torch.tensor([1.0, 200]))


def chosen(x, among):
    return x * among[int(torch.empty(1).uniform_(0.0, float(len(among))).item())]


def test_a_number_drawn_for_a_choice() -> None:
    """Of one there is nothing to choose; else the reason is told with every release of torch."""
    for among in ((3,), (3, 4, 5)):
        made = gradsplit.compile(chosen, backend="eager")
        runs = []
        for call in (chosen, made):
            torch.manual_seed(3)
            runs.append(call(torch.ones(2), among))
        assert torch.equal(*runs)
        assert [reason.reason_id for reason in made.break_reasons] == ["data-dependent-value"] * (
            len(among) > 1
        )


def averaged(x):
    found = (x > 0).sum()
    return x / max(1, found), x.sin().sum() * min(found, 3)


def counted(x):
    return x, max((x > 0).sum(), 2) - 1


def told_apart(x):
    found = max(1, (x > 0).sum())
    return (x.long() * found, x) if isinstance(found, int) else (x, found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_greater_of_a_number_and_a_tensor(backend) -> None:
    """To tensors of floats both do the same; where the program may tell them apart, it decides as plain Python."""
    few = [[-1, -2, -3], [1, -2, 3], [-1, -2, 3], [5, 1, 2]]
    sums = [data[:2] for data in few]  # another size
    assert not check(averaged, [*few, *sums], backend).break_reasons
    for program in (counted, told_apart):
        made = check(program, few, backend)
        assert made.break_reasons


def test_numbers_of_constants_are_known() -> None:
    def program(x: torch.Tensor) -> Any:
        scale = 2 ** float(torch.tensor(x.shape[0] / 20).log2().round())
        level = -torch.log2(torch.tensor(scale, dtype=torch.float32)).item()
        return x * scale, [level] * int(level)

    made = gradsplit.compile(program, backend="eager", fullgraph=True)
    assert_same(made(torch.ones(5)), program(torch.ones(5)), "results")
