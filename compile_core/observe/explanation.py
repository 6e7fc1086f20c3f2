"""What ``explain`` finds out, and how it prints."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.captured import Guard
from gradsplit.compile_core.ir.sources import LocalSource


@dataclass(frozen=True)
class BreakReason:
    """Why a graph ended.

    Attributes:
        reason: id and explanation.
        user_stack: the user's lines, outermost first.
        hint: what the user can do, or nothing.
    """

    reason: str
    user_stack: list[traceback.FrameSummary]
    hint: str

    @staticmethod
    def of(error: Unsupported) -> BreakReason:
        stack = [
            traceback.FrameSummary(
                place.filename, place.line, place.function, lookup_line=False, line=place.text
            )
            for place in error.stack
        ]
        return BreakReason(f"[{error.reason_id}] {error.explanation}", stack, error.hint)


@dataclass(frozen=True)
class ExplainedGuard:
    """A condition under which the captured graphs hold: the name of what is looked at, where that is, what kind of
    condition it is, and what must hold."""

    name: str
    source: str
    guard_types: list[str]
    code_list: list[str]

    @staticmethod
    def of(guard: Guard) -> ExplainedGuard:
        where = {"local" if isinstance(source.root, LocalSource) else "global" for source in guard.sources}
        names = ", ".join(str(source) for source in guard.sources)
        found_in = "local" if where == {"local"} else "global"
        return ExplainedGuard(names, found_in, [guard.kind], [guard.text])

    def __str__(self) -> str:
        return (
            f"    Name: {self.name!r}\n    Source: {self.source}\n    Guard Types: {self.guard_types}\n"
            f"    Code List: {self.code_list}\n"
        )


@dataclass(frozen=True)
class ExplainOutput:
    """What one call of a function was compiled to.

    Unpacked, it is ``(summary, out_guards, graphs, ops_per_graph)``.

    Attributes:
        graphs: the graphs in the order in which they were captured.
        graph_count, graph_break_count: their number, and one less.
        break_reasons: where and why a graph ended before its function did.
        op_count: calls of functions in all graphs; calls of tensor methods are not counted.
        ops_per_graph: the functions called, one list a graph.
        out_guards: the conditions under which the graphs hold.
        fallbacks: operators that the default backend has no lowering for, with how often it calls torch's kernels.
        unfused: pairs of kernels that share memory traffic and stay apart, with the reason.
        compile_times: a table of the seconds of each stage.
    """

    graphs: list[torch.fx.GraphModule]
    graph_count: int
    graph_break_count: int
    break_reasons: list[BreakReason]
    op_count: int
    ops_per_graph: list[list[Any]]
    out_guards: list[ExplainedGuard]
    fallbacks: dict[str, int]
    unfused: list[str]
    compile_times: str

    def __iter__(self) -> Iterator[Any]:
        return iter((self.summary, self.out_guards, self.graphs, self.ops_per_graph))

    @property
    def summary(self) -> str:
        """The counts in a sentence, and every break with its source line."""
        text = (
            f"gradsplit produced {self.graph_count} graphs, with {self.graph_break_count} graph breaks "
            f"and {self.op_count} ops.\n Break reasons:\n"
        )
        for number, reason in enumerate(self.break_reasons, 1):
            text += f"{number}. {reason.reason}\n{''.join(traceback.format_list(reason.user_stack))}\n"
        return text

    def __str__(self) -> str:
        lines = [
            f"Graph Count: {self.graph_count}",
            f"Graph Break Count: {self.graph_break_count}",
            f"Op Count: {self.op_count}",
            "Break Reasons:",
        ]
        for number, reason in enumerate(self.break_reasons, 1):
            lines += [f"  Break Reason {number}:", f"    Reason: {reason.reason}"]
            lines += [f"    Hint: {reason.hint}"] if reason.hint else []
            lines += ["    User Stack:", *(f"      {frame}" for frame in reason.user_stack)]
        lines.append("Ops per Graph:")
        for number, ops in enumerate(self.ops_per_graph, 1):
            lines += [f"  Ops {number}:", *(f"    {op}" for op in ops)]
        lines.append("Out Guards:")
        for number, guard in enumerate(self.out_guards, 1):
            lines += [f"  Guard {number}:", str(guard).rstrip()]
        lines.append("Operators without a Lowering:")
        lines += [f"  {name}: {count}" for name, count in self.fallbacks.items()]
        lines += ["Not Fused:", *(f"  {pair}" for pair in self.unfused)]
        return "\n".join([*lines, f"Compile Times: {self.compile_times}", ""])
