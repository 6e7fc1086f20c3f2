"""Plain frames whose callees are mapped: each callee once, and the frame does what it did."""

from __future__ import annotations

import contextlib
import functools
import itertools

import pytest
import torch

import gradsplit
from gradsplit.compile_core.compiled_calls.plain_frames import PlainFrames
from gradsplit.compile_core.interface.testing import CompileCounter, CompileCounterWithBackend
from tests.capture.test_reference_faq import a_fn


def helper(x, *args, scale=1, **kwargs):
    return x * scale + sum(args) + sum(kwargs.values())


class Base:
    def method(self, x):
        return x + 1


class Derived(Base):
    factor = 3
    layers = (helper, abs)

    def method(self, x):
        return super().method(x) * self.factor

    def by_index(self, x):
        return self.layers[0](x, 1, scale=2) + self.layers[1](-x)

    @property
    def chosen(self):
        return helper


def plain_call(x):
    return helper(x, 2, scale=3)


def spread(x):
    args, named = (1, 2), {"scale": 2, "more": 5}
    return helper(x, *args) + helper(x, **named) + helper(*(x, 1), **named)


def method_call(x):
    return Derived().method(x)


def method_of_what_a_variable_makes(x):
    make = Derived
    return make().method(x) + make(*()).method(x)


def expression_callee(x):
    chosen = [helper, Derived().method]
    return chosen[0](x) + chosen[1](x if x > 0 else -x) + (lambda y: helper(y))(x)


def property_callee(x):
    return Derived().chosen(x, scale=2)


def nested(x):
    return helper(helper(x, scale=helper(2)), helper(1))


def conditional_argument(x):
    return helper(x if x > 1 else helper(x), helper(1) if x else 2)


def conditional_callee(x):
    return (helper if x > 1 else abs)(x)


def decorated_inside(x):
    @functools.wraps(helper)
    def inner(y):
        return helper(y) + 1

    return inner(x)


def comprehension(x):
    return (
        [helper(x, k) for k in range(3)]
        + sorted({helper(k) for k in range(2)})
        + [*(helper(k) for k in (1, 2))]
    )


def context(x):
    with contextlib.suppress(KeyError), contextlib.nullcontext(helper(x)) as y:
        x = y + helper(1)
        raise KeyError(helper(x))
    return helper(x)


def exceptions(x):
    try:
        if helper(x) < 100:
            raise ValueError(helper(x))
    except ValueError as error:
        return helper(error.args[0])
    finally:
        x = helper(x)
    return x


def loop(x):
    for k in itertools.count():
        if helper(k) > 3:
            break
        x = helper(x, k)
    else:
        x = 0
    while helper(x) > 10:
        x -= helper(2)
    return x


def looks_at_its_frame(x):
    y = helper(x)
    return sorted(locals()), len(vars()), y


def class_inside(x):
    class Inner(Base):
        value = helper(x)

    return Inner.value + Inner().method(x)


def closure(x):
    total = 0

    def add(y):
        nonlocal total
        total += helper(y)
        return total

    return add(x) + add(x)


