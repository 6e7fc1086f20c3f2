"""Random programs over sizes and integers equal their plain runs at every size, with few entries."""

from typing import Any

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.ir.source_writer import compile_function
from tests.capture.same_as_plain import assert_same

NUMBERS = st.recursive(
    st.sampled_from(
        ["rows", "columns", "n", "2", "3", "7", "x.numel()", "y.shape[0]", "len(y)", "x.stride(0)"]
    ),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*"]), inner),
        st.builds(
            "({} {} {})".format,
            inner,
            st.sampled_from(["//", "%"]),
            st.sampled_from(["2", "3", "rows", "-4"]),
        ),
        st.builds("max({}, {})".format, inner, inner),
        st.builds("abs({})".format, inner),
        st.builds("int({} / {})".format, inner, st.sampled_from(["3", "rows"])),
        st.builds("math.ceil({} * 0.3)".format, inner),
        st.builds("({} if {} > {} else {})".format, inner, inner, inner, inner),
    ),
    max_leaves=4,
)

STATEMENTS = st.one_of(
    st.builds("n = {}".format, NUMBERS),
    st.builds("rows = abs({}) + 1".format, NUMBERS),
    st.builds("y = x * ({} % 11)".format, NUMBERS),
    st.builds("y = x[: {}]".format, NUMBERS),
    st.builds("y = x[:, {} % columns :]".format, NUMBERS),
    st.builds("y = torch.cat([x, x.new_ones(abs({}) % 5, x.shape[1])])".format, NUMBERS),
    st.just("y = x.T.reshape(-1, x.shape[0]).T"),
    st.just("y = x.reshape(-1)[:, None]"),
    st.builds("y = y + torch.arange(y.shape[0])[:, None] / (abs({}) + 1)".format, NUMBERS),
    st.builds("y = y.expand(2, *y.shape).sum(0) * ({} / 7)".format, NUMBERS),
    st.builds("if {} % 2 == 0: y = y + 1".format, NUMBERS),
    st.builds("if y.shape[0] > {}: y = y * 2".format, NUMBERS),
    st.builds("kept.append({})".format, NUMBERS),
    st.builds("kept.append(({}) / 3 * 0.1)".format, NUMBERS),
    st.builds("kept.append(({} < {}, y.shape))".format, NUMBERS, NUMBERS),
    st.builds("z = z + len({{{}: 1, {}: 2}})".format, NUMBERS, NUMBERS),
    st.just("x.add_(y.shape[0])"),
)

CALLS = [(2, 3, 4), (4, 3, 4), (5, 3, 6), (8, 6, 6), (9, 5, 2), (1, 4, 0), (16, 2, -3), (5, 5, 5), (4, 3, 4)]


def run(function: Any, rows: int, columns: int, n: int) -> tuple[Any, ...]:
    x = torch.arange(float(rows * columns)).reshape(rows, columns)
    kept: list[Any] = []
    try:
        return function(x, n, kept), x, kept
    except Exception as error:
        return type(error).__name__, kept


@example(["y = x * (((rows // 2) // -4) % 11)", "n = (rows // 2) // -4"], None)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
@given(st.lists(STATEMENTS, min_size=1, max_size=5), st.sampled_from([None, True]))
def test_programs_over_sizes(statements: list[str], dynamic: bool | None) -> None:
    lines = [
        "def program(x, n, kept):",
        "rows, columns = x.shape",
        "y = z = x",
        *statements,
        "return y, z, n, rows",
    ]
    program = compile_function("\n    ".join(lines), "program", {"torch": torch, "math": __import__("math")})
    compiled = CompiledFunction(program, lambda captured, inputs: captured.module, dynamic=dynamic)
    for call in CALLS:
        expected, found = run(program, *call), run(compiled, *call)
        if isinstance(expected[0], str):
            # What a program that raises has changed before is the concern of other tests.
            assert expected[0] == found[0], lines
        else:
            assert_same(expected, found, "\n".join(lines))
    assert len(compiled.entries) <= len(CALLS), lines
