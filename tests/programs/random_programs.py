"""Random programs, compiled and plain: results, side effects, exceptions, gradients and changes of arguments are equal.

``python -m tests.programs.random_programs --count 20000 --seed 0 --processes 2`` runs many, and prints the first that
differs, made as small as removing statements makes it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import itertools
import linecache
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from tests.programs.program_writer import Program, ProgramWriter, Statement

_SECONDS_PER_PROGRAM = 120
_numbers = itertools.count()


@dataclass(frozen=True)
class Case:
    """One call's inputs."""

    seed: int = 0
    rows: int = 2
    n: int = 3
    requires_grad: bool = True
    same: bool = False
    training: bool = True
    more: tuple[Any, ...] = ()
    special: bool = False


# The first is repeated, so that guards are met again; the others change one thing each.
CASES = (
    Case(),
    Case(seed=1),
    Case(n=4),
    Case(requires_grad=False, n=0),
    Case(same=True),
    Case(training=False, rows=3),
    Case(seed=2, more=(1, "two"), special=True),
    Case(seed=3),
)


def make_namespace(text: str) -> dict[str, Any]:
    filename = f"<program {next(_numbers)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    namespace: dict[str, Any] = {"__name__": "random_program"}
    torch.manual_seed(0)
    exec(compile(text, filename, "exec"), namespace)
    namespace["kept_model"] = namespace["Model"]()
    return namespace


def run_case(function: Any, namespace: dict[str, Any], case: Case) -> list[str]:
    """Everything that can be seen of a call, as text."""
    torch.manual_seed(case.seed)
    leaves = [torch.randn(case.rows, 3, requires_grad=case.requires_grad) for _ in range(3)]
    x, y, weight = (leaf * 1 for leaf in leaves)
    y = x if case.same else y
    box = namespace["Special" if case.special else "Box"](weight)
    model = namespace["kept_model"].train(case.training)
    items, table = [x, y + 1], {"t": y, "0": 1}
    given = (x, y, items, table, box, model, case.n, *case.more)
    named = {"bias": x * 2} if case.more else {}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            result: Any = function(*given, **named)
    except Exception as error:
        result = ("raised", type(error), str(error), lines_of(error))
    finally:
        grad_mode = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
    state = [result, given, namespace["CALLS"], namespace["COUNT"], namespace["Box"].made, model.count]
    seen = Description()
    seen.add(state)
    seen.add([grad_mode, sys.exc_info()[0], printed.getvalue(), torch.rand(1)])
    seen.add([*model.parameters(), *model.buffers(), *(parameter.grad for parameter in model.parameters())])
    seen.add(gradients(seen.tensors, [*leaves, *model.parameters()]))
    for parameter in model.parameters():
        parameter.grad = None
    namespace["CALLS"].clear()
    return seen.lines


def lines_of(error: BaseException) -> list[tuple[int | None, str]]:
    """The user's lines of a traceback."""
    entries = traceback.extract_tb(error.__traceback__)
    return [(entry.lineno, entry.name) for entry in entries if entry.filename.startswith("<program")]


