"""Questions about functions and numbers that are answered at capture."""

from __future__ import annotations

import collections.abc
import inspect
import types

import pytest
import torch
from torch import nn

import gradsplit
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction


def compile_eager(function):
    return CompiledFunction(function, lambda graph, inputs: graph.module, fullgraph=True)


class Layer(nn.Module):
    def chunk(self, x, mask=None):
        return x

    def forward(self, x):
        count = len(inspect.signature(self.chunk).parameters)
        return x + count, [*inspect.signature(self.chunk).parameters]


def limits(x):
    return x.clamp(torch.finfo(x.dtype).min, torch.finfo(torch.float16).max), torch.iinfo(torch.int8).bits


def code(x):
    return x + len(limits.__code__.co_varnames), limits.__code__.co_argcount


def read_only(x):
    held = {"a": x}
    view = types.MappingProxyType(held)
    held["b"] = x + 1
    try:
        view["c"] = x
    except TypeError:
        return [*view], view["b"], len(view), "a" in view
    return None


VIEW = types.MappingProxyType({"scale": 2})


def existing_view(x):
    return x * VIEW["scale"], VIEW, types.MappingProxyType({"x": x}), "nothing" in VIEW


def first_of_sequence(x, items):
    return x + next(item for item in items if item > 1), any(item == 1 for item in items)


@pytest.mark.parametrize(
    "function", [Layer(), limits, code, read_only, existing_view], ids=lambda function: str(function)[:12]
)
def test_same_as_plain(function):
    x = torch.ones(2)
    assert str(compile_eager(function)(x)) == str(function(x))


def delegating(items):
    yield from items


def test_a_dropped_generator_of_another_runs_no_code():
    """Since 3.12 a ``yield from`` has a handler, which takes StopIteration alone."""

    def program(x):
        return x + next(item for item in delegating(iter([2, 3])) if item > 1)

    assert gradsplit.compile(program, backend="eager", fullgraph=True)(torch.ones(1)).item() == 3


class Closing:
    """Says when it is dropped."""

    def __init__(self, log):
        self.log = log

    def __del__(self):
        self.log.append("dropped")


def closing(log):
    try:
        yield 1
        yield 2
    finally:
        log.append("dropped")


def delegating_to_closing(log):
    yield from closing(log)


@pytest.mark.parametrize("make", [Closing, closing, delegating_to_closing], ids=["object", "own", "another"])
def test_what_is_dropped_runs_its_code_then(make):
    """Where that is nothing tells in a capture, so the frame runs as plain Python."""

    def program(x, log):
        held = make(log)
        log.append(next(held, None) if isinstance(held, types.GeneratorType) else 0)
        del held
        log.append("after")
        return x + 1

    plain, compiled = [], []
    program(torch.ones(1), plain)
    gradsplit.compile(program, backend="eager")(torch.ones(1), compiled)
    assert compiled == plain


def test_a_dropped_generator_runs_no_code():
    """``Sequence.__iter__`` stands in a try block, whose except clause does not take GeneratorExit."""

    class Items(collections.abc.Sequence):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            if index > 2:
                raise IndexError
            return index

    assert compile_eager(first_of_sequence)(torch.ones(1), Items())[0].item() == 3
