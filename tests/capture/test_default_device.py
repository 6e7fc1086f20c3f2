"""``with torch.device(...)`` in a program: tensors are made there in every call, and afterwards as before."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map_only

import gradsplit


def entered(x):
    with torch.device("meta"):
        inside = torch.ones(2), torch.zeros(2, device="cpu"), torch.get_default_device()
    return x * torch.ones(3), *inside


def nested(x):
    with torch.device("meta"):
        one = torch.ones(2)
        with x.device:
            two = torch.rand(2)
        three = torch.empty(3)
    return one, two, three, torch.ones(1)


def left_by_an_exception(x):
    try:
        with torch.device("meta"):
            raise ValueError
    except ValueError:
        return x + torch.ones(3)


def in_a_frame_that_is_called(x):
    def make():
        with torch.device("meta"):
            return torch.ones(2)

    return make(), x * torch.ones(3)


def ended_inside(x):
    with torch.device("meta"):
        one = torch.ones(2)
        gradsplit.graph_break()
        two = torch.ones(2)
    return one, two, x * torch.ones(3)


def ended_in_both(x):
    with torch.device("meta"), torch.device("cpu"):
        gradsplit.graph_break()
        one = torch.ones(2)
    return one, x * torch.ones(3)


def set_for_good(x):
    torch.set_default_device("meta")
    one = torch.ones(2)
    torch.set_default_device(None)
    return one, x * torch.ones(3)


WHOLE = [entered, nested, left_by_an_exception, in_a_frame_that_is_called]


def shown(results):
    """Values, but of tensors on the meta device."""
    results = results if isinstance(results, tuple) else (results,)
    values = tree_map_only(
        torch.Tensor, lambda item: (item.shape, str(item.device), item.is_meta or item.tolist()), results
    )
    return [str(item) for item in values]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "triton"])
@pytest.mark.parametrize("program", [*WHOLE, ended_inside, ended_in_both, set_for_good])
def test_tensors_are_made_on_the_device(program, backend):
    options = {} if backend == "eager" else {"fallback_random": True}
    compiled = gradsplit.compile(program, backend=backend, fullgraph=program in WHOLE, options=options)
    x = torch.linspace(-1, 1, 3)
    for call in range(3):
        torch.manual_seed(call)
        expected = shown(program(x))
        torch.manual_seed(call)
        assert shown(compiled(x)) == expected
        assert torch.get_default_device() == torch.device("cpu")


@pytest.mark.parametrize("program", [entered, nested, ended_inside])
def test_inside_of_another_default(program):
    compiled = gradsplit.compile(program, backend="eager")
    for outer in ("meta", "cpu", "meta"):
        with torch.device(outer):
            x = torch.ones(3, device=outer)
            expected, found = program(x), compiled(x)
            assert torch.get_default_device() == torch.device(outer)
        assert [getattr(item, "device", item) for item in found] == [
            getattr(item, "device", item) for item in expected
        ]
