"""``functools.lru_cache``: the cache decides what runs, as in the plain program."""

from __future__ import annotations

import functools

import pytest
import torch

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction

calls = []


def compile_eager(function, fullgraph=True):
    return CompiledFunction(function, lambda graph, inputs: graph.module, fullgraph=fullgraph)


@functools.lru_cache
def noted(number):
    calls.append(number)
    return number * 2


@functools.cache
def table(size):
    return {"positions": torch.arange(float(size)), "size": size}


@functools.cache
def failing():
    raise KeyError("nothing")


class Speaker:
    def __init__(self):
        self.said = []

    @functools.lru_cache(None)  # noqa: B019
    def say_once(self, text):
        self.said.append(text)


def test_the_body_runs_once():
    calls.clear()
    noted.cache_clear()
    compiled = compile_eager(lambda x, number: x * noted(number) + noted(number))
    for _ in range(3):
        assert compiled(torch.ones(1), 3).item() == 12
    assert calls == [3] and len(compiled.entries) == 1
    assert compiled(torch.ones(1), 4).item() == 16
    assert calls == [3, 4]


def test_the_result_is_the_cached_object():
    table.cache_clear()
    compiled = compile_eager(lambda x: (x + table(3)["positions"], table(3)))
    result, cached = compiled(torch.ones(3))
    assert cached is table(3) and result.tolist() == [1, 2, 3]
    table(3)["positions"] = torch.zeros(3)
    assert compiled(torch.ones(3))[0].tolist() == [1, 1, 1]


SCALES = [2]


@functools.lru_cache
def scaled(number):
    return number * SCALES[0]


@pytest.mark.parametrize("call", [scaled, lambda number: functools.partial(scaled, number)()])
def test_a_cleared_cache(call):
    compiled = compile_eager(lambda x: x * call(3))
    for scale in (2, 5, 2):
        SCALES[0] = scale
        scaled.cache_clear()
        for _ in range(2):
            assert compiled(torch.ones(1)).item() == 3 * scale


def test_methods_are_cached_for_their_object():
    def function(speaker, x):
        speaker.say_once("hello")
        return x + 1

    compiled = compile_eager(function)
    speakers = [Speaker(), Speaker()]
    for speaker in speakers * 2:
        compiled(speaker, torch.ones(1))
    assert [speaker.said for speaker in speakers] == [["hello"], ["hello"]]


def test_exceptions_pass():
    def function(x):
        try:
            return x + failing()
        except KeyError:
            return x - 1

    assert compile_eager(function)(torch.ones(1)).item() == 0


def test_tensors_as_keys_end_the_graph():
    compiled = compile_eager(lambda x: functools.cache(torch.neg)(x) if x is None else id_of(x) + 1, False)
    assert compiled(torch.ones(1)).item() == 2
    assert compiled.break_reasons[0].reason_id == "cached-call"


@functools.lru_cache
def id_of(x):
    return x


def test_lists_as_keys_raise():
    compiled = compile_eager(lambda x: noted([x]), False)
    with pytest.raises(TypeError, match="unhashable"):
        compiled(torch.ones(1))
