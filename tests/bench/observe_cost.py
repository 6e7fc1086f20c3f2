"""What logs, reports, progress and the minimizer cost where none of them is switched on.

    python -m tests.bench.observe_cost [--model mlp] [--rounds 60]

Two sides in one process: the compiler as it is, and with all that observes it taken out. They take turns. *Compile* is
the processor time of a first step of a model whose kernels are built already, *call* that of a call of a small graph.
A percent of a compilation is about what it varies by: the table has the quarter and the median of all rounds, and the
first side a second time, for what says nothing. Below stands what the single calls of a compilation add up to by the
clock, which has the clock's own time in it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

import gradsplit
from gradsplit.compile_core import artifact_logs, run_record
from gradsplit.compile_core.capture.values import base
from gradsplit.compile_core.compiled_calls import record_captures
from gradsplit.compile_core.minimizer import write_failures
from gradsplit.compile_core.observe import dump, measure_steps, progress, stage_times
from tests.bench.thread_seconds import median_seconds
from tests.bench.training_models import TRAININGS

_NOTHING = nullcontext([0.0])
# What observes: where it is, and what does nothing in its place.
OBSERVERS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "record": (run_record, lambda *given: None),
    "log_artifact": (artifact_logs, lambda *given: None),
    "watch": (measure_steps, lambda *given: None),
    "timed": (stage_times, lambda *given: _NOTHING),
    "progress": (progress, lambda *given: _NOTHING),
    "recording_failure": (record_captures, lambda *given: _NOTHING),
    "_users_place": (base, lambda *given: None),
    "compiling": (write_failures.GraphFailures, lambda *given: _NOTHING),
    "watched": (write_failures.GraphFailures, lambda failures, compiled: compiled),
    "__call__": (dump.StageDump, lambda *given, **named: None),
}


@contextmanager
def replaced(make: Callable[[str, Any, Callable[..., Any]], Any]) -> Iterator[None]:
    """All that observes is replaced, in each module that has it under its name.

    Args:
        make: of its name, itself, and what does nothing.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("gradsplit")]
    with ExitStack() as stack:
        for name, (owner, nothing) in OBSERVERS.items():
            found = getattr(owner, name)
            instead = make(name, found, nothing)
            for place in {owner, *(module for module in modules if vars(module).get(name) is found)}:
                stack.enter_context(mock.patch.object(place, name, instead))
        yield


def without_observers() -> Any:
    return replaced(lambda name, found, nothing: nothing)


def counted_calls(run: Callable[[], Any]) -> Counter[str]:
    """How often each observer is called."""
    counts: Counter[str] = Counter()

    def make(name: str, found: Any, nothing: Callable[..., Any]) -> Any:
        def count(*given: Any, **named: Any) -> Any:
            counts[name] += 1
            return found(*given, **named)

        return count

    with replaced(make):
        run()
    return counts


def seconds_inside(run: Callable[[], Any]) -> float:
    """Seconds in all calls of observers: of ``with timed(...)``, to enter and to leave."""
    total = 0.0

    class Timed:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __enter__(self) -> Any:
            return clocked(self._inner.__enter__)

        def __exit__(self, *raised: Any) -> Any:
            return clocked(self._inner.__exit__, *raised)

    def clocked(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        nonlocal total
        start = time.perf_counter()
        result = call(*given, **named)
        total += time.perf_counter() - start
        return result

    def make(name: str, found: Any, nothing: Callable[..., Any]) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            result = clocked(found, *given, **named)
            return Timed(result) if hasattr(result, "__enter__") else result

        return call

    with replaced(make):
        run()
    return total


def compile_seconds(step: Callable[[], Any]) -> float:
    """Processor time that a first step takes longer than the next."""
    gradsplit.reset()
    start = time.process_time()
    step()
    middle = time.process_time()
    step()
    return 2 * middle - start - time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[*TRAININGS], default="mlp")
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs = TRAININGS[arguments.model]()
    compiled = gradsplit.compile(model)

    def step() -> None:
        compiled(**inputs).backward()

    step()
    sides = {"as it is": nullcontext, "taken out": without_observers, "as it is, again": nullcontext}
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(arguments.rounds):
        for name in [*sides][:: 1 if turn % 2 else -1]:
            with sides[name]():
                found[name].append(compile_seconds(step))
    counts = counted_calls(lambda: compile_seconds(step))
    inside = min(seconds_inside(lambda: compile_seconds(step)) for _ in range(5))

    small = gradsplit.compile(lambda x: (x * 2).sin().sum())
    x = torch.randn(4, 8, requires_grad=True)
    with without_observers():
        bare = gradsplit.compile(lambda x: (x * 2).sin().sum())
        bare(x).backward()
    calls = [lambda: small(x).backward(), lambda: bare(x).backward()]
    of_calls = median_seconds([*calls, calls[0]], arguments.rounds, 10e-3)
    in_calls = counted_calls(lambda: [small(x).backward() for _ in range(10)])

    table = Table("", *sides, title=f"{arguments.model}, CPU, {arguments.rounds} rounds")
    for what, n in (("quarter", 0), ("median", 1)):
        times = [statistics.quantiles(seconds, n=4)[n] for seconds in found.values()]
        table.add_row(
            f"compile, ms of processor time, {what}", *(f"{1e3 * seconds:.1f}" for seconds in times)
        )
    share = inside / statistics.median(found["as it is"])
    table.add_row(f"the {sum(counts.values())} calls in it, ms", f"{inside * 1e3:.2f} ({share:.2%})")
    table.add_row("call, µs of thread time, median", *(f"{1e6 * seconds:.2f}" for seconds in of_calls))
    table.add_row("observers that a call reaches", str(sum(in_calls.values())))
    console = Console(width=120)
    console.print(table)
    console.print(dict(counts))


if __name__ == "__main__":
    main()
