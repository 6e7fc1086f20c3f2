"""How much memory a forward and its backward need at once, told from their programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gradsplit.compile_core.ir.loops import LoopProgram, Step, View
from gradsplit.compile_core.ir.schedule import Compute, Schedule
from gradsplit.compile_core.runtime.executable import Executable, link
from gradsplit.compile_core.runtime.instructions import instructions_of
from gradsplit.compile_core.runtime.link_program import LinkedProgram
from gradsplit.compile_core.runtime.memory_lives import memory_of_both
from gradsplit.compile_core.runtime.place_buffers import offsets
from tests.runtime.test_link_program import doubling, extern, spec, whole

aten = torch.ops.aten
MIB = 1 << 20
# Elements of a buffer.
MUCH = 2 * MIB


def program(
    steps: Sequence[Step], inputs: Sequence[str], outputs: Sequence[str], sizes: Mapping[str, int]
) -> Executable:
    """A schedule of one region; buffers have ``MUCH`` elements unless ``sizes`` say otherwise."""
    buffers = {name: spec(sizes.get(name, MUCH)) for name in (*inputs, *"abcdefgh", *outputs)}
    views: list[View | None] = [whole(name, sizes.get(name, MUCH)) for name in outputs]
    loops = LoopProgram("test", tuple(inputs), (), buffers, {}, tuple(steps), tuple(views))
    made = LinkedProgram("", (), lambda _: (), None, lambda: instructions_of(loops, True))
    compute = Compute("region", torch.fx.GraphModule({}, torch.fx.Graph()), tuple(inputs), tuple(outputs))
    return link(Schedule("test", tuple(inputs), (compute,), tuple(outputs)), {"region": made})


def copies(*pairs: str) -> list[Step]:
    return [doubling(f"nest_{pair}", pair[0], pair[1], MUCH) for pair in pairs]


def needed(forward: Executable, backward: Executable, kept: Mapping[int, int], num_visible: int = 0) -> float:
    """How many buffers."""
    made = memory_of_both(forward, backward, kept, num_visible)
    assert made is not None
    used = {memory: (memory.begins, memory.ends) for memory in made}
    return offsets(used, {memory: memory.bytes for memory in made}, 512)[1] / MUCH / 4


def test_the_backward_lies_where_temporaries_and_what_was_kept_lay() -> None:
    forward = program(copies("xa", "ab", "bc"), "x", "c", {})
    assert needed(forward, program(copies("ca"), "c", "a", {}), {0: 0}) == 2
    # Beside what was kept, the temporaries of the backward.
    backward = program(copies("ca", "ab"), "c", "b", {})
    assert needed(forward, backward, {0: 0}) == 2
    assert needed(forward, program(copies("ca", "cb", "ad"), "c", "bd", {}), {0: 0}) == 3


def test_what_others_hold_is_not_used_again() -> None:
    forward = program(copies("xa", "xb"), "x", "ab", {})
    backward = program(copies("bc", "cd"), "b", "d", {})
    assert needed(forward, backward, {0: 1}, num_visible=1) == 3
    # The loss is what the backward reads: it stays.
    assert needed(program(copies("xa"), "x", "a", {}), program(copies("ac"), "a", "c", {}), {0: 0}, 1) == 2


def test_gaps_that_are_too_small() -> None:
    sizes = {"c": MUCH // 2, "d": MUCH // 2}
    forward = program([doubling("n", "x", "c", MUCH // 2), *copies("xa", "xb")], "x", "bca", sizes)
    # What is free after the first step is half of what the second one makes.
    steps = [extern(aten.neg.default, (whole("c", MUCH // 2),), "d"), *copies("ae")]
    backward = program(steps, "ca", "de", sizes)
    assert needed(forward, backward, {0: 1, 1: 2}, num_visible=1) == 4


def test_views_and_several_results() -> None:
    steps = [
        extern(aten.sin.default, (whole("x", MUCH),), "a"),
        extern(aten.t.default, (whole("a", MUCH),), "b"),
    ]
    forward = program(steps, "x", "b", {})
    assert needed(forward, program(copies("ba"), "b", "a", {}), {0: 0}) == 2


def test_programs_that_do_not_say() -> None:
    forward = program(copies("xa"), "x", "a", {})
    silent = link(forward.schedule, {"region": lambda arguments: arguments})
    assert memory_of_both(silent, forward, {0: 0}, 0) is memory_of_both(forward, silent, {0: 0}, 0) is None


def test_what_outlasts_the_program_that_makes_it() -> None:
    """A result, what a result is a view of, what a call makes beside a result, and all that is not torch's own."""
    steps = [
        *copies("xa"),
        extern(aten.t.default, (whole("a", MUCH),), "b"),
        *copies("xc", "cd"),
        extern(aten.topk.default, (whole("d", MUCH), MUCH), "e", "f"),
    ]
    made = memory_of_both(program(steps, "x", "be", {}), program(copies("xa"), "x", "a", {}), {}, 2)
    assert made is not None
    assert [{name for _, name in memory.buffers} for memory in made if memory.outlasts] == [
        {"a", "b"},
        *({"e"}, {"f"}, {"a"}),
    ]
