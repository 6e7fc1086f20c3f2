"""``torch.autograd.grad`` and ``backward`` in captured code: values, ``.grad`` of every leaf and what raises are those
of plain Python, in one graph where that can be, and with a break where hooks or outer history hang on it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import gradsplit
from gradsplit.compile_core.backends.registry import DEFAULT_BACKEND
from gradsplit.compile_core.errors import Unsupported
from tests.capture.test_train_steps import break_reasons

BACKENDS = ["eager", "aot_eager", DEFAULT_BACKEND]


def leaf(*size):
    return torch.randn(*size, requires_grad=True)


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def seen_of(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    grad = seen_of(value.grad) if value.is_leaf else None
    held = value.to_dense() if value.is_sparse else value
    layout = None if value.is_sparse else value.stride()
    return held.detach().clone(), value.requires_grad, value.is_leaf, layout, grad


def outcome(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except RuntimeError as error:
        return RuntimeError, str(error).splitlines()[0]


def observed(function: Any, make: Any, calls: int, afterwards: Any) -> list[Any]:
    torch.manual_seed(0)
    arguments = make()
    seen: list[Any] = []
    for call in range(calls):
        torch.manual_seed(call)
        result = outcome(function, *arguments)
        seen.append(pytree.tree_map(seen_of, result))
        if afterwards is not None:
            seen.append(pytree.tree_map(seen_of, outcome(afterwards, result, *arguments)))
        modules = [given for given in arguments if isinstance(given, nn.Module)]
        seen += [seen_of(parameter) for module in modules for parameter in module.parameters()]
        seen += [seen_of(given) for given in arguments if isinstance(given, torch.Tensor)]
        seen.append(torch.get_rng_state())
    return seen


def check(
    function: Any,
    make: Any,
    *,
    backend: str = "eager",
    breaks: str | None = None,
    calls: int = 3,
    afterwards: Any = None,
    tolerance: float = 1e-5,
) -> Any:
    """Some calls plain and compiled. ``breaks`` is a part of the reason why the graph ends; by default it must not."""
    options = {} if backend == "eager" else {"options": {"fallback_random": True}}
    expected = observed(function, make, calls, afterwards)
    compiled = gradsplit.compile(function, backend=backend, fullgraph=breaks is None, **options)
    found = observed(compiled, make, calls, afterwards)
    assert_alike(found, expected, tolerance)
    reasons = [str(reason) for reason in break_reasons(compiled)]
    assert bool(reasons) == (breaks is not None), reasons
    assert breaks is None or any(breaks in reason for reason in reasons), reasons
    return compiled


def assert_alike(found: Any, expected: Any, tolerance: float) -> None:
    ours, theirs = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        else:
            assert one == other


def backward(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss


def penalised(model, x):
    x = x.detach().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + ((slope.norm(dim=1) - 1) ** 2).mean()


def penalised_step(model, x):
    loss = penalised(model, x)
    loss.backward()
    return loss


def physics(model, x):
    value = model(x)
    (first,) = torch.autograd.grad(value, x, torch.ones_like(value), create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0], x, torch.ones_like(first[:, 0]), create_graph=True)
    return (second[:, 0] + value[:, 0]).square().mean()


def forces(model, x):
    positions = x.clone().requires_grad_()
    energy = model(positions).sum()
    return energy, -torch.autograd.grad(energy, positions)[0]


def inner_step(model, x, y):
    loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, model.parameters(), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(model.named_parameters(), gradients, strict=True)}
    return torch.func.functional_call(model, fast, (y,)).square().mean()


def twice(model, x):
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


def two_steps(model, x):
    losses = []
    for _ in range(2):
        losses.append(model(x).square().mean())
        losses[-1].backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
    return losses[0] + losses[1]


def dropped(model, x):
    return backward(lambda x: nn.functional.dropout(model(nn.functional.dropout(x, 0.3)), 0.5), x)


def under_autocast(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def without_gradients(model, x):
    loss = model(x).mean()
    with torch.no_grad():
        loss.backward()


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3 * ctx.saved_tensors[0] ** 2


def hooked_result(model, x):
    hidden = model[0](x)
    hidden.register_hook(lambda gradient: gradient * 3)
    return backward(model[1:], hidden)


PROGRAMS: dict[str, Any] = {
    "backward": (backward, network),
    "penalty": (penalised, network),
    "penalty and step": (penalised_step, network),
    "forces": (forces, network),
    "retained": (twice, network),
    "two steps": (two_steps, network),
    "dropout": (dropped, network),
    "batch norm": (backward, lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))),
    "no_grad": (without_gradients, network),
    "hook of a result": (hooked_result, network),
    "function": (lambda model, x: backward(lambda x: Cubed.apply(model(x)), x), network),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_network(name, backend):
    function, make = PROGRAMS[name]
    check(function, lambda: (make(), torch.randn(5, 4)), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend):
    check(under_autocast, lambda: (network(), torch.randn(5, 4)), backend=backend, tolerance=2e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives(backend):
    def step(model, x):
        loss = physics(model, x)
        loss.backward()
        return loss

    for function in (physics, step):
        check(function, lambda: (network(), leaf(5, 4)), backend=backend)
    check(inner_step, lambda: (network(), torch.randn(5, 4), torch.randn(5, 4)), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_keep_what_history_they_have(backend):
    """A later backward of a result raises where the program's own has freed the graph, and only there."""

    def through_logits(model, x):
        logits = model(x)
        logits.square().mean().backward()
        return logits

    def kept(model, x):
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        return loss

    def views(model, x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach(), loss * 2, loss

    def again(result, *arguments):
        result = result[1] if isinstance(result, tuple) else result
        result.sum().backward()

    for function in (backward, through_logits, kept, views):
        check(function, lambda: (network(), torch.randn(5, 4)), backend=backend, afterwards=again)
    nothing_saved = lambda w: (lambda loss: (loss.backward(), loss)[1])(w.sum())  # noqa: E731
    check(nothing_saved, lambda: (leaf(3),), backend=backend, afterwards=again)


SMALL: dict[str, Any] = {
    "values": (lambda x: torch.autograd.grad(x.sin().sum(), x), lambda: (leaf(3),)),
    "seed": (
        lambda x: torch.autograd.grad([x * x], [x], grad_outputs=[torch.full((3,), 2.0)]),
        lambda: (leaf(3),),
    ),
    "between": (
        lambda x: (lambda h: torch.autograd.grad((h * 2).exp().sum(), h))(x.sin()),
        lambda: (leaf(3),),
    ),
    "unused": (
        lambda x, y: torch.autograd.grad((x * 2).sum(), [x, y], allow_unused=True),
        lambda: (leaf(3), leaf(3)),
    ),
    "zeros": (
        lambda x, y: torch.autograd.grad((x * 2).sum(), [x, y], materialize_grads=True),
        lambda: (leaf(3), leaf(3)),
    ),
    "second": (
        lambda x: torch.autograd.grad(
            torch.autograd.grad(Cubed.apply(x).sum(), x, create_graph=True)[0].sin().sum(), x
        ),
        lambda: (leaf(3),),
    ),
    "only one": (lambda x, y: (x * y).sin().sum().backward(inputs=[x]), lambda: (leaf(3), leaf(3))),
    "all at once": (
        lambda x, y: torch.autograd.backward([x.sum(), y * 2], [None, torch.ones(3)]),
        lambda: (leaf(3), leaf(3)),
    ),
    "read and dropped": (
        lambda x: (x.sin().sum().backward(), x.grad.clone(), setattr(x, "grad", None))[1],
        lambda: (leaf(3),),
    ),
    "a new leaf": (
        lambda x: (lambda w: ((w * x).sum().backward(), w.grad + 1))(torch.ones(3, requires_grad=True)),
        lambda: (torch.randn(3),),
    ),
    "one gradient for two": (
        lambda x, y: ((x + y).backward(torch.ones(3)), x.grad.mul_(2))[0],
        lambda: (leaf(3), leaf(3)),
    ),
    "branches": (
        lambda x: torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,)).sum().backward(),
        lambda: (leaf(3),),
    ),
    "channels last": (
        lambda model, x: model(x).square().mean().backward(),
        lambda: (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), torch.randn(2, 3, 6, 6)),
    ),
    "expanded": (lambda x: x.sum().backward(), lambda: (leaf(2, 3),)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SMALL)
