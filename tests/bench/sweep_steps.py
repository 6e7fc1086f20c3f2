"""Steps of many models that nobody tuned for: ours beside TorchInductor's, with what each costs to compile.

    python -m tests.bench.sweep_steps [--models bert,... | --small 60] [--modes default,reduce-overhead] [--inference]
        [--batch 32] [--workers 12] [--limit-s 560] [--rows 5] [--out docs/sweep.md]

A step is forward and backward under bf16 autocast with the model's own dropout, float32 products at "high", gradients
dropped before it; with ``--inference`` a forward of a bf16 model under ``no_grad``. With ``--batch`` the model's inputs
are cut or repeated to that many. With ``--small`` the models are so many of ``tests/sweeps``, as small as there. On a
CPU everything is float32.
Each model has a process of its own, in which its sides take turns (``rows.py``). Several processes compile at a time,
two cores each; while one is timed all others are stopped, so that nothing else uses the host or the GPU.

Figures: milliseconds of a step (the median of rows), processor seconds of the first step with empty caches beyond a
later one, the peak of memory over some steps without what other sides hold, and the loss of the first step. The memory
is what tensors have; where CUDA graphs are recorded, whose memory torch's allocator counts as free between replays, it
is what the allocator holds. cuBLAS has 32 MiB or more for each thread and stream, for good: what plain steps and other
sides left there is freed before a side begins, so each pays for its own. Models that were not timed when ``--limit-s``
has passed are named.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import math
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import gradsplit
from tests.bench.compile_time import processor_seconds
from tests.bench.rows import Row, rows_in_turn, run_row, synchronise
from tests.bench.sweep_models import MODELS, SquaredResults
from tests.sweeps.cases import LIBRARIES, case_named, cases_of, in_order

_CORES_OF_A_MODEL = 2
# Steps of a side before its memory is looked at: libraries choose, graphs are recorded.
_SETTLING = 6
_STEPS_OF_PEAK = 2
_WARM_UP_S = 0.7
_IN_A_ROW = 6
# Of one model, in processor seconds.
_LIMIT_OF_A_MODEL_S = 400


@dataclass(frozen=True)
class Setting:
    """How models run: the compilers' modes, whether they are trained, on which device, with how many inputs at once;
    0 for the model's own number."""

    modes: tuple[str, ...]
    is_trained: bool
    device: str
    rows: int
    batch: int


@dataclass
class Figures:
    """Of one side of one model.

    Attributes:
        compile_s: processor seconds.
        peak_gib: of the GPU; 0 without one.
    """

    compile_s: float
    peak_gib: float
    loss: float
    step_ms: float = math.nan


@dataclass(frozen=True)
class Measured:
    """A model's figures by side, or why it has none."""

    name: str
    sides: Mapping[str, Figures]
    error: str = ""


SIDES: Mapping[str, Callable[[nn.Module, str], Any]] = {
    "gradsplit": lambda model, mode: gradsplit.compile(model, mode=mode),
    "inductor": lambda model, mode: torch.compile(model, mode=mode),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--small", type=int, default=0)
    parser.add_argument("--modes", default="default")
    parser.add_argument("--inference", action="store_true")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=max(1, len(os.sched_getaffinity(0)) - 2))
    parser.add_argument("--limit-s", type=float, default=math.inf)
    parser.add_argument("--rows", type=int, default=5, help=f"measured ones, of {_IN_A_ROW} steps")
    parser.add_argument("--out", type=Path, help="a Markdown file for the table")
    arguments = parser.parse_args()
    modes = tuple(arguments.modes.split(","))
    setting = Setting(modes, not arguments.inference, arguments.device, arguments.rows, arguments.batch)
    names = small_models(arguments.small) if arguments.small else arguments.models.split(",")
    found = []
    for measured in measure_all(names, setting, arguments.workers, time.monotonic() + arguments.limit_s):
        found.append(measured)
        print(line(measured), flush=True)
    for mode in modes:
        report = markdown(found, mode, set(names) - {measured.name for measured in found})
        Console(width=150).print(table(found, mode))
        print("\n".join(report.splitlines()[-8:]))
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.write(report + "\n")


