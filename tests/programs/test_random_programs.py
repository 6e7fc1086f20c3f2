"""Random programs do the same compiled and plain: 40 of them; ``make random-programs`` runs more."""

from __future__ import annotations

import pytest

from gradsplit.compile_core.autograd.captured_graphs.cut_points import find_cut_points
from gradsplit.compile_core.autograd.captured_graphs.pieces import cut_graph, link_pieces
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from tests.programs import random_programs
from tests.programs.program_writer import Program, Statement
from tests.programs.random_programs import check_seed, check_text, minimized

CHUNK = 10


@pytest.mark.parametrize("first", range(0, 40, CHUNK))
def test_random_programs(first):
    for seed in range(first, first + CHUNK):
        found = check_seed(seed)
        assert found is None, found


def in_pieces(captured, inputs):
    """The graph, cut wherever it may be."""
    examples = [entry.example for entry in captured.inputs]
    points = find_cut_points(captured.module, examples)
    place_of = points.places(place for place, allowed in enumerate(points.allowed) if allowed and place)
    pieces = cut_graph(captured.module, place_of, points.examples(place_of, examples))
    return link_pieces(captured.module, pieces, [piece.module for piece in pieces], not points.changed_at)


def test_random_programs_in_pieces(monkeypatch):
    monkeypatch.setattr(
        random_programs, "CompiledFunction", lambda function, _: CompiledFunction(function, in_pieces)
    )
    for seed in range(500, 505):
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
