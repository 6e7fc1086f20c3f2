"""Sizes and integers that stay open: what one entry serves, and what it does not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradsplit
from tests.capture.same_as_plain import assert_same as assert_agree


def assert_same(found: Any, expected: Any) -> None:
    assert_agree(expected, found, "results")


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return gradsplit.compile(function, backend="eager", fullgraph=True, **options)


def check(function: Callable[..., Any], calls: list[tuple[Any, ...]], entries: int, **options: Any) -> Any:
    """All calls equal the plain ones; this many entries are needed."""
    made = compiled(function, **options)
    for arguments in calls:
        assert_same(made(*arguments), function(*arguments))
    assert len(made.entries) == entries
    return made


def batches(*sizes: int) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(size, 4),) for size in sizes]


def guard_texts(made: Any) -> list[str]:
    return [guard.text for guard in made.entries[0].captured.guards]


def test_a_size_that_changed_becomes_symbolic_at_the_recompile() -> None:
    check(lambda x: (x.sum(1) * x.shape[0], x.shape), batches(3, 5, 7, 3, 512), entries=2)


def test_a_dropout_that_drops_nothing_returns_its_input() -> None:
    def function(x: torch.Tensor) -> Any:
        first, second = x.sin(), x.cos()
        kept = torch.nn.functional.dropout(first, 0.0).add_(1)
        return first, kept is first, torch.dropout(second, 0.5, train=False).mul_(2) is second, second

    check(function, batches(3, 5, 7), entries=2)


def test_never() -> None:
    check(lambda x: x.sum(1) * x.shape[0], batches(3, 5, 7, 3), entries=3, dynamic=False)


def test_all_at_once() -> None:
    check(lambda x: x.sum(1) * x.shape[0], batches(3, 5, 7, 512), entries=1, dynamic=True)


def test_sizes_0_and_1_have_entries_of_their_own() -> None:
    check(lambda x: x + torch.ones(x.shape[0], 1), batches(3, 1, 0, 5, 1, 0), entries=3, dynamic=True)


def test_a_branch_on_a_size_is_a_guard() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] % 8 == 0 else x * 3

    made = check(function, batches(16, 8, 24, 9, 10, 512), entries=2, dynamic=True)
    assert any("x.shape[0] % 8" in text for text in guard_texts(made))


def test_equal_sizes_are_a_guard_only_where_the_program_needs_it() -> None:
    pair = [(torch.randn(3, 4), torch.randn(3, 5)), (torch.randn(3, 4), torch.randn(6, 5))]
    check(lambda x, y: (x.sum(1), y.sum(1)), pair, entries=1, dynamic=True)
    made = check(lambda x, y: x.sum(1) + y.sum(1), pair[:1], entries=1, dynamic=True)
    with pytest.raises(RuntimeError, match="must match"):
        made(*pair[1])


def test_a_loop_over_a_size_needs_its_value() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for step in range(x.shape[0]):
            x = x + step
        return x

    check(function, batches(3, 5, 5, 3), entries=2, dynamic=True)


def test_values_that_leave_the_graph_are_integers_of_the_call() -> None:
    class Notes:
        rows = 0

    def function(x: torch.Tensor, notes: Notes) -> dict[str, Any]:
        rows, columns = x.shape
        notes.rows = rows * 2
        return {
            "text": f"{columns}",
            "shape": x.T.shape,
            "half": rows / 2,
            "count": x.numel(),
            "sum": x.sum(),
        }

    made = compiled(function, dynamic=True)
    for rows in (3, 6, 17):
        mine, plain = Notes(), Notes()
        x = torch.randn(rows, 4)
        result = made(x, mine)
        assert_same(result, function(x, plain))
        assert type(result["shape"][1]) is int and type(result["half"]) is float
        assert mine.rows == plain.rows and type(mine.rows) is int
    assert len(made.entries) == 1


def test_a_dictionary_key_needs_the_value() -> None:
    check(lambda x: {x.shape[0]: x + 1}, batches(3, 5, 3), entries=2, dynamic=True)


ARITHMETIC: dict[str, Callable[[int, int], Any]] = {
    "sum": lambda a, b: a + b - 3 * a,
    "floor division": lambda a, b: (a * 7 // b, -a // b, a // -3),
    "remainder": lambda a, b: (a % b, -a % b, a % -3),
    "divmod": lambda a, b: divmod(a, b),
    "power": lambda a, b: (a**2, a**0, b**3),
    "float power": lambda a, b: (a**0.5, a**-0.5, a**-1),
    "division": lambda a, b: (a / b, a / 3, 1 / a),
    "floats in order": lambda a, b: (a * 0.1 * 0.1, a * 0.1 + 0.2 + 0.3, (a - 0.1) * 3.0 / b),
    "square root": lambda a, b: (math.sqrt(a), 1 / math.sqrt(a * b)),
    "roundings": lambda a, b: (
        math.ceil(a / b),
        math.floor(a / 3),
        int(a * 0.37),
        round(a / 2),
        math.trunc(b / a),
    ),
    "rounding of long floats": lambda a, b: (int(a * 0.1 * 0.7), math.ceil(a / 3 * 0.1)),
    "extrema": lambda a, b: (max(a, b), min(a, b, 7), abs(a - b)),
    "products": lambda a, b: (math.prod([a, b, 2]), sum([a, b, 3])),
    "conversions": lambda a, b: (float(a), int(b), bool(a), str(a)),
    "bits": lambda a, b: (a & b, a | 1, a ^ b, a << 1, a >> 1, ~a),
    "comparisons": lambda a, b: (a < b, a == b, a != 3, a >= 4.5, a / b > 1.5, not a, a is None),
    "chains": lambda a, b: 2 < a < b,
    "sequences": lambda a, b: ((a, b) == (4, 6), a in (3, 4), (a, b) < (4, 7)),
    "attributes": lambda a, b: (a.bit_length(), a.real, isinstance(a, int), type(b) is int),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name: str) -> None:
    compute = ARITHMETIC[name]

    def function(x: torch.Tensor, n: int) -> Any:
        return compute(x.shape[0], n), x + 1

    made = compiled(function, dynamic=True)
    for rows, n in [(4, 6), (6, 4), (10, 3), (3, 3), (255, 20), (1000, 7), (2, 1)]:
        x = torch.randn(rows)
        assert_same(made(x, n), function(x, n))


OPEN = [
    "sum",
    "floor division",
    "division",
    "floats in order",
    "square root",
    "extrema",
    "products",
    "comparisons",
]


@pytest.mark.parametrize("name", OPEN)
def test_arithmetic_keeps_sizes_open(name: str) -> None:
    compute = ARITHMETIC[name]
    x = torch.randn(40)
    gradsplit.mark_dynamic(x, 0)  # an error where the size comes to be one value
    compiled(lambda x, n: (compute(x.shape[0], n), x + 1), dynamic=True)(x, 7)


def test_numbers_in_operations() -> None:
    def function(x: torch.Tensor, n: int) -> Any:
        rows = x.shape[0]
        made = torch.zeros(rows + n, n) + torch.arange(n) * (rows / 3)
        return made, x[: rows // 2], x[rows - n :], x.expand(n, rows, 4), x.reshape(n, -1) / math.sqrt(n)

    check(
        function,
        [(torch.randn(6, 4), 3), (torch.randn(8, 4), 2), (torch.randn(20, 4), 5)],
        entries=1,
        dynamic=True,
    )


def test_integer_arguments_become_symbolic_when_they_change() -> None:
    x = torch.randn(12)
    made = check(lambda x, n: x[:n] * n, [(x, 3), (x, 5), (x, 7), (x, 11)], entries=2)
    # Slicing counts from the other end where the integer is negative.
    assert_same(made(x, -2), x[:-2] * -2)
    assert len(made.entries) == 3
    assert "n == 3" not in guard_texts(made)


def test_negative_integers() -> None:
    x = torch.randn(12)
    check(lambda x, n: (x[n:], n // 2, n % 5, x * n), [(x, -3), (x, -5), (x, -7)], entries=1, dynamic=True)


def test_division_by_an_integer_that_may_be_zero() -> None:
    def function(x: torch.Tensor, n: int) -> Any:
        return x * (x.shape[0] // n)

    made = compiled(function, dynamic=True)
    x = torch.randn(6)
    for n in (3, 2, 4):
        assert_same(made(x, n), function(x, n))
    with pytest.raises(ZeroDivisionError):
        made(x, 0)


def test_strides_that_do_not_follow_from_sizes() -> None:
    def views(width: int) -> torch.Tensor:
        return torch.randn(5, width)[:, :3]

    def function(x: torch.Tensor) -> Any:
        return x * 2, x.stride(), x.is_contiguous()

    check(function, [(views(4),), (views(7),), (views(9),), (views(12),)], entries=2)


def test_transposed_and_contiguous_are_told_apart() -> None:
    def function(x: torch.Tensor) -> Any:
        return x.is_contiguous(), x + 1

    calls = [(torch.randn(3, 5),), (torch.randn(5, 4).T,), (torch.randn(6, 7),), (torch.randn(9, 8).T,)]
    check(function, calls, entries=2, dynamic=True)


def test_gradients() -> None:
    made = compiled(lambda x: (x.sin() * x.shape[0]).sum(), dynamic=True)
    for rows in (3, 5, 8):
        x = torch.randn(rows, 4, requires_grad=True)
        made(x).backward()
        assert_same(x.grad, x.detach().cos() * rows)
    assert len(made.entries) == 1


def test_changes_in_place() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y.shape[0])
        return x * y

    made = compiled(function, dynamic=True)
    for rows in (3, 5, 8):
        mine, plain, y = torch.zeros(rows), torch.zeros(rows), torch.randn(rows)
        assert_same(made(mine, y), function(plain, y))
        assert_same(mine, plain)
    assert len(made.entries) == 1


def test_changes_in_place_of_intermediate_results() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x

    made = compiled(function, dynamic=True)
    for rows in (3, 5):
        leaf = torch.randn(rows, requires_grad=True)
        made(leaf * 1).sum().backward()
        assert_same(leaf.grad, torch.full((rows,), 2.0))
    with pytest.raises(RuntimeError, match="in-place"):
        made(torch.randn(4, requires_grad=True))


def test_an_operation_that_takes_no_symbolic_integer() -> None:
    x = torch.randn(6, 6)

    def function(x: torch.Tensor, n: int) -> Any:
        return torch.tril(x, diagonal=n) + torch.nn.functional.one_hot(torch.arange(3), n).sum()

    check(function, [(x, 3), (x, 4)], entries=2)


def test_graph_breaks_pass_integers_on() -> None:
    def function(x: torch.Tensor) -> Any:
        y = x.reshape(-1, 2)
        print(end="")
        return y * y.shape[0], y.shape[0] + 1

    made = gradsplit.compile(function, backend="eager")
    for rows in (4, 6, 8, 10, 30):
        x = torch.randn(rows, 3)
        assert_same(made(x), function(x))
    assert len(made.entries) == 2
    assert [len(rest.entries) for rest in made.continuations] == [2]


def test_lists_of_tensors_and_sizes() -> None:
    def function(xs: list[torch.Tensor], size: tuple[int, int]) -> Any:
        return torch.cat(xs), [x.shape[0] for x in xs], xs[0].expand(*size)

    calls = [([torch.randn(1, 3), torch.randn(rows, 3)], (rows, 3)) for rows in (2, 3, 4, 5)]
    check(function, calls, entries=2)


def test_modules() -> None:
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.AdaptiveAvgPool2d(1)
    )
    made = gradsplit.compile(module, backend="eager", fullgraph=True)
    for size in ((2, 3, 8, 8), (3, 3, 8, 8), (5, 3, 9, 9), (7, 3, 12, 10), (9, 3, 11, 21)):
        x = torch.randn(size)
        module.eval()
        assert_same(made(x), module(x))
    assert len(made._run.entries) == 3


def test_data_dependent_sizes_still_break_the_graph() -> None:
    made = gradsplit.compile(lambda x: x.nonzero() + 1, backend=lambda module, inputs: module, dynamic=True)
    for rows in (3, 5):
        x = torch.arange(rows)
        assert_same(made(x), x.nonzero() + 1)
    assert made.break_reasons


def test_padding_keeps_sizes_open() -> None:
    """Torch's operator asks for numbers where it runs in C++."""
    check(lambda x: torch.nn.functional.pad(x, (0, 1), value=-1) * 2, batches(2, 3, 4, 5), entries=2)


