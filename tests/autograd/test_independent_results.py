"""A backward through one result of a graph leaves an independent one what it needs, and frees the rest."""

import pytest
import torch

from gradsplit import compile


def program(x, y):
    wide = y.exp()
    return (x.sin() * x).sum(), (wide * y).sum(), wide.square().mean(), (x + y).sum()


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2)]


def observe(function, order):
    """The gradients after each backward of ``order``, or that it raised."""
    x, y = inputs()
    results = function(x, y)
    seen = []
    for position, retain in order:
        try:
            results[position].backward(retain_graph=retain)
        except RuntimeError as error:
            assert "second time" in str(error)
            seen.append("second time")
        seen.append([None if each.grad is None else each.grad.clone() for each in (x, y)])
    return seen


@pytest.mark.parametrize(
    "order",
    [
        [(0, False), (1, False), (0, False)],
        [(1, False), (0, False), (2, False)],
        [(0, True), (0, False), (1, True), (1, False), (1, False)],
        [(0, False), (3, False), (3, False), (2, False), (3, False)],
        [(1, False), (2, False)],
    ],
)
def test_backwards_one_after_the_other(order):
    assert_same(observe(compile(program), order), observe(program, order))


def assert_same(compiled, plain):
    assert len(compiled) == len(plain)
    for found, expected in zip(compiled, plain, strict=True):
        assert isinstance(found, str) == isinstance(expected, str)
        if isinstance(expected, list):
            torch.testing.assert_close(found, expected)


def test_a_tensor_changed_by_several_calls_leads_through_all_of_them():
    """What a change needs for its backward is nothing, which is never freed."""

    def steps(d, b):
        d.add_(b)
        return d.var(-1)

    found = []
    for call in (steps, compile(steps)):
        x, y = inputs()
        d = x.clone()
        for _ in range(3):
            call(d, y.detach()).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


def test_gradients_that_a_rewrite_adds_up_in_one_operation():
    """What rows were chosen by is read by the gradient of the choice alone, also where that is added to the other."""

    def rows(d, at, where):
        chosen = d.index_select(0, at)
        d[where] = -1
        return chosen

    found = []
    for call in (rows, compile(rows)):
        x, y = inputs()
        d = x + 0
        for _ in range(2):
            call(d, torch.tensor([1, 0, 1]), y.detach() > 0).square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


def test_a_mask_that_both_results_are_dropped_by_is_used_up():
    def dropped(x, y):
        kept = torch.nn.functional.dropout(x + y)
        return kept[0], kept[1]

    for call in (dropped, compile(dropped)):
        first, second = call(*inputs())
        first.backward()
        with pytest.raises(RuntimeError, match="second time"):
            second.backward()


def test_sizes_that_depend_on_data():
    """A second backward comes to the first call for its change alone, with zeros for as many chosen as there were."""

    def chosen(d, y):
        positive = d[d > 0]
        d.add_(y)
        return positive

    found = []
    for call in (chosen, compile(chosen)):
        x, y = inputs()
        d = x.clone()
        for _ in range(3):
            call(d, y).sum().backward()
        found.append((x.grad, y.grad))
    torch.testing.assert_close(found[1], found[0])


def test_a_change_between_the_backwards_is_noticed():
    def squares(x, y):
        return x.sin().sum(), y.square().sum()

    x, y = inputs()
    scale = compile(squares)(x, y)
    scale[0].backward()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scale[1].backward()


def test_a_change_of_what_another_result_needs_is_left_alone():
    """Both are computed from a square, which reads the input, and the exponential saves itself."""

    def program(x, y):
        square = y.square()
        return x.sin().sum(), square.nan_to_num(), square.exp2()

    found = []
    for call in (program, compile(program)):
        x, y = inputs()
        sine, square, power = call(x, y)
        sine.backward()
        with torch.no_grad():
            power.add_(1)
        square.sum().backward()
        found.append(y.grad)
        with pytest.raises(RuntimeError, match=r"second time|modified by an inplace operation"):
            power.sum().backward()
    torch.testing.assert_close(found[1], found[0])


def test_only_what_is_waited_for_is_kept():
    def squares(x, y):
        return x.exp().square().sum(), y.exp().square().sum()

    x, y = inputs()
    first, second = compile(squares)(x, y)
    node = first.grad_fn
    first.backward()
    tensors = [value for value in node.kept.values if isinstance(value, torch.Tensor)]
    assert 1 <= len(tensors) < len(node.kept.values)
    assert all(value.grad_fn is None for value in tensors)
    second.backward()
    assert not any(isinstance(value, torch.Tensor) for value in node.kept.values)
    torch.testing.assert_close(y.grad, 2 * (2 * y).exp().detach())


def test_results_of_one_computation_keep_nothing():
    def logits_and_loss(x, y):
        logits = (x * y).tanh()
        return logits, logits.square().sum()

    logits, loss = compile(logits_and_loss)(*inputs())
    loss.backward()
    assert getattr(loss.grad_fn, "kept", None) is None
    with pytest.raises(RuntimeError, match="second time"):
        logits.sum().backward()
