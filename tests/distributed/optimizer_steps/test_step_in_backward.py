"""When parameters are stepped in a backward, told to the class that decides it; collectives are made up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from gradsplit.compile_core.torch_facts.optimizers import hear_of_steps, rounds_of_steps
from gradsplit.distributed.optimizer_steps.parameter_readers import ParameterReaders
from gradsplit.distributed.optimizer_steps.partial_optimizer import PartialOptimizer
from gradsplit.distributed.optimizer_steps.step_in_backward import StepInBackward


class FakeWork:
    def __init__(self, is_done: bool = True) -> None:
        self.is_done = is_done

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self, *timeout: Any) -> None:
        assert self.is_done

    def get_future(self) -> Any:
        raise NotImplementedError


@pytest.fixture
def parameters() -> dict[str, torch.nn.Parameter]:
    made = {name: torch.nn.Parameter(torch.ones(2, 2)) for name in "abc"}
    for parameter in made.values():
        parameter.grad = torch.ones(2, 2)
    return made


def stepper_of(parameters: Mapping[str, torch.nn.Parameter]) -> StepInBackward:
    optimizer = PartialOptimizer(torch.optim.SGD(parameters.values(), lr=1.0), parameters)
    return StepInBackward(optimizer, parameters, on_streams=False)


def stepped(parameters: Mapping[str, torch.nn.Parameter]) -> str:
    return "".join(name for name, parameter in parameters.items() if not parameter.any())


def test_nothing_is_stepped_that_is_read_yet(parameters):
    stepper, x = stepper_of(parameters), torch.ones(2)
    a, b, c = parameters.values()
    stepper.begin_round("abc")
    stepper.program_begins()
    stepper.reducing("ab", FakeWork())
    stepper.region_ended({"x": x, "t": b.detach().t(), "row": c[1:]})
    assert stepped(parameters) == ""  # a bucket is stepped as a whole
    stepper.reducing("c", FakeWork())
    # What a region makes may lie in a parameter, too.
    stepper.region_ended({"x": x, "made": c.detach().view(4)})
    assert stepped(parameters) == "ab"
    stepper.region_ended({"x": x})
    assert stepped(parameters) == "abc"
    stepper.end_round([])
    assert torch.equal(a, torch.zeros(2, 2))  # once


def test_collectives_that_are_not_done_are_not_waited_for(parameters):
    stepper, work = stepper_of(parameters), FakeWork(is_done=False)
    stepper.begin_round("abc")
    stepper.program_begins()
    stepper.reducing("a", work)
    stepper.reducing("b", FakeWork())
    stepper.region_ended({})
    assert stepped(parameters) == "b"
    work.is_done = True
    stepper.end_round([])
    assert stepped(parameters) == "abc"


def test_what_autograd_may_read_is_stepped_at_the_end(parameters):
    stepper = stepper_of(parameters)
    a, b, _ = parameters.values()
    stepper.begin_round("ab")
    stepper.program_begins()
    stepper.reducing("abc", FakeWork())
    stepper.region_ended({"a": a})  # a is what the program returns
    stepper.program_begins()
    stepper.region_ended({"b": b})
    assert stepped(parameters) == ""
    stepper.region_ended({})
    assert stepped(parameters) == ""
    stepper.end_round([])
    assert stepped(parameters) == "abc"


def test_unknown_reads_are_of_everything(parameters):
    readers = ParameterReaders(parameters)
    readers.program_begins()
    readers.region_ended(None)
    assert readers.read == set("abc")
    readers.program_begins()
    readers.region_ended({})
    assert readers.read == set("abc")


def test_steps_of_parts_are_heard_of(parameters):
    """By the values of frozen parameters, whose hook on all optimizers' steps is none that waits for the whole step."""
    hear_of_steps()
    before, stepper = rounds_of_steps(), stepper_of(parameters)
    stepper.begin_round("abc")
    stepper.program_begins()
    stepper.reducing("abc", FakeWork())
    stepper.region_ended({})
    stepper.end_round([])
    assert stepped(parameters) == "abc" and rounds_of_steps() != before
