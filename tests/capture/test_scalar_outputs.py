"""``config.capture_scalar_outputs``: floats that the program reads out of tensors stay in the graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gradsplit.compile_core import config
from tests.capture.same_as_plain import check_same


@pytest.fixture(autouse=True)
def scalar_outputs():
    with config.patch(capture_scalar_outputs=True):
        yield


def scaled(x):
    return x * x.sum().item() + float(x.detach().mean()), x.clamp(-x.max().item(), x.max().item() / 2)


def normalised(x):
    norm = x.norm().item()
    return (
        x * (1.0 / (norm + 1e-6)),
        torch.full((3,), norm),
        torch.tensor(norm) + x,
        x.half() * x.sum().half().item(),
    )


def read_twice(x):
    y = x * 2
    first = y.sum().item()
    y.mul_(3)
    return y * first * y.sum().item()


def handed_out(x):
    loss = (x * 2).sum()
    before = loss.item()
    loss.detach().add_(1)
    return before, x * 3, [loss.item(), before / 2], {"mean": float(x.detach().mean())}


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("program", [scaled, normalised, read_twice, handed_out])
def test_floats_stay_in_one_graph(program, backend) -> None:
    check_same(program, lambda: (torch.arange(1.0, 6.0, requires_grad=True),), backend=backend)


def sizes(x):
    return torch.arange(0, x.sum().item() ** 2) * 2, x + 1


def scale_factors(x):
    return F.interpolate(x.view(1, 1, 5), scale_factor=x.mean().item() * 0 + 2)


def probabilities(x):
    return F.dropout(x, x.sigmoid().mean().item()) + 1


def slopes(x):
    return F.leaky_relu(x, x.sigmoid().mean().item())


def branches(x):
    return x * 2 if x.sum().item() > 0 else x


def texts(x):
    return f"{x.sum().item():.3f}", x * 2


def integers(x):
    return x[: (x > 0).sum().item()] * 2


@pytest.mark.parametrize("program", [sizes, scale_factors, probabilities, slopes, branches, texts, integers])
def test_where_more_than_elements_depends_on_one_the_graph_ends(program) -> None:
    check_same(program, lambda: (torch.randn(5, requires_grad=True),), fullgraph=False)


COMPARED = {
    "is": lambda flag, number: flag is True,
    "equal": lambda flag, number: flag == True,  # noqa: E712
    "number": lambda flag, number: flag == 1,
    "unequal": lambda flag, number: (not flag) != False,  # noqa: E712
    "two": lambda flag, number: flag is (number == 1.0),
    "in": lambda flag, number: flag in (None, True),
    "number in": lambda flag, number: number in [1.0, 5.0],
    "tuple": lambda flag, number: (flag, 2) == (True, 2),
    "tuple with number": lambda flag, number: (number, 2) == (1.0, 2),
    "dictionary": lambda flag, number: {"a": number, "b": flag} == {"a": 1.0, "b": True},
    "count": lambda flag, number: [number, flag].count(1.0) > 1,
    "other kind": lambda flag, number: flag != "a" and number is not None and number != "a",
}


@pytest.mark.parametrize("name", COMPARED)
def test_what_depends_on_data_is_never_another_object_for_its_kind(name) -> None:
    """A truth value or float of the graph compared as an item, or by identity: that it is no constant says nothing."""

    def program(x):
        return x * 2 if COMPARED[name](x.bool()[0].item(), x[0].item()) else x * 3

    for first in (0.0, 1.0):
        check_same(program, lambda first=first: (torch.tensor([first, 2.0]),), fullgraph=False)


def matched(x):
    match x.bool()[0].item(), x[0].item():
        case (True, 1.0):
            return x * 2
        case _:
            return x * 3


def test_patterns_of_what_depends_on_data() -> None:
    for first in (0.0, 1.0):
        check_same(matched, lambda first=first: (torch.tensor([first, 2.0]),), fullgraph=False)
