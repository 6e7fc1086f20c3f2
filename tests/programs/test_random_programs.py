"""Random programs do the same compiled and plain: 500 of them; the command of random_programs runs more."""

from __future__ import annotations

import pytest

from tests.programs import random_programs
from tests.programs.program_writer import Program, Statement
from tests.programs.random_programs import check_seed, check_text, minimized

CHUNK = 25


@pytest.mark.parametrize("first", range(0, 500, CHUNK))
def test_random_programs(first):
    for seed in range(first, first + CHUNK):
        found = check_seed(seed)
        assert found is None, found


def test_a_difference_is_found_and_made_small(monkeypatch):
    def swaps_arguments(function, compile_graph):
        return lambda x, y, *rest, **named: function(y, x, *rest, **named)

    monkeypatch.setattr(random_programs, "CompiledFunction", swaps_arguments)
    returned = Statement("x = x * 2")
    loop = Statement(blocks=[("for i in range(3):", [Statement("n += 1"), Statement("y = y + i")])])
    small = minimized(Program([], [returned, loop]))
    assert small.body == [] and "compiled" in (check_text(small.text()) or "")
