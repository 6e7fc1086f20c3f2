# ruff: noqa: C416, C417, UP031, B023 - what is written here is what is tested
"""Python features: each function gives the same result compiled (in one graph) as plain, twice."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction

SCALE = 3.0
COUNTER = 0
TABLE = {"a": 2, "b": [1, 2, 3]}


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Options:
    factor: float = 2.0
    names: list = dataclasses.field(default_factory=list)

    @property
    def doubled(self):
        return self.factor * 2

    @staticmethod
    def static(x):
        return x + 1

    @classmethod
    def made(cls, factor):
        return cls(factor)


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: int


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


class Base:
    def method(self, x):
        return x * 2


class Derived(Base):
    offset = 5

    def method(self, x):
        return super().method(x) + self.offset


def helper(x, *rest, scale=1.0, **named):
    for item in rest:
        x = x + item
    for key in sorted(named):
        x = x * named[key]
    return x * scale


def closures(x):
    k = 2

    def inner(y):
        nonlocal k
        k += 1
        return y * k

    return inner(inner(x)), k


def keyword_arguments(x):
    return helper(x, 1, 2, scale=SCALE, b=2, a=3)


def star_calls(x):
    args, named = (1, 2), {"scale": 2.0}
    return helper(x, *args, **named)


def containers(x):
    items = [x, x + 1]
    items.append(x * 2)
    table = {"first": items[0], "rest": items[1:]}
    table["n"] = len(items)
    first, *others = items
    return table, (first, others), {**table, "more": 1}, [*items, 3]


def comprehensions(x):
    squares = [i * i for i in range(4) if i != 2]
    named = {str(i): x + i for i in squares}
    return [named[k] for k in named], {i for i in squares} == {0, 1, 9}, sum(v.sum() for v in named.values())


def loops(x):
    total = x
    for i, (a, b) in enumerate(zip([1, 2, 3], reversed([4, 5, 6]), strict=True)):
        if i == 1:
            continue
        total = total + a * b
    else:
        total = total * 2
    while total.ndim < 4:
        total = total.unsqueeze(0)
    return total


def exceptions(x):
    try:
        if x.shape[0] > 1:
            raise ValueError("large", 3)
        y = x
    except (KeyError, ValueError) as error:
        y = x + len(error.args)
    finally:
        y = y * 2
    try:
        {}["missing"]
    except KeyError:
        y = y + 1
    return y


def generators(x):
    def items(n):
        for i in range(n):
            yield x + i

    return sum(items(3)), any(i > 2 for i in range(5)), list(items(2)), max(i for i in (3, 1))


def yield_from(x):
    def inner(n):
        yield x + n
        yield n
        return n * 2

    def outer():
        result = yield from inner(3)
        yield result
        yield from [7, 8]

    return list(outer())


def user_objects(x):
    options = Options(3.0)
    options.names.append("a")
    options.factor += 1
    return Options.static(x) * options.doubled * Options.made(2.0).factor, Derived().method(x), options.names


def named_tuples(x):
    pair = Pair(x, x + 1)
    left, _ = pair
    return pair, pair.left + pair[1], left


def strings(x):
    name = f"{x.shape[0]:>3}|{x.dtype}|{'q'!r}"
    return name.strip().upper(), name.split("|"), "%d-%s" % (3, "a"), ",".join(["a", "b"])


def folded(x):
    return x * math.sqrt(4.0) + int(3.7) + round(2.5) + min(3, 1, 2) + abs(-2) + divmod(7, 2)[1] + pow(2, 3)


def partials(x):
    return functools.partial(helper, scale=2.0)(x, 1), functools.reduce(lambda a, b: a + b, [x, x, x])


def itertools_use(x):
    return [x + a * b for a, b in itertools.chain([(1, 2)], [(3, 4)])], list(map(lambda v: v + 1, [x, 2]))


def isinstance_use(x):
    kinds = (
        isinstance(x, torch.Tensor),
        isinstance(3, (str, int)),
        isinstance(Derived(), Base),
        callable(helper),
    )
    return (
        x if all(kinds) else -x,
        hasattr(x, "shape"),
        getattr(Options(), "nothing", 7),
        type(x) is torch.Tensor,
    )


def slices(x):
    y = x[1:, ::2] + x[:-1, 0:1]
    y[0] = 7
    y[..., -1] += 1
    return y, x[None].shape, x[torch.tensor([0, 1])]


def in_place(x):
    y = x.clone()
    y.add_(1).mul_(2)
    z = y
    z += 1
    return y, z is y


def no_grad(x):
    with torch.no_grad():
        y = x * 2
    with torch.enable_grad(), contextlib.nullcontext():
        z = x * 3
    return y + z, y.requires_grad, torch.is_grad_enabled()


def autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.T
    return y, x @ x.T


def shapes(x):
    b, c = x.shape
    return x.view(c, b).reshape(-1), x.size(0) * x.size(-1), x.numel(), list(x.shape), x.dim(), x.new_zeros(b)


def sorted_things(x):
    pairs = sorted([(2, "b"), (1, "a")], reverse=True)
    return [x * n for n, _ in pairs], sorted({"z": 1, "y": 2}), max("ab", key=lambda c: -ord(c))


def enums(x):
    mode = Mode.SLOW
    return x * (2 if mode is Mode.FAST else 3) * mode.value, mode == Mode.SLOW, mode.name


def globals_read(x):
    return x * SCALE + TABLE["a"] + len(TABLE["b"])


def walrus_ternary(x):
    return (y := x + 1) * 2 if (n := x.shape[0]) > 1 else x, y, n


def returned_closure(x):
    factor = 3

    def inner(z, more=2):
        return z * factor + more

    return inner(x)


def ordered(x):
    table = collections.OrderedDict(a=x)
    table["b"] = x + 1
    counts = collections.defaultdict(list)
    counts["k"].append(1)
    return table, counts


def frozen_dataclass(x):
    return x * Frozen(4).value


def multi_outputs(x):
    values, indices = x.max(dim=1)
    result = torch.topk(x, 1)
    return values, indices, result.values, torch.split(x, 1), x.unbind(0)


def pops(x):
    items = [1, 2, x]
    last = items.pop()
    del items[0]
    items.insert(0, 9)
    items[0:1] = [7, 8]
    items += [5]
    table = {"a": 1, "b": 2}
    removed = table.pop("a"), table.pop("c", 4), table.setdefault("d", 5), table.get("zz")
    return items, last, removed, table, "b" in table, 7 in items, list(table.items())


def nested_functions(x):
    def compose(*functions):
        def run(value):
            for function in functions:
                value = function(value)
            return value

        return run

    return compose(torch.relu, F.gelu, lambda v: v + 1)(x)


def chained_comparison(x):
    return x if (0 < x.shape[0] <= 5 and not x.shape[1] < 2) or False else -x


def matched(x):
    match x.shape[0]:
        case 1:
            return x
        case 2 | 3:
            return x * 2
        case _:
            return x * 3


FUNCTIONS = [
    closures,
    keyword_arguments,
    star_calls,
    containers,
    comprehensions,
    loops,
    exceptions,
    generators,
    yield_from,
    user_objects,
    named_tuples,
    strings,
    folded,
    partials,
    itertools_use,
    isinstance_use,
    slices,
    in_place,
    no_grad,
    autocast,
    shapes,
    sorted_things,
    enums,
    globals_read,
    walrus_ternary,
    returned_closure,
    ordered,
    frozen_dataclass,
    multi_outputs,
    pops,
    nested_functions,
    chained_comparison,
    matched,
]


def assert_same(one, other):
    assert type(one) is type(other), (one, other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.requires_grad == other.requires_grad
        assert torch.equal(one, other)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert one == other


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_same_as_plain(function):
    torch.manual_seed(0)
    compiled = CompiledFunction(function, lambda graph, inputs: graph.module, fullgraph=True)
    for _ in range(2):
        x = torch.randn(2, 3, requires_grad=True)
        assert_same(compiled(x.clone()), function(x.clone()))
    assert len(compiled.entries) == 1


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.log = []
        self.register_buffer("state", torch.zeros(2))

    def forward(self, x):
        self.calls += 1
        self.log.append(x.shape[0])
        self.state = self.state + x.sum()
        return x + self.state[0]


def test_module_side_effects_are_replayed():
    module, plain = Counter(), Counter()
    compiled = CompiledFunction(module, lambda graph, inputs: graph.module, fullgraph=True)
    for _ in range(3):
        x = torch.randn(2)
        assert torch.equal(compiled(x), plain(x))
    assert module.calls == plain.calls == 3
    assert module.log == plain.log == [2, 2, 2]
    assert torch.equal(module.state, plain.state) and "state" in dict(module.named_buffers())


def test_argument_mutation_is_replayed():
    def mutate(x, items, table):
        items.append(x + 1)
        table["n"] = table.get("n", 0) + 1
        table.update(last=items[-1])
        return items

    compiled = CompiledFunction(mutate, lambda graph, inputs: graph.module, fullgraph=True)
    x = torch.ones(2)
    one, other = ([1], {}), ([1], {})
    assert compiled(x, *one) is one[0]
    mutate(x, *other)
    assert_same(one, other)


def test_globals_and_cells_are_replayed():
    count = 0

    def step(x):
        nonlocal count
        global COUNTER
        count += 1
        COUNTER = COUNTER + 2
        return x + count

    compiled = CompiledFunction(step, lambda graph, inputs: graph.module, fullgraph=True)
    before = COUNTER
    assert compiled(torch.zeros(1)).item() == 1
    assert compiled(torch.zeros(1)).item() == 2
    assert count == 2 and before + 4 == COUNTER


def test_closures_can_be_returned():
    def make(x):
        total = [0]

        def add(n, by=2):
            total[0] += n * by
            return x + total[0]

        return add

    compiled = CompiledFunction(make, lambda graph, inputs: graph.module, fullgraph=True)
    add = compiled(torch.zeros(2))
    assert torch.equal(add(1), torch.full((2,), 2.0)) and torch.equal(add(1), torch.full((2,), 4.0))


def test_lambda_arguments_do_not_recompile():
    def apply(f, x):
        return f(x)

    compiled = CompiledFunction(apply, lambda graph, inputs: graph.module, fullgraph=True)
    for k in (2, 2, 3):
        assert torch.equal(compiled(lambda v: v * k, torch.ones(2)), torch.ones(2) * k)
    assert len(compiled.entries) == 2


def test_arguments_named_like_our_own_names():
    def function(entry, inputs, graph, out, l_x=1, **owner):
        return entry + inputs + graph + out + l_x + len(owner)

    compiled = CompiledFunction(function, lambda graph, inputs: graph.module, fullgraph=True)
    x = torch.ones(1)
    assert torch.equal(compiled(x, x, 1, 2, plain=3), function(x, x, 1, 2, plain=3))


def test_exceptions_surface_and_leave_nothing():
    seen = []

    def fails(x):
        seen.append(1)
        if x.shape[0] == 2:
            raise RuntimeError("two")
        return x @ x

    compiled = CompiledFunction(fails, lambda graph, inputs: graph.module, fullgraph=True)
    with pytest.raises(RuntimeError, match="two"):
        compiled(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|size mismatch|shapes cannot be"):
        compiled(torch.ones(3, 2))
    assert seen == [1, 1]


def test_identity_of_returned_arguments():
    def same(x, items):
        return x, items, items[0], (x.add_(1), x)

    compiled = CompiledFunction(same, lambda graph, inputs: graph.module, fullgraph=True)
    x, items = torch.zeros(2), [object()]
    result = compiled(x, items)
    assert result[0] is x and result[1] is items and result[2] is items[0]
    assert result[3][0] is x and x.sum() == 2
