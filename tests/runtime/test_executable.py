"""Schedules that run: order, destinations, and when memory is given up."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import pytest
import torch

from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.schedule import Compute, Schedule
from gradsplit.compile_core.runtime.executable import link
from tests.runtime.silent_communicator import SilentCommunicator

EMPTY = torch.fx.GraphModule({}, torch.fx.Graph())


def compute(name: str, inputs: str, outputs: str, **destinations: str) -> Compute:
    return Compute(name, EMPTY, tuple(inputs.split()), tuple(outputs.split()), destinations)


def schedule(inputs: str, outputs: tuple[str | None, ...], *computes: Compute) -> Schedule:
    return Schedule("test", tuple(inputs.split()), computes, outputs)


class Recorder(SilentCommunicator):
    """Destinations and observer in one."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.place = torch.zeros(2)

    def destinations(self, names: Sequence[str]) -> list[torch.Tensor]:
        self.events += [f"destination {name}" for name in names]
        return [self.place for _ in names]

    def arrived(self, names: Sequence[str], values: Mapping[str, torch.Tensor] | None) -> None:
        self.events.append(f"arrived {' '.join(names)}".strip())

    def region_started(self, name: str) -> None:
        self.events.append(f"{name} started")

    def region_finished(self, name: str) -> None:
        self.events.append(f"{name} finished")


def double(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    return [2 * argument for argument in arguments]


def test_values_pass_from_region_to_region():
    steps = compute("first", "x", "y"), compute("second", "y", "z")
    run = link(schedule("x unused", ("z", None, "x"), *steps), {"first": double, "second": double})
    x = torch.ones(2)
    z, nothing, same = run([x, torch.ones(1)])
    assert torch.equal(z, 4 * x) and nothing is None and same is x


def test_inputs_are_given_up_before_the_last_region_that_reads_them():
    alive = []

    def first(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
        x, _ = arguments
        arguments.clear()
        result = x + 1
        watch = weakref.ref(x)
        del x
        alive.append(watch() is not None)
        return [result, torch.ones(1)]

    steps = compute("first", "x y", "a unread"), compute("second", "a y", "b _")
    run = link(schedule("x y", ("b",), *steps), {"first": first, "second": double})
    inputs = [torch.ones(2), torch.ones(2)]
    (result,) = run(inputs)
    assert alive == [False] and inputs == []
    assert torch.equal(result, torch.full((2,), 4.0))


def test_a_value_that_is_returned_is_kept():
    steps = compute("first", "x", "y"), compute("second", "y", "z")
    run = link(schedule("x", ("y", "z", "y"), *steps), {"first": double, "second": double})
    y, z, again = run([torch.ones(1)])
    assert (y.item(), z.item()) == (2.0, 4.0) and y is again


def test_destinations_and_observer():
    def store(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
        x, place = arguments
        return [place.copy_(x)]

    recorder = Recorder()
    step = compute("region", "x", "w.stored", **{"w.stored": "w"})
    run = link(schedule("x", (None,), step), {"region": store})
    run.observer = recorder
    assert run([torch.ones(2)], recorder) == [None]
    assert torch.equal(recorder.place, torch.ones(2))
    region = ["destination w", "region started", "region finished"]
    assert recorder.events == [*region, "arrived w"]


def test_missing_region():
    with pytest.raises(InternalError, match="no compiled region for \\['region'\\]"):
        link(schedule("x", ("y",), compute("region", "x", "y")), {})


def test_wrong_number_of_inputs():
    steps = compute("first", "x", "y"), compute("second", "y", "z")
    run = link(schedule("x", ("z",), *steps), {"first": double, "second": double})
    with pytest.raises(ValueError):
        run([])


def test_a_region_that_is_all_gets_the_list_itself():
    given: list[list[torch.Tensor]] = []

    def region(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
        given.append(arguments)
        return double(arguments)

    run = link(schedule("x", ("y",), compute("region", "x", "y")), {"region": region})
    inputs = [torch.ones(2)]
    assert torch.equal(run(inputs)[0], torch.full((2,), 2.0)) and given[0] is inputs
    recorder = run.observer = Recorder()
    run([torch.ones(2)])
    assert recorder.events == ["region started", "region finished"]


def test_a_region_that_leaves_inputs_and_results_out():
    seen = []

    def both(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
        seen.append(len(arguments))
        first, second = arguments
        arguments.clear()
        return [first + second, first - second]

    steps = compute("only", "x y", "total difference")
    run = link(schedule("x unused y", ("difference", None, "total"), steps), {"only": both})
    inputs = [torch.full((2,), 5.0), torch.zeros(1), torch.full((2,), 3.0)]
    difference, nothing, total = run(inputs)
    assert seen == [2] and inputs == [] and nothing is None
    assert difference.tolist() == [2.0, 2.0] and total.tolist() == [8.0, 8.0]
