"""``heapq`` and ``bisect``: the real functions, on lists whose items compare as the program's do."""

from __future__ import annotations

import bisect
import heapq
from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import CALL_RULES, CallRule, answers
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import ListValue, SequenceValue, SortKey


def _heap_rule(function: Any) -> CallRule:
    """A function that reorders its first argument, and may take or give an item."""

    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        heap, *items = args
        if not isinstance(heap, ListValue) or heap.cls is not list or kwargs:
            raise state.unsupported("heap", f"{function.__name__} of {heap.describe()}")
        keyed = [SortKey(state, item) for item in heap.all(state)]
        try:
            result = function(keyed, *(SortKey(state, item) for item in items))
        except IndexError as error:
            raise state.raise_exception(IndexError, *error.args) from None
        heap.replace(state, [key.value for key in keyed])
        return result.value if isinstance(result, SortKey) else ConstantValue(None)

    return call


for _function in (heapq.heapify, heapq.heappush, heapq.heappop, heapq.heapreplace, heapq.heappushpop):
    CALL_RULES[_function] = _heap_rule(_function)


def _bisect_rule(function: Any, inserts: bool) -> Any:
    def find(
        state: CaptureState,
        a: Value,
        x: Value,
        lo: Value | None = None,
        hi: Value | None = None,
        *,
        key: Any = None,
    ) -> Any:
        if not isinstance(a, SequenceValue) or (inserts and not isinstance(a, ListValue)):
            raise state.unsupported("bisect", f"{function.__name__} of {a.describe()}")
        items = a.all(state)
        keyed = [SortKey(state, item if key is None else key.call(state, [item], {})) for item in items]
        wanted = x if key is None or not inserts else key.call(state, [x], {})
        start = 0 if lo is None else state.as_index(lo, "lo")
        stop = len(items) if hi is None else state.as_index(hi, "hi")
        position = function(keyed, SortKey(state, wanted), start, stop)
        return (
            a.insert(state, ConstantValue(position), x) if isinstance(a, ListValue) and inserts else position
        )

    return find


answers(
    {
        bisect.bisect_left: _bisect_rule(bisect.bisect_left, inserts=False),
        bisect.bisect_right: _bisect_rule(bisect.bisect_right, inserts=False),
        bisect.insort_left: _bisect_rule(bisect.bisect_left, inserts=True),
        bisect.insort_right: _bisect_rule(bisect.bisect_right, inserts=True),
    }
)
