"""``torch.cond`` and ``torch.while_loop`` in the joint trace: compiled with their gradients, both ways in one graph.

Plain ``torch.cond`` compiles its branches itself; so each program is compared to one that branches in Python.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import gradsplit
from gradsplit.compile_core.ir.kept_calls import KeptCall
from gradsplit.compile_core.pipeline import CompiledGraph
from tests.capture.same_as_plain import assert_same, run_once, twin_of

BACKENDS = ["aot_eager", "triton"]


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def branch(predicate, on_true, on_false, operands=()):
    """``torch.cond`` in Python."""
    return (on_true if predicate else on_false)(*operands)


def repeat(condition, step, carried):
    """``torch.while_loop`` in Python."""
    while condition(*carried):
        carried = step(*carried)
    return carried


def compiled_like_plain(make_program, make_inputs, backend, control_flow, plain, calls=4):
    compiled = gradsplit.compile(make_program(control_flow), backend=backend, fullgraph=True)
    for seed in range(calls):
        torch.manual_seed(seed)
        inputs = make_inputs()
        twins = tuple(map(twin_of, inputs))
        expected = run_once(make_program(plain), inputs, seed)
        found = run_once(compiled, twins, seed)
        # An unread tensor has a gradient of zeros in the one, none in the other.
        zeros = [None if g is None or not g.any() else g for g in expected[2]]
        none = [None if g is None or not g.any() else g for g in found[2]]
        assert_same(
            (expected[0], expected[1], zeros, expected[3]), (found[0], found[1], none, found[3]), "outcome"
        )
    (entry,) = compiled.entries
    assert isinstance(entry.compiled, CompiledGraph)
    return entry.compiled.partitioned


def both_read(cond):
    return lambda flag, x, w: cond(flag, lambda a, b: (a @ b).sin(), lambda a, b: a + b, (x, w)) * 2


def closed_over(cond):
    def program(flag, x, w):
        y = x.exp()
        return cond(flag, lambda a: a * w, lambda a: a + y, (x,)).sum() + y

    return program


def several_results(cond):
    def program(flag, x, w):
        made = cond(
            flag, lambda a: {"y": a * w, "rest": (a.argmax(), a.cos())},
            lambda a: {"y": a + w, "rest": (a.argmin(), a.sin())}, (x,),
        )  # fmt: skip
        return made["y"], made["rest"]

    return program


def nested(cond):
    def on_true(a):
        return cond(a.sum() > 0, lambda b: b * 2, lambda b: b * 3, (a,))

    return lambda flag, x, w: cond(flag, on_true, lambda a: a @ w, (x,)).exp()


def in_a_checkpoint(cond):
    def program(flag, x, w):
        def body(a):
            return cond(flag, lambda b: b @ w, lambda b: b * w, (a,)).sin() @ w

        return checkpoint(body, x, use_reentrant=False)

    return program


def checkpoint_in_a_branch(cond):
    def body(a):
        return a.sin().exp()

    return lambda flag, x, w: cond(
        flag, lambda a: checkpoint(body, a, use_reentrant=False), lambda a: a * w, (x,)
    )


def under_autocast(cond):
    def program(flag, x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cond(flag, lambda a: a @ w, lambda a: w @ a, (x,))

    return program


def under_no_grad(cond):
    def program(flag, x, w):
        with torch.no_grad():
            scale = cond(flag, lambda a: a @ w, lambda a: w @ a, (x,))
        return x * scale

    return program


def results_that_are_inputs(cond):
    def program(flag, x, w):
        y, z = cond(flag, lambda a, b: (a * 1, b.t()), lambda a, b: (a, b.t() * 1), (x, w))
        return y.add(1), z

    return program


def numbers_become_floats(cond):
    def program(flag, x, w):
        return cond(flag, lambda a: a * torch.arange(4) / 3, lambda a: a * torch.ones(4), (x,)) * w

    return program


def one_branch_without_gradients(cond):
    return lambda flag, x, w: cond(flag, lambda a: a @ w, lambda a: a * 2, (x.detach(),)) * x.sum()


def one_after_the_other(cond):
    def program(flag, x, w):
        y = cond(flag, lambda a: a.sin(), lambda a: a * 2, (x,))
        return cond(~flag, lambda a: a @ w, lambda a: a - 3, (y,))

    return program


CONDITIONALS = [
    one_after_the_other, both_read, one_branch_without_gradients, closed_over, several_results, nested, in_a_checkpoint,
    checkpoint_in_a_branch, under_autocast, under_no_grad, results_that_are_inputs, numbers_become_floats,
]  # fmt: skip


def flag_and_leaves():
    return torch.tensor(bool(torch.rand(()) > 0.5)), leaf(4, 4), leaf(4, 4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make_program", CONDITIONALS, ids=lambda make: make.__name__)
def test_cond(make_program, backend):
    compiled_like_plain(make_program, flag_and_leaves, backend, torch.cond, branch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cond_without_gradients(backend):
    graph = compiled_like_plain(
        both_read,
        lambda: (torch.rand(()) > 0.5, torch.randn(4, 4), torch.randn(4, 4)),
        backend,
        torch.cond,
        branch,
    )
    assert graph.backward is None


def test_the_branches_are_one_node_and_so_are_their_gradients():
    graph = compiled_like_plain(both_read, flag_and_leaves, "aot_eager", torch.cond, branch)
    assert graph.backward is not None
    for module, name in ((graph.forward, "cond"), (graph.backward, "cond_backward")):
        assert [str(node.target) for node in module.graph.nodes if isinstance(node.target, KeptCall)] == [
            name
        ]
    assert graph.saved_bytes == 0  # the gradients are computed from what the branches read


def test_a_branch_whose_random_numbers_would_be_drawn_twice_is_left_to_torch(caplog):
    compiled = gradsplit.compile(
        lambda flag, x: torch.cond(flag, lambda a: F.dropout(a, 0.5), lambda a: a * 2, (x,)),
        backend="aot_eager",
        fullgraph=True,
    )
    compiled(torch.tensor(True), leaf(4))
    assert "random-in-branch" in caplog.text


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_outlives_the_compiled_function(backend):
    compiled = gradsplit.compile(both_read(torch.cond), backend=backend, fullgraph=True)
    x, w = leaf(3, 3), leaf(3, 3)
    result = compiled(torch.tensor(False), x, w)
    del compiled
    result.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((3, 3), 2.0))


def counted(while_loop):
    return lambda x, w: while_loop(
        lambda count, y: (count < 5) & (y.abs().sum() < 40),
        lambda count, y: (count + 1, y * w.sum().abs()),
        (torch.tensor(0), x),
    )


def passes_one_on(while_loop):
    return lambda x, w: while_loop(
        lambda count, y, z: count < 2,
        lambda count, y, z: (count + 1, y @ z, z.clone()),
        (torch.tensor(0), x, w),
    )


def loop_under_no_grad(while_loop):
    def program(x, w):
        scale = x.sin()
        with torch.no_grad():
            _, y = while_loop(
                lambda count, y: count < 3,
                lambda count, y: (count + 1, torch.tanh(y @ w)),
                (torch.tensor(0), scale),
            )
        return y @ w * x

    return program


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("make_program", "requires_grad"), [(counted, False), (passes_one_on, False), (loop_under_no_grad, True)]
)
def test_while_loop(make_program, requires_grad, backend):
    def inputs():
        return tuple(torch.randn(4, 4).requires_grad_(requires_grad) for _ in range(2))

    compiled_like_plain(make_program, inputs, backend, while_loop, repeat)