def test_small_programs(name, backend):
    function, make = SMALL[name]
    check(function, make, backend=backend)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (lambda loss: (loss.backward(), loss.backward()))((x * y).exp().sum()),
        lambda x, y: (lambda e: (e.mul_(2), e.sum().backward()))((x * y).exp()),
        lambda x, y: (x.detach() * 2).sum().backward(),
        lambda x, y: (x * 2).backward(),
        lambda x, y: torch.autograd.grad((x * 2).sum(), [x, y]),
        lambda x, y: torch.autograd.grad((x * 2).sum(), x, torch.ones(7)),
    ],
)
def test_what_raises(function):
    check(function, lambda: (leaf(3), leaf(3)))


OPTIMIZERS: dict[str, Any] = {
    "SGD": {"momentum": 0.9}, "Adam": {}, "AdamW": {}, "Adamax": {}, "NAdam": {}, "RAdam": {}, "Adagrad": {},
    "Adadelta": {}, "RMSprop": {}, "Rprop": {}, "ASGD": {}, "Adafactor": {},
}  # fmt: skip


class Trained(nn.Module):
    def __init__(self, make_optimizer):
        super().__init__()
        self.network = network()
        self.optimizer = make_optimizer(self.network.parameters())


def train(run, x, to_none=True, clips=False):
    run.optimizer.zero_grad(set_to_none=to_none)
    loss = run.network(x).square().mean()
    loss.backward()
    if clips:
        nn.utils.clip_grad_norm_(run.network.parameters(), 0.1)
    run.optimizer.step()
    return loss


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_optimizers(name, to_none):
    make = functools.partial(getattr(torch.optim, name), lr=0.01, **OPTIMIZERS[name])
    step = functools.partial(train, to_none=to_none)
    check(lambda run, x: step(run, x), lambda: (Trained(make), torch.randn(5, 4)), calls=4)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_steps_in_kernels(backend):
    make = functools.partial(torch.optim.AdamW, lr=0.01)
    for clips in (False, True):
        step = functools.partial(train, clips=clips)
        check(
            lambda run, x, step=step: step(run, x),
            lambda: (Trained(make), torch.randn(5, 4)),
            backend=backend,
            calls=4,
            tolerance=1e-4,
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_closures(backend):
    def step(run, x):
        def closure():
            run.optimizer.zero_grad()
            loss = run.network(x).square().mean()
            loss.backward()
            return loss

        return run.optimizer.step(closure)

    make = functools.partial(torch.optim.Adam, lr=0.01)
    check(step, lambda: (Trained(make), torch.randn(5, 4)), backend=backend)
    # Whether it goes on depends on data.
    check(
        step,
        lambda: (Trained(torch.optim.LBFGS), torch.randn(5, 4)),
        backend=backend,
        breaks="truth value",
        calls=2,
        tolerance=1e-3,
    )


def hooked(method, hook):
    x = leaf(3)
    getattr(x, method)(functools.partial(hook, x) if method != "register_hook" else hook)
    return (x,)


_KEPT: list[Any] = []


def hooked_node():
    x = leaf(3)
    node = torch.autograd.graph.get_gradient_edge(x).node
    node.register_hook(lambda *_: setattr(x, "grad", x.grad * 7))
    _KEPT.append(node)
    return (x,)


LEFT_TO_PYTHON: dict[str, Any] = {
    "hook": (
        lambda x: x.sin().sum().backward(),
        lambda: hooked("register_hook", lambda gradient: gradient * 10),
        "hooks",
    ),
    "hook, for values": (
        lambda x: torch.autograd.grad(x.sin().sum(), x),
        lambda: hooked("register_hook", lambda gradient: gradient * 10),
        "hooks",
    ),
    "hook after": (
        lambda x: x.sin().sum().backward(),
        lambda: hooked("register_post_accumulate_grad_hook", lambda x, _: x.grad.mul_(5)),
        "hooks",
    ),
    "hook of a node": (lambda x: x.sin().sum().backward(), hooked_node, "hooks"),
    "new hook": (
        lambda x: (x.register_hook(lambda gradient: gradient * 3), x.sin().sum().backward())[1],
        lambda: (leaf(3),),
        "hooks",
    ),
    "retain_grad": (
        lambda x: (lambda h: (h.retain_grad(), h.sin().sum().backward(), h.grad))(x * 2)[2],
        lambda: (leaf(3),),
        "retain",
    ),
    "history": (lambda x: x.sin().sum().backward(retain_graph=True), lambda: (leaf(3) * 2,), "before the graph"),
    "path outside": (
        lambda y, x: torch.autograd.grad((y * x).sum(), x, retain_graph=True),
        lambda: (lambda x: (x * 3, x))(leaf(3)),
        "before the graph",
    ),
    "view outside": (
        lambda x, y: torch.autograd.grad((x * y).sum() + x.sum(), x, retain_graph=True),
        lambda: (lambda x: (x, x[0]))(leaf(3, 3)),
        "before the graph",
    ),
    "memory": (
        lambda a, b: ((a.view(6) + b).backward(torch.ones(6)), a.grad.mul_(2))[0],
        lambda: (leaf(2, 3), leaf(6)),
        "memory",
    ),
    "sparse": (
        lambda model, x: model(x).sum().backward(),
        lambda: (nn.Embedding(5, 3, sparse=True), torch.tensor([1, 2])),
        "layouts",
    ),
    "data": (
        lambda x: Choosing.apply(x).sum().backward(), lambda: (leaf(3),), "item",
    ),
}  # fmt: skip


class Choosing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x if x.sum().item() > 0 else gradient * 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LEFT_TO_PYTHON)
def test_the_graph_ends(name, backend):
    function, make, reason = LEFT_TO_PYTHON[name]
    check(function, make, backend=backend, breaks=reason)