def small_models(count: int) -> list[str]:
    """Of the models of ``tests/sweeps`` so many, evenly spread over its order by families."""
    cases = in_order([[*cases_of(library).values()] for library in LIBRARIES])
    return [case.name for case in cases[:: max(1, len(cases) // count)][:count]]


def _made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    if "/" not in name:
        return MODELS[name]()
    model, inputs = case_named(name).make()
    return SquaredResults(model), inputs


def measure_all(names: Sequence[str], setting: Setting, workers: int, end: float) -> Iterator[Measured]:
    """The models' figures as they come, until ``end`` of the monotonic clock."""
    waiting, running = list(reversed(names)), dict[Connection, tuple[str, BaseProcess]]()
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    started = 0
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                name = waiting.pop()
                mine, theirs = context.Pipe()
                two = {
                    cores[(_CORES_OF_A_MODEL * started + i) % len(cores)] for i in range(_CORES_OF_A_MODEL)
                }
                process = context.Process(target=_child, args=(name, setting, two, theirs))
                process.start()
                theirs.close()
                running[mine] = name, process
                started += 1
            for connection in wait(list(running), max(0.0, min(5.0, end - time.monotonic()))):
                assert isinstance(connection, Connection)
                name, process = running[connection]
                try:
                    result = connection.recv()
                    if isinstance(result, str):
                        yield Measured(name, {}, result)
                    else:
                        with _alone(process, [other for _, other in running.values()]):
                            connection.send("go")
                            yield Measured(
                                name, {side: Figures(**of) for side, of in connection.recv().items()}
                            )
                except EOFError:
                    process.join()
                    yield Measured(name, {}, f"its process ended with {process.exitcode}")
                _signal(process, signal.SIGKILL)
                process.join()
                del running[connection]
            if time.monotonic() > end:
                return
    finally:
        for _, process in running.values():
            _signal(process, signal.SIGKILL)
        for _, process in running.values():
            process.join()


@contextlib.contextmanager
def _alone(process: BaseProcess, processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Stops the others, with all that they started, meanwhile."""
    others = [other for other in processes if other is not process]
    for other in others:
        _signal(other, signal.SIGSTOP)
    try:
        yield
    finally:
        for other in others:
            _signal(other, signal.SIGCONT)


def _signal(process: BaseProcess, number: int) -> None:
    assert process.pid is not None
    with suppress(ProcessLookupError):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:  # it is so new that it has no group of its own yet
            os.kill(process.pid, number)


def _child(name: str, setting: Setting, cores: set[int], answers: Connection) -> None:
    """Compiles the sides of a model, waits until it may time them, and answers with the figures."""
    os.setsid()
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, _raise_timeout)
    signal.setitimer(signal.ITIMER_PROF, _LIMIT_OF_A_MODEL_S)
    with tempfile.TemporaryDirectory() as caches:
        try:
            steps, figures = set_up(name, setting, caches)
        except Exception as error:
            answers.send(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            return
        gc.collect()
        answers.send({})
        answers.recv()
        os.sched_setaffinity(0, all_cores)
        device = torch.device(setting.device)
        runs: dict[str, Callable[[], Row]] = {
            side: partial(run_row, step, device, _IN_A_ROW) for side, step in steps.items()
        }
        for side, rows in rows_in_turn(runs, _WARM_UP_S, setting.rows).items():
            figures[side].step_ms = statistics.median(row.step_ms for row in rows)
        answers.send({side: asdict(of) for side, of in figures.items()})


def _raise_timeout(*_: Any) -> None:
    raise TimeoutError(f"takes more than {_LIMIT_OF_A_MODEL_S} processor seconds")


def set_up(
    name: str, setting: Setting, caches: str
) -> tuple[dict[str, Callable[[], object]], dict[str, Figures]]:
    """The steps of a model's sides, compiled, and what their first ones tell."""
    import torch._inductor.config as inductor_config

    os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"] = (
        f"{caches}/torch",
        f"{caches}/triton",
    )
    inductor_config.force_disable_caches, inductor_config.compile_threads = True, 1
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model, inputs = _made(name)
    model.train(setting.is_trained)
    inputs = tree_map_only(Tensor, lambda value: value.to(setting.device), inputs)
    if setting.batch:
        inputs = {key: value[torch.arange(setting.batch) % len(value)] for key, value in inputs.items()}
    if not setting.is_trained and setting.device == "cuda":
        model = model.to(torch.bfloat16)
        inputs = {key: _in_half(value) for key, value in inputs.items()}
    model = model.to(setting.device)
    float(_step(model, model, inputs, setting)())  # libraries load, imports are done
    steps: dict[str, Callable[[], object]] = {}
    figures: dict[str, Figures] = {}
    for mode in setting.modes:
        for side, wrap in SIDES.items():
            os.environ["GRADSPLIT_CACHE"] = f"{caches}/{mode}"
            torch._dynamo.reset()
            module = copy.deepcopy(model)
            step = _step(module, wrap(module, mode), inputs, setting)
            steps[f"{side} {mode}"] = step
            figures[f"{side} {mode}"] = _first_steps(step, torch.device(setting.device), mode != "default")
    return steps, figures


def _in_half(value: Tensor) -> Tensor:
    return value.to(torch.bfloat16) if value.is_floating_point() else value


def _step(
    module: nn.Module, call: Any, inputs: Mapping[str, Tensor], setting: Setting
) -> Callable[[], Tensor]:
    on_gpu = setting.device == "cuda"

    def train() -> Tensor:
        module.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            loss = call(**inputs)
        loss.backward()
        return loss.detach()

    def infer() -> Tensor:
        with torch.no_grad():
            return call(**inputs)

    return train if setting.is_trained else infer


def _first_steps(step: Callable[[], Any], device: torch.device, is_recorded: bool) -> Figures:
    gc.collect()
    held, peak = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
    if is_recorded:
        held, peak = torch.cuda.memory_reserved, torch.cuda.max_memory_reserved
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        before_bytes = held()
    begin_s = processor_seconds()
    torch.manual_seed(0)
    loss = float(step())
    first_s = processor_seconds() - begin_s
    for _ in range(_SETTLING):
        step()
    synchronise(device)
    begin_s = processor_seconds()
    step()
    synchronise(device)
    compile_s = first_s - (processor_seconds() - begin_s)
    if device.type != "cuda":
        return Figures(compile_s, 0.0, loss)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(_STEPS_OF_PEAK):
        step()
    torch.cuda.synchronize()
    return Figures(compile_s, (peak() - before_bytes) / 2**30, loss)


def line(measured: Measured) -> str:
    """One model's figures in a line."""
    if measured.error:
        return f"{measured.name}: {measured.error}"
    sides = (
        f"{side} {of.step_ms:.2f} ms, {of.peak_gib:.2f} GiB, {of.compile_s:.0f} s, {of.loss:.4f}"
        for side, of in measured.sides.items()
    )
    return f"{measured.name}: {'; '.join(sides)}"


def _compared(found: Sequence[Measured], mode: str) -> list[tuple[str, Figures, Figures]]:
    """Models with both sides, our slowest by comparison first."""
    both = [
        (measured.name, measured.sides[f"gradsplit {mode}"], measured.sides[f"inductor {mode}"])
        for measured in found
        if not measured.error
    ]
    return sorted(both, key=lambda row: -row[1].step_ms / row[2].step_ms)


_HEADER = ("model", "ms", "TorchInductor", "ratio", "GiB", "TorchInductor", "compile s", "TorchInductor")


def _cells(found: Sequence[Measured], mode: str) -> list[tuple[str, ...]]:
    return [
        (
            name,
            *(f"{ours.step_ms:.2f}", f"{theirs.step_ms:.2f}", f"{ours.step_ms / theirs.step_ms:.2f}"),
            *(f"{ours.peak_gib:.2f}", f"{theirs.peak_gib:.2f}"),
            *(f"{ours.compile_s:.0f}", f"{theirs.compile_s:.0f}"),
        )
        for name, ours, theirs in _compared(found, mode)
    ]


def table(found: Sequence[Measured], mode: str) -> Table:
    made = Table(*_HEADER, title=mode)
    for cells in _cells(found, mode):
        made.add_row(*cells)
    return made


def markdown(found: Sequence[Measured], mode: str, missing: set[str]) -> str:
    """The table of a mode, with its means and the models that are not in it."""
    rows = [_HEADER, ("---",) * len(_HEADER), *_cells(found, mode)]
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    compared = _compared(found, mode)
    if compared:
        ratios = {
            "step": [ours.step_ms / theirs.step_ms for _, ours, theirs in compared],
            "peak": [ours.peak_gib / theirs.peak_gib for _, ours, theirs in compared if theirs.peak_gib],
            "compile": [ours.compile_s / theirs.compile_s for _, ours, theirs in compared],
        }
        lines += ["", f"Mode `{mode}`, {len(compared)} models, ours over TorchInductor's:", ""]
        lines += [
            f"- {name}: geometric mean {statistics.geometric_mean(values):.3f}, greatest {max(values):.2f}, "
            f"{sum(value <= 1 for value in values)} at most 1.0, {sum(value > 1.05 for value in values)} above 1.05"
            for name, values in ratios.items()
            if values
        ]
    lines += [f"- not measured: {measured.name} ({measured.error})" for measured in found if measured.error]
    if missing:
        lines.append(f"- out of time: {', '.join(sorted(missing))}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
