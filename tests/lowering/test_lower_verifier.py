"""The verifier names the step and the broken rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.loops import (
    Access,
    Apply,
    Gather,
    Load,
    LoopNest,
    LoopProgram,
    Reduce,
    Statement,
    Store,
    View,
)
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.ir.verify_loops import verify_program

FLOAT = torch.float32


def _program(*body: Statement, extents: tuple[int, ...] = (4, 3), reduced_axes: int = 0) -> LoopProgram:
    cpu = torch.device("cpu")
    buffers = {
        "x": TensorSpec.contiguous((4, 3), FLOAT, cpu),
        "n": TensorSpec.contiguous((4,), torch.int64, cpu),
        "y": TensorSpec.contiguous((4, 3), FLOAT, cpu),
    }
    nest = LoopNest("nest", extents, reduced_axes, body)
    return LoopProgram("program", ("x", "n"), (), buffers, {}, (nest,), (View("y", (4, 3), (3, 1)),))


LOAD = Load(Access("x", (3, 1)), FLOAT)
INDEX = Load(Access("n", (1, 0)), torch.int64)
STORE = Store(Access("y", (3, 1)), 0)


def test_a_sound_program_passes() -> None:
    verify_program(_program(LOAD, STORE))


BROKEN: list[tuple[str, LoopProgram]] = [
    ("is no earlier value", _program(LOAD, Store(Access("y", (3, 1)), 2))),
    ("is no earlier value", _program(LOAD, STORE, Store(Access("y", (3, 1)), 1))),
    ("reaches", _program(Load(Access("x", (3, 1), 1), FLOAT), STORE)),
    ("reaches", _program(INDEX, replace(LOAD, access=Access("x", (0, 1), 0, (Gather(0, 3, 5),))),
                         Store(Access("y", (3, 1)), 1))),
    ("one stride per axis", _program(Load(Access("x", (3,)), FLOAT), STORE)),
    ("two points store to one element", _program(LOAD, Store(Access("y", (1, 1)), 0))),
    ("stands still along the parallel axis i", _program(LOAD, Store(Access("y", (0, 1)), 0))),
    ("the value varies along j", _program(LOAD, Store(Access("y", (3, 0)), 0), reduced_axes=1)),
    ("there is no reduced axis", _program(LOAD, Reduce("sum", 0, FLOAT), STORE)),
    ("takes 2 arguments", _program(LOAD, Apply("add", (0,), FLOAT), STORE)),
    ("there is no such operation", _program(LOAD, Apply("plus", (0, 0), FLOAT), STORE)),
    ("arguments' dtypes differ", _program(LOAD, INDEX, Apply("add", (0, 1), FLOAT), STORE)),
    ("yields torch.bool", _program(LOAD, Apply("lt", (0, 0), FLOAT), STORE)),
    ("no dtype to compute in", _program(replace(LOAD, dtype=torch.bfloat16), STORE)),
    ("writes the input", _program(LOAD, Store(Access("x", (3, 1)), 0), STORE)),
    ("before anything wrote it", _program(replace(LOAD, access=Access("y", (3, 1))), STORE)),
    ("before anything wrote it", _program(LOAD, replace(STORE, reduction="sum"))),
    ("combines values in the buffer", _program(LOAD, STORE, replace(STORE, reduction="sum"))),
    ("combines values in the buffer", _program(LOAD, replace(STORE, reduction="prod"))),
    ("stores nothing", _program(LOAD)),
    ("nothing wrote", replace(_program(LOAD, STORE), steps=())),
    ("is never written", replace(_program(LOAD, STORE), inputs=("x",), destinations=("n",))),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_broken_rules_are_named(number: int) -> None:
    rule, program = BROKEN[number]
    with pytest.raises(InternalError, match=rule):
        verify_program(program)
