"""The function that calls a region's kernels: allocation, views, arguments, lifetimes."""

from __future__ import annotations

import math

import pytest
import torch

from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.ir.loops import (
    Access,
    Apply,
    ExternCall,
    Load,
    LoopNest,
    LoopProgram,
    Step,
    Store,
    View,
)
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.runtime.instructions import instructions_of
from gradsplit.compile_core.runtime.link_program import LinkedProgram, link_program

aten = torch.ops.aten
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("region_form")


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec.contiguous(shape, dtype, CPU)


def whole(buffer: str, *shape: int) -> View:
    return View(buffer, shape, spec(*shape).stride)


def doubling(name: str, source: str, target: str, size: int) -> LoopNest:
    body = (
        Load(Access(source, (1,)), torch.float32),
        Apply("add", (0, 0), torch.float32),
        Store(Access(target, (1,)), 1),
    )
    return LoopNest(name, (size,), 0, body)


def link(
    steps: list[Step],
    outputs: list[View | None],
    buffers: dict[str, TensorSpec],
    inputs: tuple[str, ...] = ("x",),
    destinations: tuple[str, ...] = (),
    constants: dict[str, torch.Tensor] | None = None,
) -> LinkedProgram:
    """Linked with Python functions for kernels: each writes twice its first buffer into its second."""
    program = LoopProgram(
        "test", inputs, destinations, buffers, constants or {}, tuple(steps), tuple(outputs)
    )
    nests = [step for step in steps if isinstance(step, LoopNest)]
    sources = [KernelSource(nest.name, "cpp", "", _buffers(nest), device=CPU) for nest in nests]
    kernels = {nest.name: lambda source, target: target.copy_(2 * source) for nest in nests}
    return link_program(program, sources, kernels)


def _buffers(nest: LoopNest) -> tuple[str, ...]:
    return tuple(line.access.buffer for line in nest.body if isinstance(line, (Load, Store)))


def extern(target, arguments: tuple, *outputs: str | None, **keywords) -> ExternCall:
    return ExternCall(target, arguments, keywords, outputs)


def test_kernels_and_torchs_own():
    run = link(
        [doubling("nest", "x", "y", 3), extern(aten.add.Tensor, (whole("y", 3), 1), "z")],
        [whole("z", 3), None],
        {"x": spec(3), "y": spec(3), "z": spec(3)},
    )
    z, nothing = run([torch.ones(3)])
    assert torch.equal(z, torch.full((3,), 3.0)) and nothing is None


def test_text_frees_each_buffer_behind_its_last_use():
    run = link(
        [doubling("one", "x", "y", 3), doubling("two", "y", "z", 3)],
        [whole("z", 3)],
        {"x": spec(3), "y": spec(3), "z": spec(3)},
    )
    assert run.text.splitlines() == [
        "# test",
        "def run(arguments):",
        "    b0, = arguments",
        "    arguments.clear()",
        "    b1 = empty_strided((3,), (1,), dtype=constant_torch_float32, device=constant_cpu)",
        "    kernel_one(b0, b1)",
        "    del b0",
        "    b2 = empty_strided((3,), (1,), dtype=constant_torch_float32, device=constant_cpu)",
        "    kernel_two(b1, b2)",
        "    del b1",
        "    return (b2, )",
    ]


def test_destination_is_written_and_returned():
    run = link(
        [doubling("nest", "x", "w", 3)], [whole("w", 3)], {"x": spec(3), "w": spec(3)}, destinations=("w",)
    )
    place = torch.zeros(3)
    (result,) = run([torch.ones(3), place])
    assert result is place and torch.equal(place, torch.full((3,), 2.0))


def test_view_of_an_input_that_begins_inside_its_storage():
    memory = torch.arange(10.0)
    run = link([], [View("x", (2,), (2,), 1)], {"x": spec(4)})
    (result,) = run([memory[3:7]])
    assert result.tolist() == [4.0, 6.0]


def test_view_of_a_result_of_torch_that_begins_inside_its_storage():
    run = link(
        [extern(aten.select.int, (whole("x", 2, 3), 0, 1), "row")],
        [View("row", (2,), (1,), 1)],
        {"x": spec(2, 3), "row": spec(3)},
    )
    (result,) = run([torch.arange(6.0).view(2, 3)])
    assert result.tolist() == [4.0, 5.0]


def test_view_of_a_constant_that_begins_inside_its_storage():
    constant = torch.arange(6.0)[2:]
    run = link([], [View("c", (2,), (1,), 1)], {"c": spec(4)}, inputs=(), constants={"c": constant})
    assert run([])[0].tolist() == [3.0, 4.0]


