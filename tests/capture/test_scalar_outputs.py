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
