"""Forwards that begin before buffers have their values, and those that cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from compile_core.ir.graphs import PartitionedGraph
from compile_core.ir.late_inputs import LateInputs
from compile_core.ir.regions import whole_schedule
from compile_core.ir.schedule import Schedule
from compile_core.pipeline import CompiledGraph
from tests.autograd.compare_with_eager import compile_program

Program = Callable[..., Any]


class Sender:
    """A planner whose buffers get their values when somebody waits for them."""

    def __init__(self, sent: dict[int, torch.Tensor]) -> None:
        self.sent = sent
        self.receivers: Sequence[torch.Tensor] = ()
        self.under_way = False

    def plan_backward(self, graph: PartitionedGraph, inputs: Sequence[torch.Tensor]) -> tuple[Schedule, None]:
        assert graph.backward is not None
        return whole_schedule("backward", graph.backward), None

    def late_inputs(self, inputs: Sequence[torch.Tensor]) -> LateInputs:
        return LateInputs(frozenset(self.sent), self.finish)

    def start(self, receivers: Sequence[torch.Tensor]) -> None:
        self.receivers, self.under_way = receivers, True

    def finish(self) -> None:
        if self.under_way:
            self.under_way = False
            for position, value in self.sent.items():
                self.receivers[position].data.copy_(value)


def running_statistics(
    x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, count: torch.Tensor
) -> torch.Tensor:
    y = (x @ weight).relu()
    mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
    count.add_(1)
    return y.square().sum()


def batch_norm(
    x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
) -> torch.Tensor:
    y = torch.nn.functional.batch_norm(x @ weight, mean, variance, training=True)
    return (y * x.cumsum(0)[:, :1]).sin().sum()


def swapped(x: torch.Tensor, weight: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The new value of each is computed from the other."""
    kept = one.clone()
    one.copy_(other + 1)
    other.copy_(kept)
    return (x @ weight).sin().sum()


def untouched(x: torch.Tensor, weight: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (x @ weight).sin().sum()


def read(x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return running_statistics(x, weight, mean, count) + mean.sum()


def needed_by_the_backward(
    x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, count: torch.Tensor
) -> torch.Tensor:
    return (x @ weight * mean.clone()).sum() + 0 * running_statistics(x, weight, mean, count)


def set_anew(x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """What is sent must not take the place of the new value."""
    y = x @ weight
    torch.mean(y.detach(), 0, out=mean)
    count.add_(1)
    return y.sum()


def much_would_be_kept(
    x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, count: torch.Tensor
) -> torch.Tensor:
    y = (x @ weight).relu()
    mean.add_((y.detach() * mean).mean(0))
    return y.square().sum()


def fails(x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return running_statistics(x, weight, mean, count) + weight.flatten()[count.new_tensor([99])].sum()


SENT = {2: torch.full((5,), 2.0), 3: torch.full((), 7)}


def inputs_of(program: Program) -> list[torch.Tensor]:
    torch.manual_seed(0)
    second = torch.ones(5) if program in (batch_norm, swapped) else torch.tensor(3)
    return [torch.randn(64, 3), torch.randn(3, 5, requires_grad=True), torch.zeros(5), second]


def check(program: Program, backend: str, options: Mapping[str, Any] | None = None) -> CompiledGraph:
    """Values, gradients and buffers are those of a program that begins when everything has been sent."""
    sender = Sender(SENT)
    compiled = compile_program(program, inputs_of(program), sender, backend, options)
    for _ in range(3):
        plain, ours = inputs_of(program), inputs_of(program)
        for position, value in SENT.items():
            plain[position].copy_(value)
        sender.start(ours)
        if not compiled.awaits_inputs:
            sender.finish()
        expected, (found,) = program(*plain), compiled(*ours)
        sender.finish()
        expected.backward()
        found.backward()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(ours[1].grad, plain[1].grad)
        for position in SENT:
            torch.testing.assert_close(ours[position], plain[position])
    return compiled


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
@pytest.mark.parametrize("program", [running_statistics, swapped, untouched])
def test_values_may_come_during_the_forward(program: Program, backend: str) -> None:
    assert check(program, backend).awaits_inputs


def test_a_batch_norm_that_is_decomposed_and_one_that_is_not() -> None:
    assert check(batch_norm, "triton").awaits_inputs
    assert not check(batch_norm, "aot_eager").awaits_inputs


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
@pytest.mark.parametrize("program", [read, needed_by_the_backward, set_anew, much_would_be_kept])
def test_values_must_be_there_before(program: Program, backend: str) -> None:
    assert not check(program, backend).awaits_inputs


def test_the_first_part_runs_before_they_are_there() -> None:
    sender = Sender(SENT)
    compiled = compile_program(running_statistics, inputs_of(running_statistics), sender, "triton")
    seen = []

    class Watch:
        def region_started(self, name: str) -> None:
            seen.append((name, sender.under_way))

        def region_finished(self, name: str) -> None:
            seen.append((name, sender.under_way))

    compiled.forward.observer = Watch()
    ours = inputs_of(running_statistics)
    sender.start(ours)
    compiled(*ours)
    assert seen == [("forward", True), ("forward", True)]
    assert not sender.under_way and ours[3].item() == 8
    assert ours[2]._version == ours[3]._version == 1


def test_values_are_there_when_the_forward_has_raised() -> None:
    """The call is made again as plain Python, by those who called."""
    sender = Sender(SENT)
    compiled = compile_program(fails, inputs_of(fails), sender, "triton")
    assert compiled.awaits_inputs
    ours = inputs_of(fails)
    sender.start(ours)
    with pytest.raises(IndexError):
        compiled(*ours)
    assert not sender.under_way and ours[3].item() == 7
