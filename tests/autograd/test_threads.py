"""Compiled calls and backwards in several threads, and copies of what was compiled."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from tests.autograd.scenarios import BACKENDS, check_scenario, for_each, layer, leaf


def in_thread(function, *args):
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    thread.join()
    assert results, "the thread raised"
    return results[0]


def backward_in_another_thread(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    loss = f(x, w).sum()
    in_thread(loss.backward)
    return x.grad, w.grad


def forward_in_another_thread(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    in_thread(f, x, w).sum().backward()
    return x.grad, w.grad


def calls_at_once(compile):
    f, x, w = compile(layer), torch.randn(3, 3), torch.randn(3, 3)
    gradients = [torch.zeros(3, 3)] * 4

    def work(number):
        for _ in range(5):
            own = (x * number).requires_grad_()
            f(own, w).sum().backward()
            assert own.grad is not None
            gradients[number] = own.grad

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return gradients


def backwards_of_one_graph_at_once(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    y = f(x, w)
    gradients = [None] * 4

    def work(number):
        gradients[number] = torch.autograd.grad(y, x, torch.full((3, 3), float(number)), retain_graph=True)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return gradients


def without_threads_of_the_engine(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    with torch.autograd.set_multithreading_enabled(False):
        f(x, w).sum().backward()
    return x.grad, w.grad


THREADS = {
    scenario.__name__: scenario
    for scenario in (
        backward_in_another_thread,
        forward_in_another_thread,
        calls_at_once,
        backwards_of_one_graph_at_once,
        without_threads_of_the_engine,
    )
}


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(THREADS)
def test_threads(scenario, backend):
    check_scenario(scenario, backend)


def _after_training(f):
    f(torch.ones(2, 3)).sum().backward()
    return f


def deep_copy(compile):
    original = _after_training(compile(nn.Linear(3, 3)))
    copied = copy.deepcopy(original)
    with torch.no_grad():
        original.weight.zero_()
    x = torch.ones(2, 3)
    copied(x).sum().backward()
    return original(x), copied(x), original.weight.grad, copied.weight.grad


def pickled(compile):
    original = _after_training(compile(nn.Linear(3, 3)))
    restored = pickle.loads(pickle.dumps(original))
    y = restored(torch.ones(2, 3))
    y.sum().backward()
    return y, restored.weight.grad


def state_exchanged(compile):
    first, second = (_after_training(compile(nn.Linear(3, 3))) for _ in range(2))
    second.load_state_dict(first.state_dict())
    return first(torch.ones(2, 3)), second(torch.ones(2, 3))


COPIES = {scenario.__name__: scenario for scenario in (deep_copy, pickled, state_exchanged)}


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(COPIES)
def test_copies(scenario, backend):
    check_scenario(scenario, backend)