def test_products_of_sizes() -> None:
    check(lambda x: x * math.prod(x.shape) + math.prod(size + 1 for size in x.shape), batches(2, 3, 4, 5), 2)
    check(lambda x: x * math.prod([2, 3.5], start=2) + math.prod([]), batches(2), 1)


def test_counters_of_modules_and_globals() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.seen.append(self.calls * 2)
            return x * self.calls

    module = Counting()
    made = gradsplit.compile(module, backend="eager", fullgraph=True)
    for call in range(1, 12):
        assert torch.equal(made(torch.ones(2)), torch.full((2,), float(call)))
    assert module.seen == list(range(2, 24, 2)) and type(module.calls) is int
    assert len(made._run.entries) == 3  # for 0, for 1, and for all others


def test_items_that_change_one_after_the_other() -> None:
    def function(x: torch.Tensor, steps: list[int]) -> torch.Tensor:
        for index, step in enumerate(steps):
            x = x + step * index
        return x

    x = torch.zeros(2)
    check(function, [(x, [1, 2, 3]), (x, [1, 5, 3]), (x, [4, 5, 6]), (x, [7, 8, 9])], entries=3)


def test_comparisons_leave_sizes_open() -> None:
    """Whatever else an operator may be asked about its operands, it must not ask a size for its value."""
    check(
        lambda x: x + 1 if x.numel() == 0 or x.shape[0] in (100, 200) else x * x.shape[0], batches(3, 5, 7), 2
    )
