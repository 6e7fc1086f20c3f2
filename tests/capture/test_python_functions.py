# ruff: noqa - the programs are written as people write them
"""Functions: parameters, closures, defaults, decorators and functools, each against the plain program."""

from __future__ import annotations

import functools
import inspect
import sys
import types

import pytest
import torch

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from tests.capture.compare_runs import Programs, check_program

program = Programs()
CALLS = 0


def kinds(a, b=2, /, c=3, *rest, d, e=5, **named):
    return a, b, c, rest, d, e, named


def counted(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        wrapper.calls += 1
        return function(*args, **kwargs)

    wrapper.calls = 0
    return wrapper


def repeated(times):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(value):
            for _ in range(times):
                value = function(value)
            return value

        return wrapper

    return decorate


class Memory:
    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.function = function
        self.seen = []

    def __call__(self, value):
        self.seen.append(value)
        return self.function(value)


@counted
def increased(value):
    return value + 1


@repeated(3)
def doubled(value):
    "Doubles."
    return value * 2


@Memory
def remembered(value):
    return value * 10


@functools.cache
def slow_square(n):
    return n * n


@functools.cache
def cached_mask(n):
    return torch.ones(n)


@functools.singledispatch
def shown(value):
    return "object"


@shown.register
def _(value: int):
    return f"int {value}"


@shown.register(list)
def _(value):
    return [shown(item) for item in value]


@functools.total_ordering
class Version:
    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return self.number == other.number

    def __lt__(self, other):
        return self.number < other.number


class WithCached:
    def __init__(self, base):
        self.base = base
        self.computed = 0

    @functools.cached_property
    def total(self):
        self.computed += 1
        return self.base * 2

    def scaled(self, factor, offset=0):
        return self.base * factor + offset

    tripled = functools.partialmethod(scaled, 3)
    shifted = functools.partialmethod(scaled, offset=7)

    @functools.singledispatchmethod
    def of(self, value):
        return "any"

    @of.register
    def _(self, value: str):
        return "str" + value


@program
def all_kinds_of_parameters(x, n):
    return x, kinds(1, d=n), kinds(1, 2, 3, 4, 5, d=6, e=7, f=8), kinds(*[1, 2], d=1, c=9, b=4)


@program
def default_is_shared_between_calls(x, n):
    def append(item, items=[]):
        items.append(item)
        return items

    first = append(1)
    second = append(n)
    return x, first, first is second, append(3, [])


@program
def default_expressions(x, n):
    k = n

    def inner(value=k * 2, *, other=k + x.shape[0]):
        return value + other

    k = 100
    return x + inner(), inner(1), inner(other=2)


@program
def shared_cells(x, n):
    count = 0

    def up(by=1):
        nonlocal count
        count += by
        return count

    def read():
        return count

    up()
    up(n)
    count += 10
    return x + read(), count, up.__closure__[0].cell_contents if n > 5 else None


@program
def closures_in_a_loop(x, n):
    made = []
    for i in range(3):

        def inner(value, i=i):
            return value * i + n

        made.append(inner)
    return [f(x) for f in made], [f.__name__ for f in made]


@program
def functions_handed_out(x, n):
    state = [n]

    def get():
        return state

    def push(v):
        state.append(v)
        return len(state)

    push(4)
    return x, state, get.__name__


@program
def empty_cell(x, n):
    def inner():
        return later

    try:
        inner()
    except NameError as error:
        text = str(error)
    later = n
    return x, inner(), text


@program
def deleted_cell(x, n):
    value = n

    def inner():
        return value

    del value
    try:
        return inner()
    except NameError as error:
        return x, str(error)


@program(recompiles=False)
def decorated_with_arguments(x):
    return doubled(x), doubled.__name__, doubled.__doc__, doubled.__wrapped__(1)


@program
def lambda_tricks(x, n):
    curry = lambda f: lambda a: lambda b: f(a, b)
    compose = lambda *fs: functools.reduce(lambda f, g: lambda v: g(f(v)), fs)
    return curry(lambda a, b: a * b)(x)(n), compose(lambda v: v + 1, lambda v: v * 2, torch.relu)(x)


@program
def partial_objects(x, n):
    add = functools.partial(kinds, 1, d=2)
    more = functools.partial(add, n, e=0)
    return (
        x,
        add(),
        more(c=3),
        add.args,
        add.keywords,
        more.func is kinds,
        more.args,
        functools.partial(max, 3)(n),
    )


@program
def partial_handed_out(x, n):
    return functools.partial(kinds, n, d=1).keywords, x


@program
def partial_methods(x, n):
    item = WithCached(n)
    return x * item.tripled(), item.tripled(1), item.shifted(2)


@program
def cached_properties(x, n):
    item = WithCached(n)
    return x + item.total, item.total, item.computed, item


@program
def lru_cached(x, n):
    return x * slow_square(n), slow_square(n) + slow_square(3)


@program
def cached_tensor(x, n):
    return x + cached_mask(3), cached_mask(n).shape, cached_mask(3) is cached_mask(3)


@program
def reductions(x, n):
    return (
        functools.reduce(lambda a, b: a + b, [x, x, n]),
        functools.reduce(max, range(n), 0),
        functools.reduce(lambda a, b: [*a, b], "abc", []),
    )


@program
def single_dispatch(x, n):
    return x, shown(n), shown([1, "a", [2.0]]), shown(True)


@program
def single_dispatch_methods(x, n):
    item = WithCached(n)
    return x, item.of(1), item.of("s")


@program
def total_order(x, n):
    a, b = Version(1), Version(n)
    return (
        x,
        a < b,
        a <= b,
        a > b,
        a >= b,
        a == b,
        a != b,
        sorted([Version(3), b, a])[0].number,
        max(a, b) is b,
    )


@program
def compared_by_function(x, n):
    key = functools.cmp_to_key(lambda a, b: (a > b) - (a < b))
    return (
        x,
        sorted([3, n, 2], key=key),
        sorted("bca", key=functools.cmp_to_key(lambda a, b: -1 if a > b else 1)),
    )


@program
def function_attributes(x, n):
    def inner(value: int, more: str = "s") -> float:
        "Doc."
        return value

    inner.tag = n
    return (
        x,
        inner.tag,
        inner.__name__,
        inner.__doc__,
        inner.__qualname__,
        inner.__defaults__,
        inner.__kwdefaults__,
        inner.__code__.co_argcount,
        hasattr(inner, "nothing"),
        inner.__module__,
        callable(inner),
    )


@program
def signatures(x, n):
    signature = inspect.signature(kinds)
    bound = signature.bind(1, d=n)
    bound.apply_defaults()
    return (
        x,
        list(signature.parameters),
        dict(bound.arguments),
        [p.default for p in signature.parameters.values()][1],
    )


@program
def signature_of_a_callback(x, n):
    def takes_two(a, b=None):
        return a

    names = list(inspect.signature(takes_two).parameters)
    return x, "b" in names, len(names)


@program
def inspection(x, n):
    return (
        x,
        inspect.isfunction(kinds),
        inspect.isclass(Version),
        inspect.ismethod(WithCached(1).scaled),
        inspect.isbuiltin(len),
        inspect.isgeneratorfunction(kinds),
        callable(Version),
    )


@program
def method_objects(x, n):
    item = WithCached(n)
    bound = item.scaled
    unbound = WithCached.scaled
    return (
        x,
        bound(2),
        unbound(item, 3),
        bound.__self__ is item,
        bound.__func__ is unbound,
        bound.__name__,
        item.scaled == bound,
        kinds.__get__(n)(d=1),
        types_of(bound),
    )


def types_of(value):
    return type(value).__name__


@program
def recursive_closure(x, n):
    def outer(k):
        def even(i):
            return True if i == 0 else odd(i - 1)

        def odd(i):
            return False if i == 0 else even(i - 1)

        return even(k)

    return x, outer(n), outer(n + 1)


@program
def classes_of_functions(x):
    def inner(v):
        return v

    return (
        x,
        inner.__class__,
        kinds.__class__.__name__,
        type(inner).__class__,
        len.__class__,
        x.__class__,
        x.sum.__name__,
    )


@pytest.mark.parametrize("function, settings", program.table, ids=program.names)
def test_same_as_plain(function, settings):
    check_program(function, **settings)


def test_decorator_state_is_kept():
    def run(x, n):
        return increased(x) + remembered(n)

    increased.calls = 0
    remembered.seen.clear()
    compiled = CompiledFunction(run, lambda graph, inputs: graph.module, fullgraph=True)
    for n in range(3):
        assert torch.equal(compiled(torch.ones(1), n), torch.ones(1) + 1 + 10 * n)
    assert increased.calls == 3 and remembered.seen == [0, 1, 2]


def test_scripted_functions_are_what_they_were_made_from():
    @torch.jit.script
    def scripted(x, n: int):
        return (x * n).relu()

    compiled = CompiledFunction(
        lambda x: scripted(x, 2) + 1, lambda graph, inputs: graph.module, fullgraph=True
    )
    x = torch.tensor([1.0, -1.0])
    assert torch.equal(compiled(x), scripted(x, 2) + 1)


def test_imports(monkeypatch):
    """A module that is not loaded is loaded by the capture, where nothing that the program did before waits."""

    def run(x):
        import colorsys
        import xml.dom.minidom as dom
        from . import models

        return x + 1, colorsys.rgb_to_hsv(0.5, 0.5, 0.5), dom.__name__, models.__name__

    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    compiled = CompiledFunction(run, lambda graph, inputs: graph.module, fullgraph=True)
    found, expected = compiled(torch.ones(1)), run(torch.ones(1))
    assert found[1:] == expected[1:] and "colorsys" in sys.modules


def test_global_writes_and_deletes():
    def run(x, n):
        global CALLS, MADE
        CALLS += n
        MADE = x + CALLS
        first = MADE
        del MADE
        try:
            MADE
        except NameError as error:
            return first, str(error)

    scope = {"CALLS": 3, "torch": torch, "NameError": NameError}
    moved = types.FunctionType(run.__code__, scope)
    scope["__builtins__"] = __builtins__

    compiled = CompiledFunction(moved, lambda graph, inputs: graph.module, fullgraph=True)
    result = compiled(torch.ones(1), 2)
    assert scope["CALLS"] == 5 and "MADE" not in scope
    assert result[0].item() == 6 and "MADE" in result[1]
    scope["MADE"] = 1
    compiled(torch.ones(1), 2)
    assert "MADE" not in scope and scope["CALLS"] == 7


def test_the_cache_of_a_function_is_used():
    made = []

    @functools.lru_cache
    def make(n):
        made.append(n)
        return torch.full((2,), float(n))

    def run(x, n):
        return x + make(n), make(n)

    check_program(run)
    assert made == [1, 2, 3]
