"""``torch.cond`` and ``torch.while_loop`` with tensors that decide: one graph for both ways."""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops import scan
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import gradsplit
from gradsplit.compile_core.errors import Unsupported
from tests.capture.same_as_plain import check_same

BACKENDS = ["eager", "aot_eager", "triton"]


def leaf():
    return torch.randn(3, requires_grad=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_branches_in_one_graph(backend):
    scale = leaf()

    def program(flag, x):
        shift = x.sum()
        made = torch.cond(
            flag, lambda a: {"one": a.sin() * scale, "two": (a + shift, 3)},
            lambda a: {"one": a * scale, "two": (a - 1, 3)}, (x,),
        )  # fmt: skip
        return made["one"] + made["two"][0], made["two"][1]

    compiled = gradsplit.compile(program, backend=backend, fullgraph=True)
    for flag in (True, False, True):
        x = leaf()
        twin = x.detach().clone().requires_grad_()
        scale.grad = None
        result, three = compiled(torch.tensor(flag), x)
        result.sum().backward()
        found, scale.grad = scale.grad, None
        expected = twin.sin() * scale + twin + twin.sum() if flag else twin * scale + twin - 1
        expected.sum().backward()
        assert three == 3
        torch.testing.assert_close([result, x.grad, found], [expected, twin.grad, scale.grad])
    assert len(compiled.entries) == 1


def test_gradients_of_what_the_other_branch_reads_are_zeros():
    compiled = gradsplit.compile(
        lambda flag, x, y: torch.cond(flag, lambda a, b: a * 2, lambda a, b: b * 3, (x, y)),
        backend="eager",
        fullgraph=True,
    )
    x, y = leaf(), leaf()
    compiled(torch.tensor(True), x, y).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert torch.equal(y.grad, torch.zeros(3))


def test_a_result_is_a_tensor_of_its_own():
    compiled = gradsplit.compile(
        lambda flag, x: torch.cond(flag, lambda a: a, lambda a: a * 1, (x,)), backend="eager", fullgraph=True
    )
    x = torch.randn(3)
    result = compiled(torch.tensor(True), x)
    result.add_(1)
    assert torch.equal(result, x + 1)


def test_a_python_predicate_chooses_at_capture():
    compiled = gradsplit.compile(
        lambda x: torch.cond(x.shape[0] > 2, torch.sin, torch.cos, (x,)), backend="eager", fullgraph=True
    )
    for size in (2, 3):
        x = torch.randn(size)
        assert torch.equal(compiled(x), x.sin() if size > 2 else x.cos())


def different_shapes(x):
    return torch.cond(x.sum() > 0, lambda a: a, lambda a: a[:1], (x,))


def changes_in_place(x):
    return torch.cond(x.sum() > 0, lambda a: a.add_(1) * 2, lambda a: a * 1, (x,))


@pytest.mark.parametrize("program", [different_shapes, changes_in_place])
def test_refused(program):
    with pytest.raises(Unsupported):
        gradsplit.compile(program, backend="eager", fullgraph=True)(torch.randn(3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_while_loop(backend):
    factor = torch.tensor(1.5)

    def program(x):
        return torch._higher_order_ops.while_loop(
            lambda count, y: (count < 5) & (y.sum() < 100), lambda count, y: (count + 1, y * factor),
            (torch.tensor(0), x * 2),
        )  # fmt: skip

    compiled = gradsplit.compile(program, backend=backend, fullgraph=True)
    for start in (1.0, 30.0, 500.0):
        count, value = compiled(torch.full((3,), start))
        expected_count, expected = 0, torch.full((3,), start * 2)
        while expected_count < 5 and expected.sum() < 100:
            expected_count, expected = expected_count + 1, expected * factor
        assert count == expected_count
        torch.testing.assert_close(value, expected)
    assert len(compiled.entries) == 1


@pytest.mark.filterwarnings("ignore:flex_attention called without")  # by the plain program
def test_attention_by_a_mask_of_blocks_that_the_program_makes():
    """Without gradients the operator of flex_attention is what it computes with."""

    def attend(query, key):
        mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 128, 128, device="cpu")
        return flex_attention(query, key, key, score_mod=lambda s, b, h, i, j: s + (i - j), block_mask=mask)

    check_same(attend, lambda: (torch.randn(1, 2, 128, 8), torch.randn(1, 2, 128, 8)), calls=1)


def test_a_scan_without_gradients():
    def scanned(x):
        return scan(lambda carry, row: (carry + row, carry * row), torch.zeros(3), x)

    check_same(scanned, lambda: (torch.randn(4, 3),))
    with pytest.raises(Unsupported, match="ScanOp"):
        gradsplit.compile(scanned, backend="eager", fullgraph=True)(torch.randn(4, 3, requires_grad=True))