def test_with_a_history_to_accumulate():
    with pytest.warns(UserWarning, match="create_graph=True"):
        check(
            lambda x: (x**3).sum().backward(create_graph=True),
            lambda: (leaf(3),),
            breaks="with a history",
            calls=1,
        )


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_come_later(method):
    def late(_, x):
        getattr(x, method)(lambda given: x.grad.mul_(5) if given is x else given * 10)

    check(lambda x: x.sin().sum().backward(), lambda: (leaf(3),), afterwards=late, breaks="hooks")


def handed_on(model, x):
    """The old gradient is let go of by the parameter, but not by the program."""
    old = model.weight.grad
    model.zero_grad()
    model(x).square().sum().backward()
    with torch.no_grad():
        model.weight.sub_(model.weight.grad, alpha=0.1)
    return old


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_old_gradient_is_handed_on(backend):
    check(handed_on, lambda: (nn.Linear(4, 2), torch.randn(5, 4)), backend=backend, calls=4)


def hook_between(x, again):
    y = x * x
    y.register_hook(lambda gradient: gradient * 3)
    (first,) = torch.autograd.grad((y**2).sum(), x, create_graph=again, retain_graph=True)
    y.sum().backward(retain_graph=True)
    return first


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("again", [False, True])
def test_a_hook_runs_in_the_mode_of_the_backward(again, backend):
    """It has left gradients on for what the backward computes next, and was no part of one that is differentiated."""
    check(lambda x: hook_between(x, again), lambda: (leaf(3),), backend=backend)
    if again:
        check(
            lambda x: hook_between(x, True).sum().backward(),
            lambda: (leaf(3),),
            backend=backend,
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_that_turn_out_to_be_one(backend):
    def values(x, y):
        return torch.autograd.grad((x * y).sum(), [x, y])

    def stored(x, y):
        (x * y).sum().backward()
        return x.grad.clone(), y.grad.clone()

    for function in (values, stored):
        compiled = gradsplit.compile(function, backend=backend, fullgraph=True)
        compiled(leaf(3), leaf(3))
        x = leaf(3)
        expected = function(*[x.detach().requires_grad_()] * 2)
        torch.testing.assert_close(compiled(x, x), expected)


@pytest.mark.filterwarnings("ignore:Anomaly", "ignore:Error detected")
def test_saved_tensors_hooks_and_anomalies_are_seen():
    compiled = gradsplit.compile(lambda x: x.exp().sum().backward(), backend="aot_eager")
    compiled(leaf(3))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (packed.append(x), x)[1], lambda x: x):
        compiled(leaf(3))
    assert packed
    bad = torch.tensor([-1.0, 2.0, 3.0], requires_grad=True)
    rooted = gradsplit.compile(lambda x: x.sqrt().sum().backward(), backend="eager")
    rooted(leaf(3).abs().detach().requires_grad_())
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="nan"):
        rooted(bad)


