"""What helps to look into one compilation: one function alone, the compiler's own stack, a line that shows progress."""

from __future__ import annotations

import io
import sys
import time

import pytest
import torch

import gradsplit
from gradsplit.compile_core.interface.testing import CompileCounter
from gradsplit.compile_core.observe import progress


def inner(x):
    return x.sin() + 1


def outer(x):
    return inner(x * 2) * 3


class Outer(torch.nn.Module):
    def forward(self, x):
        return outer(x)


def test_only_functions_of_a_name_are_compiled(monkeypatch):
    monkeypatch.setenv("GRADSPLIT_DEBUG_FUNCTION", "inner")
    x = torch.randn(3)
    for program in (outer, Outer()):
        counter = CompileCounter()
        torch.testing.assert_close(gradsplit.compile(program, backend=counter)(x), outer(x))
        assert (counter.frame_count, counter.op_count) == (1, 2)
    monkeypatch.setenv("GRADSPLIT_DEBUG_FUNCTION", "another")
    counter = CompileCounter()
    torch.testing.assert_close(gradsplit.compile(outer, backend=counter)(x), outer(x))
    assert counter.frame_count == 0


def test_verbose_adds_the_compilers_stack(caplog):
    def program(x):
        print("a break")
        return x + 1

    for verbose in (False, True):
        caplog.clear()
        gradsplit.reset()
        with gradsplit.config.patch(verbose=verbose):
            gradsplit.compile(program, backend="eager")(torch.ones(3))
        assert "is not captured in full" in caplog.text
        assert ("Traceback (most recent call last)" in caplog.text) is verbose


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("rank", "stream"), [("0", _Terminal), ("1", _Terminal), ("0", io.StringIO)])
def test_a_line_on_the_first_ranks_terminal_shows_what_is_compiled(rank, stream, monkeypatch):
    def backend(module, inputs):
        time.sleep(0.6)
        return module.forward

    monkeypatch.setattr(progress, "_DELAY_S", 0.1)
    monkeypatch.setattr(sys, "stderr", shown := stream())
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("TERM", "xterm")
    gradsplit.compile(outer, backend=backend)(torch.ones(3))
    is_shown = "gradsplit compiles outer: backend" in shown.getvalue()
    assert is_shown == ((rank, stream) == ("0", _Terminal))
