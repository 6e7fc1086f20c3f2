"""Changes of inputs that the forward program makes itself, and those that it must leave to what is round it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gradsplit
from gradsplit.compile_core.autograd.bound_graphs.compiled_call import CompiledCall


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4))
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor, what: str) -> torch.Tensor:
        y = self.norm(x) * self.scale
        if what == "reads old":  # the backward needs what the buffer was
            y = y * self.seen.clone()
        if what == "reads alias":
            y = y + self.seen
        self.seen += 1
        return y + self.seen if what == "reads new" else y


@pytest.mark.parametrize("what", ["", "reads old", "reads alias", "reads new"])
@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
def test_values_gradients_and_versions(what: str, backend: str) -> None:
    plain = Counted()
    twin = copy.deepcopy(plain)
    compiled = gradsplit.compile(twin, backend=backend, fullgraph=True)
    pairs = list(zip(twin.buffers(), plain.buffers(), strict=True))
    for _ in range(3):
        x = torch.randn(8, 4)
        before = [(buffer._version, same._version) for buffer, same in pairs]
        plain(x, what).square().sum().backward()
        compiled(x, what).square().sum().backward()
        for (buffer, expected), (version, its) in zip(pairs, before, strict=True):
            torch.testing.assert_close(buffer, expected)
            assert (buffer._version > version) == (expected._version > its)
    for parameter, expected in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_new_statistics_are_no_outputs_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[tuple[object, ...]] = []
    forward = CompiledCall.forward

    def spy(*arguments: object) -> tuple[object, ...]:
        outputs.append(forward(*arguments))
        return outputs[-1]

    monkeypatch.setattr(CompiledCall, "forward", staticmethod(spy))
    norm = nn.BatchNorm1d(4)
    gradsplit.compile(norm, fullgraph=True)(torch.randn(8, 4))
    (found,) = outputs
    assert sum(isinstance(output, torch.Tensor) for output in found) == 1
    assert norm.num_batches_tracked.item() == 1


def test_a_backward_that_is_differentiated_sees_the_values_of_before() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x * w.clone()).sin().sum()
        w.mul_(2)
        return y

    results = []
    for call in (f, gradsplit.compile(f, options={"double_backward": True})):
        x, w = torch.linspace(0, 1, 4, requires_grad=True), torch.full((4,), 3.0)
        (first,) = torch.autograd.grad(call(x, w), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        results.append((first.detach(), second, w))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "make", [lambda t: t, lambda t: t.view_as(t), lambda t: t.mT[:2]], ids=["leaf", "view", "part"]
)
def test_a_change_through_data_is_not_counted(make) -> None:
    """It made a view's history anew, from a base that may have none: its gradients were lost."""

    def f(x: torch.Tensor) -> torch.Tensor:
        x.data.mul_(2)
        return x * 3

    for call in (f, gradsplit.compile(f, fullgraph=True)):
        leaf = torch.ones(2, 3).mT.requires_grad_()
        x = make(leaf)
        for count in (1, 2):
            y = call(x)
            y.sum().backward()
            assert (x._version, leaf._version, y[0, 0].item()) == (0, 0, 3 * 2**count)
            assert leaf.grad[0, 0].item() == 3 * count


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
def test_running_statistics_count_changes_as_plain_python_does(backend) -> None:
    """A graph that runs with torch's kernels, or plain Python, has saved them for a backward when they change again."""
    plain, compiled = (torch.nn.BatchNorm1d(2, dtype=torch.float64).train() for _ in range(2))
    call = gradsplit.compile(compiled, backend=backend)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    for module, run in ((plain, plain), (compiled, call)):
        by_torch = module(x)
        run(x.detach())
        run(x)
        (by_torch * torch.arange(2)).sum().backward()
        assert module.running_mean._version == module.running_var._version
    assert compiled.running_mean._version == plain.running_mean._version
    assert compiled.num_batches_tracked._version == plain.num_batches_tracked._version
    for found, expected in zip(compiled.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_change_through_data_of_what_a_backward_reads(caplog: pytest.LogCaptureFixture) -> None:
    """Plain PyTorch's backward reads what is there by then, of an input and of what the program computes."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        z = y.exp()
        z.data.mul_(2)
        x.data.mul_(3)
        return z

    gradients = []
    for call in (f, gradsplit.compile(f, fullgraph=True)):
        x = torch.linspace(0, 1, 4, requires_grad=True)
        call(x).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
    assert "a graph runs with torch's own kernels: [unseen-change]" in caplog.text
