"""Backwards for some parameters only, and gradients that are returned instead of accumulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

import gradsplit
from tests.multi_process.ddp_cases.graph_breaks import Broken
from tests.multi_process.ddp_harness import (
    DEVICE,
    Net,
    PartlyPlain,
    case,
    check_close,
    check_gradients,
    check_in_graph,
    check_steps,
    data,
    loss_of,
    pair,
    plain_step,
    stock_ddp,
)


def alike(expected: Any, found: Any) -> None:
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            check_close(other, one, "gradient", exact=DEVICE == "cpu")


@case()
def backwards_for_all_parameters() -> None:
    """Stock DDP reduces them."""

    def run(model: Any, step: int) -> None:
        loss_of(model(data(step))).backward(inputs=list(model.parameters()))

    for make in (Net, PartlyPlain, Broken):
        stock, compiled = pair(make, backend="aot_eager")
        check_steps(stock, compiled, run, steps=2)
        check_steps(stock, compiled, steps=1)
        check_in_graph(compiled)


@case()
def backwards_for_one_half_and_the_other() -> None:
    """Stock DDP reduces all when it has all. Buckets of ours are reduced twice, which changes nothing."""

    def run(model: Any, step: int) -> None:
        loss, parameters = loss_of(model(data(step))), list(model.parameters())
        loss.backward(inputs=parameters[::2], retain_graph=True)
        torch.autograd.backward([loss], inputs=[get_gradient_edge(other) for other in parameters[1::2]])

    for make in (Net, PartlyPlain):
        stock, compiled = pair(make, backend="aot_eager")
        check_steps(stock, compiled, run, steps=2)
        check_in_graph(compiled)


@case()
def backwards_for_some_parameters() -> None:
    """These are reduced, where stock DDP leaves ranks with gradients of their own; the others stay as they are, and the
    next forward says that gradients are missing."""
    stock, compiled = pair(PartlyPlain, backend="aot_eager")
    expected = stock_ddp(PartlyPlain)
    for model in (stock, compiled, expected):
        plain_step(model, 0)
        for name in ("first.bias", "second.bias"):  # of a program and of plain code
            parameter = model.module.get_parameter(name)
            parameter.grad = torch.full_like(parameter, 1.0 + dist.get_rank())
    before = [parameter.grad.clone() for parameter in expected.parameters()]
    for model in (stock, compiled):
        x = data(1).requires_grad_()
        loss_of(model(x)).backward(inputs=[x, model.module.second.weight, model.module.third.bias])
        assert x.grad is not None
    plain_step(expected, 1)
    for (name, parameter), kept, whole in zip(
        compiled.module.named_parameters(), before, expected.parameters(), strict=True
    ):
        is_asked = name in ("second.weight", "third.bias")
        check_close(parameter.grad, whole.grad if is_asked else kept, name, exact=True)
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
        stock(data(2))
    compiled(data(2))


@case()
def gradients_that_are_returned() -> None:
    """They are the rank's own, as in stock DDP, and nothing is reduced; the backward behind it is."""

    def run(model: Any, step: int) -> None:
        x = data(step).requires_grad_()
        loss, parameters = loss_of(model(x)), list(model.parameters())
        returned.append(torch.autograd.grad(loss, [parameters[0], x, *parameters], retain_graph=True))
        edges = [get_gradient_edge(parameter) for parameter in parameters[2:4]]
        returned.append(torch.autograd.grad(loss, edges, retain_graph=True))
        assert all(parameter.grad is None for parameter in parameters)
        loss.backward()

    for make in (Net, PartlyPlain, Broken):
        returned: list[Any] = []
        stock, compiled = pair(make, backend="aot_eager")
        check_steps(stock, compiled, run, steps=2)
        # Two calls in each of two steps, first of one module and then of the other.
        for k in (0, 1, 4, 5):
            alike(returned[k], returned[k + 2])
        check_in_graph(compiled)


@case()
def gradients_of_unused_parameters_are_none() -> None:
    class Partial(Net):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.norm(self.first(x))
            return self.second(x), self.third(x)

    stock, compiled = pair(Partial, backend="aot_eager")
    for model in (stock, compiled):
        left, right = model(data(0))
        weights = [model.module.second.weight, model.module.third.weight]
        found = torch.autograd.grad(loss_of(left), weights, allow_unused=True, retain_graph=True)
        assert found[0] is not None and found[1] is None
        found = torch.autograd.grad(loss_of(left), weights, materialize_grads=True, retain_graph=True)
        assert not found[1].any()
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(loss_of(left), weights, retain_graph=True)
        (loss_of(left) + loss_of(right)).backward()
    check_gradients(stock, compiled, exact=True)


@case()
def a_loss_weighted_by_the_last_layers_gradients() -> None:
    """As adversarial losses are balanced, by code that heeds no advice against ``autograd.grad``."""

    def run(model: Any, step: int) -> None:
        output, last = model(data(step)), model.module.third.weight
        first, second = loss_of(output), output.abs().mean()
        norms = [torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in (first, second)]
        (first + (norms[0] / norms[1]).detach() * second).backward()

    stock, compiled = pair(backend="aot_eager")
    check_steps(stock, compiled, run, steps=2)
    check_in_graph(compiled)


@case()
def many_gradients_at_once() -> None:
    stock, compiled = pair(backend="aot_eager")
    found = []
    for model in (stock, compiled):
        output, weights = model(data(0)), [model.module.first.weight, model.module.third.bias]
        rows = torch.eye(4, device=output.device)
        found.append(torch.autograd.grad(output[0, :4], weights, rows, is_grads_batched=True))
    for expected, batch in zip(*found, strict=True):
        check_close(batch, expected, "gradients")


@case()
def gradients_with_a_history() -> None:
    """A penalty on gradients of parameters needs the option; without it differentiating them is an error."""

    def run(model: Any, step: int) -> None:
        loss = loss_of(model(data(step)))
        found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(gradient.square().sum() for gradient in found)).backward()

    stock = stock_ddp()
    compiled = gradsplit.compile(stock_ddp(), backend="aot_eager", options={"double_backward": True})
    check_steps(stock, compiled, run, steps=2, exact=False)
    refused: nn.Module = gradsplit.compile(stock_ddp(), backend="aot_eager")
    with pytest.raises(gradsplit.CompileError, match="double_backward"):
        run(refused, 0)


class UsesGradientOfInput(nn.Module):
    """Asks in its forward for the gradient of its input, through a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        (gradient,) = torch.autograd.grad(hidden.sum(), x, retain_graph=True)
        return self.last(hidden + gradient)


@case()
def of_inputs_in_a_forward() -> None:
    """Also in the first, before there is a bucket: what programs store then is dropped."""
    stock, compiled = pair(UsesGradientOfInput)
    for step in range(3):
        for model in (stock, compiled):
            model(data(step).requires_grad_()).sum().backward()
        check_gradients(stock, compiled)