PROGRAMS = [
    plain_call,
    spread,
    method_call,
    method_of_what_a_variable_makes,
    expression_callee,
    property_callee,
    nested,
    conditional_argument,
    conditional_callee,
    decorated_inside,
    comprehension,
    context,
    exceptions,
    loop,
    looks_at_its_frame,
    class_inside,
    closure,
    Derived().method.__func__,
    Derived().by_index.__func__,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_frame_does_what_it_did_and_its_callees_are_mapped(program):
    seen = []

    def note(callee):
        seen.append(callee)
        return callee

    mapped = PlainFrames(note).form_of(program)
    first = (Derived(),) if "." in program.__qualname__ else ()
    for x in (5, 1, -2):
        assert mapped(*first, x) == program(*first, x)
    assert seen or program.__name__ == "method"  # what super() finds is called as it is from 3.12 on
    if program is plain_call:
        assert seen == [helper] * 3
    if program is expression_callee:
        assert [getattr(callee, "__name__", None) for callee in seen[:4]] == [
            "Derived",
            "helper",
            "method",
            "<lambda>",
        ]
    if program is method_of_what_a_variable_makes:
        names = ["Derived", "method", "Derived", "method"]
        assert [callee.__name__ for callee in seen] == names * 3
    if program is nested:
        assert seen == [helper] * 12
    if program is comprehension:
        assert seen[:9].count(helper) >= 3


def test_generators_and_defaults_stay():
    def generate(x, n=2, *, step=3):
        for k in range(n):
            received = yield helper(x, k * step)
            if received:
                yield helper(received)

    mapped = PlainFrames(lambda callee: callee).form_of(generate)
    assert list(mapped(1)) == list(generate(1))
    assert mapped.__defaults__ == (2,) and mapped.__name__ == "generate"


def complex_conjugate(z):
    return torch.conj(z)


def combine(real, imag):
    z = torch.complex(real, imag)
    return complex_conjugate(z)


@pytest.mark.parametrize("disable", [gradsplit.disable, torch.compiler.disable])
def test_only_the_frame_of_a_function_is_disabled(disable):
    """The sample of the reference page on torch.compiler.disable(recursive=False)."""
    counter = CompileCounterWithBackend("triton")
    complex_function = disable(combine, recursive=False)

    def outer_function():
        real = torch.tensor([2, 3], dtype=torch.float32)
        imag = torch.tensor([4, 5], dtype=torch.float32)
        z = complex_function(real, imag)
        return torch.abs(z)

    opt_outer_function = gradsplit.compile(outer_function, backend=counter)
    for _ in range(2):
        assert torch.allclose(opt_outer_function(), torch.tensor([4.4721, 5.8310]), atol=1e-4)
    targets = [
        node.target for graph in counter.graphs for node in graph.graph.nodes if node.op == "call_function"
    ]
    assert targets == [torch.tensor, torch.tensor, torch.conj, torch.abs]


@pytest.mark.parametrize("disable", [gradsplit.disable, torch.compiler.disable])
def test_what_a_disabled_frame_calls_is_compiled(disable):
    counter = CompileCounter()
    disabled = disable(a_fn, recursive=False)

    @gradsplit.compile(backend=counter)
    def f(x):
        return disabled(x + 1) - 1

    for _ in range(2):
        assert torch.equal(f(torch.ones(2)), torch.full((2,), 14.0))
    assert (counter.frame_count, counter.op_count) == (4, 4)
    assert torch.equal(disabled(torch.ones(2)), torch.full((2,), 9.0))
    assert counter.frame_count == 4


def test_a_method_that_is_disabled_alone():
    counter = CompileCounter()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        @gradsplit.disable(recursive=False)
        def part(self, x):
            return self.inner(x) * 2

        def forward(self, x):
            return self.part(x + 1) - 1

    model = Model()
    compiled = gradsplit.compile(model, backend=counter)
    x = torch.randn(3, 2)
    assert torch.allclose(compiled(x), model(x))
    assert (counter.frame_count, counter.op_count) == (3, 3)


def layer(x):
    return torch.sin(x) * 2


def writes_into_a_view(x):
    y = layer(x)
    out = torch.empty(8)[:2]
    torch.mul(x, x, out=out)  # resizes a view, which no graph does
    return layer(y) + out


def raises_in_a_capture_only(x, scale=None):
    if scale is None and not torch.compiler.is_compiling():
        scale = torch.ones(3)
    return layer(x) * scale[:1]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("program", [writes_into_a_view, raises_in_a_capture_only])
def test_callees_of_a_frame_that_cannot_be_captured_are_compiled(program):
    counter = CompileCounter()
    compiled = gradsplit.compile(program, backend=counter)
    x = torch.randn(5)
    # A capture may meet an exception that plain Python does not raise for other arguments: so it takes some.
    for _ in range(gradsplit.config.cache_size_limit + 2):
        assert torch.equal(compiled(x), program(x))
    assert counter.frame_count == 1
