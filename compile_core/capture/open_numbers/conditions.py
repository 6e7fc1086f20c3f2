"""Comparisons of numbers of which some depend on data: they are values of the program, until it decides by one.

What is known of the numbers, by what they are (no size is negative) or by ``torch._check``, decides; so does a guard,
where the number follows from tensors without dims of the CPU. Else the graph ends at the decision.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from gradsplit.compile_core.capture.open_numbers.known_numbers import decision_by
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.torch_facts.symbolic_numbers import depends_on_data, truth_of


class ConditionValue(Value):
    """A comparison of integers of which some depend on data; its truth is only known when the graph runs.

    ``node`` computes it where the graph read it out of a tensor. ``expected`` is what a decision by it assumes.
    """

    cls = bool

    def __init__(
        self, number: torch.SymBool, node: fx.Node | None = None, expected: bool | None = None
    ) -> None:
        self.number = number
        self.node = node
        self.expected = expected

    def describe(self) -> str:
        return f"the condition {self.number}, which depends on data"

    def settle(self, state: CaptureState) -> Value:
        return ConstantValue(self.truth(state))

    def graph_argument(self, state: CaptureState) -> Any:
        if self.node is not None:
            return state.graph.own_node(self.node)
        try:
            return state.graph.number(self.number.node.expr)
        except NotImplementedError:
            raise state.unsupported("data-dependent-value", f"no node for {self.describe()}") from None

    def truth(self, state: CaptureState) -> bool:
        known = truth_of(self.number)
        if known is None:
            node = self.graph_argument(state)
            shown = self.describe()
            known = decision_by(state, node, bool, shown) if isinstance(node, fx.Node) else bool(node)
        if known is None:
            known = self._of_what_is_not_empty(state)
        if known is None:
            known = assumed(state, self, self.expected)
        if known is None:
            raise state.unsupported(
                "data-dependent-branch",
                f"the truth value of {self.describe()}",
                "say torch._check() of it before",
            )
        return bool(known)

    def _of_what_is_not_empty(self, state: CaptureState) -> bool | None:
        """What holds for all sizes but nought, which is assumed of each call then; None where that differs, and of what
        the user asked for."""
        expression = self.number.node.expr
        symbols = expression.free_symbols
        if not state.data_reads or not state.graph.data_sizes.are_sizes(symbols):
            return None
        found = {bool(expression.xreplace(dict.fromkeys(symbols, size))) for size in _SIZES}
        known = len(found) == 1 and state.assume(self, True in found)
        return True in found if known else None


_SIZES = [sympy.Integer(size) for size in (1, 2, 3, 1000)]


def condition_value(number: Any) -> Value:
    """A comparison of numbers of torch as a value: a constant where it is known, with the condition that it stays so
    where it depends on sizes alone."""
    if not isinstance(number, torch.SymBool):
        return ConstantValue(bool(number))
    known = truth_of(number)
    if known is None and not depends_on_data(number):
        known = bool(number)
    return ConditionValue(number) if known is None else ConstantValue(known)


def combined(function: Any, *sides: Value) -> Value | None:
    """``&``, ``|`` or ``not`` of conditions; None where there is none, or what is no truth value beside it."""
    if not any(isinstance(side, ConditionValue) for side in sides):
        return None
    numbers = [
        side.number if isinstance(side, ConditionValue) else getattr(side, "value", None) for side in sides
    ]
    if not all(isinstance(number, (bool, torch.SymBool)) for number in numbers):
        return None
    value = condition_value(function(*numbers))
    expected = [side.expected if isinstance(side, ConditionValue) else side.as_constant() for side in sides]
    if isinstance(value, ConditionValue) and None not in expected:
        value.expected = bool(function(*expected))
    return value


def expected_of(node: fx.Node) -> bool | None:
    """What programs expect to hear that ask a question of all elements of a tensor at once, as whether any is not
    finite, or padding, before they treat it: that all are as they should be, or none as it should not."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return {"all": True, "any": False}.get(name)


def assumed(state: CaptureState, value: Value, expected: bool | None) -> bool | None:
    """``expected`` if it may be assumed, here and unasked, which a check in the graph says otherwise of; else None."""
    reads = state.data_reads
    if expected is None or not reads.may_end or not reads.may_stay(state.frames[-1].place()):
        return None
    return expected if state.assume(value, expected) else None
