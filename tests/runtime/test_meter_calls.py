"""What torch's operators allocate on the way is seen in a program's first run, which computes what it always does."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import gradsplit
from gradsplit.compile_core import pipeline
from gradsplit.compile_core.ir.loops import ExternCall, LoopProgram, Step
from gradsplit.compile_core.runtime import cuda_graphs, meter_calls, one_piece
from gradsplit.compile_core.runtime.instructions import Call, Switch, instructions_of
from gradsplit.compile_core.runtime.link_program import link_program
from gradsplit.compile_core.runtime.memory_lives import Memory, memory_of_both
from gradsplit.compile_core.runtime.meter_calls import CallMeter, may_be_metered, parts
from gradsplit.compile_core.runtime.one_piece import InOnePiece, Pieces
from tests.runtime.recorder_on_cpu import LendingRecorder
from tests.runtime.test_link_program import extern, spec, whole
from tests.runtime.test_memory_lives import MIB, MUCH, copies, program
from tests.runtime.test_share_temporaries import Net

aten = torch.ops.aten
IMAGE, FILTER = (2, 3, 8, 8), (3, 3, 3, 3)
OPERANDS = (whole("x", *IMAGE), whole("i", *IMAGE), whole("w", *FILTER))


def gradients(mask: list[bool], *outputs: str | None) -> Any:
    arguments = (*OPERANDS, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
    return extern(aten.convolution_backward.default, arguments, *outputs)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """What it says in turn that it gave and got back, after which nothing changes."""
    counts: list[tuple[int, int]] = []
    monkeypatch.setattr(
        meter_calls,
        "_given_and_got_back",
        lambda: counts.pop(0) if len(counts) > 1 else (counts or [(0, 0)])[0],
    )
    monkeypatch.setattr(one_piece, "may_be_metered", lambda: True)
    yield counts


def test_each_gradient_of_a_convolution_is_made_by_a_call_of_its_own() -> None:
    call = gradients([True, True, True], "a", None, "b")
    found = parts(call)
    assert [part.outputs for part in found] == [("a", None, None), (None, None, "b")]
    assert [part.arguments[-1] for part in found] == [[True, False, False], [False, False, True]]
    assert all(part.arguments[:-1] == call.arguments[:-1] for part in found)
    for single in (
        gradients([False, True, False], None, None, None),
        extern(aten.topk.default, (whole("x", 3), 3), "a", "b"),
    ):
        assert parts(single) == [single]


def test_metered_calls_compute_the_same(allocator: list[tuple[int, int]], region_form: str) -> None:
    steps: list[Step] = [
        gradients([True, True, False], "a", "b", None),
        ExternCall(aten.neg.out, (whole("b", *FILTER),), {}, (), {"out": whole("c", *FILTER)}),
        extern(aten.topk.default, (whole("a", *IMAGE), 2), "d", None),
    ]
    shapes = {"x": IMAGE, "i": IMAGE, "w": FILTER, "a": IMAGE, "b": FILTER, "c": FILTER, "d": (2, 3, 8, 2)}
    buffers = {name: spec(*shape) for name, shape in shapes.items()}
    outputs = [whole(name, *shapes[name]) for name in "abcd"]
    loops = LoopProgram("both", ("x", "i", "w"), (), buffers, {}, tuple(steps), tuple(outputs))
    metered = meter_calls.meter_calls(instructions_of(loops, True))
    entered = [step for step in metered.steps if isinstance(step, Call | Switch)]
    assert [isinstance(step, Call) for step in entered] == [False, True, False] * 2 + [True] + [
        False,
        True,
        False,
    ]
    # A workspace; beside it what stays, or what others free; nothing; what stays.
    allocator += [(0, 0), (70, 40), (70, 40), (90, 95), (95, 95), (95, 95), (95, 95), (105, 95)]
    meter = CallMeter()
    given = [torch.randn(shape) for shape in (IMAGE, IMAGE, FILTER)]
    found = link_program(loops, [], {}, meter)([*given])
    assert meter.taken == {"both": [40, 20, 0]}
    for value, expected in zip(found, link_program(loops, [], {})([*given]), strict=True):
        torch.testing.assert_close(value, expected)


def large(name: str, made: Sequence[Memory]) -> list[tuple[int, int, float, bool]]:
    """Of what lies with a buffer: MiB, from when to when, and whether in own memory."""
    found = [memory for memory in made if any(buffer == name for _, buffer in memory.buffers)]
    return [(memory.bytes // MIB, memory.begins, memory.ends, memory.outlasts) for memory in found]


def test_what_a_call_took_lies_where_its_results_do_while_it_runs() -> None:
    steps: list[Step] = [
        extern(aten.sin.default, (whole("x", MUCH),), "a"),
        extern(aten.t.default, (whole("a", MUCH),), "b"),
        extern(aten.cos.default, (whole("b", MUCH),), "c"),
    ]
    forward, backward = program(steps, "x", "c", {}), program(copies("ca"), "c", "a", {})
    made = memory_of_both(forward, backward, {0: 0}, 0, {"test": [20 * MIB, 4 * MIB, 30 * MIB]})
    assert made is not None
    assert large("a", made) == [(8, 1, 5, False), (20, 1, 1, False), (8, 8, math.inf, True)]
    assert large("c", made) == [(8, 5, 9, True), (30, 5, 5, True)]
    # A view is not made, so nothing can be told to lie elsewhere with it.
    assert [memory.bytes // MIB for memory in made if not memory.buffers] == [4]


def test_the_first_run_is_metered(allocator: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    class Sharing:
        def __call__(self, inputs: list[Any]) -> Sequence[Any]:
            return inputs

        def sharing(self, memory: Any) -> Any:
            given.append(memory)
            return self

    meter = CallMeter()
    twice = InOnePiece(Sharing(), lambda: None, is_first=True, meter=meter)
    assert twice([1]) == [1] and twice([2]) == [2] and given == [meter]
    monkeypatch.setattr(one_piece, "may_be_metered", lambda: False)
    assert InOnePiece(Sharing(), lambda: None, is_first=True, meter=meter)([1]) == [1] and len(given) == 1


def test_where_calls_may_be_metered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert may_be_metered()
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        assert not may_be_metered()
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert not may_be_metered()


def test_training_finds_room_for_what_calls_took(
    allocator: list[tuple[int, int]], region_form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Pieces] = []
    counted = iter(range(0, 1 << 40, 30 * MIB))
    monkeypatch.setattr(meter_calls, "_given_and_got_back", lambda: (next(counted),) * 2)
    kept: Callable[..., Pieces] = cuda_graphs.pieces_for
    monkeypatch.setattr(cuda_graphs, "pieces_for", lambda *given: made.append(kept(*given)) or made[-1])

    class Recorder(LendingRecorder):
        def record(self, program: Any, inputs: list[torch.Tensor], within: Any = None) -> Any:
            program._pieces()
            return super().record(program, inputs, within)

    made_programs = functools.partial(cuda_graphs.graph_programs, recorder=Recorder())
    monkeypatch.setattr(pipeline, "with_cuda_graphs", made_programs)
    torch.manual_seed(0)
    plain, twin = Net(), Net()
    twin.load_state_dict(plain.state_dict())
    compiled = gradsplit.compile(twin, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):
        x = torch.randn(4, 3, 8, 8)
        for module, call in ((plain, plain), (twin, compiled)):
            module.zero_grad()
            loss, scores, _ = call(x)
            (loss + scores.sum()).backward()
        for expected, found in zip(plain.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)
    (pieces,) = made
    assert max(pieces.own_bytes, pieces.shared_bytes) == 30 * MIB
