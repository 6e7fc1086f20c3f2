"""``torch.func`` transforms and ``torch.vmap`` in captured code, and compiled functions under transforms."""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops.associative_scan import (
    associative_scan,
    associative_scan_op,
    generic_associative_scan,
)
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import gradsplit
from tests.capture.same_as_plain import check_same

SCALE = 3.0


def gradient(x):
    return grad(lambda y: y.sin().sum())(x)


def gradient_and_value(x):
    return grad_and_value(lambda y, factor: (y * factor).sin().sum(), argnums=(0, 1))(x, x * 2)


def gradient_with_aux(x):
    def loss(y, parts):
        made = y * parts["scale"] + parts["shift"][0]
        return made.square().sum(), {"made": made, "name": made * 2}

    return grad(loss, has_aux=True)(x, {"scale": x, "shift": [x, 2]})


def second_gradient(x):
    return grad(lambda y: grad(lambda z: (z**3).sum())(y).sum())(x)


def gradient_of_a_closure(x):
    weight = x * 2

    def loss(y):
        return (y * weight * SCALE).sum()

    return grad(loss)(x) + weight


def gradient_under_no_grad(x):
    with torch.no_grad():
        return grad(lambda y: y.exp().sum())(x)


def batched(x):
    return vmap(lambda row: row.sum(0))(x)


def batched_dims(x):
    return vmap(lambda a, b: (a @ b, a.shape[0])[0], in_dims=(1, 0), out_dims=0)(x, x.T.contiguous())


def batched_none(x):
    return vmap(lambda a, b, scale=1.0: {"one": a * b * scale, "two": (a, b)}, in_dims=(0, None))(
        x, x[0], scale=x[1]
    )


def batched_random(x):
    return vmap(lambda row: torch.nn.functional.dropout(row, 0.5), randomness="different")(x)


def batched_chunks(x):
    return vmap(torch.sin, chunk_size=2)(x)


def per_sample_gradients(x):
    weight = x.sum(0)
    return vmap(grad(lambda w, row: (w * row).sin().sum()), in_dims=(None, 0))(weight, x)


def jacobians(x):
    return jacrev(torch.sin)(x), jacfwd(lambda y: y.exp() * 2)(x)


def hessians(x):
    return hessian(lambda y: y.pow(3).sum())(x[0])


def pulled_back(x):
    value, pull = vjp(lambda y: (y.sin(), y * 2), x)
    (first,) = pull((torch.ones_like(x), x))
    return value, first


def pushed_forward(x):
    return jvp(lambda y, z: y * z.sin(), (x, x * 2), (torch.ones_like(x), x))


def changes_in_place(x):
    return vmap(lambda row: row.clone().add_(1).mul_(row))(x)


PROGRAMS = [
    gradient, gradient_and_value, gradient_with_aux, second_gradient, gradient_of_a_closure,
    gradient_under_no_grad, batched, batched_dims, batched_none, batched_chunks, per_sample_gradients,
    jacobians, hessians, pulled_back, pushed_forward, changes_in_place, batched_random,
]  # fmt: skip


@pytest.mark.parametrize(("backend", "requires_grad"), [("eager", False), ("eager", True), ("triton", True)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_same_as_plain(program, backend, requires_grad):
    check_same(program, lambda: (torch.randn(3, 4, requires_grad=requires_grad),), backend=backend)


MADE_BEFORE = [grad(lambda x: (x * SCALE).sum()), vmap(lambda x: x * SCALE), jacrev(lambda x: x * SCALE)]


@pytest.mark.parametrize("function", MADE_BEFORE)
def test_transformed_before_the_capture(function, monkeypatch):
    compiled = gradsplit.compile(lambda x: function(x) + 1, backend="eager", fullgraph=True)
    for scale in (3.0, 5.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        x = torch.randn(3)
        assert torch.equal(compiled(x), function(x) + 1)


@pytest.mark.parametrize("transform", [grad, vmap, jacrev])
def test_a_compiled_function_under_a_transform(transform):
    def function(x):
        return x.sin().sum()

    compiled = gradsplit.compile(function, backend="aot_eager")
    x = torch.randn(3, 3)
    compiled(x)
    torch.testing.assert_close(transform(compiled)(x), transform(function)(x))


def test_side_effects_end_the_graph():
    seen = []

    def loss(x):
        seen.append(x.shape)
        return x.sum()

    check_same(lambda x: grad(loss)(x * 2) + 1, lambda: (torch.randn(3),), fullgraph=False)
    assert len(seen) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_an_empty_batch(dtype):
    check_same(lambda x: vmap(lambda row: row.flip(0).clone())(x), lambda: (torch.zeros(0, 3, dtype=dtype),))


def test_a_scan_halves_its_rows_until_none_is_left():
    def scanned(factors, terms):
        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        return associative_scan(combine, (factors, terms), dim=1, combine_mode="generic")[1]

    check_same(scanned, lambda: (torch.rand(2, 4, requires_grad=True), torch.rand(2, 4)))


def test_a_scan_by_torchs_operator_has_the_gradients_of_what_it_computes():
    """As ``associative_scan`` calls it for tensors of GPUs."""

    def scanned(factors, terms, scan):
        def combine(factor, term, next_factor, next_term):
            return factor * next_factor, next_factor * term + next_term

        return scan(combine, [factors, terms], additional_inputs=())[1]

    found = []
    for scan in (associative_scan_op, generic_associative_scan):
        torch.manual_seed(0)
        given = [torch.rand(5, 2, requires_grad=True) for _ in range(2)]
        is_plain = scan is generic_associative_scan
        call = scanned if is_plain else gradsplit.compile(scanned, backend="aot_eager", fullgraph=True)
        result = call(*given, scan)
        result.square().sum().backward()
        found.append([result, *[each.grad for each in given]])
    torch.testing.assert_close(*found)


def test_errors_are_torchs_own():
    compiled = gradsplit.compile(lambda x: grad(lambda y: y * 2)(x), backend="eager")
    with pytest.raises(RuntimeError, match="scalar"):
        compiled(torch.randn(3))


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_what_fails_on_fake_tensors_leaves_autograd_as_it_was(backend):
    """Torch has no forward mode of fake tensors under two other transforms."""

    def loss(row):
        return (row.sin() * SCALE).prod()

    rows = torch.randn(4, 3)
    compiled = gradsplit.compile(lambda x: vmap(hessian(loss))(x * 2), backend=backend)
    torch.testing.assert_close(compiled(rows), vmap(hessian(loss))(rows * 2))
    assert (torch.ones(2, requires_grad=True) * 2).requires_grad
