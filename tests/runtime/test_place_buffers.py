"""Small temporaries that lie in one buffer: which do, and that none is overwritten while it is in use."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from gradsplit.compile_core.ir.loops import Access, Apply, Load, LoopNest, LoopProgram, Store, View
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.build import build, generate
from gradsplit.compile_core.runtime.link_program import link_program
from gradsplit.compile_core.runtime.place_buffers import place_buffers
from tests.runtime.test_link_program import doubling, extern, spec, whole


def adding(name: str, one: str, other: str, target: str, size: int) -> LoopNest:
    body = (
        Load(Access(one, (1,)), torch.float32),
        Load(Access(other, (1,)), torch.float32),
        Apply("add", (0, 1), torch.float32),
        Store(Access(target, (1,)), 2),
    )
    return LoopNest(name, (size,), 0, body)


@pytest.mark.parametrize("seed", range(20))
def test_none_is_overwritten_while_it_is_in_use(seed: int):
    """Sums of random pairs of what was computed before, of random lengths."""
    generator = random.Random(seed)
    sizes = {"x": 4096}
    steps = []
    for k in range(40):
        one, other = (generator.choice([*sizes][-6:]) for _ in range(2))
        size = min(sizes[one], sizes[other], generator.choice([1, 7, 64, 200, 4096]))
        sizes[f"t{k}"] = size
        steps.append(adding(f"n{k}", one, other, f"t{k}", size))
    program = LoopProgram(
        "test", ("x",), (), {name: spec(size) for name, size in sizes.items()}, {}, tuple(steps), ()
    )
    placement = place_buffers(program)
    assert len(placement.places) == 40 and len(placement.buffers) == 1
    ranges = {}
    for name, place in placement.places.items():
        touched = [
            k
            for k, step in enumerate(steps)
            if any(name == s.access.buffer for s in step.body if hasattr(s, "access"))
        ]
        ranges[name] = (place.offset_bytes, place.offset_bytes + 4 * sizes[name], touched[0], touched[-1])
    for name, (begin, end, first, last) in ranges.items():
        assert begin % 128 == 0
        for other, (begin2, end2, first2, last2) in ranges.items():
            assert name == other or end <= begin2 or end2 <= begin or last < first2 or last2 < first
    (whole_spec,) = placement.buffers.values()
    assert (
        max(end for _, end, _, _ in ranges.values())
        <= whole_spec.numel
        < sum(4 * size for size in sizes.values())
    )


@pytest.mark.usefixtures("region_form")
def test_values(tmp_path: Path):
    names = [f"t{k}" for k in range(9)]
    buffers = dict.fromkeys(("x", *names), spec(10))
    steps = [doubling("first", "x", "t0", 10)]
    steps += [adding(f"n{k}", names[k - 1], names[max(0, k - 3)], names[k], 10) for k in range(1, 9)]
    program = LoopProgram("test", ("x",), (), buffers, {}, tuple(steps), (whole("t8", 10),))
    sources = [generate(step, buffers) for step in steps]
    run = link_program(program, sources, build(sources, tmp_path))
    assert run.text.count("empty_strided") == 2  # the small ones' and the result's
    values = [2.0]
    for k in range(1, 9):
        values.append(values[k - 1] + values[max(0, k - 3)])
    assert run([torch.ones(10)])[0].tolist() == [values[-1]] * 10


def test_what_others_see_has_memory_of_its_own():
    large = TensorSpec.contiguous((1 << 20,), torch.float32, torch.device("cpu"))
    buffers = {**dict.fromkeys("xadropq", spec(3)), "l": large}
    steps = (
        doubling("1", "x", "a", 3),
        extern(torch.ops.aten.relu.default, (whole("a", 3),), "r"),
        doubling("2", "r", "d", 3),
        doubling("3", "d", "l", 3),
        doubling("4", "l", "p", 3),
        doubling("5", "p", "q", 3),
        doubling("6", "q", "o", 3),
    )
    program = LoopProgram("test", ("x",), ("d",), buffers, {}, steps, (View("o", (3,), (1,)),))
    assert sorted(place_buffers(program).places) == ["p", "q"]


def test_results_that_nobody_sees_share_memory():
    """What is seen as well, what others than kernels touch, and what is large does not."""
    large = TensorSpec.contiguous((1 << 13,), torch.float32, torch.device("cpu"))
    double = TensorSpec.contiguous((3,), torch.float64, torch.device("cpu"))
    buffers = {**dict.fromkeys("xabcdefr", spec(3)), "l": large, "w": double}
    steps = (
        *(doubling(name, "x", name, 3) for name in "abcdefl"),
        doubling("w", "x", "w", 3),
        extern(torch.ops.aten.relu.default, (whole("f", 3),), "r"),
    )
    outputs = tuple(View(name, buffers[name].shape, (1,)) for name in "aabbcddefrlw")
    program = LoopProgram("test", ("x",), (), buffers, {}, steps, outputs, kept=frozenset(range(3, 12)))
    placement = place_buffers(program)
    assert sorted(placement.places) == ["c", "d", "e"]
    assert [place.offset_bytes for _, place in sorted(placement.places.items())] == [0, 128, 256]
    (shared,) = placement.buffers.values()
    assert shared.dtype == torch.float32


@pytest.mark.usefixtures("region_form")
def test_kept_results_are_views_of_one_buffer(tmp_path: Path):
    buffers = {**dict.fromkeys("xtab", spec(2, 5)), "seen": spec(10)}
    flat = {name: View(name, (10,), (1,)) for name in buffers}
    steps = tuple(
        doubling(target, source, target, 10)
        for source, target in (("x", "t"), ("t", "a"), ("a", "b"), ("b", "seen"))
    )
    outputs = (flat["seen"], View("a", (5, 2), (1, 5)), None, View("b", (2, 5), (5, 1)), flat["a"])
    program = LoopProgram("test", ("x",), (), buffers, {}, steps, outputs, kept=frozenset({1, 2, 3, 4}))
    sources = [generate(step, buffers) for step in steps]
    run = link_program(program, sources, build(sources, tmp_path))
    x = torch.arange(10.0).view(2, 5)
    for _ in range(2):
        seen, a, nothing, b, again = run([x])
        assert nothing is None
        torch.testing.assert_close(seen, 16 * x.flatten())
        torch.testing.assert_close(a, 4 * x.t())
        torch.testing.assert_close(b, 8 * x)
        torch.testing.assert_close(again, 4 * x.flatten())
        assert b.data_ptr() - a.data_ptr() == 128
        assert (
            a.untyped_storage().data_ptr()
            == b.untyped_storage().data_ptr()
            != seen.untyped_storage().data_ptr()
        )
