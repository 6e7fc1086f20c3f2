"""Results that go straight into buffers of the caller, and the strides that results have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.loops import LoopProgram
from gradsplit.compile_core.ir.verify_loops import verify_program
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from gradsplit.compile_core.lowering.nests.order_axes import simplify
from tests.lowering.convolution_programs import LAYOUTS, inputs, weight_gradient
from tests.lowering.loop_evaluator import evaluate
from tests.lowering.lowering_harness import calls, check, compute_of, nests, trace


def _into_destinations(
    function: Callable[..., object],
    *inputs: Tensor,
    turn: Callable[[Tensor], Tensor] = Tensor.contiguous,
) -> LoopProgram:
    """Sends every result of ``function`` to a destination, which lies as ``turn`` lays out a result, and compares what
    arrives there."""
    module = trace(function, *inputs)
    expected = module(*inputs)
    names = {f"result_{n}": f"bucket_{n}" for n in range(len(expected))}
    buffers = [torch.full_like(turn(result), float("nan")) for result in expected]
    strides = {name: buffer.stride() for name, buffer in zip(names, buffers, strict=True)}
    program = fuse(lower(compute_of(module, names, strides)))
    verify_program(program)
    assert program.destinations == tuple(names)
    returned = evaluate(program, inputs, buffers)
    for buffer, result, value in zip(buffers, expected, returned, strict=True):
        torch.testing.assert_close(buffer, result)
        assert value is not None and value.data_ptr() == buffer.data_ptr()
    return program


def _temporaries(program: LoopProgram) -> set[str]:
    return set(program.buffers) - set(program.inputs) - set(program.destinations) - set(program.constants)


FUNCTIONS: list[tuple[Callable[..., object], int]] = [
    (lambda x, y: x + y, 0),
    (lambda x, y: x.sum(0), 0),
    (lambda x, y: (x * y).t(), 0),
    (lambda x, y: x @ y.t(), 0),
    (lambda x, y: (x @ y.t()).t(), 0),
    (lambda x, y: (x @ y.t()) * 0.25, 0),
    (lambda x, y: (x @ y.t()).t() / 4, 0),
    (lambda x, y: torch.cat([x, y]), 0),
    (lambda x, y: (x + y).view(-1), 0),
    (lambda x, y: (x.exp() + y, x.exp().sum(1)), 0),
    (lambda x, y: (x, y.t()), 0),  # inputs are copied
    (lambda x, y: torch.cumsum(x * 2, 0), 1),
    (lambda x, y: torch.sort(x)[0], 1),
    (lambda x, y: [x + y] * 2, 0),
    (lambda x, y: ((z := x @ y.t()), z * 2), 0),
]


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_results_are_written_where_the_caller_wants_them(number: int) -> None:
    function, temporaries = FUNCTIONS[number]
    program = _into_destinations(function, torch.randn(6, 6), torch.randn(6, 6))
    assert len(_temporaries(program)) <= temporaries


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_destinations_lie_in_any_order(number: int) -> None:
    """Column by column, as the transpose of a product does."""
    function, temporaries = FUNCTIONS[number]

    def turned(result: Tensor) -> Tensor:
        return result.contiguous() if result.dim() < 2 else result.t().contiguous().t()

    program = _into_destinations(function, torch.randn(6, 6), torch.randn(6, 6), turn=turned)
    # A view as one row of what lies column by column is a copy.
    assert len(_temporaries(program)) <= temporaries


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_convolutions_lie_as_their_weights(layout: torch.memory_format) -> None:
    program = _into_destinations(
        weight_gradient, *inputs(layout), turn=lambda result: result.contiguous(memory_format=layout)
    )
    (store,) = nests(program)
    # From torch's kernel to the destination, neighbours stay neighbours.
    assert len(simplify(store).extents) == 1


def test_a_factor_stays_where_the_product_has_other_users() -> None:
    program = _into_destinations(
        lambda x, y: ((z := x @ y) * 0.5, z.sum()), torch.randn(4, 4), torch.randn(4, 4)
    )
    assert calls(program)[0].target is torch.ops.aten.mm.out


def test_garbage_in_a_destination_does_not_reach_the_result() -> None:
    program = _into_destinations(lambda x, y: (x @ y) * 0.5, torch.randn(4, 4), torch.randn(4, 4))
    (call,) = calls(program)
    assert call.target is torch.ops.aten.addmm.out and dict(call.keywords) == {"beta": 0, "alpha": 0.5}


def test_results_have_eagers_strides() -> None:
    x = torch.randn(3, 4, 5)
    check(lambda x: ((x * 2).permute(2, 0, 1), x[:, 1:3], x.expand(2, 3, 4, 5), (x + 1)[:, ::2]), x)
    check(lambda x: (x.permute(2, 0, 1) * 2, (x * 2).expand(2, 3, 4, 5), torch.empty_like(x).fill_(1)), x)


def test_copies_to_inputs_come_last() -> None:
    def update(x: Tensor, y: Tensor) -> list[Tensor]:
        new = x * 0.9 + y
        return [x + 1, torch.ops.aten.copy_.default(x, new)]

    x, y = torch.randn(3), torch.randn(3)
    graph = torch.fx.Graph()
    placeholders = [graph.placeholder(name) for name in "xy"]
    target = torch.ops.aten
    scaled = graph.call_function(target.mul.Tensor, (placeholders[0], 0.9))
    new = graph.call_function(target.add.Tensor, (scaled, placeholders[1]))
    old = graph.call_function(target.add.Tensor, (placeholders[0], 1))
    copied = graph.call_function(target.copy_.default, (placeholders[0], new))
    graph.output((old, copied))
    for node in graph.nodes:
        node.meta["val"] = x
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    program = fuse(lower(compute_of(module)))
    verify_program(program)
    expected_input = x.clone()
    expected = update(expected_input, y)
    actual = evaluate(program, [x, y])
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(x, expected_input)
    assert len(nests(program)) == 1


def test_symbolic_sizes_are_refused() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    module = make_fx(lambda x: (x + 1,), tracing_mode="symbolic")(torch.randn(3))
    with pytest.raises(Unsupported, match="symbolic-shape"):
        lower(compute_of(module))
