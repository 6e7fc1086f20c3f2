"""Tensors that wrap others: inputs, parameters, intermediate values and results of compiled functions."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

import gradsplit
from tests.compiled_calls.wrapper_classes import Int8Weight, Labelled

_BACKENDS = ("eager", "aot_eager", "triton")


def _two(*size: int, requires_grad: bool = False) -> TwoTensor:
    made: Any = TwoTensor(torch.randn(*size), torch.randn(*size))
    return made.requires_grad_(requires_grad)


def _labelled(*size: int, label: str = "a", factor: float = 2.0) -> Labelled:
    made: Any = Labelled(torch.randn(*size), label, factor)
    return made.requires_grad_()


def _assert_alike(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if found is None:
        return
    if not hasattr(found, "__tensor_flatten__"):
        torch.testing.assert_close(found, expected)
        return
    (names, context), (_, other) = found.__tensor_flatten__(), expected.__tensor_flatten__()
    assert context == other and found.shape == expected.shape and found.stride() == expected.stride()
    for name in names:
        _assert_alike(getattr(found, name), getattr(expected, name))


def _check(program: Callable[..., Any], inputs: list[Tensor], backend: str, leaves: Any = ()) -> None:
    """Twice, so that the second call goes by the guards of the first."""
    compiled = gradsplit.compile(program, backend=backend, fullgraph=True)
    wanted = [leaf for leaf in (*inputs, *leaves) if leaf.requires_grad]
    for _ in range(2):
        found, expected = compiled(*inputs), program(*inputs)
        _assert_alike(found, expected)
        assert found.requires_grad == expected.requires_grad
        if not expected.requires_grad:
            continue
        gradients = [
            torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True)
            for result in (found, expected)
        ]
        for mine, theirs in zip(*gradients, strict=True):
            _assert_alike(mine, theirs)


def _views(x: Any) -> Any:
    return x.reshape(-1)[: x.shape[0]] * x.dim()


def _by_label(x: Any) -> Any:
    return x.scaled() if x.is_named and x.label == "a" else x + 1


def _made(x: Any) -> Any:
    return Labelled(x.sin(), "new", 3.0).scaled().cos()


_PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], list[Any]]]] = {
    "element by element": (lambda x: (x * 2).sin(), lambda: [_two(3, 3, requires_grad=True)]),
    "a product with itself": (
        lambda x, y: (x @ y).relu(),
        lambda: [_two(3, 3, requires_grad=True)] * 2,
    ),
    "without gradients": (lambda x: x.exp().sum(), lambda: [_two(4)]),
    "views": (_views, lambda: [_two(3, 3)]),
    "inner tensors": (lambda x: x.a * 2 + x.b, lambda: [_two(3)]),
    "a library's method": (lambda x: x.get_elem_a() * 2, lambda: [_two(3)]),
    "wrappers of wrappers": (lambda x: x.cos() * x, lambda: [TwoTensor(_two(2), _two(2))]),
    "what its class says": (_by_label, lambda: [_labelled(3)]),
    "what its class says otherwise": (_by_label, lambda: [_labelled(3, label="b")]),
    "made in the frame": (_made, lambda: [torch.randn(3, requires_grad=True)]),
    "made and taken apart": (
        lambda x: Labelled(x * 2, "new").value.sin(),
        lambda: [torch.randn(3, requires_grad=True)],
    ),
    "a number of its context": (lambda x: x * x.factor, lambda: [_labelled(3, factor=5.0)]),
    "quantised weights": (
        lambda x, w: functional.linear(x, w),
        lambda: [torch.randn(2, 8, requires_grad=True), Int8Weight.of(torch.randn(4, 8))],
    ),
    "weights quantised in the frame": (
        lambda x, w: functional.linear(x, Int8Weight.of(w)),
        lambda: [torch.randn(2, 8, requires_grad=True), torch.randn(4, 8)],
    ),
}


@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize("name", _PROGRAMS)
def test_programs_are_one_graph_with_eagers_results(name: str, backend: str) -> None:
    torch.manual_seed(0)
    program, inputs = _PROGRAMS[name]
    _check(program, inputs(), backend)


@pytest.mark.parametrize("backend", _BACKENDS)
def test_parameters_get_gradients_of_their_own_class(backend: str) -> None:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(_two(3, 3))
    model.bias = nn.Parameter(_two(3))
    _check(model, [_two(2, 3, requires_grad=True)], backend, list(model.parameters()))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("backend", _BACKENDS)
def test_optimizers_step(optimizer: Any, backend: str) -> None:
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        parameters = [nn.Parameter(_two(4, 3)) for _ in range(2)]
        made = optimizer(parameters, lr=0.1)
        step = gradsplit.compile(made.step, backend=backend) if compiles else made.step
        for number in range(3):
            for parameter in parameters:
                parameter.grad = parameter.detach() * 0.5 + number
            step()
        found.append([parameter.detach() for parameter in parameters])
    for mine, theirs in zip(*found, strict=True):
        _assert_alike(mine, theirs)


@pytest.mark.parametrize("backend", _BACKENDS)
def test_another_context_is_captured_anew(backend: str) -> None:
    compiled = gradsplit.compile(_by_label, backend=backend, fullgraph=True)
    for given in (_labelled(3), _labelled(3, label="b"), _labelled(3, factor=7.0), _labelled(4)):
        _assert_alike(compiled(given), _by_label(given))


def _changes(x: Any) -> Any:
    x.add_(1)
    return x * 2


def _changes_inner(x: Any) -> Any:
    x.a.mul_(3)
    return x * 2


@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize("program", [_changes, _changes_inner])
def test_changes_in_place_are_seen(program: Callable[..., Any], backend: str) -> None:
    torch.manual_seed(0)
    mine = _two(3)
    theirs: Any = TwoTensor(mine.a.clone(), mine.b.clone())
    compiled = gradsplit.compile(program, backend=backend, fullgraph=True)
    for _ in range(2):
        versions = mine._version, theirs._version
        _assert_alike(compiled(mine), program(theirs))
        _assert_alike(mine, theirs)
        assert (mine._version > versions[0]) == (theirs._version > versions[1])
    result = _two(3, requires_grad=True) * mine
    compiled(mine)
    # The version of a wrapper does not count what is written to its inner tensors.
    refused = pytest.raises(RuntimeError, match="modified by an inplace operation")
    with refused if program is _changes else contextlib.nullcontext():
        result.backward(torch.ones_like(result))


@pytest.mark.parametrize("backend", _BACKENDS)
def test_an_input_that_is_changed_may_be_another_one_next_time(backend: str) -> None:
    def program(x: Any, y: Any) -> Any:
        x.add_(1)
        return x + y

    compiled = gradsplit.compile(program, backend=backend)
    for same in (False, True):
        pair = [[_two(3), _two(3)] for _ in range(2)]
        torch.manual_seed(0)
        mine: Any = TwoTensor(torch.ones(3), torch.ones(3))
        theirs: Any = TwoTensor(torch.ones(3), torch.ones(3))
        found = compiled(mine, mine if same else pair[0][0])
        _assert_alike(found, program(theirs, theirs if same else pair[0][0]))


@pytest.mark.parametrize("backend", _BACKENDS)
def test_a_break_hands_wrappers_on(backend: str) -> None:
    def program(x: Any) -> Any:
        y = x.sin() * 2
        gradsplit.graph_break()
        return y.cos() + x

    compiled = gradsplit.compile(program, backend=backend)
    given = _two(3, requires_grad=True)
    for _ in range(2):
        found, expected = compiled(given), program(given)
        _assert_alike(found, expected)
        _assert_alike(
            torch.autograd.grad(found, given, torch.ones_like(found))[0],
            torch.autograd.grad(expected, given, torch.ones_like(expected))[0],
        )


@pytest.mark.parametrize("backend", _BACKENDS)
def test_a_view_of_an_input_as_a_result(backend: str) -> None:
    given = _two(2, 3, requires_grad=True)
    compiled = gradsplit.compile(lambda x: (x.t(), x * 2), backend=backend)
    view, _ = compiled(given)
    (gradient,) = torch.autograd.grad(view, given, torch.ones_like(view))
    _assert_alike(gradient, torch.ones_like(given))
    with torch.no_grad():
        given.mul_(2)
    _assert_alike(view.detach(), given.detach().t())


@pytest.mark.parametrize("backend", _BACKENDS)
def test_draws_for_wrappers_end_the_graph(backend: str) -> None:
    """What a class does with generators for them is its own."""

    def program(x: Any) -> Any:
        return functional.dropout(x * 2, 0.5) + 1

    compiled, given = gradsplit.compile(program, backend=backend), _labelled(4, 4)
    for _ in range(2):
        torch.manual_seed(0)
        found = compiled(given)
        state = torch.get_rng_state()
        torch.manual_seed(0)
        _assert_alike(found, program(given))
        assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(gradsplit.Unsupported, match="dropout cannot be known"):
        gradsplit.compile(program, backend=backend, fullgraph=True)(given)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", _BACKENDS)
def test_without_gradients(mode: Any, backend: str) -> None:
    given = _two(3, requires_grad=mode is torch.no_grad)
    compiled = gradsplit.compile(_changes if mode is torch.inference_mode else _views, backend=backend)
    with mode():
        inputs = (
            [given.clone(), given.clone()] if mode is torch.inference_mode else [given[None], given[None]]
        )
        plain = _changes if mode is torch.inference_mode else _views
        _assert_alike(compiled(inputs[0]), plain(inputs[1]))


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
def test_the_gradient_of_a_plain_tensor_that_is_a_wrapper(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Eager gives a plain leaf such a gradient, if it does; the graph runs with torch's own kernels."""
    given, plain = _two(3, requires_grad=True), torch.randn(3, requires_grad=True)
    compiled = gradsplit.compile(lambda x, y: x * y, backend=backend)
    with caplog.at_level(logging.WARNING):
        found = compiled(given, plain)
    assert "wrapper-gradient" in caplog.text
    gradients = [
        torch.autograd.grad(result, [given, plain], torch.ones_like(result))
        for result in (found, given * plain)
    ]
    for mine, theirs in zip(*gradients, strict=True):
        _assert_alike(mine, theirs)


