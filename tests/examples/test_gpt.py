import pytest
import torch

from examples.gpt import GPT, GPTConfig
from examples.text_data import batch, load_tokens

SMALL = GPTConfig(vocabulary=17, context=8, layers=2, heads=2, width=16)


def test_default_has_3_3_million_parameters():
    assert sum(parameter.numel() for parameter in GPT(GPTConfig()).parameters()) == 3_323_392


def test_logits_are_causal():
    model = GPT(SMALL)
    tokens = torch.randint(17, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 17
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert torch.all(difference[:5] == 0)
    assert torch.all(difference[5:] > 0)


def test_loss_starts_at_the_uniform_distribution_and_reaches_every_parameter():
    model = GPT(SMALL)
    loss = model(torch.randint(17, (4, 8)), torch.randint(17, (4, 8)))
    assert loss.item() == pytest.approx(torch.tensor(17.0).log().item(), abs=0.05)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_tied_head_is_the_embedding():
    model = GPT(GPTConfig(vocabulary=17, context=8, layers=1, heads=2, width=16, tied=True))
    assert model.head.weight is model.token_embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_learns_text():
    tokens = load_tokens()
    model = GPT(GPTConfig(context=32, layers=1, heads=2, width=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(30):
        optimizer.zero_grad()
        loss = model(*batch(tokens, step, rank=0, world_size=1, batch_size=8, context=32))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 5.4
    assert sum(losses[-5:]) / 5 < 3.5
