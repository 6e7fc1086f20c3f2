import torch

from examples.text_data import batch, load_tokens


def test_text_is_readable_and_long():
    tokens = load_tokens()
    assert tokens.dtype == torch.uint8
    assert len(tokens) > 300_000
    assert b"Python" in bytes(tokens.tolist())


def test_targets_are_the_next_bytes():
    tokens = torch.arange(200, dtype=torch.uint8)
    inputs, targets = batch(tokens, 3, rank=0, world_size=1, batch_size=4, context=16)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_ranks_share_the_global_batch():
    tokens = torch.arange(200, dtype=torch.uint8)
    whole, _ = batch(tokens, 7, rank=0, world_size=1, batch_size=6, context=16)
    parts = [batch(tokens, 7, rank, world_size=3, batch_size=2, context=16)[0] for rank in range(3)]
    assert torch.equal(torch.cat(parts), whole)


def test_steps_and_seeds_differ_and_repeat():
    tokens = torch.arange(200, dtype=torch.uint8)

    def inputs(step, seed):
        return batch(tokens, step, rank=0, world_size=1, batch_size=8, context=16, seed=seed)[0]

    assert torch.equal(inputs(1, 0), inputs(1, 0))
    assert not torch.equal(inputs(1, 0), inputs(2, 0))
    assert not torch.equal(inputs(1, 0), inputs(1, 1))
