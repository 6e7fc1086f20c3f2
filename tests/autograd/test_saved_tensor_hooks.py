"""Hooks for what autograd saves: a compiled call hands its saved tensors to them, its compilation none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks

import gradsplit
from tests.autograd.scenarios import BACKENDS, check_scenario, for_each, layer, leaf, outcome


class Archive:
    """Hooks that keep tensors as arrays, and count."""

    def __init__(self) -> None:
        self.packed = self.unpacked = 0

    def pack(self, tensor: torch.Tensor) -> np.ndarray:
        self.packed += 1
        return tensor.detach().numpy().copy()

    def unpack(self, array: np.ndarray) -> torch.Tensor:
        self.unpacked += 1
        return torch.from_numpy(array)

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, self.unpack)


def packed_from_the_first_call_on(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    archive = Archive()
    with archive.hooks():
        y = f(x, w)
    y.sum().backward()
    assert 0 < archive.packed <= 4 and archive.unpacked == archive.packed
    return x.grad, w.grad


def packed_by_some_calls_only(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    first = f(x, w)
    archive = Archive()
    with archive.hooks():
        second = f(x, w)
    assert archive.packed > 0
    count = archive.packed
    third = f(x, w)
    assert archive.packed == count
    (first + second.sin() + third.cos()).sum().backward()
    return x.grad, w.grad


def packed_tensors_changed_by_the_user(compile):
    f, x, w = compile(lambda x, w: x * w), leaf(3), torch.randn(3)
    with Archive().hooks():
        y = f(x, w)
    w.zero_()
    y.sum().backward()
    return x.grad


def unpacked_for_each_backward(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    archive = Archive()
    with archive.hooks():
        y = f(x, w)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert archive.unpacked == 2 * archive.packed
    return x.grad, w.grad


def in_memory_of_the_host(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    with save_on_cpu():
        y = f(x, w)
    y.sum().backward()
    return x.grad, w.grad


def hooks_disabled(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)

    def contradict():
        with disable_saved_tensors_hooks("not here"), save_on_cpu():
            f(x, w)

    with disable_saved_tensors_hooks("not here"):
        y = f(x, w)
    y.sum().backward()
    return x.grad, outcome(contradict)


def pack_that_raises(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    calls = []

    def refuse(tensor):
        calls.append(tensor)
        raise ValueError("no room")

    def call():
        with saved_tensors_hooks(refuse, lambda packed: packed):
            f(x, w)

    return [outcome(call) for _ in range(2)], len(calls)


def unpack_that_raises(compile):
    def refuse(packed):
        raise ValueError("lost")

    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    with saved_tensors_hooks(lambda tensor: tensor, refuse):
        y = f(x, w)
    return outcome(lambda: y.sum().backward())


OUTSIDE = {
    scenario.__name__: scenario
    for scenario in (
        packed_from_the_first_call_on,
        packed_by_some_calls_only,
        packed_tensors_changed_by_the_user,
        unpacked_for_each_backward,
        in_memory_of_the_host,
        hooks_disabled,
        pack_that_raises,
        unpack_that_raises,
    )
}


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(OUTSIDE)
def test_hooks_around_a_call(scenario, backend):
    check_scenario(scenario, backend)


def hooks_inside(compile):
    archive = Archive()

    def program(x, w):
        with archive.hooks():
            y = layer(x, w)
        return y.sin()

    f, x, w = compile(program), leaf(3, 3), leaf(3, 3)
    f(x, w).sum().backward()
    assert archive.packed > 0
    return x.grad, w.grad


def saved_on_the_host_inside(compile):
    def program(x, w):
        with save_on_cpu():
            y = layer(x, w)
        return y.sin()

    f, x, w = compile(program), leaf(3, 3), leaf(3, 3)
    f(x, w).sum().backward()
    return x.grad, w.grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scenario", [hooks_inside, saved_on_the_host_inside])
def test_hooks_inside_of_the_program(scenario, backend):
    check_scenario(scenario, backend, breaks=True)


def test_what_is_packed_is_what_the_partition_saves():
    """Three values in plain Python besides the inputs, one compiled."""
    compiled = gradsplit.compile(lambda x: x.sin().exp().sin().exp().sum(), backend="aot_eager")
    archive = Archive()
    x = leaf(3)
    with archive.hooks():
        compiled(x).backward()
    assert archive.packed == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_region_under_hooks_is_a_graph(backend):
    archive = Archive()

    def hooked(x):
        with archive.hooks():
            return x.sin().exp()

    def program(x):
        return hooked(x * 2).cos() * x

    counter = gradsplit.testing.CompileCounterWithBackend(backend)
    compiled, x = gradsplit.compile(program, backend=counter), leaf(3)
    compiled(x).sum().backward()
    twin = x.detach().requires_grad_()
    packed = archive.packed
    program(twin).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)
    assert packed > 0 and counter.frame_count == 3
    with pytest.raises(gradsplit.Unsupported, match="saved-tensors-hooks"):
        gradsplit.compile(program, fullgraph=True)(x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_disabled_inside_of_the_program(backend):
    def program(x):
        with disable_saved_tensors_hooks("outer"):
            y = x.sin()
            with disable_saved_tensors_hooks("inner"):
                y = y * x
        return y.exp()

    compiled = gradsplit.compile(program, backend=backend, fullgraph=True)
    x, twin = leaf(3), leaf(3)
    twin.data.copy_(x)
    compiled(x).sum().backward()
    program(twin).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)
    for step in (program, compiled):
        with save_on_cpu(), pytest.raises(RuntimeError, match="outer"):
            step(x)
    with save_on_cpu():
        x.sin()  # they may be set again


def test_hooks_that_are_disabled_across_a_break():
    def program(x):
        messages = []
        with disable_saved_tensors_hooks("not here"):
            y = x.sin()
            gradsplit.graph_break()
            try:
                with save_on_cpu():
                    y = y * x
            except RuntimeError as error:
                messages.append(str(error))
        with save_on_cpu():
            return y.exp() * x, messages

    compiled, x, twin = gradsplit.compile(program, backend="aot_eager"), leaf(3), leaf(3)
    twin.data.copy_(x)
    for _ in range(2):
        found, expected = compiled(x), program(twin)
        assert found[1] == expected[1] == ["not here"]
        found[0].sum().backward()
        expected[0].sum().backward()
        torch.testing.assert_close(x.grad, twin.grad)
