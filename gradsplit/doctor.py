"""``python -m gradsplit.doctor FILE:FACTORY``: at which rung a program first crashes, differs or slows down.

The factory is a function of the file without arguments that returns a program: a function or module, a tuple of its
arguments, and perhaps a dictionary of its keyword arguments. Each rung runs in a process of its own, forward and
backward: plain PyTorch; ``backend="eager"``, where the capture is all that is new; ``"aot_eager"``, which adds
autograd; the default, which adds kernels; and, for modules, two ranks on CPUs under ``DistributedDataParallel`` beside
stock DDP. What this machine has of what gradsplit needs is printed, too.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from gradsplit.compile_core.backends.registry import DEFAULT_BACKEND
from gradsplit.compile_core.interface.api import compile
from gradsplit.compile_core.minimizer.outcome import Outcome, copied, difference_of, raised
from gradsplit.compile_core.minimizer.trials import in_a_fork
from gradsplit.support import versions_table

PLAIN, DDP = "plain", "DDP on two ranks"
RUNGS = (PLAIN, "eager", "aot_eager", DEFAULT_BACKEND, DDP)
_NO_PROGRAM = "there is no program"
# Steps that are timed, after those in which all is compiled.
_STEPS, _WARM_UP = 12, 3
# A rung is slower than plain PyTorch from here on; less than a millisecond is what calls of any compiler cost.
_SLOWER, _SLOWER_S = 1.15, 1e-3
LIMIT_S = 600.0

_NEXT = {
    PLAIN: "make the program run without gradsplit first",
    "eager": "the capture is at fault: GRADSPLIT_LOGS=graph_breaks,graph_code shows what it made of the program, and "
    "gradsplit.disable on the function that the message names leaves that one plain",
    "aot_eager": "the joint trace or the partition is at fault: GRADSPLIT_REPRO_AFTER=capture GRADSPLIT_REPRO_LEVEL=4 "
    "makes a small program of it",
    DEFAULT_BACKEND: "lowering or a kernel is at fault: GRADSPLIT_REPRO_AFTER=capture GRADSPLIT_REPRO_LEVEL=4 "
    'makes a small program of it; backend="aot_eager" goes on without',
    DDP: "data parallelism is at fault: gradsplit.distributed.explain_ddp(ddp)(*args) shows its plan, and "
    'DDPOptions(overlap="reducer") keeps stock DDP\'s reducer',
}
_SLOW_NEXT = (
    "GRADSPLIT_LOGS=graph_breaks,recompiles,perf_hints says what is plain, compiled again, or left to torch"
)


@dataclass(frozen=True)
class Program:
    """What a factory returns."""

    call: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @staticmethod
    def of(made: Any) -> Program:
        """
        Raises:
            TypeError: it is no callable with a tuple of arguments, and perhaps a dictionary.
        """
        parts = [*made] if isinstance(made, tuple) else [made]
        if not parts or not callable(parts[0]) or len(parts) > 3:
            raise TypeError(
                "the factory returns a function or module, a tuple of arguments and perhaps a dictionary"
            )
        args = parts[1] if len(parts) > 1 else ()
        kwargs = parts[2] if len(parts) > 2 else {}
        if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
            raise TypeError("arguments are a tuple, and keyword arguments a dictionary")
        return Program(parts[0], args, kwargs)


def load(place: str) -> Program:
    """The program of ``FILE:FACTORY``.

    Raises:
        ValueError, TypeError: there is none.
    """
    path, _, name = place.rpartition(":")
    if not path or not Path(path).is_file():
        raise ValueError(f"{place!r} is not FILE:FACTORY with a file that is there")
    found = runpy.run_path(path)
    if not callable(found.get(name)):
        raise ValueError(f"{path} has no function {name}")
    torch.manual_seed(0)
    return Program.of(found[name]())


def run_step(call: Callable[..., Any], owner: Any, program: Program) -> dict[str, Tensor]:
    """Forward and backward with copies of the arguments: results, gradients and buffers by name.

    Args:
        owner: the module whose parameters and buffers count, if it is one.
    """
    args, kwargs = tree_map(copied, (tuple(program.args), dict(program.kwargs)))
    module = owner if isinstance(owner, torch.nn.Module) else None
    if module is not None:
        module.zero_grad()
    torch.manual_seed(1)
    results = [leaf for leaf in tree_leaves(call(*args, **kwargs)) if isinstance(leaf, Tensor)]
    losses = [result.float().square().mean() for result in results if result.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    found = {f"result {k}": result.detach().clone() for k, result in enumerate(results)}
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    found |= {
        f"gradient of argument {k}": leaf.grad for k, leaf in enumerate(inputs) if leaf.grad is not None
    }
    if module is not None:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad.clone()
        found |= {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
    return found


def try_rung(program: Program, backend: str) -> Outcome:
    """A rung in this process: values of the first steps beside plain PyTorch's, then times."""
    plain = copy.deepcopy(program.call) if isinstance(program.call, torch.nn.Module) else program.call
    try:
        expected = [run_step(plain, plain, program) for _ in range(2)]
    except Exception as error:
        return replace(raised(error), kind="plain raises")
    owner = copy.deepcopy(program.call) if isinstance(program.call, torch.nn.Module) else program.call
    call = owner if backend == PLAIN else compile(owner, backend=backend)
    begin = time.perf_counter()
    try:
        found = [run_step(call, owner, program)]
        first_s = time.perf_counter() - begin
        found.append(run_step(call, owner, program))
    except Exception as error:
        return raised(error)
    for step, (mine, others) in enumerate(zip(found, expected, strict=True)):
        for name, value in others.items():
            difference = difference_of(mine.get(name), value, None)
            if difference:
                return Outcome("differs", name, f"the {name} {difference} in step {step + 1}")
    return Outcome("equal", figures={"first": first_s, **_step_s(program, (call, owner), (plain, plain))})


