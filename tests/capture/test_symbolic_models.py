"""A batch size that changes costs a model at most one recompilation."""

import pytest
import torch
from torch import nn

import gradsplit
from examples.gpt import GPT, GPTConfig

TINY = GPTConfig(vocabulary=32, context=8, layers=2, heads=2, width=8)


def step(run: nn.Module, model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The loss and all gradients."""
    model.zero_grad(set_to_none=True)
    loss = run(*inputs)
    loss.backward()
    return [
        loss.detach(),
        *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
    ]


def tokens(batch: int, time: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(0, TINY.vocabulary, (2, batch, time))
    return drawn[0], drawn[1]


@pytest.mark.parametrize("dynamic", [None, True])
def test_one_entry_serves_batches_of_2_to_512_of_a_gpt(dynamic: bool | None) -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    made = gradsplit.compile(model, backend="eager", fullgraph=True, dynamic=dynamic)
    step(made, model, *tokens(5))
    for batch in (2, 3, 4, 7, 8, 64, 511, 512):
        inputs = tokens(batch)
        torch.testing.assert_close(step(made, model, *inputs), step(model, model, *inputs))
    assert len(made._run.entries) == (1 if dynamic else 2)


def test_another_length_costs_one_more() -> None:
    model = GPT(TINY)
    made = gradsplit.compile(model, backend="eager", fullgraph=True)
    for batch, time in ((2, 8), (3, 8), (4, 8), (4, 7), (5, 6), (9, 3)):
        inputs = tokens(batch, time)
        torch.testing.assert_close(step(made, model, *inputs), step(model, model, *inputs))
    assert len(made._run.entries) == 3


def test_the_stages_behind_capture() -> None:
    model = GPT(TINY)
    made = gradsplit.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch in (2, 3, 64, 3):
        inputs = tokens(batch)
        torch.testing.assert_close(step(made, model, *inputs), step(model, model, *inputs))
    assert len(made._run.entries) == 1


def test_convolutions_with_batch_norm() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    made = gradsplit.compile(model, backend="eager", fullgraph=True)
    for batch in (2, 3, 5, 9):
        x = torch.randn(batch, 3, 12, 12)
        model.eval()
        torch.testing.assert_close(made(x), model(x))
    assert len(made._run.entries) == 2
