"""Results that lie in the memory of one another, and inputs that autograd sees changed."""

from __future__ import annotations

import pytest
import torch

import gradsplit
from gradsplit.compile_core.errors import Unsupported
from tests.autograd.compare_with_eager import captured, check, compile_program
from tests.autograd.scenarios import check_scenario, for_each, outcome

BACKENDS = ["aot_eager", "triton"]


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def _view(x):
    y = x * 2
    return y, y.view(-1)


def _only_views(x):
    y = x * 2
    return y[0], y[1:]


def _chunks(x):
    chunks = (x @ x.t()).chunk(2)
    return chunks[0], chunks[1]


def _detached(x):
    y = x * 2
    return y.detach(), y


def _transposed(x):
    y = (x * 2).t()
    return y, y[0], y.t()


def _in_place(x):
    y = x * 2
    z = y[0]
    z.mul_(3)
    return z, y


SHARING = [_view, _only_views, _chunks, _detached, _transposed, _in_place]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("program", SHARING)
def test_results_share_memory(program, requires_grad, backend):
    x = torch.randn(4, 4, requires_grad=requires_grad)
    tolerance = {} if backend == "aot_eager" else {"rtol": 1e-6, "atol": 1e-6}
    check(program, x, backend=backend, **tolerance)


@pytest.mark.parametrize("program", [_view, _only_views, _transposed, _in_place])
def test_a_change_of_one_is_seen_in_the_other(program):
    x = torch.randn(4, 4)
    module = captured(program)
    expected, actual = module(x), compile_program(module, [x])(x)
    for results in (expected, actual):
        results[0].fill_(7)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def test_gradients_flow_through_a_change_of_one():
    x = leaf(4, 4)
    gradients = []
    for run in (_view, compile_program(_view, [x])):
        y, flat = run(x)
        y.mul_(torch.arange(4.0))
        (gradient,) = torch.autograd.grad(flat.square().sum(), [x])
        gradients.append(gradient)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_activation_changed_in_place(backend):
    def program(x, w):
        x.mul_(w)
        return (x.sin(), x)

    gradients = []
    w, start = leaf(3), leaf(3)
    module = captured(program)
    compiled = compile_program(module, [(start * 1), w], backend=backend)
    for run in (module, compiled):
        activation = start * 2
        before = activation + 1
        result, same = run(activation, w)
        assert same is activation
        loss = (result + before + activation.cos() + same).sum()
        gradients.append((loss.detach(), *torch.autograd.grad(loss, [start, w])))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_value_that_autograd_saved_and_the_program_changed():
    """Eager refuses its gradient; so the graph is left to eager."""

    def program(x, w):
        y = x * w
        x.add_(w)
        return (y,)

    with pytest.raises(Unsupported, match="modified by an inplace operation"):
        compile_program(program, [leaf(3) * 1, leaf(3)])


def test_input_that_takes_a_gradient_by_being_changed():
    def program(x, w):
        x.add_(w)
        return (x * 2,)

    w = leaf(3)
    for run in (captured(program), compile_program(program, [torch.zeros(3), w])):
        x, w.grad = torch.zeros(3), None
        (y,) = run(x, w)
        assert x.requires_grad
        (y.sum() + x.sum()).backward()
        torch.testing.assert_close(w.grad, torch.full((3,), 3.0))


def _update_under_no_grad() -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    w, g = graph.placeholder("w"), graph.placeholder("g")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    graph.call_method("sub_", (w, g))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    graph.output((graph.call_function(torch.mul, (w, w)),))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _update_detached(w, g):
    w.detach().sub_(g)
    return (w * w,)


@pytest.mark.parametrize("program", [_update_under_no_grad(), _update_detached])
@pytest.mark.parametrize("backend", BACKENDS)
def test_parameter_changed_without_autograd(program, backend):
    compiled = check(program, leaf(3), torch.randn(3), backend=backend)
    assert [mutation.differentiable for mutation in compiled.partitioned.signature.mutated] == [False]


