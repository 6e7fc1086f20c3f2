"""Twenty programs with one trouble each, and the rung at which ``gradsplit.doctor`` must find it.

``python -m tests.observe.doctor_programs [WORKERS]`` examines all of them, and prints a table.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import gradsplit
from gradsplit.distributed.collectives import averaging
from tests.forked_ranks import run_forked
from tests.minimizer import planted_faults
from tests.start_ranks import ROOT, python_path

TROUBLE = "DOCTOR_TROUBLE"
# Name -> the rung that the verdict begins with, and what it says.
EXPECTED: dict[str, tuple[str, str]] = {}
_MAKE: dict[str, Callable[[], Any]] = {}
Made = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]


class Model(torch.nn.Module):
    """A layer, something, and a layer."""

    def __init__(self, something: Callable[[torch.Tensor], torch.Tensor], width: int = 8) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.something = something

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.something(torch.tanh(self.first(x))))


def _program(name: str, rung: str, says: str, something: Callable[[torch.Tensor], torch.Tensor]) -> None:
    EXPECTED[name] = rung, says
    _MAKE[name] = lambda: (Model(something), (torch.randn(8, 8),))


def _planted(name: str, rung: str, says: str) -> None:
    fault = planted_faults.FAULTS[name]
    EXPECTED[name] = rung, says

    def make() -> Made:
        fault.plant()
        return Model(fault.needs), (torch.randn(8, 8),)

    _MAKE[name] = make


for _name in ("sin", "atan", "sigmoid", "erf", "abs", "maximum"):
    _planted(f"kernel of {_name}", "triton", "differs")
_planted("pass fuse raises", "triton", "raises: IndexError")
_planted("pass batch_nests raises", "triton", "raises: AssertionError")
_planted("pass absent_gradients makes sinh of cosh", "aot_eager", "differs")
_planted("pass absent_gradients raises", "aot_eager", "raises: KeyError")
_planted("pass known_masks raises", "aot_eager", "raises: RuntimeError")


def _raise(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("the program's own")


def _sees_compilers(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0 if torch.compiler.is_compiling() else x


def _waits(x: torch.Tensor) -> torch.Tensor:
    gradsplit.graph_break()
    return x


_program("the program raises", "plain", "plain raises", _raise)
_program("the program dies", "plain", "crashes: SIGSEGV", lambda x: os.kill(os.getpid(), 11))  # type: ignore[arg-type]
_program("another program when it is captured", "eager", "differs", _sees_compilers)


def _wrong_mean() -> Made:
    """The in-graph way divides by another number."""
    begin = averaging.Averaging.__init__

    def begin_wrongly(self: averaging.Averaging, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        self.factor = 0.75

    averaging.Averaging.__init__ = begin_wrongly  # type: ignore[method-assign]
    return Model(torch.relu), (torch.randn(8, 8),)


def _slow_entry() -> Made:
    """A step that compiled programs wait in."""

    def something(x: torch.Tensor) -> torch.Tensor:
        return _waiting_when_compiled(x)

    return Model(something), (torch.randn(8, 8),)


class _Waiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def _waiting_when_compiled(x: torch.Tensor) -> torch.Tensor:
    return _wait(x) if gradsplit.is_compiling() else x


@gradsplit.disable
def _wait(x: torch.Tensor) -> torch.Tensor:
    return _Waiting.apply(x)  # type: ignore[no-any-return]


_MAKE["gradients are not averaged"], EXPECTED["gradients are not averaged"] = _wrong_mean, (
    "DDP on two ranks", "differs",
)  # fmt: skip
_MAKE["slower when it is compiled"], EXPECTED["slower when it is compiled"] = _slow_entry, (
    "eager", "times as long",
)  # fmt: skip


def _one_rank(act: Callable[[], None]) -> Callable[[torch.Tensor], torch.Tensor]:
    def something(x: torch.Tensor) -> torch.Tensor:
        if os.environ.get("RANK") == "1":
            act()
        return x

    return something


def _raise_on_a_rank() -> None:
    raise RuntimeError("only on rank 1")


_program(
    "a rank raises", "DDP on two ranks", "raises: RuntimeError: only on rank 1", _one_rank(_raise_on_a_rank)
)
_program("a rank exits", "DDP on two ranks", "crashes", _one_rank(lambda: os._exit(5)))
_program("nothing is wrong", "all rungs agree", "", torch.relu)
_program("a graph break, and nothing wrong", "all rungs agree", "", _waits)


def factory() -> Any:
    return _MAKE[os.environ[TROUBLE]]()


def examine(name: str, timeout_s: float = 400.0) -> str:
    """What ``gradsplit.doctor`` says last."""
    environment = {TROUBLE: name, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    command = ["-m", "gradsplit.doctor", f"{__file__}:factory"]
    try:
        run = run_forked(command, ROOT, timeout_s, **environment)
    except subprocess.TimeoutExpired:
        return f"no verdict in {timeout_s:.0f} s"
    return " ".join(run.stdout.rpartition("┘")[2].split()) or run.stderr


def is_right(name: str, said: str) -> bool:
    rung, says = EXPECTED[name]
    return said.startswith(rung) and says in said


def main(names: Sequence[str], workers: int = 1) -> None:
    table = Table("program", "right", "verdict")

    def examined(name: str) -> str:
        begin = time.monotonic()
        said = examine(name)
        print(f"{name}: {is_right(name, said)}, {time.monotonic() - begin:.0f} s: {said[:160]}", flush=True)
        return said

    with ThreadPoolExecutor(workers) as pool:
        verdicts = dict(zip(names, pool.map(examined, names), strict=True))
    for name, said in verdicts.items():
        table.add_row(name, str(is_right(name, said)), escape(said[:160]))
    Console(width=160).print(table)
    print(f"{sum(is_right(*each) for each in verdicts.items())} of {len(names)} verdicts are right")


if __name__ == "__main__":
    main([*EXPECTED], *map(int, sys.argv[1:]))
