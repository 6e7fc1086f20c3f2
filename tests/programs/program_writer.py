"""Writes random Python programs: one function over tensors, numbers, containers and objects, with all it calls.

A program is a tree of statements, so that a smaller one with the same behaviour can be looked for by removing parts.
Its variables keep their kinds (``x``, ``y``, ``z`` are tensors of one shape, ``n``, ``m``, ``k`` numbers, ``items``
and ``other`` lists of tensors, ``table`` a dictionary, ``box`` an object), so that most programs run; where one raises,
that is part of its behaviour.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

PRELUDE = """
import collections
import contextlib
import functools
import itertools

import torch
from torch import nn

CALLS = []
COUNT = 0
WEIGHT = torch.arange(9.0).reshape(3, 3) / 10
Pair = collections.namedtuple("Pair", ["left", "right"])


class Problem(Exception):
    pass


class Manager:
    def __init__(self, name, swallows=False):
        self.name = name
        self.swallows = swallows

    def __enter__(self):
        CALLS.append(("enter", self.name))
        return self

    def __exit__(self, kind, error, trace):
        CALLS.append(("exit", self.name, kind))
        return self.swallows and kind is not None and issubclass(kind, (Problem, LookupError))


@contextlib.contextmanager
def generated(value):
    CALLS.append("begin")
    try:
        yield value * 2
    finally:
        CALLS.append("end")


def numbers(value, count):
    for i in range(count):
        yield value + i


def talking(value):
    value = value + 1
    print("talking", tuple(value.shape))
    return value * 2


def slope(value, factor, again=False):
    value = value.detach().requires_grad_()
    (found,) = torch.autograd.grad((value * factor).sin().sum(), value, create_graph=again)
    return found * factor


def echo(value, *rest, factor=2, **named):
    return value * factor + len(rest) + len(named)


class Box:
    kind = "box"
    made = 0

    def __init__(self, weight):
        self.weight = weight
        self.calls = 0
        self.kept = []

    def __call__(self, value):
        self.calls += 1
        return value + self.calls

    def __add__(self, value):
        return self.weight + value

    def __radd__(self, value):
        self.calls += 2
        return value - self.weight

    def __getitem__(self, key):
        return self.weight if key % 2 else self.weight * 2

    def __len__(self):
        return len(self.kept)

    def __contains__(self, key):
        return key < self.calls

    def __iter__(self):
        return iter([self.weight, self.weight + 1])

    @property
    def scaled(self):
        return self.weight * 3

    @scaled.setter
    def scaled(self, value):
        self.weight = value / 3

    @staticmethod
    def shift(value):
        return value - 1

    @classmethod
    def describe(cls, n):
        return f"{cls.kind}{n}"

    def keep(self, value):
        self.kept.append(value)
        return self


class Special(Box):
    kind = "special"

    def __call__(self, value):
        return super().__call__(value) * 2

    def keep(self, value):
        print("keep", len(self.kept))
        return super().keep(value)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Dropout(0.5)])
        self.register_buffer("steps", torch.zeros(1))
        self.count = 0

    def forward(self, value):
        self.count += 1
        self.steps += 1
        value = self.norm(self.linear(value))
        for layer in self.layers:
            value = layer(value)
        return value + self.steps


