"""Results to which no gradient comes: infinite derivatives of theirs meet nothing that has one."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
import torch
from torch.autograd import grad
from torch.autograd.graph import register_multi_grad_hook

import gradsplit
from gradsplit.compile_core.autograd.bound_graphs import changeable_values
from tests.autograd.scenarios import BACKENDS, check_scenario, for_each, leaf, outcome


def roots_and_logarithms(a, b):
    h = a * 3
    return (h * 2).sum(), h**0.5, h.log() * b, b.sqrt()


def one_from_another(a, b):
    h = (a @ b).sqrt()
    g = h / a
    return g, h, g.t() @ h.sum(0)


def joined(a, b):
    h = torch.cat([a, b])
    first, second = h.sqrt().chunk(2)
    return torch.stack([first, second.log()]), second, (first * 0.0) / second


def repeated(a, b):
    s = a.sum(0, keepdim=True)
    return s.expand(3, 3) / b, s.expand(3, 3).sqrt().cumsum(0), s.unsqueeze(-1).expand(1, 3, 2).log().sum(-1)


def of_other_types(a, b):
    h = a.to(torch.float32) * 2
    return h.sqrt().double(), h.to(torch.complex64) / b, a.log()


def changed_in_place(a, b):
    h = a * 2
    h[0].mul_(b[1])
    k = h.sqrt()
    return h, k, b * 2


class TwoResults(torch.autograd.Function):
    """Its gradients are infinite or NaN for whatever arrives, zeros too."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a)
        return a * 2, b.sin()

    @staticmethod
    def backward(ctx, g, h):
        (a,) = ctx.saved_tensors
        return g / a + h, h / (a - a)


class NoneForAbsent(TwoResults):
    @staticmethod
    def forward(ctx, a, b):
        ctx.set_materialize_grads(False)
        return TwoResults.forward(ctx, a, b)

    @staticmethod
    def backward(ctx, g, h):
        (a,) = ctx.saved_tensors
        return None if g is None else g / a, None if h is None else h / (a - a)


def custom_function(a, b):
    x, y = TwoResults.apply(a.sqrt(), b * 1)
    return x.t(), y * 3, a.exp()


def custom_function_with_none(a, b):
    x, y = NoneForAbsent.apply(a * 1, b)
    return x.sqrt() * b, y.sqrt(), b.exp()


class Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * 2

    @staticmethod
    def backward(ctx, g):
        (a,) = ctx.saved_tensors
        return g / (a - a)


def functions_before_one_with_none(a, b):
    """They are called, and get zeros, whichever of its results gets a gradient."""
    return NoneForAbsent.apply(Divided.apply(a), Divided.apply(b))


class NoneForFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        return a * 2, b * 3

    @staticmethod
    def backward(ctx, g, h):
        return None, h * 3


def functions_before_one_that_gives_nothing(a, b):
    return NoneForFirst.apply(Divided.apply(a), b)


