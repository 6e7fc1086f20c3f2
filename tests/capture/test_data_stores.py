"""``x.data = …``: a leaf gets other memory, and what is computed afterwards is of that, with the leaf's gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gradsplit
from tests.capture.same_as_plain import check_same


def halved(x, w, e):
    w.data = w.data * 0.5
    return x * w


def scaled_without_gradients(x, w, e):
    with torch.no_grad():
        w.data = w.data / w.norm()
    return x * w, w.is_leaf, w.grad_fn


def replaced(x, w, e):
    old = w.data
    w.data = e
    y = (x * w).sin()
    return y, old, w.requires_grad


def swapped(x, w, e):
    x.data, w.data = w.data, x.data
    return x * w + x


def without_requiring(x, w, e):
    e.data = e * 2
    return x * e


def given(size=4):
    return (
        torch.randn(size, requires_grad=True), torch.randn(size, requires_grad=True), torch.randn(size),
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("program", [halved, scaled_without_gradients, replaced, swapped, without_requiring])
def test_stores_are_in_one_graph(program, backend) -> None:
    check_same(program, given, backend=backend)


def used_before(x, w, e):
    y = w.sin()
    w.data = e * 2
    return y, x * w


def changed_afterwards(x, w, e):
    new = e * 2
    w.data = new
    new.mul_(2)
    return x * w


def changed_through_data(x, w, e):
    new = e * 2
    w.data = new
    w.data.mul_(2)
    return x * w, new


def changed_itself(x, w, e):
    w.data = e * 2
    with torch.no_grad():
        w.add_(1)
    return x * w


def a_view_is_handed_out(x, w, e):
    w.data = e * 2
    return x * w, w.view(2, 2)


def of_another_form(x, w, e):
    e.data = torch.ones(2)
    return x[:2] * e


def of_a_result(x, w, e):
    y = x * 2
    y.data = e
    return y * w


def with_a_break(x, w, e):
    w.data = w.data * 2
    y = w.sin()
    gradsplit.graph_break()
    return y * w


@pytest.mark.parametrize(
    "program",
    [used_before, changed_afterwards, changed_through_data, changed_itself, a_view_is_handed_out, of_another_form,
     of_a_result, with_a_break],
)  # fmt: skip
def test_what_has_no_place_in_a_graph_is_left_to_plain_python(program) -> None:
    check_same(program, given, fullgraph=False)


def test_the_memory_is_shared_as_in_plain_python() -> None:
    x, w, e = given()
    before = w.data
    _, old, _ = gradsplit.compile(replaced, backend="eager", fullgraph=True)(x, w, e)
    e.fill_(7)
    assert w.tolist() == [7] * 4 and old.data_ptr() == before.data_ptr()


def test_a_layer_that_scales_its_weight_in_each_call() -> None:
    class Scaled(nn.Linear):
        def forward(self, x):
            self.weight.data = self.weight.data / self.weight.data.norm()
            return super().forward(x)

    torch.manual_seed(0)
    plain = Scaled(4, 3)
    module = copy.deepcopy(plain)
    compiled = gradsplit.compile(module, backend="eager", fullgraph=True)
    for _ in range(3):
        x = torch.randn(2, 4)
        plain(x).square().sum().backward()
        compiled(x).square().sum().backward()
        torch.testing.assert_close(module.weight, plain.weight)
        torch.testing.assert_close(module.weight.grad, plain.weight.grad)
        with torch.no_grad():
            plain.weight.sub_(0.1 * plain.weight.grad)
            module.weight.sub_(0.1 * module.weight.grad)