"""

TENSORS = ("x", "y", "z")
NUMBERS = ("n", "m", "k")


@dataclass
class Statement:
    """A simple statement is its ``text``; a compound one has blocks, each with a header."""

    text: str = ""
    blocks: list[tuple[str, list[Statement]]] = field(default_factory=list)

    def lines(self) -> list[str]:
        if not self.blocks:
            return [self.text]
        found = []
        for header, body in self.blocks:
            found.append(header)
            found += [f"    {line}" for inner in body for line in inner.lines()] or ["    pass"]
        return found


@dataclass
class Program:
    """Top-level helper functions, and the body of ``program``."""

    helpers: list[Statement]
    body: list[Statement]

    def text(self) -> str:
        parts = [line for helper in self.helpers for line in [*helper.lines(), "", ""]]
        parts.append("def program(x, y, items, table, box, model, n=1, *rest, scale=1.5, **named):")
        parts += ["    global COUNT", "    z, m, k, other, pair = x + y, 2, 0, [y], Pair(x, 1)"]
        parts += [f"    {line}" for statement in self.body for line in statement.lines()]
        parts.append("    return x, y, z, n, m, k, items, other, table, box, pair, rest, named")
        return PRELUDE + "\n".join(parts) + "\n"


class ProgramWriter:
    """Writes the program of a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        # A third of the programs has nothing that must end a graph.
        self.breaks = self.random.random() < 0.66
        self.helpers = 0
        self.functions = 0
        self.in_loop = 0
        self.locals_only = False

    def write(self) -> Program:
        helpers = [self.helper() for _ in range(self.random.randint(0, 2))]
        return Program(helpers, self.block(self.random.randint(1, 3), top=True))

    def pick(self, *choices: str) -> str:
        return self.random.choice(choices)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    # Expressions

    def tensor(self, depth: int = 1) -> str:
        if depth <= 0 or self.chance(0.3):
            return self.pick(*TENSORS)
        t, u = self.tensor(depth - 1), self.tensor(depth - 1)
        n = self.number(0)
        choices = [
            f"({t} + {u})",
            f"({t} * 0.5 - {u})",
            f"({t} * {n})",
            f"torch.relu({t})",
            f"{t}.sin()",
            f"torch.where({t} > 0, {t}, {u})",
            f"({t} - {t}.mean())",
            f"({t} @ WEIGHT)",
            f"{t}.clone()",
            f"echo({t}, {u}, factor={n})",
            f"echo(*[{t}, 1], **{{'a': {n}}})",
            f"({t} if {self.condition(0)} else {u})",
            f"sum([{t}, {u}], {t})",
            f"functools.reduce(lambda a, b: a + b * scale, [{t}, {u}])",
            f"(lambda v, s=scale: v * s + {n})({t})",
            f"functools.partial(echo, factor={n})({t})",
            f"torch.cat([{t}, {u}])[: {t}.shape[0]]",
            f"{t}.reshape(-1).reshape({t}.shape)",
            f"{t}.t().t()",
            f"{t}[:, :]",
            f"torch.stack([{t}, {u}]).sum(0)",
            f"torch.zeros_like({t})",
            f"torch.rand_like({t})",
            f"nn.functional.dropout({t}, 0.5, training=model.training)",
            f"{t}.detach()",
            f"[{t}, {u}][{n} % 2]",
            f"[v + i for i, v in enumerate(({t}, {u}))][-1]",
            f"next(numbers({t}, 2))",
            f"sum(v for v in numbers({t}, 2))",
            f"dict(a={t}, b={u})['b']",
            f"Pair({t}, {u}).right",
            f"max([({n}, {t}), (3, {u})], key=lambda p: p[0])[1]",
            f"torch.full_like({t}, {n})",
            f"{t}.exp().clamp(max=5)",
            f"{t}.to(torch.float64).to(torch.float32)",
            f"slope({t}, {u})",
            f"slope({t}, {u}, again=True)",
        ]
        if not self.locals_only:
            choices += [
                f"items[{n} % max(len(items), 1)]",
                "items[-1]",
                "other[0]",
                "table['t']",
                "box.weight",
                "box.scaled",
                f"box({t})",
                f"(box + {t})",
                f"({t} + box)",
                f"box[{n}]",
                f"box.shift({t})",
                "pair.left",
                f"model({t})",
                f"model.linear({t})",
                f"table.get('u', {t})",
                "sum(box)",
                f"named.get('bias', {t})",
            ]
        choices += [f"helper{i}({t}, {n})" for i in range(self.helpers)]
        if self.breaks:
            choices += [
                f"talking({t})",
                f"({t} * float({u}.detach().sum() > 0))",
                f"[talking(v) for v in ({t},)][0]",
            ]
        return self.pick(*choices)

    def number(self, depth: int = 1) -> str:
        if depth <= 0 or self.chance(0.3):
            return self.pick(*NUMBERS, "1", "2", "3")
        n, m, t = self.number(depth - 1), self.number(depth - 1), self.tensor(0)
        choices = [
            f"({n} + {m}) % 7",
            f"({n} * 2 - 3)",
            f"max({n}, {m})",
            f"{t}.shape[0]",
            f"({t}.dim() + {n})",
            f"sum(range({n} % 4))",
            f"len([i for i in range(5) if i < {n}])",
            f"abs({n}) // 2",
            f"divmod({n}, 3)[1]",
            f"({n} if {self.condition(0)} else {m})",
            f"int({n} / 2)",
            f"next((i for i in itertools.count() if i * i > {n}), 0)",
            f"len({{i % 3 for i in range({n} % 6)}})",
            f"len(f'{{{self.pick(*NUMBERS)}:5}}{{{self.pick(*NUMBERS)}!r}}')",
            f"sorted([{n}, {m}, 2], key=lambda v: -v)[0]",
            f"[{n}, {m}].index({n})",
            f"(-{n} ** 2 % 5)",
            f"({n} > 2) + ({m} == 1)",
        ]
        if not self.locals_only:
            choices += [
                "len(items)",
                "box.calls",
                "len(box)",
                "COUNT",
                "len(table)",
                "model.count",
                "table.get('0', 4)",
                f"len(box.describe({n}))",
                "items.index(items[-1])",
                "len(rest) + len(named)",
                "sum(1 for _ in zip(items, other))",
            ]
        if self.breaks:
            choices += [f"int({t}.detach().abs().sum().item()) % 4", f"int(bool({t}.sum() > 0))"]
        return self.pick(*choices)

    def condition(self, depth: int = 1) -> str:
        n, m = self.number(depth - 1), self.number(depth - 1)
        choices = [
            f"({n} > {m})",
            f"({n} % 2 == 0)",
            f"(not {n})",
            f"0 < {n} <= 3",
            f"{self.tensor(0)}.shape[0] == 2",
        ]
        if not self.locals_only:
            choices += [
                "len(items) < 3",
                "'u' in table",
                "items",
                "x is y",
                "items is other",
                "box.weight is x",
                "isinstance(box, Special)",
                "model.training",
                f"{n} in box",
                "hasattr(box, 'extra')",
                "torch.is_grad_enabled()",
                "x.requires_grad",
            ]
        if self.breaks:
            choices += [f"{self.tensor(0)}.sum() > 0", f"{self.tensor(0)}.mean().item() < 0.1"]
        if depth > 0 and self.chance(0.3):
            return f"({self.condition(0)} {self.pick('and', 'or')} {self.condition(0)})"
        return self.pick(*choices)

    # Statements

    def block(self, depth: int, top: bool = False) -> list[Statement]:
        return [
            self.statement(depth)
            for _ in range(self.random.randint(2, 6) if top else self.random.randint(1, 3))
        ]

    def statement(self, depth: int) -> Statement:
        if depth > 0 and self.chance(0.45):
            makers = [
                self.branch,
                self.branch,
                self.loop,
                self.loop,
                self.attempt,
                self.attempt,
                self.manager,
            ]
            makers += [self.closure, self.repeat, self.match, self.local_class]
            return self.random.choice(makers)(depth)
        return Statement(self.simple())

    def simple(self) -> str:
        t, u, n = self.tensor(2), self.tensor(1), self.number(2)
        variable, name = self.pick(*TENSORS), self.pick(*NUMBERS)
        choices = [
            f"{variable} = {t}",
            f"{variable} = {t}",
            f"{name} = {n}",
            f"{name} += {n}",
            f"{variable} += {u}",
            f"{variable} = {variable} + {name}",
            "x, y = y, x",
            f"{variable}.mul_(0.5)",
            f"{variable}[0] = {n}",
            f"{variable}[0].add_(1)",
            f"{variable} = {variable}[:]",
            f"q = {variable}[:1]; q += 1",
            f"{variable}.add_({u})",
            f"{name} = {self.condition()}",
            f"{name} = (q := {n}) + q",
            f"print({name}, {variable}.shape)" if self.breaks else f"{name} = 3",
            f"del {variable}; {variable} = {'y' if variable != 'y' else 'x'} * 2",
        ]
        if self.in_loop:
            choices += ["break", "continue"]
        if self.chance(0.06):
            choices += [
                f"raise Problem({name})",
                f"assert {self.condition()}, 'asserted'",
                f"return {variable}, {name}",
                "items[99]",
                f"{name} = {n} // ({name} - {name})",
            ]
        if not self.locals_only:
            choices += [
                f"items.append({t})",
                f"items.append({t})",
                f"other.extend([{u}, {variable}])",
                f"items[-1] = {t}",
                f"items += [{u}]",
                f"items.insert({n} % 2, {u})",
                "other = items",
                "other = list(items)",
                f"other = [{u}, *items]",
                "items = items[::-1]",
                "first, *other = items",
                f"table['t'] = {t}",
                f"table[str({n} % 3)] = {n}",
                f"table.update(u={u})",
                f"table.setdefault('s', []).append({n})",
                "table.pop('u', None)",
                "del table['0']",
                f"table = {{**table, 'v': {n}}}",
                f"box.calls += {n}",
                f"box.weight = {t}",
                f"box.scaled = {u}",
                f"box.extra = {n}",
                f"box.keep({u}).keep({n})",
                "box.items = items",
                f"Box.made += {n}",
                f"COUNT += {n}",
                f"COUNT = {n}",
                f"CALLS.append({n})",
                "CALLS.append(len(items))",
                f"pair = pair._replace(right={n})",
                f"pair = Pair({u}, {n})",
                f"box = Special({u})",
                "model.count += 1",
                f"model({t}.detach()).square().sum().backward()",
                f"model.linear({t}.detach()).sum().backward(retain_graph=True)",
                f"{variable} = model.linear.weight.grad.sum() + {u}",
                "model.linear.zero_grad()",
                f"model.extra = {u}",
                f"setattr(box, 'extra', {n})",
                f"{name} = getattr(box, 'extra', {n})",
                "other.clear()",
                "items.sort(key=lambda v: v.dim())",
                "items.reverse()",
                f"named['late'] = {n}",
                "other.pop()",
                f"{variable} = items.pop()",
                "(lambda a, *b, c=3: CALLS.append((len(b), c)))(1, *items, c=n)",
                "print('table', sorted(table), len(items))" if self.breaks else "k = len(sorted(table))",
            ]
        return self.pick(*choices)

    def branch(self, depth: int) -> Statement:
        blocks = [(f"if {self.condition(2)}:", self.block(depth - 1))]
        if self.chance(0.3):
            blocks.append((f"elif {self.condition()}:", self.block(depth - 1)))
        if self.chance(0.6):
            blocks.append(("else:", self.block(depth - 1)))
        return Statement(blocks=blocks)

    def loop(self, depth: int) -> Statement:
        headers = [
            "for i in range(3):",
            f"for i in range({self.number(1)} % 3):",
            f"for i, z in enumerate([{self.tensor()}, {self.tensor()}]):",
            f"for z in numbers({self.tensor()}, 2):",
            f"for z in (v * 2 for v in ({self.tensor()}, y)):",
            "for k in reversed(range(2)):",
            "for z, k in itertools.product([x, y], [1, 2]):",
        ]
        if not self.locals_only:
            headers += [
                "for z in items[:4]:",
                "for z in list(items)[-3:]:",
                "for name, value in list(table.items())[:3]:",
                "for name in sorted(table)[:3]:",
                "for z, k in zip(items[:3], range(5)):",
                "for i, (z, k) in enumerate(zip(other[:3], (4, 5)), 1):",
                "for z in map(lambda v: v + scale, items[:3]):",
                "for z in itertools.chain(items[:2], other[:2]):",
                "for z in box:",
                "for layer in model.layers:",
            ]
        self.in_loop += 1
        body = self.block(depth - 1)
        if self.chance(0.5) and not self.locals_only:
            body.insert(
                0, Statement(self.pick("CALLS.append('round')", "if len(items) < 6: items.append(y)"))
            )
        self.in_loop -= 1
        blocks = [(self.pick(*headers), body)]
        if self.chance(0.2):
            blocks.append(("else:", self.block(depth - 1)))
        return Statement(blocks=blocks)

    def repeat(self, depth: int) -> Statement:
        self.functions += 1
        count = f"left{self.functions}"
        self.in_loop += 1
        body = [Statement(f"{count} -= 1"), *self.block(depth - 1)]
        self.in_loop -= 1
        return Statement(
            blocks=[
                ("if True:", [Statement(f"{count} = 3"), Statement(blocks=[(f"while {count} > 0:", body)])]),
            ]
        )

    def attempt(self, depth: int) -> Statement:
        body = self.block(depth - 1)
        if self.chance(0.6):
            error = self.pick(
                f"raise Problem({self.number()})",
                f"raise ValueError('v', {self.number()})",
                "[][0]",
                "{}['none']",
                "n // (n - n)",
                "x.no_such_attribute",
                "int('x')",
                "x.reshape(7, 7)",
                "raise KeyError(k) from Problem(n)",
            )
            body.insert(self.random.randint(0, len(body)), Statement(error))
        blocks = [("try:", body)]
        kinds = self.random.randint(0, 2)
        if kinds:
            header = self.pick(
                "except (Problem, ValueError) as error:",
                "except LookupError as error:",
                "except Exception as error:",
                "except (ArithmeticError, RuntimeError, AttributeError) as error:",
            )
            handler = [
                Statement(
                    self.pick("n += len(error.args)", "CALLS.append(str(error))", "CALLS.append(type(error))")
                ),
                *self.block(depth - 1),
            ]
            if self.chance(0.1):
                handler.append(
                    Statement(self.pick("raise", "raise Problem('again')", "raise Problem('x') from error"))
                )
            blocks.append((header, handler))
        if kinds == 2:
            blocks.append(("except Exception:", self.block(depth - 1)))
        if kinds and self.chance(0.3):
            blocks.append(("else:", self.block(depth - 1)))
        if not kinds or self.chance(0.4):
            blocks.append(("finally:", self.block(depth - 1)))
        return Statement(blocks=blocks)

    def manager(self, depth: int) -> Statement:
        headers = [
            "with torch.no_grad():",
            "with torch.no_grad():",
            "with torch.enable_grad():",
            f"with torch.set_grad_enabled({self.condition(0)}):",
            "with Manager('a'):",
            "with Manager('b', swallows=True) as manager:",
            f"with generated({self.tensor()}) as z:",
            f"with Manager('c', True), generated({self.tensor()}) as y, torch.no_grad():",
            "with contextlib.suppress(Problem, LookupError):",
            "with contextlib.nullcontext(x) as z:",
        ]
        return Statement(blocks=[(self.pick(*headers), self.block(depth - 1))])

    def closure(self, depth: int) -> Statement:
        self.functions += 1
        name = f"inner{self.functions}"
        shared = self.pick("n", "m", "z", "k")
        changed = "n" if shared == "z" else shared
        body = [Statement(self.pick(f"nonlocal {changed}", "pass"))]
        if body[0].text != "pass":
            body.append(Statement(f"{changed} += 1"))
        body.append(Statement(f"v = v * scale + {shared}"))
        if self.breaks and self.chance(0.4):
            body.append(Statement("print('inner', w)"))
        body.append(Statement(self.pick("return v", "return v * w", f"return v if w else v + {shared}")))
        header = self.pick(
            f"def {name}(v, w=1):", f"def {name}(v, *rest, w=2, **named):", f"def {name}(v, /, w=n):"
        )
        call = self.pick(
            f"x = {name}({self.tensor()})",
            f"y = {name}({self.tensor()}, w={self.number()})",
            f"z = sum([{name}(v) for v in (x, y)])",
            f"other = list(map({name}, [x, y]))",
            f"z = functools.partial({name}, w=3)(x)",
            f"items.append({name}(y))" if not self.locals_only else f"y = {name}(y)",
        )
        # A function may not declare a parameter of the outer one nonlocal before the outer one has it.
        return Statement(
            blocks=[
                ("if True:", [Statement(blocks=[(header, body)]), *self.block(depth - 1), Statement(call)]),
            ]
        )

    def match(self, depth: int) -> Statement:
        return Statement(
            blocks=[
                (
                    f"match ({self.number()}, {self.pick('items', 'table', 'n') if not self.locals_only else 'n'}):",
                    [
                        Statement(blocks=[("case (1, _):", self.block(depth - 1))]),
                        Statement(blocks=[("case (int() as m, [_, *_]):", self.block(depth - 1))]),
                        Statement(blocks=[("case (_, {'t': z}):", self.block(depth - 1))]),
                        Statement(blocks=[("case _:", self.block(depth - 1))]),
                    ],
                )
            ]
        )

    def local_class(self, depth: int) -> Statement:
        self.functions += 1
        name = f"Local{self.functions}"
        method = Statement(
            blocks=[
                ("def apply(self, v):", [Statement("self.seen += 1"), Statement("return v * self.seen + n")])
            ]
        )
        make = Statement(blocks=[("def __init__(self):", [Statement("self.seen = 0")])])
        return Statement(
            blocks=[
                (
                    "if True:",
                    [
                        Statement(blocks=[(f"class {name}:", [make, method])]),
                        Statement(f"local = {name}()"),
                        *self.block(depth - 1),
                        Statement(f"z = local.apply({self.tensor()}) + local.apply(y)"),
                    ],
                )
            ]
        )

    def helper(self) -> Statement:
        """A function of its own, with tensors and numbers only."""
        self.locals_only, in_loop, self.in_loop = True, self.in_loop, 0
        body = [
            Statement("global COUNT"),
            Statement("x, y, z, n, m, k, scale = value, value * 2, value - 1, count, 1, 0, 0.5"),
            *self.block(2),
            Statement(self.pick("return x + y", "return z", "return x if n else y")),
        ]
        text = Statement(blocks=[(f"def helper{self.helpers}(value, count=1):", body)])
        self.locals_only, self.in_loop = False, in_loop
        self.helpers += 1
        return text