def _step_s(program: Program, ours: tuple[Any, Any], plain: tuple[Any, Any]) -> dict[str, float]:
    """Seconds of the quickest step, compiled and plain, in turns: others of the machine delay some, and are not to be
    taken for the compiler. Each side is what is called, and the module that it trains."""
    times: dict[str, list[float]] = {"step": [], "plain": []}
    for _ in range(_WARM_UP + _STEPS):
        for seconds, (call, owner) in zip(times.values(), (ours, plain), strict=True):
            begin = time.perf_counter()
            run_step(call, owner, program)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
    return {name: min(seconds[_WARM_UP:]) for name, seconds in times.items()}


def try_ddp(place: str, limit_s: float = LIMIT_S) -> Outcome:
    """The last rung, on ranks of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gradsplit.launch", "--nproc-per-node", "2", "--no-preflight"]
        command += ["-m", "gradsplit.doctor", place, "--rank-of", folder]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            return Outcome("hangs", "", f"for {limit_s:.0f} s")
        answers = sorted(Path(folder).glob("rank_*.json"), key=lambda path: path.stat().st_mtime_ns)
        outcomes = [Outcome(**json.loads(path.read_text())) for path in answers]
        ended = re.search(r"launch: rank (\d+) of", run.stderr)
        has_crashed = ended is not None and not Path(folder, f"rank_{ended[1]}.json").exists()
    # The first rank that failed: the others may fail since it left them.
    failed = next((outcome for outcome in outcomes if outcome.is_failure), None)
    if failed is not None and not has_crashed:
        return failed
    if run.returncode != 0 or len(outcomes) < 2:
        last = (run.stderr.strip() or run.stdout.strip()).rpartition("\n")[2]
        return Outcome("crashes", f"exit {run.returncode}", f"the ranks ended with {run.returncode}: {last}")
    return outcomes[0]


def _run_rank(place: str, folder: Path) -> None:
    """One of two ranks: a compiled DDP module beside a stock one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    program = load(place)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def wrapped() -> DistributedDataParallel:
        return DistributedDataParallel(copy.deepcopy(program.call).cpu())  # type: ignore[attr-defined]

    try:
        stock, ours = wrapped(), wrapped()
        call = compile(ours)
        outcome = Outcome("equal")
        for step in range(2):
            expected, found = run_step(stock, stock, program), run_step(call, ours, program)
            for name, value in expected.items():
                difference = difference_of(found.get(name), value, None)
                if difference and not outcome.is_failure:
                    outcome = Outcome(
                        "differs", name, f"the {name} {difference} in step {step + 1} on rank {rank}"
                    )
        if not outcome.is_failure:
            outcome = Outcome("equal", figures=_step_s(program, (call, ours), (stock, stock)))
    except Exception as error:
        outcome = raised(error)
        time.sleep(1)  # if it is since the other rank has gone, the launcher sees that first
    part = folder / f"{rank}.part"
    part.write_text(json.dumps(asdict(outcome)))
    part.replace(folder / f"rank_{rank}.json")
    if outcome.kind == "raises":  # the other rank may wait for this one in a collective: the launcher ends it
        sys.exit(1)
    dist.barrier()
    dist.destroy_process_group()