@torch.library.custom_op("tests_absent::two_results", mutates_args=())
def two_results(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a * 2, b.sin()


two_results.register_fake(lambda a, b: (torch.empty_like(a), torch.empty_like(b)))
two_results.register_autograd(
    TwoResults.backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
)


def custom_operator(a, b):
    x, y = two_results(a.sqrt(), b * 1)
    return x.t(), y * 3


def constant_derivatives(a, b):
    h = a * b
    x = a * (b / (b - b)).detach()  # times zeros without memory, all is zeros
    return torch.sgn(h), torch.copysign(h.detach(), b) * 2, a.sqrt(), torch.sgn(x), x


PROGRAMS = (
    roots_and_logarithms, one_from_another, joined, repeated, of_other_types, changed_in_place, custom_function,
    custom_function_with_none, functions_before_one_with_none, functions_before_one_that_gives_nothing, custom_operator,
    constant_derivatives,
)  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("program", PROGRAMS)
def test_any_of_the_results(program, backend):
    """Each subset of the results gets gradients; infinite derivatives are everywhere."""

    def scenario(compile):
        f, found = compile(program), []
        count = len(program(torch.ones(3, 3), torch.ones(3, 3)))
        for chosen in chain.from_iterable(combinations(range(count), n) for n in range(1, count + 1)):
            a, b = (torch.eye(3, dtype=torch.float64)[k:].repeat(3, 1)[:3].requires_grad_() for k in (0, 1))
            results = f(a, b)
            sum(results[k].abs().sum() for k in chosen).backward()
            found.append([chosen, a.grad, b.grad])
        return found

    check_scenario(scenario, backend)


def dead_after_a_break(compile):
    def program(a):
        d = a**0.5  # noqa: F841
        y = a * 2
        print(end="")
        return y

    return gradient_at_zero(compile(program))


def deleted_before_a_break(compile):
    def program(a):
        d, e = a**0.5, a.log()  # noqa: F841
        y = a * 2
        del d
        print(end="")
        return y

    return gradient_at_zero(compile(program))


def left_by_a_branch(compile):
    def program(a):
        d = a**0.5
        y = a * 2
        if y.sum() > 100:
            return d
        return y

    return gradient_at_zero(compile(program))


def changed_behind_a_break(compile):
    def program(a):
        middle, e, w = a.median(), a.exp(), (a * 2).exp()
        print(end="")
        middle.pow_(2)
        e.zero_()
        return w

    return gradient_at_zero(compile(program))


def functions_that_nothing_comes_to(compile):
    """The engine comes to them from after the break, to each or to the first only, and they get zeros."""

    def program(a, b, first, second):
        x, y = Divided.apply(a).cos(), Divided.apply(b)
        print(end="")
        z = NoneForFirst.apply(x if first else a, a)[1]
        return NoneForFirst.apply(y, z)[1] if second else z + 0 * y.detach()

    found = []
    for first, second in ((True, True), (True, False), (False, True)):
        for factor in (None, 1):
            leaves = leaf(3), leaf(3)
            a, b = leaves if factor is None else (each * factor for each in leaves)
            compile(program)(a, b, first, second).sum().backward()
            found.append([each.grad for each in leaves])
    return found


def gradient_at_zero(f):
    a = torch.zeros(3, requires_grad=True)
    f(a).sum().backward()
    return a.grad


BREAKS = {
    scenario.__name__: scenario
    for scenario in (
        dead_after_a_break,
        deleted_before_a_break,
        left_by_a_branch,
        changed_behind_a_break,
        functions_that_nothing_comes_to,
    )
}


@pytest.mark.filterwarnings("ignore:Local variable")
@pytest.mark.parametrize("backend", BACKENDS[1:])
@for_each(BREAKS)
def test_values_behind_breaks(scenario, backend):
    check_scenario(scenario, backend, breaks=True)


def changed_results(compile):
    """That what is saved has been changed is an error where a gradient that comes depends on it."""
    f = compile(lambda x, y: (torch.linalg.inv(x), torch.linalg.inv(y)))

    def attempt(changed, wanted):
        x, y = leaf(3, 3), leaf(3, 3)
        results = f(x, y)
        with torch.no_grad():
            results[changed].add_(1)
        kind = outcome(results[wanted].sum().backward)
        return x.grad, y.grad, kind and kind[0]

    return [attempt(changed, wanted) for changed in range(2) for wanted in range(2)]


def changed_inputs(compile):
    f = compile(lambda x, y, a, b: (x * a, y * b))

    def attempt(changed, wanted):
        x, y, factors = leaf(3), leaf(3), [torch.ones(3), torch.ones(3)]
        results = f(x, y, *factors)
        factors[changed].add_(1)
        kind = outcome(results[wanted].sum().backward)
        return x.grad, y.grad, kind and kind[0]

    return [attempt(changed, wanted) for changed in range(2) for wanted in range(2)]


def zeros_for_a_gradient(compile):
    """Of what is overwritten the gradient is zeros where one of the result arrives."""
    f, x = compile(lambda x: (x.sin().zero_(), x * 2)), leaf(3)
    f(x)[0].sum().backward()
    return x.grad


def inputs_that_are_no_longer_read(compile):
    """Nothing of them is read, whatever has become of their sizes and indices."""

    def program(x, y, z, a, index):
        # The pivots that are saved for a solution may not be zeros.
        return x * a, y.gather(0, index), x.cos(), torch.linalg.solve(z, z + 1)

    f = compile(program)
    x, y, z, a, index = leaf(3), leaf(5), leaf(2, 2), torch.ones(3), torch.arange(3)
    cosine = f(x, y, z, a, index)[2]
    a.resize_(1)
    a.untyped_storage().resize_(0)
    index.fill_(1 << 50)
    cosine.sum().backward()
    return x.grad, y.grad


class Seen:
    def __init__(self):
        self.calls = {}

    def watch(self, name, tensor):
        log = self.calls[name] = []
        tensor.register_hook(lambda gradient: log.append(gradient.clone()))
        tensor.register_hook(lambda gradient: gradient * 2)
        tensor.register_hook(lambda gradient: log.append("removed")).remove()

    def watch_several(self, tensors):
        every, any = self.calls["every"], self.calls["any"] = [], []
        register_multi_grad_hook(tensors, lambda gradients: every.append([*gradients]))
        register_multi_grad_hook(tensors[:1], any.append, mode="any")


def hooks(compile):
    """They are called where a gradient comes only, but for the one that counts how many tensors get one."""
    f, before, found = compile(lambda x, y: (x.sin(), y.cos(), x * y)), compile(lambda x: x * 2), []
    for chosen in ((0,), (1,), (0, 1), (2,)):
        x, y, seen = leaf(3), leaf(3), Seen()
        inner = before(y)
        results = f(x, inner)
        for name, tensor in zip("xyi012", (x, y, inner, *results), strict=True):
            seen.watch(name, tensor)
        if chosen != (2,):
            seen.watch_several(results[:2])
        results[1].retain_grad()
        sum(results[k].sum() for k in chosen).backward()
        found.append((seen.calls, x.grad, y.grad, results[1].grad))
    return found


def gradient_of_unread_alone(compile):
    """The engine comes to nothing, whatever has become of what is saved."""
    f, x, y, a = compile(lambda x, y, a: (y * a, x > y)), leaf(3), leaf(3), torch.ones(3)
    result = f(x, y, a)[0]
    a.add_(1)
    return grad(result.sum(), [x], allow_unused=True)


def changed_behind_constant_gradients(compile):
    """The gradient of ``y`` is zeros whatever arrives; where nothing does, what they are like may have been changed."""
    f, x, y = compile(lambda x, y: (y.pow(0.0), x.sin() * x)), leaf(3), leaf(3)
    changed = y * 1
    result = f(x, changed)[1]
    changed.mul_(2)
    return grad(result.sum(), [x, y], allow_unused=True)


def hooks_of_unread(compile):
    """No gradient leads to a leaf, whose hook is not called."""
    f, x, y, calls = compile(lambda x, y: (x.sin(), x == y)), leaf(3), leaf(3), []
    y.register_hook(calls.append)
    f(x, y)[0].sum().backward()
    return calls, x.grad, y.grad


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize(
    "scenario",
    [
        changed_results,
        changed_inputs,
        inputs_that_are_no_longer_read,
        zeros_for_a_gradient,
        hooks,
        hooks_of_unread,
        gradient_of_unread_alone,
        changed_behind_constant_gradients,
    ],
)
def test_what_is_seen_of_absent_gradients(scenario, backend):
    check_scenario(scenario, backend)


@pytest.mark.parametrize("scenario", [changed_results, changed_inputs, inputs_that_are_no_longer_read])
def test_changes_where_torch_unpacks_everything_at_once(scenario, monkeypatch):
    monkeypatch.setattr(changeable_values, "_UNPACKS_ONE", False)
    check_scenario(scenario, BACKENDS[-1])


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_gradients_without_memory(backend):
    """The gradient of ``sgn`` stands for zeros without having any memory."""

    def program(a):
        return a * 2

    a = leaf(3, 3)
    torch.sgn(gradsplit.compile(program, backend=backend)(a)).sum().backward()
    torch.testing.assert_close(a.grad, torch.zeros_like(a), rtol=0, atol=0)
    zeros = torch.autograd.grad(torch.sgn(a).sum(), a)[0]
    compiled = gradsplit.compile(program, backend=backend)
    for given in (torch.ones(3, 3, dtype=zeros.dtype), zeros):
        torch.testing.assert_close(compiled(given), given * 2, rtol=0, atol=0)
