"""Runs a program through the stages with torch's own kernels, and the same program eagerly, and compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gradsplit
from gradsplit.compile_core.autograd.partitioning.partition import partition
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.backends.registry import RegionBackend, resolve_backend
from gradsplit.compile_core.ir.graphs import JointGraph, PartitionedGraph
from gradsplit.compile_core.options import parse_options
from gradsplit.compile_core.pipeline import CompiledGraph, SchedulePlanner, compile_stages

Program = Callable[..., Any]


def captured(program: Program) -> torch.fx.GraphModule:
    """The graph that capture would make of a function of tensors: a flat tuple comes out."""
    if isinstance(program, torch.fx.GraphModule):
        return program
    module = torch.fx.symbolic_trace(program)
    (output,) = module.graph.find_nodes(op="output")
    if not isinstance(output.args[0], (tuple, list)):
        output.args = ((output.args[0],),)
    module.recompile()
    return module


def fakes(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    mode = FakeTensorMode()
    return [
        mode.from_tensor(tensor.detach(), static_shapes=True).requires_grad_(tensor.requires_grad)
        for tensor in inputs
    ]


def joint_graph(program: Program, *inputs: torch.Tensor) -> JointGraph:
    return trace_joint(captured(program), fakes(inputs), {})


def partitioned_graph(program: Program, *inputs: torch.Tensor) -> PartitionedGraph:
    return partition(joint_graph(program, *inputs))


def compile_program(
    program: Program,
    inputs: Sequence[torch.Tensor],
    planner: SchedulePlanner | None = None,
    backend: str = "aot_eager",
    options: Mapping[str, Any] | None = None,
) -> CompiledGraph:
    resolved = resolve_backend(backend)
    assert isinstance(resolved, RegionBackend)
    return compile_stages(
        captured(program),
        fakes(inputs),
        inputs,
        backend=resolved,
        options=parse_options(None, {"fallback_random": True, **(options or {})}),
        planner=planner,
    )


def copies(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Equal leaves with memory of their own, in the same layout."""
    copied = []
    for tensor in inputs:
        memory = tensor.detach().untyped_storage().clone()
        copied.append(
            torch.empty(0, dtype=tensor.dtype).set_(
                memory, tensor.storage_offset(), tensor.shape, tensor.stride()
            )
        )
        copied[-1].requires_grad_(tensor.requires_grad)
    return copied


def assert_same(actual: torch.Tensor, expected: torch.Tensor, **tolerance: float) -> None:
    """Equal values, and all that a program can see of a tensor besides."""
    torch.testing.assert_close(actual, expected, equal_nan=True, **(tolerance or {"rtol": 0, "atol": 0}))
    assert actual.requires_grad == expected.requires_grad
    assert actual.numel() == 0 or layout(actual) == layout(expected)


def layout(tensor: torch.Tensor) -> list[int]:
    """Strides; those of dims of one element say nothing."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def check(
    program: Program, *inputs: torch.Tensor, backend: str = "aot_eager", **tolerance: float
) -> CompiledGraph:
    """Results, changed inputs, gradients and random state are eager's; without a tolerance bit for bit."""
    module = captured(program)
    eager_inputs, compiled_inputs = copies(inputs), copies(inputs)
    state = torch.get_rng_state()
    compiled = compile_program(module, compiled_inputs, backend=backend)
    assert torch.equal(torch.get_rng_state(), state), "compiling moved the random generator"

    expected = module(*eager_inputs)
    state_after = torch.get_rng_state()
    torch.set_rng_state(state)
    actual = compiled(*compiled_inputs)
    assert torch.equal(torch.get_rng_state(), state_after), "the compiled program draws other random numbers"

    backward(expected)
    backward(actual)
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other, **tolerance)
    for one, other in zip(compiled_inputs, eager_inputs, strict=True):
        assert_same(one, other, **tolerance)
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert_same(one.grad, other.grad, **tolerance)
    return compiled


def backward(results: Sequence[torch.Tensor]) -> None:
    """Sends the same made-up gradients into all results that take one."""
    generator = torch.Generator().manual_seed(1)
    roots = [result for result in results if result.requires_grad]
    tangents = [
        torch.randn(root.shape, generator=generator, dtype=torch.float64).to(root.dtype) for root in roots
    ]
    if roots:
        torch.autograd.backward(roots, tangents)


def check_drawing_call(compiled: Program, program: Program, seed: int, *inputs: torch.Tensor) -> None:
    """Results, the state of the CPU's generator, and the gradient of the first input, of the first result or of the
    only one, are those of a plain call."""
    torch.manual_seed(seed)
    found = compiled(*inputs)
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    expected = program(*inputs)
    assert torch.equal(after, torch.get_rng_state())
    torch.testing.assert_close(found, expected)
    first, second = (value[0] if isinstance(value, tuple) else value for value in (found, expected))
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), inputs[0]) for y in (first, second)))


def check_call(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """The result of the compiled function, its strides and the gradients are those of a plain call."""
    plain, ours = copies(inputs), copies(inputs)
    expected, found = function(*plain), gradsplit.compile(function)(*ours)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()
    for result in (expected, found):
        (result * torch.arange(result.numel()).view(result.shape)).sum().backward()
    torch.testing.assert_close([tensor.grad for tensor in ours], [tensor.grad for tensor in plain])
