"""``CompileProfiler``: which functions are compiled again and again, and why."""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsplit.compile_core.ir.captured import CapturedFrame
from gradsplit.compile_core.observe.observer import Observer


class CompileProfiler(Observer):
    """A backend that runs graphs with torch's own kernels and notes graph breaks and recompilations.

    While it watches, functions may have any number of entries, so that every recompilation is seen.
    Use it as ``compile(f, backend=profiler)``; it may, but need not, be entered as a context manager.

    Attributes:
        frame_count: graphs compiled.
        op_count: calls in all of them.
        cache_limit: how many entries functions may have under this backend.
    """

    cache_limit = sys.maxsize

    def __init__(self) -> None:
        self.frame_count = 0
        self.op_count = 0
        self._breaks: Counter[str] = Counter()
        self._misses: dict[types.CodeType, list[str]] = {}

    def __call__(
        self, module: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor]
    ) -> Callable[..., Any]:
        self.frame_count += 1
        self.op_count += sum(node.op.startswith("call") for node in module.graph.nodes)
        return module.forward

    def __enter__(self) -> CompileProfiler:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def frame_captured(self, name: str, code: types.CodeType, frame: CapturedFrame) -> None:
        if frame.break_reason is not None:
            self._breaks[str(frame.break_reason)] += 1

    def frame_missed(self, name: str, code: types.CodeType, reason: str) -> None:
        self._misses.setdefault(code, []).append(reason)

    def get_metrics(self) -> dict[str, dict[types.CodeType, list[str]]]:
        """The guards that failed, by the code of the function, in order."""
        return {"guard_failures": {code: list(reasons) for code, reasons in self._misses.items()}}

    def report(self) -> str:
        """Both tables, with the limit that would be enough."""
        lines = ["gradsplit Profiler Report", "=========================", "", "Graph Breaks", "------------"]
        if self._breaks:
            for reason, count in self._breaks.items():
                lines += [f"{count} time{'s' if count > 1 else ''}: {reason}", ""]
            lines.append("compile(..., fullgraph=True) stops at the first one.")
        else:
            lines.append("No graph breaks detected.")
        lines += ["", "Recompilation", "-------------"]
        if self._misses:
            for code, reasons in self._misses.items():
                lines.append(f"'{code.co_name}' ({code.co_filename}:{code.co_firstlineno})")
                lines.append(f"  recompiled {len(reasons)} time{'s' if len(reasons) > 1 else ''}:")
                lines += [f"    {reason}" for reason in reasons]
            needed = 1 + max(len(reasons) for reasons in self._misses.values())
            lines += [
                "",
                f"Set gradsplit.config.cache_size_limit to {needed} to keep all of these entries.",
            ]
        else:
            lines.append("No recompilation detected.")
        return "\n".join([*lines, ""])
