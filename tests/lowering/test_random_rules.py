"""Numbers that kernels make are those that ``ir.counter_random`` defines, wherever and however they are made."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from gradsplit.compile_core.ir.counter_random import INTEGERS, NORMAL, SEED_STRIDE, UNIFORM, random_bits
from gradsplit.compile_core.ir.loops import Apply
from gradsplit.compile_core.lowering.build import build, generate
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from gradsplit.compile_core.lowering.triton_kernels import triton_compiler
from gradsplit.compile_core.runtime.link_program import link_program
from tests.lowering.loop_evaluator import evaluate
from tests.lowering.lowering_harness import calls, check, compute_of, nests, trace

SEEDS = torch.tensor([-(2**63), 1 << 40, 12345, -7]).repeat_interleave(SEED_STRIDE).view(-1, SEED_STRIDE)


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


PUBLISHED = pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)


@PUBLISHED
def test_the_published_vectors_of_philox(counter, key, expected):
    position = torch.tensor(signed(counter[1] << 32 | counter[0]))
    found = int(random_bits(torch.tensor(key), position)) & (2**64 - 1)
    assert (found & 0xFFFFFFFF, found >> 32) == expected


@PUBLISHED
def test_the_text_for_nvidias_gpus_computes_them_too(counter, key, expected):
    """What no CPU runs, read here instruction by instruction."""
    text = triton_compiler._prelude(is_nvidia=True, is_aligned=True)["PHILOX"].value
    words = {"$2": key, "$3": counter[0], "$4": counter[1]}

    def read(word: str) -> int:
        return words[word] if word in words else int(word, 16)

    for instruction in re.sub(r"[{}]|\.reg [^;]*;", "", text).split(";")[:-1]:
        name, *operands = re.split(r"[\s,{}]+", instruction.strip().replace("mov.b64 ", "split "))
        match name, operands:
            case "mov.b32", [to, value]:
                words[to] = read(value)
            case "add.u32", [to, left, right]:
                words[to] = (read(left) + read(right)) & 0xFFFFFFFF
            case "xor.b32", [to, left, right]:
                words[to] = read(left) ^ read(right)
            case "mul.wide.u32", [to, left, right]:
                words[to] = read(left) * read(right)
            case "split", [low, high, value]:
                words[low], words[high] = read(value) & 0xFFFFFFFF, read(value) >> 32
            case _:
                raise AssertionError(instruction)
    assert (words["$0"], words["$1"]) == expected


def test_the_upper_half_of_a_seed_matters():
    seeds = torch.tensor([5, 5 + (1 << 32), 5 - (1 << 63)])
    assert random_bits(seeds, torch.tensor(3)).unique().numel() == 3


def draw(seeds, shape, dtype):
    return (
        UNIFORM(seeds, 0, shape, dtype=dtype),
        NORMAL(seeds, 1, shape, dtype=dtype),
        INTEGERS(seeds, 2, shape, -5, 11, dtype=torch.int32),
        INTEGERS(seeds, 3, shape, -(2**62), 2**62 - 1, dtype=torch.int64),
    )


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 8]), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_lowered_numbers_of_any_shape(shape, dtype):
    program = check(lambda seeds: draw(seeds, shape, dtype), SEEDS)
    assert not calls(program)


def test_views_of_numbers_and_gathers_from_them():
    def function(seeds, rows):
        numbers = UNIFORM(seeds, 1, [3, 4, 5], dtype=torch.float32)
        moved = numbers.permute(2, 0, 1).reshape(5, 12)[1:, ::2].flip(0)
        return moved + 1, numbers[rows][:, 1:], numbers.sum(1)

    assert not calls(check(function, SEEDS, torch.tensor([2, 0, 1, 2])))


def test_dropout_is_one_nest_over_one_axis():
    """Nothing but the input, the seed and the result is moved, and the axes are one."""

    def dropout(x, seeds):
        return x * (UNIFORM(seeds, 1, x.shape, dtype=torch.float32) < 0.9) * (1 / 0.9)

    (nest,) = nests(check(dropout, torch.randn(4, 6, 8), SEEDS))
    assert nest.extents == (4 * 6 * 8,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept", [0.9, -0.3, 1e-45, float("inf"), float("nan")])
def test_the_quotient_of_a_condition_is_a_choice(dtype, kept):
    """Of two numbers that are those of the division."""
    kept = torch.tensor(kept, dtype=torch.float32).to(dtype).item() if kept != 0.9 else kept
    x = torch.tensor([0.5, -0.5, float("nan")])
    program = check(lambda x: (x > 0).to(dtype) / kept, x, tolerance=0.0)
    (found,) = evaluate(program, [x])
    is_number = ~found.isnan()
    assert torch.equal(found[is_number].signbit(), ((x > 0).to(dtype) / kept)[is_number].signbit())
    (nest,) = nests(program)
    operations = [statement.operation for statement in nest.body if isinstance(statement, Apply)]
    assert ("div" in operations) == (kept == 0)
    assert "round_to" not in operations


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_compiled_for_the_cpu(dtype, tmp_path):
    module = trace(lambda seeds: draw(seeds, (3, 1001), dtype), SEEDS)
    program = fuse(lower(compute_of(module)))
    sources = [generate(nest, program.buffers) for nest in nests(program)]
    results = link_program(program, sources, build(sources, tmp_path))([SEEDS])
    for mine, expected in zip(results, draw(SEEDS, (3, 1001), dtype), strict=True):
        is_normal = dtype.is_floating_point and mine is results[1]
        bound = torch.finfo(dtype).eps * 8 if is_normal else 0.0
        torch.testing.assert_close(mine, expected, rtol=bound, atol=bound)


def test_the_operators_have_fakes_with_open_sizes():
    module = make_fx(lambda x, s: UNIFORM(s, 0, x.shape, dtype=torch.float32), tracing_mode="symbolic")(
        torch.randn(5, 7), SEEDS
    )
    x = torch.randn(4, 2)
    assert torch.equal(module(x, SEEDS), UNIFORM(SEEDS, 0, [4, 2], dtype=torch.float32))


def test_equal_layers_are_one_kernel():
    """The offset of its seed is the caller's to add, and lies at a multiple of 16 bytes."""

    def layers(x, seeds):
        for slot in range(0, 4, 2):
            x = torch.mm(x, x)
            for k in (slot, slot + 1):
                x = x * (UNIFORM(seeds, k, x.shape, dtype=torch.float32) < 0.5)
        return x

    x = torch.randn(8, 8)
    program = fuse(lower(compute_of(trace(layers, x, SEEDS))))
    first, second = [generate(nest, program.buffers) for nest in nests(program)]
    assert first.text == second.text
    assert first.bases == (0, 0, 0) and sorted(second.bases) == [0, 0, 2 * SEED_STRIDE]
    assert SEED_STRIDE * SEEDS.element_size() % 16 == 0


def test_what_equal_layers_draw_differs(tmp_path):
    def function(seeds):
        return tuple(UNIFORM(seeds, k, [50], dtype=torch.float32).sin() for k in range(4))

    program = lower(compute_of(trace(function, SEEDS)))
    sources = [generate(nest, program.buffers) for nest in nests(program)]
    assert len({source.text for source in sources}) == 1
    for found, expected in zip(
        link_program(program, sources, build(sources, tmp_path))([SEEDS]), function(SEEDS), strict=True
    ):
        torch.testing.assert_close(found, expected)