def test_several_results_some_of_them_unused():
    run = link(
        [extern(aten.max.dim, (whole("x", 2, 3), 1), None, "indices")],
        [whole("indices", 2)],
        {"x": spec(2, 3), "indices": spec(2, dtype=torch.int64)},
    )
    assert run([torch.tensor([[1.0, 3, 2], [4, 0, 0]])])[0].tolist() == [1, 0]


@pytest.mark.parametrize("rows", [1, 2])
def test_unused_result(rows):
    """An operator that is called for what it does to the generator."""
    run = link([extern(aten.rand_like.default, (whole("x", rows, 3),), None)], [], {"x": spec(rows, 3)})
    state = torch.get_rng_state()
    assert run([torch.ones(rows, 3)]) == ()
    assert not torch.equal(torch.get_rng_state(), state)


def test_result_that_is_a_list():
    run = link(
        [extern(aten.split.Tensor, (whole("x", 4), 2), "a", "b")],
        [whole("b", 2)],
        {"x": spec(4), "a": spec(2), "b": spec(2)},
    )
    assert run([torch.arange(4.0)])[0].tolist() == [2.0, 3.0]


def test_out_variant_writes_into_a_given_buffer():
    call = ExternCall(aten.add.out, (whole("x", 3), 1), {}, (), {"out": whole("y", 3)})
    run = link([call], [whole("y", 3)], {"x": spec(3), "y": spec(3)})
    assert run([torch.ones(3)])[0].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e20, 1e-20, -2.5, 3, True])
def test_numbers(value):
    steps = [
        extern(aten.full.default, ([1], number), name, dtype=torch.float64)
        for name, number in (("a", value), ("b", 1e20), ("c", 1e-20), ("d", math.inf))
    ]
    run = link(
        steps,
        [whole(name, 1) for name in "abcd"],
        {name: spec(1, dtype=torch.float64) for name in "abcd"},
        inputs=(),
    )
    assert [result.item() for result in run([])] == [value, 1e20, 1e-20, math.inf]


def test_values_whose_names_look_alike_stay_apart():
    run = link(
        [
            extern(aten.mul.Tensor, (whole("x", 1), 1 + 2j), "a"),
            extern(aten.mul.Tensor, (whole("x", 1), 1 - 2j), "b"),
        ],
        [whole("a", 1), whole("b", 1)],
        {"x": spec(1), "a": spec(1, dtype=torch.complex64), "b": spec(1, dtype=torch.complex64)},
    )
    assert [result.item() for result in run([torch.ones(1)])] == [1 + 2j, 1 - 2j]


def test_nest_without_kernel():
    program = LoopProgram(
        "test",
        ("x",),
        (),
        {"x": spec(3), "y": spec(3)},
        {},
        (doubling("nest", "x", "y", 3),),
        (whole("y", 3),),
    )
    with pytest.raises(InternalError, match="no kernel for nest nest"):
        link_program(program, [], {})


def test_traceback_shows_the_generated_line():
    run = link(
        [extern(aten.mm.default, (whole("x", 3), whole("x", 3)), "y")], [], {"x": spec(3), "y": spec(3)}
    )
    with pytest.raises(RuntimeError) as raised:
        run([torch.ones(3)])
    assert "extern_aten_mm_default(b0, b0)" in str(raised.getrepr())


def test_buffer_without_elements_that_nothing_writes():
    run = link(
        [extern(aten.sum.default, (whole("y", 0),), "z")],
        [whole("y", 0), whole("z")],
        {"x": spec(0), "y": spec(0), "z": spec()},
    )
    y, z = run([torch.ones(0)])
    assert y.shape == (0,) and z.item() == 0


def test_nothing_is_allocated_once_an_input_has_its_new_value() -> None:
    """What fails for want of memory is called again, with the values of before."""
    program = LoopProgram(
        "test", ("x", "y"), (), {"x": spec(4), "y": spec(4), "z": spec(4), "t": spec(4)}, {},
        (doubling("first", "y", "t", 4), doubling("second", "t", "x", 4), doubling("third", "t", "z", 4)),
        (whole("x", 4), whole("z", 4)), ("x",),
    )  # fmt: skip
    kinds = [type(step).__name__ for step in instructions_of(program, kernels_take_addresses=False).steps]
    assert kinds == ["Allocate", "Launch", "Free", "Allocate", "Launch", "Launch", "Free"]
