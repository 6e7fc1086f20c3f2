"""What a graph for a GPU computes on the CPU, where no GPU is: how it is cut off, and that each call computes it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import gradsplit
from gradsplit.compile_core import pipeline
from gradsplit.compile_core.autograd.bound_graphs.after_host_part import AfterHostPart
from gradsplit.compile_core.autograd.captured_graphs import host_part as host_parts
from gradsplit.compile_core.autograd.captured_graphs.fake_values import note_fake_values
from gradsplit.compile_core.autograd.captured_graphs.host_part import host_part, moved
from gradsplit.compile_core.ir.host_part import HostPart
from gradsplit.compile_core.runtime.cuda_graphs import graph_programs
from tests.autograd.compare_with_eager import check_drawing_call
from tests.runtime.recorder_on_cpu import LendingRecorder

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


def graph_of(program: Callable[..., Any], *inputs: Tensor) -> torch.fx.GraphModule:
    """What capture makes of the program."""
    found: list[torch.fx.GraphModule] = []

    def keep(module: torch.fx.GraphModule, examples: Any) -> Any:
        found.append(module)
        return module.forward

    gradsplit.compile(program, backend=keep, fullgraph=True)(*inputs)
    (module,) = found
    return module


def parts_of(
    program: Callable[..., Any], *inputs: Tensor, on_host: tuple[int, ...] = (1,), requires_grad: bool = False
) -> HostPart | None:
    """The parts of a program whose inputs lie on the GPU but for those at the positions ``on_host``."""
    module = graph_of(program, *inputs)
    put_on(GPU, module)
    for node in module.graph.nodes:
        node.meta.pop("example_value", None)
    position_of = {f"L_{name}_": k for k, name in enumerate(inspect.signature(program).parameters)}
    with FakeTensorMode():
        examples = []
        for node in module.graph.find_nodes(op="placeholder"):
            k = position_of[node.target]
            device = CPU if k in on_host else GPU
            examples.append(torch.empty(inputs[k].shape, dtype=inputs[k].dtype, device=device))
    note_fake_values(module, examples)
    if requires_grad:  # autograd does not run for a GPU that is not there
        for value in (*examples, *(node.meta.get("example_value") for node in module.graph.nodes)):
            if isinstance(value, Tensor) and value.device == CPU:
                value.requires_grad_()
    return host_part(module, examples)


def put_on(device: torch.device, module: torch.fx.GraphModule) -> None:
    """Where the graph names a device, it is this one."""
    for node in module.graph.nodes:
        node.args = tuple(device if isinstance(given, torch.device) else given for given in node.args)
    module.recompile()


def called(module: torch.fx.GraphModule) -> list[str]:
    nodes = [node for node in module.graph.nodes if node.op.startswith("call")]
    return [node.target if isinstance(node.target, str) else node.target.__name__ for node in nodes]


X, SCALE, POSITIONS = torch.ones(4), torch.tensor(2.0), torch.arange(4)


def test_numbers_are_moved() -> None:
    parts = parts_of(lambda x, scale: x * scale + scale, X, SCALE)
    assert parts is not None and called(parts.host) == ["moved"] and called(parts.device) == ["mul", "add"]
    parts = parts_of(lambda x, scale: (x * scale, scale.neg()), X, SCALE)
    assert parts is not None and called(parts.host) == ["neg", "moved"] and called(parts.device) == ["mul"]
    assert parts_of(lambda x, scale: x + 1, X, SCALE) is None


def test_what_runs_before() -> None:
    def skips_a_layer(x: Tensor, positions: Tensor) -> Any:
        chance = torch.rand([])
        x = x + (positions + 1).to(x.device, torch.float32)
        return x.sin() * chance, chance < 0.5

    parts = parts_of(skips_a_layer, X, POSITIONS)
    assert parts is not None
    assert called(parts.host) == ["rand", "add", "to", "lt", "moved"]
    assert called(parts.device) == ["add", "sin", "mul"]


def test_constants_are_left_to_the_compiler() -> None:
    def by_width(x: Tensor, scale: Tensor) -> Any:
        width = torch.sqrt(torch.tensor(4.0) * 3)
        return x / width * scale, width + 1

    parts = parts_of(by_width, X, SCALE)
    assert parts is not None
    assert called(parts.host) == ["tensor", "mul", "sqrt", "add", "moved"]
    assert called(parts.device) == ["tensor", "mul", "sqrt", "truediv", "mul"]
    assert parts_of(lambda x, scale: x * torch.tensor(2.0), X, SCALE) is None


@pytest.mark.parametrize(
    "program",
    [
        lambda x, positions: x + positions.add_(1).to(x.device, torch.float32),
        lambda x, positions: (x * torch.rand([]), torch.empty(4).copy_(x) * positions),
    ],
    ids=["changes", "needs-the-gpu"],
)
def test_left_whole(program: Any) -> None:
    assert parts_of(program, X, POSITIONS) is None


def test_gradients_are_not_for_the_host() -> None:
    program = lambda x, scale: x * (scale * 2)  # noqa: E731
    assert parts_of(program, X, SCALE, requires_grad=True) is None
    assert parts_of(program, X, SCALE) is not None


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(2.5),
        torch.tensor(2**53 + 1),
        torch.tensor(True),
        torch.tensor(1j),
        torch.tensor(0.1).bfloat16(),
    ],
)
def test_moved_numbers_are_the_same(value: Tensor) -> None:
    found = moved(value, CPU)
    assert found is not value and found.dtype == value.dtype and torch.equal(found, value)


def programs() -> list[Callable[..., Any]]:
    def numbers(x: Tensor, scale: Tensor, positions: Tensor) -> Any:
        return (x * scale).sin()

    def several(x: Tensor, scale: Tensor, positions: Tensor) -> Any:
        chance = torch.rand([])
        with torch.no_grad():
            shift = torch.rand(()) * scale
        y = x * chance + shift + positions.to(x.device, torch.float32)
        return y, chance < 0.5, y.cos() * scale, positions + 1

    return [numbers, several]


@pytest.mark.parametrize("program", programs())
def test_each_call_computes_it(program: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = LendingRecorder()
    monkeypatch.setattr(pipeline, "with_cuda_graphs", functools.partial(graph_programs, recorder=recorder))
    monkeypatch.setattr(host_parts, "moved", lambda number, device: moved(number, CPU))
    # The parts are those for a GPU, and run on the CPU.
    cut: list[HostPart] = []

    def parts_for_a_gpu(module: Any, examples: Any) -> HostPart | None:
        if cut:
            return None
        with torch.random.fork_rng():
            found = parts_of(program, X, SCALE, POSITIONS, on_host=(1, 2))
        assert found is not None
        put_on(CPU, found.host)
        put_on(CPU, found.device)
        for k, node in enumerate(found.device.graph.find_nodes(op="placeholder")):
            value = node.meta["example_value"]
            with examples[0].fake_mode:
                handed = torch.empty(value.shape, dtype=value.dtype)
            is_given = k < len(found.device_inputs)
            node.meta["example_value"] = examples[found.device_inputs[k]] if is_given else handed
        for node in found.device.graph.nodes:
            if node.op != "placeholder":
                node.meta.pop("example_value", None)
        cut.append(found)
        return found

    monkeypatch.setattr(pipeline, "host_part", parts_for_a_gpu)
    compiled = gradsplit.compile(program, mode="reduce-overhead")
    x, scale, positions = torch.randn(4, requires_grad=True), torch.tensor(1.0), torch.arange(4)
    for step in range(6):
        scale = scale + step if step % 2 else scale.add_(1)
        positions = positions + 1
        check_drawing_call(compiled, program, step, x, scale, positions)
    assert cut and recorder.replayed >= 4


def test_results_keep_their_order() -> None:
    class Runs:
        programs = ()

        def __call__(self, *inputs: Any) -> Any:
            return parts.device.forward(*inputs)

    module = graph_of(lambda x, p: (p + 1, x + 1, p * 2, x * 2), X, POSITIONS)
    (output,) = module.graph.find_nodes(op="output")
    placeholders = module.graph.find_nodes(op="placeholder")
    output.args = ((*placeholders, *output.args[0], *reversed(placeholders)),)
    module.recompile()
    with FakeTensorMode():
        examples = [torch.empty(4, device=CPU if "p" in node.name else GPU) for node in placeholders]
    for node in module.graph.nodes:
        node.meta.pop("example_value", None)
    note_fake_values(module, examples)
    parts = host_part(module, examples)
    assert parts is not None
    given = [POSITIONS if "p" in node.name else X for node in placeholders]
    for found, expected in zip(AfterHostPart(parts, Runs())(*given), module(*given), strict=True):
        assert torch.equal(found, expected)