def gradients(tensors: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    try:
        outputs = [tensor.sum() for tensor in tensors if tensor.requires_grad and tensor.grad_fn is not None]
        if not outputs or not inputs:
            return []
        return list(torch.autograd.grad(outputs, inputs, allow_unused=True))
    except RuntimeError as error:
        return [str(error).split(":")[0]]  # type: ignore[list-item]


class Description:
    """Values as lines of text, with numbers for objects, so that it shows which are the same."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self._seen: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._alive: list[Any] = []

    def add(self, value: Any, depth: int = 0) -> None:
        self.lines.append("  " * depth + self._head(value))
        if self._is_new:
            for part in self._parts(value):
                self.add(part, depth + 1)

    def _head(self, value: Any) -> str:
        self._is_new = True
        if isinstance(value, (torch.Tensor, list, dict)) or hasattr(value, "__dict__"):
            self._is_new = id(value) not in self._seen
            number = self._seen.setdefault(id(value), len(self._seen))
            self._alive.append(value)
            if not self._is_new:
                return f"again {number}"
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            storage = value.untyped_storage()._cdata
            memory = self._storages.setdefault(storage, len(self._storages))
            kind = (
                type(value).__name__,
                value.dtype,
                tuple(value.shape),
                value.requires_grad,
                has_history(value),
            )
            return f"{kind} memory {memory} {value.detach().tolist()}"
        if isinstance(value, (list, tuple, dict)):
            return f"{type(value).__name__} of {len(value)}"
        if isinstance(value, type) or callable(value):
            return getattr(value, "__qualname__", type(value).__name__)
        return (
            f"object {type(value).__name__}"
            if hasattr(value, "__dict__")
            else f"{type(value).__name__} {value!r}"
        )

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, (list, tuple)):
            yield from value
        elif isinstance(value, dict):
            for key, item in value.items():
                yield key
                yield item
        elif isinstance(value, torch.nn.Module):
            yield sorted(key for key in vars(value) if not key.startswith("_"))
        elif not isinstance(value, (torch.Tensor, type)) and hasattr(value, "__dict__"):
            yield dict(vars(value))


def difference(text: str) -> str | None:
    """The first thing that differs between the compiled and the plain program, None if nothing does."""
    plain, compiled = make_namespace(text), make_namespace(text)
    function = CompiledFunction(compiled["program"], lambda graph, inputs: graph.module)
    for number, case in enumerate(CASES):
        expected = run_case(plain["program"], plain, case)
        found = run_case(function, compiled, case)
        if found != expected:
            return f"call {number}, {case}\n{show_difference(expected, found)}"
    return None


def show_difference(expected: list[str], found: list[str]) -> str:
    for number, (one, other) in enumerate(itertools.zip_longest(expected, found)):
        if one != other:
            before = "\n".join(f"    {line}" for line in expected[max(0, number - 4) : number])
            return f"{before}\n  plain    {one}\n  compiled {other}"
    return ""


def has_history(tensor: torch.Tensor) -> bool | str:
    """Whether autograd can go back from a tensor; a view may forbid the question."""
    try:
        return not tensor.is_leaf
    except RuntimeError as error:
        return str(error)


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def expired(number: int, frame: Any) -> None:
        raise TimeoutError(f"no result within {seconds} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check_text(text: str) -> str | None:
    """``difference``, or what kept it from an answer."""
    try:
        with time_limit(_SECONDS_PER_PROGRAM), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return difference(text)
    except SyntaxError as error:
        return f"not a program: {error}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"failed: {type(error).__name__}: {error}\n{''.join(traceback.format_exc()[-1500:])}"


def check_seed(seed: int) -> str | None:
    """What is wrong with the program of a seed, with its text; None if nothing is."""
    program = ProgramWriter(seed).write()
    found = check_text(program.text())
    return None if found is None else f"seed {seed}: {found}"


def minimized(program: Program) -> Program:
    """A program that still differs, from which no statement can be taken away."""
    kind = kind_of(check_text(program.text()))

    def still_differs(candidate: Program) -> bool:
        try:
            compile(candidate.text(), "<candidate>", "exec")
        except SyntaxError:
            return False
        return kind_of(check_text(candidate.text())) == kind

    changed = True
    while changed:
        changed = False
        for place in range(len(list(removals(program)))):
            candidate = copy.deepcopy(program)
            removal = next(itertools.islice(removals(candidate), place, None), None)
            if removal is None:
                break
            block, index, replacement = removal
            block[index : index + 1] = replacement
            if still_differs(candidate):
                program, changed = candidate, True
                break
    return program


def kind_of(found: str | None) -> str:
    return "" if found is None else found.split(" ")[0].split(":")[0]


def removals(program: Program) -> Iterator[tuple[list[Statement], int, list[Statement]]]:
    """Ways to make a program smaller: a block, the index of a statement in it, and what takes its place."""

    def within(block: list[Statement]) -> Iterator[tuple[list[Statement], int, list[Statement]]]:
        for index, statement in enumerate(block):
            yield block, index, []
            for _, inner in statement.blocks:
                yield block, index, inner
            for at in range(1, len(statement.blocks)):
                yield block, index, [Statement(blocks=[*statement.blocks[:at], *statement.blocks[at + 1 :]])]
        for statement in block:
            for _, inner in statement.blocks:
                yield from within(inner)

    yield from within(program.body)
    yield from within(program.helpers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; the others follow it")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--keep-going", action="store_true", help="name every seed that differs, without its program"
    )
    arguments = parser.parse_args()
    logging.getLogger("gradsplit").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    began, wrong = time.monotonic(), []
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    with multiprocessing.get_context("fork").Pool(arguments.processes) as pool:
        for done, found in enumerate(pool.imap_unordered(check_seed, seeds, chunksize=4), 1):
            if found is not None:
                wrong.append(found)
                print(found.split("\n  File")[0], flush=True)
                if not arguments.keep_going:
                    break
            if done % 100 == 0:
                print(f"{done} programs, {len(wrong)} differ, {time.monotonic() - began:.0f} s", flush=True)
    if wrong and not arguments.keep_going:
        program = minimized(ProgramWriter(int(wrong[0].split(":")[0].split()[1])).write())
        print(program.text()[program.text().index("class Model") :])
        print(check_text(program.text()))
    print(
        f"{len(wrong)} of {len(seeds)} programs differ"
        if arguments.keep_going or not wrong
        else "one differs"
    )
    sys.stdout.flush()
    os._exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
