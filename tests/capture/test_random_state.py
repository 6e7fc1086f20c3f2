"""States of random generators that a program reads and sets: what is drawn, and where generators stand afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

import gradsplit


def forked(x):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        noise = torch.rand(3)
    return x * noise, torch.rand(3)


def forked_without_a_seed(x):
    with torch.random.fork_rng(devices=[]):
        dropped = functional.dropout(x, 0.5)
    return dropped, functional.dropout(x, 0.5)


def set_back(x):
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    return x * first, torch.rand(3), state


def seeded(x):
    before = torch.rand(3)
    torch.manual_seed(7)
    return x * before, torch.rand(3), torch.initial_seed()


def by_the_default_generator(x):
    state = torch.default_generator.get_state()
    first = torch.rand(3)
    torch.default_generator.set_state(state)
    torch.default_generator.manual_seed(5)
    return x * first, torch.rand(3)


def of_numpy(x):
    """Numbers that NumPy's own generator draws differ at every call."""
    weight = np.random.beta(0.4, 0.4)
    place = np.random.randint(0, 3)
    noise = torch.from_numpy(np.random.randn(3))
    return x * weight + noise, place, x[torch.as_tensor(np.random.permutation(3))], np.random.choice(5)


def decided_by_numpy(x):
    return x * 2 if np.random.rand() < 0.5 else x * 3


def of_numpy_set_back(x):
    state = np.random.get_state()
    first = np.random.uniform(0.5, 1.5)
    np.random.set_state(state)
    np.random.seed(int(first * 100))
    return x * first * np.random.uniform(0.5, 1.5)


PROGRAMS = [
    forked, forked_without_a_seed, set_back, seeded, by_the_default_generator, of_numpy, decided_by_numpy,
    of_numpy_set_back,
]  # fmt: skip


def outcomes(function):
    torch.manual_seed(0)
    np.random.seed(0)
    found = []
    for _ in range(4):
        x = torch.arange(3.0, requires_grad=True)
        results = function(x)
        (results[0] if isinstance(results, tuple) else results).sum().backward()
        found.append((results, x.grad, torch.get_rng_state(), np.random.random()))
    return found


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_same_as_plain(program, backend):
    torch.testing.assert_close(outcomes(gradsplit.compile(program, backend=backend)), outcomes(program))