def test_gradients_of_gradients_are_refused_in_words() -> None:
    given = _two(3, requires_grad=True)
    found = gradsplit.compile(lambda x: x.sin(), fullgraph=True)(given)
    with pytest.raises(gradsplit.Unsupported, match="the gradients of a compiled graph are differentiated"):
        torch.autograd.grad(found, given, torch.ones_like(found), create_graph=True)


def test_a_gradient_of_another_form_is_told() -> None:
    given = _labelled(3)
    found = gradsplit.compile(lambda x: x.sin(), fullgraph=True)(given)
    with pytest.raises(RuntimeError, match="in another form than the backward was compiled for"):
        found.backward(Labelled(torch.ones(3), "other"))


def _nested(*lengths: int, requires_grad: bool = True) -> Tensor:
    rows = [torch.randn(length, 3) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=requires_grad)


def _assert_nested_alike(found: Any, expected: Any) -> None:
    if expected is None or expected.layout is not torch.jagged:
        _assert_alike(found, expected)
        return
    assert type(found) is type(expected) and found.shape == expected.shape
    assert found.offsets() is expected.offsets()
    torch.testing.assert_close(found.values(), expected.values())


_linear = nn.Linear(3, 4)

_OF_NESTED: dict[str, Callable[[Any, Any], Any]] = {
    "element by element": lambda x, y: (x * y).sin() + 1,
    "a layer": lambda x, y: _linear(x).relu() * 2,
    "a row's softmax": lambda x, y: torch.softmax(x * 2, -1) * y,
    "its values": lambda x, y: x.values().square().sum() + y.values().sum(),
}