def test_where_cuda_graphs_are_recorded_a_backward_is_a_break():
    """What steps of optimizers do on the CPU would leave forward and backward without CUDA graphs."""
    compiled = gradsplit.compile(lambda x: x.sin().sum().backward(), mode="reduce-overhead")
    compiled(leaf(3))
    assert ["recorded" in str(reason) for reason in break_reasons(compiled)] == [True]
    whole = gradsplit.compile(lambda x: x.sin().sum().backward(), mode="reduce-overhead", fullgraph=True)
    whole(leaf(3))
    assert not break_reasons(whole)


def test_a_body_asks_plain_python():
    def program(x, y):
        return checkpoint(lambda x: torch.autograd.grad((x * y).sum(), y)[0] * x, x, use_reentrant=False)

    with pytest.raises(Unsupported, match="function that becomes a graph"):
        gradsplit.compile(program, backend="eager", fullgraph=True)(leaf(3), leaf(3))


def test_open_sizes():
    def step(model, x):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]

    for backend in BACKENDS:
        model = network()
        compiled = gradsplit.compile(step, backend=backend, fullgraph=True, dynamic=True)
        for rows in (5, 7, 3):
            x = torch.randn(rows, 4)
            expected = step(copy.deepcopy(model), x)
            torch.testing.assert_close(compiled(model, x), expected, rtol=1e-4, atol=1e-5)
