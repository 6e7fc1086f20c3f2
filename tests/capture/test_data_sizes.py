"""Sizes and integers that depend on data stay in the graph, which is one for all counts that come, none and one too."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true
from torch.utils.checkpoint import checkpoint

import gradsplit
from gradsplit.compile_core import config
from tests.capture.same_as_plain import assert_same, run_once, twin_of

BACKENDS = ["eager", "aot_eager", "triton"]


@pytest.fixture(autouse=True)
def data_in_graphs():
    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def check(program, datas, backend, caplog, *, fails: int = 0, dtype=torch.float32) -> Any:
    """One graph gives what plain Python does, for each of ``datas``; for ``fails`` of them what it assumes does not
    hold, and plain Python runs."""
    made = gradsplit.compile(program, backend=backend, fullgraph=True)
    with caplog.at_level(logging.WARNING, "gradsplit"):
        for data in datas:
            x = torch.tensor(data, dtype=dtype, requires_grad=dtype.is_floating_point)
            expected, found = run_once(program, (x,), 0), run_once(made, (twin_of(x),), 0)
            assert_same(expected[0], found[0], "results")
            assert_same(expected[2], found[2], "gradients")
    assert len(made.entries) == 1
    assert sum("which plain Python did not" in record.message for record in caplog.records) == fails
    return made


COUNTS = [[1, -1, 2, -3, 4], [1, 1, 1, -1, -1], [-1, -1, -2, -1, -1], [-1, -1, 5, -1, -1], [1, 2, 3, 4, 5]]


def masked(x):
    return x[x > 0] * 3, torch.masked_select(x.cos(), x > 0).pow(2)


def indices(x):
    (found,) = torch.where(x > 0)
    (again,) = (x > 0).nonzero(as_tuple=True)
    return torch.zeros_like(x).index_add(0, found, x[found] * 2), x[again].sin(), torch.argwhere(x > 0)


def counts(x):
    chosen = x[x > 0]
    return x * (x > 0).nonzero().shape[0], chosen.sum() / max(len(chosen), 1), chosen.numel(), chosen.shape


def joined(x):
    return torch.cat([x[x > 0], x[x <= 0]]).sin()


def rows(x):
    weight = torch.linspace(-1, 1, 12).view(4, 3)
    chosen = (torch.arange(15.0).view(5, 3) * x[:, None])[x > 0]
    grouped = F.linear(chosen, weight).view(chosen.shape[0], 2, 2).transpose(1, 2).reshape(-1, 4)
    return F.gelu(grouped), F.softmax(chosen, -1), F.layer_norm(chosen, (3,)), chosen.flatten()


def stores(x):
    y = x * 2
    y[x > 0] = 0.0
    y[x < -1] = y[x < -1].exp()
    return y.sin()


def chosen_twice(x):
    y = x[x > 0]
    z = y[y > 2]
    return z.sum() * x, z.shape[0] + y.shape[0]


def known_not_negative(x):
    count = (x > 0).nonzero().shape[0]
    return x * 2 if count >= 0 and not count < 0 else x * 3


def experts(x):
    weights = torch.linspace(-1, 1, 27).view(3, 3, 3)
    tokens = torch.arange(15.0).view(5, 3) * x[:, None] / 10
    choice = x.detach().long().abs() % 3
    summed, put = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for expert in range(3):
        (hit,) = torch.where(choice == expert)
        summed.index_add_(0, hit, F.silu(tokens[hit] @ weights[expert]))
        put[choice == expert] = F.silu(tokens[choice == expert] @ weights[expert])
    return summed.tanh(), put


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "program",
    [masked, indices, counts, joined, rows, stores, chosen_twice, known_not_negative, experts],
)
def test_sizes_of_results(program, backend, caplog) -> None:
    check(program, COUNTS, backend, caplog)


NUMBERS = [[3, 1, 4, 5], [0, 2, 3, 4], [1, 0, 0, 0], [2, 2, 2, 2]]


def lengths(x):
    length = int(x[0].item())
    whole = x.detach().sum().long().item()
    return torch.zeros(length) + x[1], torch.arange(whole) * 2, whole + 1, x * whole


def at(x):
    index = x.detach()[0].long().item()
    y = x * 2
    y[index] = 5.0
    return x[index] * 2 + y, x.view(2, 2)[:, index % 2].sin()


def part(x):
    length = x.detach()[0].long().item()
    torch._check(length >= 0)
    torch._check(length <= x.size(0))
    return torch.narrow(x, 0, 0, length).sin(), x[:length] * 2


def repeats(x):
    return torch.repeat_interleave(torch.arange(4.0) * x, x.detach().long()).sin()


def values(x):
    found, counted = x.detach().unique(return_counts=True)
    return (found * counted).sum() * x, torch.bincount(x.detach().long()).float() * 2


def conditions(x):
    count = x.detach()[0].long().item()
    positive = (x > 0).all().item()
    both = torch.sym_max(count, 2)
    return x * positive, count > 1, not count > 1, both, x * (count == 3)


def asked(x):
    count = x.detach()[0].long().item()
    unknown = guard_or_false(count == 7) or statically_known_true(count == 7)
    return x * 2 if unknown else x * 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", [lengths, at, part, repeats, values, conditions, asked])
def test_numbers(program, backend, caplog) -> None:
    check(program, NUMBERS, backend, caplog)


def split(x):
    first, second = torch.split(torch.arange(5.0) * x.sum(), x.detach().long().tolist())
    return first.sin(), second.cos()


@pytest.mark.parametrize("backend", BACKENDS)
def test_lists(backend, caplog) -> None:
    check(split, [[2, 3], [1, 4], [0, 5], [5, 0]], backend, caplog)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_assumed_and_does_not_hold_is_never_computed_with(backend, caplog) -> None:
    """Shape rules take the size of what is broadcast for that of the other, unless it is known to be one."""

    def added(x):
        return x[x > 0] + torch.arange(3.0)

    check(added, [[1, -1, 2, -3, 4], [-1, -1, 5, -1, -1]], backend, caplog, fails=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_may_be_a_view_is_not_changed_in_a_graph(backend) -> None:
    """Of one row, ``reshape`` makes a view, of others a copy."""

    def program(x):
        y = (torch.arange(15.0).view(5, 3) * x[:, None])[x > 0].t()
        flat = y.reshape(-1)
        flat.add_(1)
        return y * 2, flat * 3

    made = gradsplit.compile(program, backend=backend)
    for data in COUNTS:
        x = torch.tensor(data, dtype=torch.float32)
        assert_same(made(x), program(x), "results")


@pytest.mark.parametrize("rows", [[[3], [4]], [[4], [3], [5]]])
def test_a_branch_by_a_row_of_one_number_is_a_guard(rows) -> None:
    """As of the experts that are hit, in a loop over them."""

    def program(x, row):
        return x * 2 if row[0] == 4 else x * 3

    made = gradsplit.compile(program, backend="eager", fullgraph=True)
    for row in rows:
        given = torch.ones(2), torch.tensor(row)
        assert_same(made(*given), program(*given), "results")
    assert len(made.entries) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failing_check_raises_as_in_plain_pytorch(backend) -> None:
    def program(x):
        count = x.detach()[0].long().item()
        torch._check(count >= 0, lambda: f"{count} is negative")
        return x * count

    made = gradsplit.compile(program, backend=backend, fullgraph=True)
    assert_same(made(torch.tensor([2.0, 1.0])), torch.tensor([4.0, 2.0]), "results")
    with pytest.raises(RuntimeError, match="-3 is negative"):
        made(torch.tensor([-3.0, 1.0]))
    unequal = gradsplit.compile(lambda x: x[x > 0] @ torch.ones(3), backend=backend, fullgraph=True)
    assert unequal(torch.tensor([1.0, 2.0, 3.0, -1.0])) == 6
    with pytest.raises(RuntimeError, match="size"):
        unequal(torch.ones(4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_open_sizes_beside_those_of_data(backend) -> None:
    def program(x):
        return x[x > 0].sum() * x.sin(), x[x > 0].exp() * x.shape[0]

    made = gradsplit.compile(program, backend=backend, fullgraph=True, dynamic=True)
    for size in (5, 7, 9):
        x = torch.linspace(-1, size, size, requires_grad=True)
        expected, found = run_once(program, (x,), 0), run_once(made, (twin_of(x),), 0)
        assert_same(expected[0], found[0], "results")
        assert_same(expected[2], found[2], "gradients")
    assert len(made.entries) == 1


def refuse_nan(x):
    if x.isnan().any():
        raise ValueError("not a number")


def in_a_checkpoint(x):
    chosen = x[x > 0]

    def inner(y):
        torch._check(chosen.shape[0] <= 5)
        return (y * chosen.shape[0] + torch.ones(chosen.shape[0]).sum()).sin() * chosen.sum()

    return checkpoint(inner, x, use_reentrant=False)


def in_checkpoints_of_checkpoints(x):
    refuse_nan(x)
    first, second = x[x > 0], x[x > 0]

    def outer(y):
        return checkpoint(lambda z: (first * second).sum() * z.cos() / 50, y, use_reentrant=False).sin()

    return checkpoint(outer, x, use_reentrant=False)


def between_checkpoints(x):
    for _ in range(2):
        x = checkpoint(torch.sin, x, use_reentrant=False)
        refuse_nan(x)
    return x


def before_other_bodies(x):
    refuse_nan(x)
    either = torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))
    return either * vmap(torch.exp)(x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "program", [in_a_checkpoint, in_checkpoints_of_checkpoints, between_checkpoints, before_other_bodies]
)
def test_bodies(program, backend, caplog) -> None:
    check(program, COUNTS, backend, caplog)
    if program is not in_a_checkpoint:
        return
    made = gradsplit.compile(program, backend=backend, fullgraph=True)
    made(torch.tensor([1.0, 2, 3, 4, 5, -6]))
    with pytest.raises(RuntimeError, match="Expected cond"):
        made(torch.tensor([1.0, 2, 3, 4, 5, 6]))


def size_in_vmap(x):
    chosen = x[x > 0]
    return vmap(lambda row: row * chosen.shape[0])(x)


def size_made_in_a_checkpoint(x):
    return checkpoint(lambda y: y[y > 0].sin(), x, use_reentrant=False) * 2


def asserted_in_a_checkpoint(x):
    def inner(y):
        refuse_nan(y)
        return y.sin()

    return checkpoint(inner, x, use_reentrant=False)


def branches(x):
    chosen = x[x > 0]
    return chosen.max() * x if chosen.numel() > 0 else x * 2


def loops(x):
    for _ in range((x > 0).sum().item()):
        x = x * 2
    return x


@pytest.mark.parametrize(
    "program", [branches, loops, size_in_vmap, size_made_in_a_checkpoint, asserted_in_a_checkpoint]
)
def test_decisions_end_the_graph(program) -> None:
    made = gradsplit.compile(program, backend="eager")
    for data in COUNTS:
        x = torch.tensor(data, dtype=torch.float32)
        assert_same(made(x), program(x), "results")
    assert made.break_reasons


def test_without_the_settings_data_end_graphs_for_users_backends() -> None:
    with config.patch(capture_scalar_outputs=False, capture_dynamic_output_shape_ops=False):
        for program in (lambda x: x[x > 0] * 2, lambda x: x * (x > 0).sum().item()):
            made = gradsplit.compile(program, backend=lambda module, inputs: module)
            assert_same(made(torch.ones(2)), program(torch.ones(2)), "results")
            assert made.break_reasons


def test_a_number_that_is_needed_is_told_with_every_release() -> None:
    """Torch 2.11 shows where a number comes from in its exception, which only we know."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * (3, 4, 5)[int(torch.empty(1).uniform_(0.0, 3.0).item())]

    made = gradsplit.compile(program, backend="eager")
    torch.manual_seed(0)
    expected = program(torch.ones(2))
    torch.manual_seed(0)
    assert torch.equal(made(torch.ones(2)), expected)
    assert [reason.reason_id for reason in made.break_reasons] == ["data-dependent-value"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_integers_and_floats_are_saved(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """A float that the backward needs becomes a tensor, an integer that is a size, too, stays a number."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count, largest = (x > 0).sum(), float(x.detach().max())
        return x * count.item(), x.new_zeros(int(count)), x / largest

    check(program, COUNTS[:2], backend, caplog)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_drawn_before_a_failed_check_is_drawn_again(backend: str) -> None:
    def program(x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dropped = F.dropout(x, 0.5)
        return dropped, x[x > 0] + other[other > 0], torch.rand(2)

    made = gradsplit.compile(program, backend=backend, options={"fallback_random": True}, fullgraph=True)
    for x, other in (([1.0, 2], [3.0, 4]), ([1.0, -2], [3.0, 4])):  # the second one is broadcast
        runs = []
        for call in (program, made):
            torch.manual_seed(0)
            runs.append((*call(torch.tensor(x), torch.tensor(other)), torch.get_rng_state()))
        assert all(map(torch.equal, *runs))
    assert len(made.entries) == 1
