"""``Tensor.register_hook`` on what a graph computes: a function of the gradient, captured with the rest."""

from __future__ import annotations

import pytest
import torch

import gradsplit


def scaled(x, w):
    y = (x * w).sin()
    y.register_hook(lambda g: g * 2 + w.detach())
    return y.cos() * x


def several(x, w):
    y = x.sin()
    u = y * 3
    y.register_hook(lambda g: g * 2)
    z = y * w
    y.register_hook(lambda g: g.clamp(-1, 1))
    y.register_hook(lambda g: None)
    return u, z, y


def changed_between(x, w):
    y = x.sin()
    y.register_hook(lambda g: g * 2)
    y.mul_(3)
    y.register_hook(lambda g: g + 1)
    return y * w


def of_a_part(x, w):
    with torch.no_grad():
        q = x.sum()
    y = (x @ w).relu()
    y.register_hook(lambda g: g * q)
    s = y.split(2, 0)
    s[0].register_hook(lambda g: g * 3)
    return s[0].sum() + s[1].sum()


def of_constants(x, w):
    y = x * w
    y.register_hook(lambda g: torch.ones_like(g))
    return y.exp(), (x * 2).sin()


def noting(x, w):
    seen = []
    y = x.sin()
    y.register_hook(seen.append)
    return y * w


def removed(x, w):
    y = x.sin()
    y.register_hook(lambda g: g * 2).remove()
    return y * w


def of_an_argument(x, w):
    x.register_hook(lambda g: g * 2)
    return x * w


def in_place(x, w):
    y = x * w
    y.register_hook(lambda g: g.mul_(2))
    return y.sin()


def without_the_gradient(x, w):
    y = x * w
    y.register_hook(lambda g: w.detach() * 1)
    return y.sin()


WHOLE = [scaled, several, changed_between, of_a_part, of_constants, of_an_argument]
BROKEN = [noting, removed, in_place, without_the_gradient]


def _gradients(function, only):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(4, 4, generator=generator, requires_grad=True) for _ in range(2))
    results = function(x, w)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum(result.square().sum() for place, result in enumerate(results) if only in (None, place))
    return [result.detach() for result in results], torch.autograd.grad(loss, (x, w), allow_unused=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", WHOLE + BROKEN, ids=lambda program: program.__name__)
def test_same_as_plain(program, backend):
    compiled = gradsplit.compile(program, backend=backend, fullgraph=program in WHOLE)
    for only in (None, 0, 1) if program in (several, of_constants) else (None, None):
        torch.testing.assert_close(_gradients(compiled, only), _gradients(program, only))
    assert bool(compiled.break_reasons) is (program in BROKEN)


def of_leaves(x, w):
    x.register_hook(lambda g: g * 2)
    y = (x * w).sin()
    w.register_hook(lambda g: g + y.detach().sum())
    x.register_hook(lambda g: g.clamp(-1, 1))
    return y


def after_the_gradient(x, w):
    seen = []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))

    def triple(parameter):
        parameter.grad.mul_(3)

    w.register_post_accumulate_grad_hook(triple)
    return (x * w).cos(), seen


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("program", [of_leaves, after_the_gradient])
def test_hooks_on_leaves_that_are_given(program, backend) -> None:
    results = []
    for run in (program, gradsplit.compile(program, backend=backend, fullgraph=True)):
        torch.manual_seed(0)
        for _ in range(2):
            x, w = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
            found = run(x, w)
            y, seen = found if isinstance(found, tuple) else (found, [])
            y.square().sum().backward()
            results.append([y.detach(), x.grad, w.grad, *seen])
    for plain, compiled in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(compiled, plain)


def test_a_handle_that_is_used_is_left_to_plain_python() -> None:
    def program(x):
        handle = x.register_hook(lambda g: g * 100)
        y = x.sin()
        handle.remove()
        return y

    x = torch.ones(3, requires_grad=True)
    gradsplit.compile(program, backend="eager")(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3).cos())


def test_a_view_retains_its_gradient_before_its_base_is_changed():
    """Afterwards autograd allows nothing to be asked of it."""

    def program(c):
        last = [*c][-1]
        last.retain_grad()
        c.fmod_(0.5)
        return c * 2

    found = []
    for call in (program, gradsplit.compile(program, backend="eager")):
        x = torch.tensor([0.3, 0.8], requires_grad=True)
        call(x * 1).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found, rtol=0, atol=0)


def of_a_result(x, w, noted):
    y = (x * w).sin()
    y.register_hook(lambda g: g * 2)
    y.register_hook(lambda g: g + 1)
    return y


def of_a_result_before_a_break(x, w, noted):
    y = (x * w).sin()
    y.register_hook(lambda g: g * 2)
    y.register_hook(noted.append)
    return y


def of_one_result_of_two(x, w, noted):
    y, z = (x * w).sin(), x * 2
    z.register_hook(lambda g: g * w.detach())
    y.register_hook(lambda g: g * 3)
    return z, y


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "triton"])
@pytest.mark.parametrize("program", [of_a_result, of_a_result_before_a_break, of_one_result_of_two])
def test_hooks_of_results_come_before_later_ones(program, backend) -> None:
    found = []
    for run in (program, gradsplit.compile(program, backend=backend)):
        for _ in range(2):
            generator = torch.Generator().manual_seed(0)
            x, w = (torch.randn(4, generator=generator, requires_grad=True) for _ in range(2))
            noted: list[torch.Tensor] = []
            results = run(x, w, noted)
            results = results if isinstance(results, tuple) else (results,)
            for result in results:
                result.register_hook(noted.append)
            sum(result.square().sum() for result in results).backward()
            found.append([x.grad, w.grad, *noted])
    assert bool(run.break_reasons) is (program is of_a_result_before_a_break)
    torch.testing.assert_close(found[2:], found[:2])
