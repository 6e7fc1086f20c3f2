"""The joint trace, seen through the whole autograd stage: compiled programs behave as eager ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.amp import autocast_mode

from gradsplit.compile_core.errors import Unsupported
from tests.autograd.compare_with_eager import check, compile_program, joint_graph


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def test_multilayer_perceptron():
    def program(x, w1, b1, w2):
        return F.linear(F.gelu(F.linear(x, w1, b1)), w2).softmax(-1)

    check(program, torch.randn(3, 4), leaf(5, 4), leaf(5), leaf(2, 5))


def test_gradient_of_an_input_that_is_no_parameter():
    check(lambda x, w: (x @ w).sin(), leaf(3, 4), leaf(4, 2))


def test_float64():
    check(lambda x: x.exp() / 3, leaf(3, dtype=torch.float64))


def test_no_gradients_make_an_inference_graph():
    compiled = check(lambda x, y: x * y, torch.randn(3), torch.randn(3))
    assert compiled.backward is None


def test_no_grad_makes_an_inference_graph():
    with torch.no_grad():
        compiled = check(lambda x: x * 2, leaf(3))
    assert compiled.backward is None


def test_batch_norm_updates_running_statistics():
    def program(x, mean, var, count, weight, bias):
        count.add_(1)
        return F.batch_norm(x, mean, var, weight, bias, training=True, momentum=0.1)

    compiled = check(program, leaf(4, 3, 5), torch.zeros(3), torch.ones(3), torch.tensor(0), leaf(3), leaf(3))
    assert len(compiled.partitioned.signature.mutated) == 3


def test_batch_norm_in_evaluation():
    check(
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, training=False),
        leaf(4, 3, 5),
        torch.randn(3),
        torch.rand(3),
        leaf(3),
        leaf(3),
    )


def test_dropout_draws_what_eager_draws():
    check(lambda x, w: F.dropout(F.dropout(x @ w, 0.3) + 1, 0.5), leaf(8, 8), leaf(8, 8))


def test_dropout_of_a_transposed_tensor():
    check(lambda x: F.dropout(x.t(), 0.5), leaf(8, 6))


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
def test_unused_random_operator_still_advances(backend):
    def program(x):
        torch.rand_like(x)
        return x * torch.randn_like(x)

    check(program, leaf(5), backend=backend)


def test_equal_random_operators_stay_two():
    check(lambda x: (torch.rand_like(x) - torch.rand_like(x)) * x, leaf(5))


def test_in_place_random_operators():
    check(lambda x: x * torch.empty_like(x).uniform_(-1, 1) + torch.zeros_like(x).normal_(), leaf(5))


def test_attention():
    def program(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    check(program, leaf(2, 2, 8, 4), leaf(2, 2, 8, 4), leaf(2, 2, 8, 4))


def test_attention_with_dropout():
    def program(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    check(program, leaf(2, 2, 8, 4), leaf(2, 2, 8, 4), leaf(2, 2, 8, 4))


def test_convolution_in_channels_last():
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    check(lambda x, w: F.max_pool2d(F.conv2d(x, w, padding=1).relu(), 2), x, leaf(4, 3, 3, 3))


def test_embedding_and_cross_entropy():
    def program(tokens, targets, table):
        return F.cross_entropy(F.embedding(tokens, table) @ table.t(), targets)

    check(program, torch.randint(0, 7, (5,)), torch.randint(0, 7, (5,)), leaf(7, 4))


def test_parameter_used_twice():
    check(lambda x, w: (x @ w).tanh() @ w, torch.randn(3, 3), leaf(3, 3))


def test_unused_input_has_no_gradient():
    check(lambda x, unused: x * 2, leaf(3), leaf(3))


def test_integer_and_undifferentiable_results():
    check(lambda x, y: (x * 2, x.argmax(), y + 1, x.detach() * 3, x > 0), leaf(3), torch.randn(3))


def test_only_undifferentiable_results():
    compiled = check(lambda x: (x.argmax(), x > 0), leaf(3))
    assert compiled.backward is None


def test_intermediate_changed_in_place():
    def program(x):
        y = x * 2
        y[1:].mul_(3)
        y.t().add_(x.t())
        return y.exp()

    check(program, leaf(3, 3))


def test_input_changed_in_place():
    def program(x, w):
        x.mul_(2)
        x[0].add_(1)
        return x @ w

    check(program, torch.randn(3, 3), leaf(3, 3))


def test_input_read_and_then_changed():
    def program(x, w):
        y = w * x.sin()
        x.add_(1)
        return y

    check(program, torch.randn(3), leaf(3))


def test_saved_input_changed_too_early_is_left_to_eager():
    def program(x, w):
        y = w * x
        x.add_(1)
        return y

    unsupported("trace-failed", program, torch.randn(3), leaf(3))


def test_two_inputs_swapped_in_place():
    def program(x, y):
        old = x.clone()
        x.copy_(y)
        y.copy_(old)
        return x + y

    check(program, torch.randn(3), torch.randn(3))


def test_gradient_switched_off_in_the_graph():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    frozen = graph.call_method("sin", (x,))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    graph.output((graph.call_method("mul", (x, frozen)), frozen))
    check(torch.fx.GraphModule({}, graph), leaf(3))
    assert torch.is_grad_enabled()


def autocast_program(then: str = "relu") -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    mode = graph.call_function(autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, None))
    product = graph.call_method(then, (graph.call_function(torch.matmul, (x, w)),))
    again = graph.call_function(torch.matmul, (product, w))
    graph.call_function(autocast_mode._exit_autocast, (mode,))
    graph.output((again, graph.call_method("float", (product,))))
    return torch.fx.GraphModule({}, graph)


def test_autocast():
    check(autocast_program(), leaf(4, 4), leaf(4, 4), rtol=1e-2, atol=1e-2)
    assert torch.is_autocast_cache_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_around_the_program():
    with torch.autocast("cpu", torch.bfloat16):
        joint = joint_graph(lambda x, w: x @ w, leaf(4, 4), leaf(4, 4))
    (product,) = [node for node in joint.module.graph.nodes if node.name == "mm"]
    assert product.meta["val"].dtype is torch.bfloat16


def test_modes_are_restored_when_the_program_fails():
    module = autocast_program(then="nonzero")
    with pytest.raises(Unsupported, match="trace-failed"):
        joint_graph(module, leaf(4, 4), leaf(4, 4))
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()


def test_complex():
    check(lambda x, w: (x @ w).abs(), leaf(3, 3, dtype=torch.complex64), leaf(3, 3, dtype=torch.complex64))


def test_conjugated_complex_result():
    check(lambda x, w: (x * w).conj(), leaf(3, dtype=torch.complex64), leaf(3, dtype=torch.complex64))


def test_constant_tensor():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_method("mul", (x, graph.call_function(torch.arange, (3,)))),))
    check(torch.fx.GraphModule({}, graph), leaf(3))


def test_tensor_made_from_a_number():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    number = graph.call_function(torch.tensor, (2.5,))
    graph.output((graph.call_method("mul", (x, number)), number))
    check(torch.fx.GraphModule({}, graph), leaf(3))


def test_constant_changed_in_place_is_new_at_each_call():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    number = graph.call_function(torch.tensor, ([1.0, 2.0],))
    changed = graph.call_method("add_", (number, 1))
    graph.output((graph.call_method("mul", (x, changed)), changed))
    check(torch.fx.GraphModule({}, graph), leaf(2))


def test_expanded_input():
    x = torch.randn(3, 1).expand(3, 4)
    check(lambda x, w: x * w, x, leaf(3, 4))


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
def test_empty_tensor(backend):
    check(lambda x: x.exp(), leaf(0, 3), backend=backend)


# Results that are inputs, or that share memory.


def test_result_is_an_input():
    compiled = check(lambda x, w: (x, x * w), leaf(3), leaf(3))
    x = leaf(3)
    assert compiled(x, leaf(3))[0] is x


def test_result_is_a_view_of_an_input():
    compiled = check(lambda x: (x.view(3, 2)[1:], x * 2), leaf(2, 3))
    x = leaf(2, 3)
    view, _ = compiled(x)
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_result_is_a_view_of_an_input_at_an_offset():
    memory = torch.randn(10)
    compiled = check(lambda x: (x[1:3], x + 1), torch.randn(4))
    view, _ = compiled(memory[5:9])
    assert torch.equal(view, memory[6:8])


def test_result_is_a_detached_input():
    compiled = check(lambda x: (x.detach(), x * 2), leaf(3))
    x = leaf(3)
    detached, _ = compiled(x)
    assert not detached.requires_grad
    assert detached.data_ptr() == x.data_ptr()


def test_result_is_a_changed_input():
    check(lambda x, w: (x.add_(1), x.view(-1), x * w), torch.randn(3), leaf(3))


def test_the_same_result_twice():
    def program(x):
        y = x * 2
        return y, x + 1, y

    compiled = check(program, leaf(3))
    first, _, again = compiled(leaf(3))
    assert first is again


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
@pytest.mark.parametrize(
    "program",
    [
        lambda x: (x * 2, x * 2),
        lambda x: (x.exp(), x.exp().clone()),
        lambda x: (x.clone(), x.clone()),
        lambda x: (x.clone(), x + 1),
        lambda x: (torch.zeros_like(x), torch.zeros_like(x)),
        lambda x: (x.t().contiguous(), x.t().contiguous().view(-1)),
        lambda x: ((x + 1).view(-1), x + 1),
        lambda x: (x.detach().clone(), x.clone()),
    ],
)
def test_results_with_memory_of_their_own(program, backend):
    compiled = check(program, leaf(3, 3), backend=backend, rtol=1e-6, atol=1e-6)
    x = leaf(3, 3)
    memories = [tensor.untyped_storage().data_ptr() for tensor in (x, *compiled(x))]
    assert len(set(memories)) == len(memories)


# What is not compiled.


def unsupported(reason: str, program, *inputs: torch.Tensor) -> None:
    with pytest.raises(Unsupported) as raised:
        joint_graph(program, *inputs)
    assert raised.value.reason_id == reason


def test_results_that_share_memory_none_fills():
    def program(x):
        memory = x.new_empty(8)
        return memory.as_strided((2,), (1,), 1), memory.as_strided((2,), (1,), 2).view(torch.int32)

    unsupported("reinterpreting-view", program, torch.randn(2))


def test_changed_leaf_that_requires_grad():
    x = leaf(3)
    compiled = compile_program(lambda x: x.add_(1) * 2, [x])
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        compiled(x)


@pytest.mark.parametrize("change", [lambda x: x.t_(), lambda x: x.unsqueeze_(0), lambda x: x.resize_(1)])
def test_changed_metadata(change):
    unsupported("metadata-mutation", lambda x: (change(x) * 2,), torch.randn(2, 3))


def test_what_meshgrid_expands_is_not_written():
    def program(x):
        return (torch.meshgrid(x, x, indexing="ij")[1].nan_to_num_(),)

    unsupported("overlapping-write", program, torch.full((1,), torch.inf))
    # Here the kernel raises.
    unsupported("trace-failed", program, torch.full((2,), torch.inf))


def test_copies_that_overlap_are_not_written():
    """Eager copies windows as they lie in memory, so what is written to one of them is in the next one, too."""

    def program(x):
        windows = x.unfold(0, 2, 1)
        return (torch.slice_scatter(windows, windows[:1] * 3, 0, 0, 1),)

    unsupported("overlapping-write", program, torch.randn(4, 2))


def test_changed_history_alone():
    """A vector is as before, but autograd has one more view to go back through."""
    unsupported("metadata-mutation", lambda x: (x.swapdims_(0, -1) * 2,), leaf(3) * 2)


def test_sparse_input():
    unsupported("layout", lambda x: x * 2, torch.eye(3).to_sparse())


def test_view_as_another_dtype():
    unsupported("reinterpreting-view", lambda x: (x.view(torch.int32), x * 2), torch.randn(3))


def test_size_that_depends_on_data():
    unsupported("trace-failed", lambda x: x.nonzero(), torch.randn(3))


def test_changed_input_that_overlaps_another():
    memory = torch.randn(4)
    unsupported("overlapping-inputs", lambda x, y: x.add_(1)[1:3] * y, memory, memory[1:3])


def test_constant_in_a_product():
    """The backward reads the constant too, from the graph's attributes and not from what is saved."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    constant = graph.call_function(torch.tensor, ([[1.0, 2.0], [3.0, 4.0]],))
    graph.output((graph.call_function(torch.matmul, (graph.call_method("sin", (x,)), constant)),))
    compiled = check(torch.fx.GraphModule({}, graph), leaf(2, 2))
    assert compiled.partitioned.saved_bytes == 0
