"""What the recorder writes down: pure operators, decompositions, constants, marks, batch normalisation's changes."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.traceback import annotate, preserve_node_meta

from gradsplit.compile_core.autograd.tracing.record_operators import record

aten = torch.ops.aten


def targets(function, *tensors, decompositions=None):
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in tensors]
    with mode:
        module = record(lambda _, *given: function(*given), fakes, (), decompositions or {}, mode)
    return [node.target for node in module.graph.nodes if node.op == "call_function"], module


def test_changes_in_place_and_views_become_pure_operators():
    def program(x):
        y = x.clone()
        y.view(6)[:3].mul_(2)
        return [y]

    names, module = targets(program, torch.ones(2, 3))
    assert not any(target._schema.is_mutable for target in names)
    (result,) = module(torch.ones(2, 3))
    assert result.tolist() == [[2, 2, 2], [1, 1, 1]]


def test_gradients_asked_for_inside_are_recorded():
    def program(x):
        (gradient,) = torch.autograd.grad((x * x).sum(), [x])
        return [gradient]

    _, module = targets(program, torch.ones(3, requires_grad=True))
    (gradient,) = module(torch.arange(3.0))
    assert gradient.tolist() == [0, 2, 4]


def test_a_decomposition_may_decline_and_may_use_composite_operators():
    def silu(x):
        return aten.linear.default(x, x) if x.dim() == 2 else NotImplemented

    table = {aten.silu.default: silu}
    names, _ = targets(lambda x: [F.silu(x)], torch.ones(2, 2), decompositions=table)
    assert aten.linear.default not in names
    assert aten.mm.default in names
    names, _ = targets(lambda x: [F.silu(x)], torch.ones(2), decompositions=table)
    assert names == [aten.silu.default]


def test_constants_are_held_and_not_changed_by_running_the_graph():
    def program(x):
        step = torch.tensor([1.0, 2.0])
        step.add_(1)
        return [x + step]

    _, module = targets(program, torch.zeros(2))
    for _ in range(2):
        (result,) = module(torch.zeros(2))
        assert result.tolist() == [2, 3]


def test_annotations_are_kept():
    def program(x):
        with annotate({"part": 1}):
            y = x + 1
        return [y * 2]

    with preserve_node_meta():
        _, module = targets(program, torch.zeros(2))
    marks = {node.target: node.meta.get("custom") for node in module.graph.nodes}
    assert marks[aten.add.Tensor] == {"part": 1}
    assert marks[aten.mul.Tensor] is None


@pytest.mark.parametrize("operator", [aten.native_batch_norm.default, aten.cudnn_batch_norm.default])
@pytest.mark.parametrize("training", [True, False])
def test_batch_normalisation_changes_its_running_statistics(operator, training):
    def program(x, mean, var, weight, bias):
        result = operator(x, weight, bias, mean, var, training, 0.25, 1e-5)[0]
        return [result, mean, var]

    x, weight, bias = torch.randn(4, 3, 5), torch.randn(3), torch.randn(3)
    _, module = targets(program, x, torch.zeros(3), torch.ones(3), weight, bias)
    result, mean, var = module(x, torch.zeros(3), torch.ones(3), weight, bias)
    expected_mean, expected_var = torch.zeros(3), torch.ones(3)
    expected = F.batch_norm(x, expected_mean, expected_var, weight, bias, training, 0.25)
    torch.testing.assert_close((result, mean, var), (expected, expected_mean, expected_var), rtol=0, atol=0)


def test_the_gradient_of_cudnns_batch_normalisation_is_the_native_one():
    def program(x, weight, bias):
        statistics = (torch.zeros(3), torch.ones(3))
        result = aten.cudnn_batch_norm.default(x, weight, bias, *statistics, True, 0.1, 1e-5)[0]
        return torch.autograd.grad(result.square().sum(), [x, weight, bias])

    tensors = [torch.randn(4, 3, 5), torch.randn(3), torch.randn(3)]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    names, module = targets(program, *leaves)
    assert aten.cudnn_batch_norm_backward.default not in names
    expected = torch.autograd.grad(
        F.batch_norm(leaves[0], None, None, *leaves[1:], True).square().sum(), leaves
    )
    torch.testing.assert_close(module(*tensors), tuple(expected), rtol=0, atol=0)