def test_gradient_of_what_got_none_is_none():
    def program(a, b, c):
        return a * 2, b * c, a.sum() * c

    inputs = [leaf(3), leaf(3), leaf(3)]
    for run in (captured(program), compile_program(program, inputs)):
        first, _, third = run(*inputs)
        gradients = torch.autograd.grad(first.sum(), inputs, allow_unused=True, retain_graph=True)
        assert [gradient is None for gradient in gradients] == [False, True, True]
        gradients = torch.autograd.grad(third.sum(), inputs, allow_unused=True)
        assert [gradient is None for gradient in gradients] == [False, True, False]


EXPANDED = {
    "reshaped": lambda a: a.reshape(-1, 4),
    "beginning": lambda a: a[:1],
    "with_another": lambda a: (a.reshape(-1, 4), a.sin()),
    "turned": lambda a: a.t()[1:3],
    "expanded_again": lambda a: a.unsqueeze(1).expand(2, 3, 4),
    "windows": lambda a: a.unfold(1, 2, 1),
    "detached": lambda a: (a.detach()[0], a[1]),
}


@pytest.mark.parametrize("overlap", [(0, 1), (1, 1)])
@for_each(EXPANDED, "program")
def test_views_of_inputs_whose_elements_share_memory(program, overlap):
    """Each element has a gradient of its own, although it lies where others lie."""

    def scenario(compile):
        # What is compiled sees a tensor whose strides overlap.
        a = torch.arange(8.0).as_strided((2, 4), overlap).requires_grad_()
        results = compile(program)(a)
        results = results if isinstance(results, tuple) else (results,)
        for result in results:
            if result.requires_grad:
                weights = torch.arange(1.0, result.numel() + 1).reshape(result.shape)
                (result * weights).sum().backward()
        return results, [result.stride() for result in results], a.grad

    check_scenario(scenario, "aot_eager")


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1, 1)


def _one_of_several(a):
    return a.unbind()[-1]


def _without_gradients(a):
    with torch.no_grad():
        view = a[:1]
        view[0].mul_(2)
    return view


def _of_a_function(a):
    return _Through.apply(a)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("view_of", [_one_of_several, _without_gradients, _of_a_function])
def test_views_that_autograd_forbids_to_use(view_of, backend):
    """Their bases were changed; a program may have them, and the error comes where it uses them."""

    def program(a, is_used):
        activation = a * 1
        view, other = view_of(activation), view_of(a)
        with torch.no_grad():
            a.mul_(2)
        activation.mul_(3)
        print(end="")
        return view.sin() + other if is_used else activation.sin()

    def scenario(compile):
        a, f = leaf(2, 3), compile(program)
        failed = outcome(f, a, True)
        f(a, False).sum().backward()
        return failed, a.grad

    check_scenario(scenario, backend, breaks=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_of_what_nobody_holds_are_not_of_one_another(backend):
    """One of them may be made to require gradients."""

    def scenario(compile):
        def program(a):
            whole = a.asin()
            return whole.view(-1), whole[0]

        first, second = compile(program)(torch.rand(2, 3))
        first.requires_grad_()
        return first.requires_grad, second.requires_grad

    check_scenario(scenario, backend)


def test_a_view_that_comes_first_is_one_of_the_result_behind_it() -> None:
    def program(x):
        made = x * 2
        made.retain_grad()
        return made[:, -1:], made

    for call in (program, gradsplit.compile(program)):
        column, made = call(torch.ones(3, 1, requires_grad=True))
        column.sum().backward()
        assert torch.equal(made.grad, torch.ones(3, 1))


def test_the_result_with_a_gradient_retains_it_through_a_change() -> None:
    """Torch fails an assertion where it is another one than the first of a node."""

    def program(x):
        made = x * 2
        made.retain_grad()
        return x.detach().sum(), made

    for call in (program, gradsplit.compile(program)):
        made = call(torch.ones(3, requires_grad=True))[1]
        made.div_(4)
        made.sum().backward()
        assert torch.equal(made.grad, torch.ones(3))


def test_a_view_that_a_function_of_the_user_gives_without_gradients_has_no_history() -> None:
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

    def program(x):
        made = x * 2
        with torch.no_grad():
            print(end="")  # no rule, so a graph begins where gradients are off
            return Through.apply(made)

    for call in (program, gradsplit.compile(program)):
        view = call(torch.ones(2, requires_grad=True))
        assert view.requires_grad and view.is_leaf
