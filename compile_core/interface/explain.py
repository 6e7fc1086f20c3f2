"""``explain``: what a call of a function is compiled to, and where and why its graphs end."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsplit.compile_core.backends import generated_kernels
from gradsplit.compile_core.backends.registry import RegionBackend
from gradsplit.compile_core.capture.directives import leave_alone
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.compiled_calls.compiled_module import CompiledModule
from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.interface.module_compilers import claim
from gradsplit.compile_core.ir.captured import CapturedFrame, CapturedGraph
from gradsplit.compile_core.ir.data_reads import DataEnds
from gradsplit.compile_core.ir.schedule import Compute
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.extern_rules import fallback_calls
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.observe.explanation import BreakReason, ExplainedGuard, ExplainOutput
from gradsplit.compile_core.observe.observer import Observer
from gradsplit.compile_core.observe.stage_times import Stopwatch, print_times, timed
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.pipeline import compile_graph


@leave_alone
def explain(f: Callable[..., Any], *extra_args: Any, **extra_kwargs: Any) -> Any:
    """Runs a function once, compiled with the backend "eager", and reports its graphs and graph breaks.

    ``explain(f)(*args)`` calls ``f`` with the arguments and returns an ``ExplainOutput``; what ``f`` does besides
    computing, it does. Compiled entries that ``f`` may have are neither used nor changed. ``explain(f, *args)`` is an
    older form of the same. The graphs are lowered as the default backend would, to tell what it calls torch's kernels
    for and what it does not fuse; no kernel is built. A module that has a compiled form of its own, as a
    ``DistributedDataParallel`` one, is explained as that: its gradients, too.

    Raises:
        TypeError: ``f`` is not callable.
    """
    if not callable(f):
        raise TypeError(f"explain takes a function or a torch.nn.Module, not {type(f).__name__}")
    plugin = claim(f) if isinstance(f, torch.nn.Module) else None
    if plugin is not None and plugin.explain is not None:
        explain_claimed = plugin.explain(f)
        return explain_claimed(*extra_args, **extra_kwargs) if extra_args or extra_kwargs else explain_claimed

    @leave_alone
    def run(*args: Any, **kwargs: Any) -> ExplainOutput:
        seen = _SeenFrames()
        stopwatch = Stopwatch()
        compiled = CompiledFunction(
            f._orig_mod if isinstance(f, CompiledModule) else f,
            seen.compile_graph,
            observer=seen,
            data_ends=DataEnds(changes_last=True),
        )
        compiled(*args, **kwargs)
        return seen.explanation(print_times(stopwatch.seconds()))

    return run(*extra_args, **extra_kwargs) if extra_args or extra_kwargs else run


class _SeenFrames(Observer):
    """Notes every captured frame in order, and what its graph is lowered to."""

    def __init__(self) -> None:
        self.frames: list[CapturedFrame] = []
        self.fallbacks: Counter[str] = Counter()
        self.unfused: list[str] = []

    def compile_graph(self, graph: CapturedGraph, inputs: Sequence[Any]) -> Callable[..., Any]:
        backend = RegionBackend(
            "explained", self._lower_region, generated_kernels.decompositions, makes_random_numbers=True
        )
        compile_graph(graph, inputs, backend=backend, options=CompileOptions())
        return graph.module

    def _lower_region(
        self, compute: Compute, options: CompileOptions, dump: StageDump
    ) -> Callable[[], Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]]:
        with timed("lower"):
            program = lower(compute)
        with timed("fuse"):
            program = fuse(program)
        self.fallbacks.update(str(call.target) for call in fallback_calls(program))
        self.unfused += [f"{compute.name}: {refusal}" for refusal in program.unfused]
        return lambda: _never_run

    def frame_captured(self, name: str, code: types.CodeType, frame: CapturedFrame) -> None:
        self.frames.append(frame)

    def explanation(self, compile_times: str) -> ExplainOutput:
        graphs: list[torch.fx.GraphModule] = [
            frame.graph.module for frame in self.frames if frame.graph is not None
        ]
        ops = [[node.target for node in graph.graph.nodes if node.op == "call_function"] for graph in graphs]
        # A break before which there was nothing to compute ends no graph; a frame that is not captured at all has none
        # because of it, and neither has a call without any graph.
        reasons = [
            BreakReason.of(frame.break_reason)
            for frame in self.frames
            if frame.break_reason is not None
            and (frame.graph is not None or frame.runner is None or not graphs)
        ]
        return ExplainOutput(
            graphs=graphs,
            graph_count=len(graphs),
            graph_break_count=max(len(graphs) - 1, 0),
            break_reasons=reasons,
            op_count=sum(map(len, ops)),
            ops_per_graph=ops,
            out_guards=[ExplainedGuard.of(guard) for frame in self.frames for guard in frame.guards],
            fallbacks=dict(self.fallbacks),
            unfused=self.unfused,
            compile_times=compile_times,
        )


def _never_run(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    raise InternalError("a region that was only lowered was called")
