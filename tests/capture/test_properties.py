"""Random small programs: compiled with and without graph breaks, each does what the plain program does."""

from __future__ import annotations

import linecache
from itertools import count

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compile_core.compiled_function import CompiledFunction

_numbers = count()

TENSORS = ["x", "y"]
TENSOR_EXPRESSIONS = [
    "{0} + {1}",
    "{0} * 2",
    "torch.relu({0}) - {1}",
    "{0}.sin().cos()",
    "{0}.sum(0, keepdim=True) + {1}",
    "torch.where({0} > 0, {0}, {1})",
    "scale({0})",
    "scale({0}, factor=n)",
    "shift({0})",
    "{0}.clone().add_(1)",
    "items[0] + {0}",
    "table['t'] * {0}",
    "{0} if n % 2 else {1}",
    "sum([{0}, {1}, 1])",
    "(lambda v: v * n)({0})",
    "box.weight * {0}",
    "box.apply({0})",
]
NUMBER_EXPRESSIONS = [
    "n + 1",
    "x.shape[0]",
    "len(items)",
    "n * 2 - 3",
    "max(n, 2)",
    "int(n / 2)",
    "y.dim() + n",
    "sum(range(n % 4))",
    "len([i for i in range(5) if i < n])",
    "next(pair[1] for pair in enumerate([n, 3]))",
    "box.calls",
    "n // 3 if n > 3 else n",
]
STATEMENTS = [
    "items.append({t})",
    "table['t'] = {t}",
    "table[str(n % 3)] = n",
    "items[-1] = {t}",
    "box.calls += 1",
    "box.weight = {t}",
    "x, y = y, {t}",
    "items.extend([{t}, {t}])",
    "n, m = m, {n}",
    "m += {n}",
    "first, *rest = items",
    "calls.append(n)",
    "items.insert(0, {t})",
    "table.update(t={t}, u=n)",
    "y.mul_(0.5)",
    "y[0] = n",
]
BREAKS = ["log(n)", "y = y + float(x.detach().sum())", "log(str(x.shape))"]
CONDITIONS = [
    "n > 2",
    "x.shape[0] == 2",
    "len(items) < 3",
    "'0' in table",
    "n % 2 == 0 and m",
    "items",
    "not n",
]

HEADER = """
import torch

calls = []

def log(value):
    calls.append(value)

def scale(v, factor=2, *rest, **named):
    return v * factor

class Box:
    def __init__(self, weight):
        self.weight = weight
        self.calls = 0

    def apply(self, v):
        self.calls += 1
        return v + self.calls

def program(x, y, items, table, box, n=1):
    m = 1
    bias = 3
    def shift(v):
        return v + bias
"""

FOOTER = """
    return {'x': x, 'y': y, 'items': items, 'pair': (n, m), 'table': table}
"""


@st.composite
def statements(draw, depth, breaks):
    lines = []
    for _ in range(draw(st.integers(1, 4))):
        kinds = (
            ["tensor", "number", "statement"]
            + (["block"] * 2 if depth else [])
            + (["break"] if breaks else [])
        )
        kind = draw(st.sampled_from(kinds))
        tensor = draw(st.sampled_from(TENSOR_EXPRESSIONS)).format(
            draw(st.sampled_from(TENSORS)), draw(st.sampled_from(TENSORS))
        )
        number = draw(st.sampled_from(NUMBER_EXPRESSIONS))
        if kind == "tensor":
            lines.append(f"{draw(st.sampled_from(TENSORS))} = {tensor}")
        elif kind == "number":
            lines.append(f"{draw(st.sampled_from(['n', 'm']))} = {number}")
        elif kind == "statement":
            lines.append(draw(st.sampled_from(STATEMENTS)).format(t=tensor, n=number))
        elif kind == "break":
            lines.append(draw(st.sampled_from(BREAKS)))
        else:
            body = ["    " + line for line in draw(statements(depth - 1, breaks))]
            head = draw(
                st.sampled_from(
                    [
                        "if",
                        "if",
                        "for i in range(2):",
                        "for v in (x, y):",
                        "try",
                        "while",
                        "with torch.no_grad():",
                    ]
                )
            )
            if head == "if":
                lines += [f"if {draw(st.sampled_from(CONDITIONS))}:", *body, "else:"]
                lines += ["    " + line for line in draw(statements(0, breaks))]
            elif head == "try":
                error = draw(
                    st.sampled_from(["raise ValueError(n)", "items[9]", "table['none']", "n // (n - n)"])
                )
                lines += ["try:", *body, f"    {error}", "except (ValueError, LookupError) as error:"]
                lines += ["    n += len(error.args)", "except ZeroDivisionError:", "    m = 7"]
            elif head == "while":
                lines += ["k = 0", "while k < 2:", "    k += 1", *body]
            else:
                lines += [head, *body]
    return lines


def make(lines):
    text = HEADER + "\n".join("    " + line for line in lines) + FOOTER
    filename = f"<program {next(_numbers)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    namespace = {"__name__": "user_program"}
    exec(compile(text, filename, "exec"), namespace)
    return namespace, text


def arguments(namespace, seed, rows):
    torch.manual_seed(seed)
    box = namespace["Box"](torch.randn(rows, 3))
    x, y = torch.randn(rows, 3), torch.randn(rows, 3)
    return x, y, [x, torch.ones(1, 3)], {"t": y, "0": 1}, box


def outcome(function, namespace, seed, rows, n):
    namespace["calls"].clear()
    given_arguments = arguments(namespace, seed, rows)
    x, y, items, table, box = given_arguments
    try:
        result = function(*given_arguments, n=n)
        shared = (result["items"] is items, result["table"] is table, result["x"] is x, result["y"] is y)
    except Exception as error:
        return type(error), str(error)
    return describe((result, shared, items, table, x, y, box.weight, box.calls, list(namespace["calls"])))


def describe(value):
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.requires_grad, value.tolist())
    if isinstance(value, (list, tuple)):
        return type(value), [describe(item) for item in value]
    if isinstance(value, dict):
        return [(key, describe(item)) for key, item in value.items()]
    return type(value), value


def check(lines, fullgraph):
    namespace, text = make(lines)
    plain_namespace, _ = make(lines)
    compiled = CompiledFunction(namespace["program"], lambda graph, inputs: graph.module, fullgraph=fullgraph)
    for seed, rows, n in ((0, 2, 3), (1, 2, 3), (2, 1, 4), (3, 2, 0)):
        expected = outcome(plain_namespace["program"], plain_namespace, seed, rows, n)
        found = outcome(compiled, namespace, seed, rows, n)
        assert repr(found) == repr(expected), text


options = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@options
@given(statements(2, False))
def test_one_graph(lines):
    check(lines, fullgraph=False)


@options
@given(statements(2, True))
def test_with_breaks(lines):
    check(lines, fullgraph=False)