def climb(place: str, rungs: Sequence[str] = RUNGS, limit_s: float = LIMIT_S) -> dict[str, Outcome]:
    """What becomes of a program at each rung; those after plain PyTorch's are left out where it fails itself."""
    found: dict[str, Outcome] = {}
    for rung in rungs:
        if rung == DDP:
            if found[PLAIN].figures["trained parameters"]:
                found[rung] = try_ddp(place, limit_s)
            continue
        found[rung] = in_a_fork(lambda rung=rung: _load_and_try(place, rung), limit_s)
        if rung == PLAIN and found[rung].kind != "equal":
            break
    return found


def _load_and_try(place: str, rung: str) -> Outcome:
    """In a fork: a factory may use a GPU, which does not outlive one."""
    try:
        program = load(place)
    except (ValueError, TypeError) as error:
        return Outcome(_NO_PROGRAM, "", str(error))
    outcome = try_rung(program, rung)
    parameters = program.call.parameters() if isinstance(program.call, torch.nn.Module) else ()
    trained = sum(parameter.requires_grad for parameter in parameters)
    return replace(outcome, figures={**outcome.figures, "trained parameters": trained})


def verdict(found: Mapping[str, Outcome]) -> str:
    """The first rung with trouble, by how much, and what to do next."""
    for rung, outcome in found.items():
        if outcome.kind != "equal":
            return f"{rung}: the program {outcome}. Next: {_NEXT[rung]}"
    slow = [rung for rung, outcome in found.items() if _is_slow(outcome)]
    if DEFAULT_BACKEND in slow or DDP in slow:  # the others are for finding faults
        what = "stock DDP's" if slow[0] == DDP else "plain PyTorch's"
        return f"{slow[0]}: a step takes {_of_plain(found[slow[0]]):.2f} times as long as {what}. Next: {_SLOW_NEXT}"
    last = DEFAULT_BACKEND if DEFAULT_BACKEND in found else [*found][-1]
    return f"all rungs agree; a step of {last} takes {_of_plain(found[last]):.2f} of plain PyTorch's"


def _is_slow(outcome: Outcome) -> bool:
    lost_s = outcome.figures["step"] - outcome.figures["plain"]
    return _of_plain(outcome) > _SLOWER and lost_s > _SLOWER_S


def _of_plain(outcome: Outcome) -> float:
    return outcome.figures["step"] / outcome.figures["plain"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gradsplit.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", metavar="FILE:FACTORY")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        _run_rank(arguments.program, arguments.rank_of)
        return
    found = climb(arguments.program)
    if found[PLAIN].kind == _NO_PROGRAM:
        parser.error(found[PLAIN].text)
    table = Table(
        "rung", "what became of it", "first step, s", "least step, ms", "of plain (DDP: of stock DDP)"
    )
    for rung, outcome in found.items():
        first, step = outcome.figures.get("first"), outcome.figures.get("step")
        table.add_row(
            rung,
            escape(str(outcome)),
            "" if first is None else f"{first:.2f}",
            "" if step is None else f"{step * 1e3:.2f}",
            "" if step is None else f"{_of_plain(outcome):.2f}",
        )
    console = Console(width=None if Console().is_terminal else 160)
    console.print(versions_table(), "More of this machine: python -m gradsplit.support")
    console.print(table)
    console.print(verdict(found), markup=False)
    sys.exit(0 if all(outcome.kind == "equal" for outcome in found.values()) else 1)


if __name__ == "__main__":
    main()