@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize("name", _OF_NESTED)
def test_nested_tensors_of_ever_new_lengths_are_few_programs(name: str, backend: str) -> None:
    torch.manual_seed(0)
    program = _OF_NESTED[name]
    graphs = 0

    def counting(module: torch.fx.GraphModule, examples: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return module

    compiled = gradsplit.compile(program, backend=counting if backend == "eager" else backend, fullgraph=True)
    for lengths in [(2, 4), (2, 4), (3, 4), (5, 1), (7, 7), (2, 2, 2), (1, 5, 3), (4, 4, 4, 9)]:
        x = _nested(*lengths)
        y = (x.detach() * 3).requires_grad_()
        found, expected = compiled(x, y), program(x, y)
        _assert_nested_alike(found, expected)
        wanted = [x, y, *_linear.parameters()]
        gradients = [
            torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True)
            for result in (found, expected)
        ]
        for mine, theirs in zip(*gradients, strict=True):
            _assert_nested_alike(mine, theirs)
        # Its size is that of what it was computed from.
        if expected.layout is torch.jagged:
            _assert_nested_alike(found + expected.detach(), expected + expected.detach())
    assert backend != "eager" or graphs <= 4


@pytest.mark.parametrize("backend", _BACKENDS)
def test_nested_tensors_of_one_size_or_two(backend: str) -> None:
    """Which of them hold one tensor of where their rows end decides what the program may do with them."""

    def program(x: Any, y: Any) -> Any:
        return (x + y) * 2 if x.offsets() is y.offsets() else (x * 2, y * 3)

    compiled = gradsplit.compile(program, backend=backend)
    x, other = _nested(2, 3), _nested(2, 3)
    for y in (x.detach() * 2, other, x.detach() * 3, other):
        found, expected = compiled(x, y), program(x, y)
        pairs = zip(found, expected, strict=True) if type(expected) is tuple else [(found, expected)]
        for mine, theirs in pairs:
            _assert_nested_alike(mine, theirs)
