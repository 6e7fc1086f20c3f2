"""Inputs that a compiled function changes: the kernels store into them where that is safe, and never else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradsplit
from gradsplit.compile_core.backends import generated_kernels as default_backend
from gradsplit.compile_core.ir.loops import ExternCall, LoopNest, LoopProgram, NestBatch


def adds(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def overwrites(x: Tensor, y: Tensor) -> None:
    x.copy_(y.exp())


def swaps(x: Tensor, y: Tensor) -> None:
    x_before = x.clone()
    x.copy_(y)
    y.copy_(x_before)


def returns_what_it_stores(x: Tensor, y: Tensor) -> Tensor:
    total = x + y
    x.copy_(total)
    return total


def returns_the_old_value(x: Tensor, y: Tensor) -> Tensor:
    before = x * 1
    x.add_(y)
    return before


def returns_the_input(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return x


def adds_its_transpose(x: Tensor, y: Tensor) -> None:
    x.copy_(x + x.t())


def shifts(x: Tensor, y: Tensor) -> None:
    x[1:] = x[:-1] + y[1:]


def multiplies_the_old_value_later(x: Tensor, y: Tensor) -> Tensor:
    product = torch.mm(x, y)
    x.add_(1)
    return torch.mm(product, x)


def subtracts_the_mean(x: Tensor, y: Tensor) -> None:
    x.sub_(x.mean())


def normalizes_rows(x: Tensor, y: Tensor) -> None:
    x.copy_(torch.softmax(x, 1))


def changes_a_part(x: Tensor, y: Tensor) -> None:
    x[:, 0].zero_()


def changes_twice(x: Tensor, y: Tensor) -> None:
    x.add_(y)
    y.add_(x)
    x.mul_(y)


# How many inputs the program gives their new values, and how many of them by a copy at the end.
STORED: dict[Callable[..., Any], tuple[int, int]] = {
    adds: (1, 0),
    overwrites: (1, 0),
    swaps: (2, 1),  # the other is still read when the one is stored
    returns_what_it_stores: (1, 0),  # the result is a copy
    returns_the_old_value: (1, 0),
    returns_the_input: (1, 0),
    adds_its_transpose: (1, 1),
    shifts: (1, 1),
    multiplies_the_old_value_later: (1, 1),
    subtracts_the_mean: (1, 1),
    normalizes_rows: (1, 1),
    changes_a_part: (1, 0),
    changes_twice: (2, 0),
}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[LoopProgram]:
    linked: list[LoopProgram] = []
    original = default_backend.link_program

    def noting(program: LoopProgram, *others: Any) -> Any:
        linked.append(program)
        return original(program, *others)

    monkeypatch.setattr(default_backend, "link_program", noting)
    return linked


@pytest.mark.parametrize("function", STORED, ids=lambda function: function.__name__)
def test_inputs_end_up_as_in_eager(function: Callable[..., Any], programs: list[LoopProgram]) -> None:
    compiled = gradsplit.compile(function, fullgraph=True)
    for _ in range(2):
        plain = torch.randn(6, 6), torch.randn(6, 6)
        ours = [tensor.clone() for tensor in plain]
        memory = [tensor.data_ptr() for tensor in ours]
        versions = [tensor._version for tensor in ours]
        expected, actual = function(*plain), compiled(*ours)
        assert (actual is None) == (expected is None)
        if actual is not None:
            torch.testing.assert_close(actual, expected)
        for k in range(2):
            torch.testing.assert_close(ours[k], plain[k])
            assert ours[k].data_ptr() == memory[k]
            assert (ours[k]._version > versions[k]) == (plain[k]._version > 0)
    stored = sum(len(program.overwritten) for program in programs)
    nests = [step for program in programs for step in program.steps if isinstance(step, LoopNest)]
    copied = sum(nest.name.startswith("copy_to_") for nest in nests)
    assert (stored, copied) == STORED[function]


def test_a_saved_tensor_that_is_changed_is_noticed(programs: list[LoopProgram]) -> None:
    weight = torch.randn(3, requires_grad=True)
    x = torch.randn(3)
    result = (weight * x).sum()
    gradsplit.compile(adds)(x, torch.ones(3))
    assert programs[0].overwritten
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_a_call_that_fails_changes_nothing() -> None:
    def step(x: Tensor, table: Tensor, index: Tensor) -> Tensor:
        x.add_(1)
        return torch.nn.functional.embedding(index, table) * x

    x, table = torch.zeros(3), torch.randn(4, 3)
    compiled = gradsplit.compile(step)
    compiled(x, table, torch.tensor([1]))
    with pytest.raises(IndexError):
        compiled(x, table, torch.tensor([9]))
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_a_call_that_fails_before_copies_changes_nothing() -> None:
    def step(x: Tensor, table: Tensor, index: Tensor) -> Tensor:
        x.sub_(x.mean())
        return torch.nn.functional.embedding(index, table) * x

    x, table = torch.tensor([0.0, 3.0, 6.0]), torch.randn(4, 3)
    compiled = gradsplit.compile(step)
    compiled(x, table, torch.tensor([1]))
    with pytest.raises(IndexError):
        compiled(x, table, torch.tensor([9]))
    assert x.tolist() == [-3.0, 0.0, 3.0]


def test_statistics_of_batch_norms_are_no_results(programs: list[LoopProgram]) -> None:
    """Sums are not stored at once, and convolutions may fail behind them: they are copied last, counts stored last."""
    layers = [
        layer for _ in range(2) for layer in (torch.nn.Conv2d(3, 3, 3, padding=1), torch.nn.BatchNorm2d(3))
    ]
    plain = torch.nn.Sequential(*layers)
    ours = copy.deepcopy(plain)
    compiled = gradsplit.compile(ours)
    x = torch.randn(4, 3, 8, 8)
    for _ in range(2):
        for module in (plain, compiled):
            module(x).square().sum().backward()
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, plain.get_buffer(name))
    (forward,) = [program for program in programs if program.name == "forward"]
    assert len(forward.overwritten) == 6
    (copies,) = [step for step in forward.steps if isinstance(step, NestBatch) and "copy_to_" in step.name]
    (counts,) = [step for step in forward.steps if isinstance(step, NestBatch) and step is not copies]
    assert (len(copies.members), len(counts.members)) == (4, 2)
    assert min(map(forward.steps.index, (copies, counts))) > max(
        position for position, step in enumerate(forward.steps) if isinstance(step, ExternCall)
    )


def test_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.zeros(3)
        gradsplit.compile(adds)(x, torch.ones(3))
        assert x.tolist() == [1.0, 1.0, 1.0]


def test_views_and_leaves() -> None:
    base = torch.zeros(4, 3)
    leaf = torch.zeros(3, requires_grad=True)
    compiled = gradsplit.compile(adds)
    with torch.no_grad():
        compiled(base[1], torch.ones(3))
        compiled(leaf, torch.ones(3))
    assert base.sum() == 3 and leaf.sum() == 3


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
@pytest.mark.parametrize(("size", "step"), [(1, 3), (2, 2), (3, 3), (1, 1)])
def test_windows(size: int, step: int, backend: str) -> None:
    """What lies between windows stays as it is, and passes gradients on."""

    def triples_windows(x: Tensor) -> Tensor:
        y = x * 2
        y.unfold(1, size, step).mul_(3)
        return y

    x = torch.randn(3, 8, requires_grad=True)
    (expected, gradient), (found, found_gradient) = (
        (result, *torch.autograd.grad(result.square().sum(), x))
        for result in (triples_windows(x), gradsplit.compile(triples_windows, backend=backend)(x))
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_gradient, gradient)


def test_a_row_of_an_expanded_input() -> None:
    def doubles(x: Tensor) -> None:
        x[1:2] *= 2

    ours, plain = torch.ones(3), torch.ones(3)
    for function, row in ((gradsplit.compile(doubles), ours), (doubles, plain)):
        function(row.expand(4, 3))
    assert torch.equal(ours, plain)


def into_part_of_an_input(x: Tensor, out: Tensor) -> Tensor:
    torch.add(x, x, out=out[:1])
    return out * 1


def into_a_viewed_input(x: Tensor, out: Tensor) -> Tensor:
    view = out.view(-1)
    torch.add(x, x, out=out)
    return view * 1


def into_what_the_program_made(x: Tensor, out: Tensor) -> tuple[Tensor, ...]:
    made = out + 1
    view = made.view(-1)
    torch.stack([x, x], out=made)
    values, places = torch.empty(0), torch.empty(0, dtype=torch.long)
    torch.sort(x, out=(values, places))
    return view * 1, made.t(), values * 2, places


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("backend", ["triton", "aot_eager"])
@pytest.mark.parametrize("size", [(0,), (2,), (3,), (1, 1)])
@pytest.mark.parametrize("program", [into_part_of_an_input, into_a_viewed_input, into_what_the_program_made])
def test_results_given_as_out_are_resized(program: Any, size: tuple[int, ...], backend: str) -> None:
    both = []
    for run in (program, gradsplit.compile(program, backend=backend)):
        x, out = torch.tensor([3.0, 1.0, 2.0]), torch.ones(size)
        both.append([run(x, out), x, out])
    torch.testing.assert_close(both[1], both[0], check_stride=True)


def test_what_an_operator_writes_unseen_by_autograd_is_written() -> None:
    """``kron`` fills what it is given through a view that counts as none."""

    def fills(a: Tensor, b: Tensor) -> Tensor:
        made = torch.zeros(a.shape[0] * b.shape[0], a.shape[1] * b.shape[1])
        torch.kron(a, b, out=made)
        return made + 1

    a, b = torch.randn(2, 3), torch.randn(4, 5)
    torch.testing.assert_close(gradsplit.compile(fills)(a, b), fills(a, b))


def test_gradient_that_counts_different_numbers() -> None:
    """The size of what is unlike in a tensor is not known on fake tensors, whatever the release of torch says."""
    index, x = torch.tensor([4, 3, 3, 4, 0]), torch.randn(5, 5)
    value = torch.tensor(2.0, requires_grad=True)
    weights, fill = torch.randn(5, 5), lambda x, value: torch.index_fill(x, -1, index, value)
    expected, found = (
        torch.autograd.grad((run(x, value) * weights).sum(), value) for run in (fill, gradsplit.compile(fill))
    )
    torch.testing.assert_close(found, expected)


def resizes_a_result(make: Any) -> Any:
    def resizes(x: Tensor, y: Tensor) -> Tensor:
        made = make(x, y)
        with torch.no_grad():
            torch.add(y, 1, out=made)
        return made * y.exp()

    return resizes


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("backend", ["triton", "aot_eager"])
@pytest.mark.parametrize(
    "make", [lambda x, y: x.cos().t(), lambda x, y: torch.tensordot(x, x, 1), lambda x, y: x.t()]
)
def test_a_resized_result_has_its_history(make: Any, backend: str) -> None:
    x, y = torch.randn(2, 2, requires_grad=True), torch.randn(3)
    program = resizes_a_result(make)
    expected = torch.autograd.grad(program(x, y).sum(), x)
    found = torch.autograd.grad(gradsplit.compile(program, backend=backend)(x, y).sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_resized_parameter_has_its_history() -> None:
    def resizes(x: Tensor, y: Tensor) -> Tensor:
        before = x.sin()
        with torch.no_grad():
            torch.cumsum(y, 1, out=x)
        return before, x.exp()

    y = torch.randn(3, 3)
    both = []
    for program in (resizes, gradsplit.compile(resizes)):
        x = torch.ones(1, requires_grad=True)
        both.append(torch.autograd.grad(program(x, y)[1].sum(), x))
    torch.testing.assert_close(both[1], both[0])


def test_a_new_result_given_as_out_lies_as_the_kernel_lays_it() -> None:
    def divided(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        new, stacked = torch.empty(0), torch.empty(0)
        return torch.div(x, y, out=new), new, torch.cat([x, y], out=stacked), new.sin()

    x, y = torch.randn(3, 4).t(), torch.randn(3, 4).t()
    torch.testing.assert_close(gradsplit.compile(divided)(x, y), divided(x, y), check_stride=True)


@pytest.mark.parametrize("backend", ["aot_eager", None])
def test_random_numbers_fill_a_result_given_as_out_as_it_lies_in_memory(backend: str | None) -> None:
    def program(x: Tensor) -> Tensor:
        out = torch.empty(3, 3).mT
        return torch.matmul(x, x, out=out).clone().normal_()

    chosen: dict[str, Any] = {"backend": backend} if backend else {"options": {"fallback_random": True}}
    x, found = torch.randn(3, 3), []
    for call in (program, gradsplit.compile(program, **chosen)):
        torch.manual_seed(0)
        found.append(call(x))
    assert torch.equal(*found)


@pytest.mark.parametrize("backend", ["aot_eager", None])
def test_a_view_is_resized_in_the_memory_of_what_it_is_of(backend: str | None) -> None:
    """Of a view that leaves a graph nothing but its elements is computed."""

    def program(x: Tensor) -> Tensor:
        column = (x * 2)[:, 0]
        return column.resize_(2, 1)

    chosen: dict[str, Any] = {"backend": backend} if backend else {}
    x = torch.arange(8.0).view(2, 4)
    assert torch.equal(gradsplit.compile(program, **chosen)(x), program(x))


def test_a_view_of_a_leaf_that_is_changed_unseen_has_no_history() -> None:
    """Plain PyTorch raises where somebody asks for the history, which the program itself does not."""

    def program(x: Tensor) -> Tensor:
        view, other = x.squeeze(0), x.detach()
        other.data.mul_(2)
        other.mul_(0.5)
        return view

    found = []
    for call in (program, gradsplit.compile(program)):
        x = torch.arange(12.0).view(2, 6)[:, ::2].requires_grad_()
        found.append(call(x).detach())
    assert torch.equal(*found)


_INDICES = torch.tensor([[0], [0], [0]])
_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda x: x.mul_(2),
    "cumsum_": lambda x: x.cumsum_(0),
    "scatter_reduce_": lambda x: x.scatter_reduce_(1, _INDICES, x[:, :1] * 2, "amin"),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 0.5),
    "tril_ of a view": lambda x: x.T.tril_(),
    "cumsum_ of a part": lambda x: x[:2].cumsum_(1),
    "transpose_": lambda x: x.transpose_(0, 1),
}


@pytest.mark.parametrize("lies", ["transposed", "with gaps"])
@pytest.mark.parametrize("write", _WRITES)
def test_what_is_written_into_stays_where_it_lies(write: str, lies: str) -> None:
    """``reshape`` is a view or a copy by that, and ``as_strided`` reads by it."""

    def program(x: Tensor) -> list[Tensor]:
        made = x * 2
        tensors = [made] if write == "transpose_" else [made, x]
        for tensor in tensors:
            _WRITES[write](tensor)
            tensor.reshape(-1)[0] = 7.0
        return [made * 1, made.as_strided((3,), (1,)), x]

    def given() -> Tensor:
        wide = torch.arange(-9.0, 9.0).view(3, 6)
        return wide[:, :3] if lies == "with gaps" else wide[:, :3].contiguous().T

    expected, found = program(given()), gradsplit.compile(program)(given())
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.mean(x, 0, out=x[0]),
        lambda x: torch.sum(x[:1], 0, out=x[0]),
        lambda x: torch.cumsum(x[:3], 0, out=x[1:]),
        lambda x: torch.add(x, 1, out=x),
        lambda x: torch.neg(x[:2], out=x[2:]),
        lambda x: torch.neg(x[:2], out=x[1:3]),
    ],
)
def test_a_result_over_what_is_read_is_what_the_kernel_makes_of_it(
    change: Callable[[Tensor], Tensor],
) -> None:
    x = torch.arange(12.0).view(4, 3)
    ours = x.clone()
    try:
        change(x)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error)[:30]):
            gradsplit.compile(change)(ours)
    else:
        gradsplit.compile(change)(ours)
    assert torch.equal(ours, x)


def test_an_elementwise_result_over_what_is_read_is_in_a_graph() -> None:
    x = torch.ones(4)
    gradsplit.compile(lambda x: torch.add(x, 1, out=x), fullgraph=True)(x)
    assert torch.equal(x, torch.full((4,), 2.0))
