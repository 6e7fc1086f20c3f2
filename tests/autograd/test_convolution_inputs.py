"""Large inputs of convolutions are written again in the backward, beside the gradient that comes to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gradsplit
from gradsplit.compile_core.autograd.partitioning import convolution_inputs
from gradsplit.compile_core.autograd.partitioning.convolution_inputs import make_gradients_apart
from gradsplit.compile_core.autograd.partitioning.partition import partition
from gradsplit.compile_core.autograd.partitioning.recompute_orders import Order
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.loops import ExternCall, LoopProgram
from gradsplit.compile_core.ir.regions import whole_schedule
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.ir.verify_graphs import verify_partition
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from tests.autograd.compare_with_eager import captured, check, fakes
from tests.lowering.move_graph import on_gpu

aten = torch.ops.aten
Activation = Callable[[torch.Tensor], torch.Tensor]


def norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, scale, shift, True)


def relu_of_norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return F.relu(norm(x, scale, shift))


def network(between: Callable[..., Any], x, first, scale, shift, second):
    """The value that ``between`` makes of the first convolution's result is what the second one reads."""
    return F.conv2d(between(F.conv2d(x.sin(), first, padding=1), scale, shift), second, padding=1).sum()


def silu_of_groups(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return F.silu(F.group_norm(x, 4, scale, shift))


def weights(channels: int = 16) -> list[torch.Tensor]:
    shapes = [(channels, channels, 3, 3), (channels,), (channels,), (channels, channels, 3, 3)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def image(side: int = 32, count: int = 128) -> torch.Tensor:
    return torch.randn(count, 16, side, side, requires_grad=True)


def partitioned(program: Callable[..., Any], *inputs: torch.Tensor, device: str = "cuda") -> PartitionedGraph:
    joint = trace_joint(captured(program), fakes(inputs), decomposition_table(device))
    if device == "cuda":
        on_gpu(joint.module)
    graph = partition(joint)
    verify_partition(joint, graph)
    return graph


def gradients_made(graph: PartitionedGraph) -> list[list[bool]]:
    assert graph.backward is not None
    calls = graph.backward.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    return [list(call.args[-1][:2]) for call in calls]


@pytest.fixture
def any_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much it is of what is saved: these networks have few layers."""
    monkeypatch.setattr(convolution_inputs, "_PART_OF_SAVED", 1)


def two_readers(x, first, scale, shift, second):
    value = relu_of_norm(F.conv2d(x.sin(), first, padding=1), scale, shift)
    return F.conv2d(value, second, padding=1).sum() + F.conv2d(value, first, padding=1).sum()


def returned(x, first, scale, shift, second):
    value = relu_of_norm(F.conv2d(x.sin(), first, padding=1), scale, shift)
    return F.conv2d(value, second, padding=1).sum(), value


def source_returned(x, first, scale, shift, second):
    source = F.conv2d(x.sin(), first, padding=1)
    return F.conv2d(relu_of_norm(source, scale, shift), second, padding=1).sum(), source


def residual(x, first, scale, shift, second):
    value = F.conv2d(F.conv2d(x.sin(), first, padding=1), second, padding=1)
    value = F.relu(norm(value, scale, shift) + x)
    return F.conv2d(value, second, padding=1).sum()


def read_before(x, first, scale, shift, second):
    """A product of the backward needs the value before the convolution's gradient is there."""
    value = relu_of_norm(F.conv2d(x.sin(), first, padding=1), scale, shift)
    result = F.conv2d(value, second, padding=1)
    return (result * value.exp()).sin().sum()


def not_beside(x, first, scale, shift, second):
    """What the value is computed from is saved for another convolution; no kernel reads it."""
    source = F.conv2d(x.sin(), first, padding=1)
    return (F.conv2d(source * 2, second, padding=1) + F.conv2d(source, first, padding=1)).sum()


def frozen(x, first, scale, shift, second):
    value = relu_of_norm(F.conv2d(x.sin(), first, padding=1), scale, shift)
    return F.conv2d(value, second.detach(), padding=1).sum()


def of(between: Callable[..., Any]) -> Callable[..., Any]:
    def program(x, first, scale, shift, second):
        return network(between, x, first, scale, shift, second)

    return program


@pytest.mark.parametrize(
    ("program", "side", "device", "is_saved"),
    [
        (of(relu_of_norm), 32, "cuda", False),
        (of(norm), 32, "cuda", False),
        (of(silu_of_groups), 32, "cuda", False),
        (of(relu_of_norm), 32, "cpu", True),
        (of(relu_of_norm), 8, "cuda", True),
        # Its kernel does not read what this is computed from, which lies otherwise in memory.
        (of(lambda x, scale, shift: F.pad(norm(x, scale, shift), (1, 1))), 32, "cuda", True),
        # A call of torch's has several results.
        (of(lambda x, *_: F.relu(F.max_pool2d(x, 7, 1, 3))), 32, "cuda", True),
        (two_readers, 32, "cuda", True),
        (returned, 32, "cuda", True),
        (source_returned, 32, "cuda", True),
        (residual, 32, "cuda", True),
        (not_beside, 32, "cuda", True),
        (frozen, 32, "cuda", True),
        (read_before, 32, "cuda", True),
    ],
)
@pytest.mark.usefixtures("any_part")
def test_a_large_input_is_written_again_where_its_gradient_comes(
    program: Callable[..., Any], side: int, device: str, is_saved: bool
) -> None:
    graph = partitioned(program, image(side), *weights(), device=device)
    assert all(for_input for for_input, _ in gradients_made(graph)) == is_saved


def test_it_is_done_up_to_a_part_of_what_is_saved():
    def deep(x, first, scale, shift, second):
        for _ in range(8):
            x = relu_of_norm(F.conv2d(x, first, padding=1), scale, shift)
        return F.conv2d(x, second, padding=1).sum()

    graph = partitioned(deep, image(), *weights())
    made = gradients_made(graph)
    assert made.count([True, False]) == made.count([False, True]) == 1
    # The first layer's, which would be there the longest.
    assert made[-3:] == [[True, False], [False, True], [True, True]]


@pytest.mark.usefixtures("any_part")
def test_what_is_computed_from_such_an_input_is_no_other():
    """It would be computed with it, long before its own gradient comes."""

    def program(x, first, scale, shift, second):
        value = relu_of_norm(F.conv2d(x, first, padding=1), scale, shift)
        return (F.conv2d(value, first, padding=1) + F.conv2d(value.tanh(), second, padding=1)).sum()

    made = gradients_made(partitioned(program, image(), *weights()))
    assert made.count([False, True]) == 1


@pytest.mark.usefixtures("any_part")
def test_a_checkpoints_orders_stand(monkeypatch: pytest.MonkeyPatch):
    def orders(graph: torch.fx.Graph, *_: Any) -> dict[torch.fx.Node, Order]:
        return dict.fromkeys(graph.find_nodes(op="call_function", target=aten.relu.default), Order.SAVE)

    monkeypatch.setattr("gradsplit.compile_core.autograd.partitioning.partition.find_orders", orders)
    assert [False, True] not in gradients_made(partitioned(of(relu_of_norm), image(), *weights()))


@pytest.mark.usefixtures("any_part")
def test_slices_lie_as_the_gradient_of_the_result_does():
    """What they are cut from does not."""

    def program(x, first, scale, shift, second):
        value = relu_of_norm(F.conv2d(x, first, padding=1), scale, shift)
        parts, weights = value.chunk(2, 1), second.chunk(2)
        return (F.conv2d(parts[0], weights[0], padding=1) * F.conv2d(parts[1], weights[1], padding=1)).sum()

    def narrow(x: torch.Tensor) -> torch.Tensor:
        return x.detach().bfloat16().requires_grad_()

    first, scale, shift, _ = weights()
    second = torch.randn(16, 8, 3, 3)
    graph = partitioned(program, narrow(image(64)), narrow(first), scale, shift, narrow(second))
    assert [False, True] in gradients_made(graph)


def loops(graph: PartitionedGraph) -> LoopProgram:
    assert graph.backward is not None
    (compute,) = whole_schedule("backward", graph.backward).computes
    return fuse(lower(compute))


def test_no_kernel_is_needed_for_it(monkeypatch: pytest.MonkeyPatch):
    inputs = [image(), *weights()]
    saved = loops(partitioned(of(relu_of_norm), *inputs))
    monkeypatch.setattr(convolution_inputs, "_PART_OF_SAVED", 1)
    again = loops(partitioned(of(relu_of_norm), *inputs))

    def kernels(program: LoopProgram) -> list[Any]:
        return [step for step in program.steps if not isinstance(step, ExternCall)]

    assert len(kernels(again)) == len(kernels(saved))
    # The input's gradient waits for nothing, and of its call's arguments none is the input.
    for_input, for_weight, *_ = [step for step in again.steps if isinstance(step, ExternCall)]
    (written,) = reads(for_weight) - reads(for_input)
    (kernel,) = [step for step in again.steps if written in writes(step)]
    assert not writes(for_input).isdisjoint(reads(kernel))


@pytest.fixture
def written_again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Inputs of all sizes are, on CPUs too; how many of each backward."""
    found: list[int] = []

    def note(backward: torch.fx.GraphModule, convolutions: Mapping[str, str]) -> None:
        found.append(len(convolutions))
        make_gradients_apart(backward, convolutions)

    monkeypatch.setattr(convolution_inputs, "_is_large", lambda node: True)
    monkeypatch.setattr("gradsplit.compile_core.autograd.partitioning.partition.make_gradients_apart", note)
    return found


@pytest.mark.usefixtures("any_part")
@pytest.mark.parametrize("between", [relu_of_norm, norm, silu_of_groups])
def test_gradients_are_the_same(between: Callable[..., Any], written_again: list[int]) -> None:
    check(of(between), image(6, 2), *weights(), backend="triton", atol=1e-4, rtol=1e-4)
    assert written_again == [1]


@pytest.mark.usefixtures("any_part")
def test_what_plain_pytorch_does_not_save_may_change_before_the_backward(written_again: list[int]) -> None:
    """A norm's shift, which the value is computed from, is no part of the norm's gradient."""

    def gradients(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        inputs = [torch.nn.Parameter(x.detach()) for x in (image(6, 2), *weights())]
        result = call(*inputs)
        with torch.no_grad():
            inputs[3].add_(5.0)
        return list(torch.autograd.grad(result, inputs))

    found, expected = gradients(gradsplit.compile(of(norm))), gradients(of(norm))
    assert written_again == [1]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("sides", [1, 2, 3])
@pytest.mark.parametrize("is_last", [False, True])
def test_an_inputs_gradient_reads_nothing_of_the_input(
    dtype: torch.dtype, groups: int, is_transposed: bool, sides: int, is_last: bool
) -> None:
    """That is what the call for it alone relies on."""
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    memory_format = formats.get(sides, torch.contiguous_format) if is_last else torch.contiguous_format
    settings = ([1] * sides, [1] * sides, [1] * sides, is_transposed, [0] * sides, groups)
    with torch.device("cuda"):
        x = torch.randn(2, 16, *[8] * sides, dtype=dtype).contiguous(memory_format=memory_format)
        weight = torch.randn(16, 16 // groups, *[3] * sides, dtype=dtype).contiguous(
            memory_format=memory_format
        )
    gradient = torch.randn_like(aten.convolution(x, weight, None, *settings))
    both = aten.convolution_backward(gradient, x, weight, None, *settings, [True, True, False])
    alone = aten.convolution_backward(
        gradient, torch.full_like(x, float("nan")), weight, None, *settings, [True, False, False]
    )
    torch.testing.assert_close(alone[0], both[0])
    assert alone[0].stride() == both[0].stride()
