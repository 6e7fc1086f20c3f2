"""Random expressions through lowering, fusion and code generation, compared with eager.

``python -m tests.lowering.random_expressions --count 20000 --seed 0 --processes 2`` runs many, and prints the first
that differs, made as small as leaving out steps makes it. A seed is an expression; ``--seed`` goes on where another run
ended.

How far a result may be off comes from float64. The expression is run in float64, a few times with every step rounded as
coarsely as its dtype would, by up to two units at random (Parker's Monte Carlo arithmetic). The most that these runs
and eager are off at an element is what rounding does there; kernels may be off by a small multiple of it. Where these
runs disagree about infinities, NaN or integers, rounding decides and any result is right. What no step rounds must
equal eager. Before something is called wrong there are many such runs, in which operators are what torch decomposes
them into, each part rounded.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gradsplit.compile_core.backends.generated_kernels import generate_region
from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.ir.loops import LoopProgram
from gradsplit.compile_core.lowering.build import build
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.runtime.link_program import link_program
from tests.lowering.expression_operations import ACCUMULATES, EXACT
from tests.lowering.expression_writer import write_expression
from tests.lowering.expressions import Expression, Step, smaller, without_denormals
from tests.lowering.interpreted_kernels import link_interpreted
from tests.lowering.loop_evaluator import evaluate
from tests.lowering.lowering_harness import compute_of, trace
from tests.lowering.move_graph import GPU

_ROUNDED_RUNS = 6
# Before something is called wrong, rounded as coarsely as kernels may be: few see a number beside an edge.
_MOST_ROUNDED_RUNS = 200
# Kernels may round in another order than eager, and their functions are a few units in the last place off.
_FACTOR = 4.0
_UNITS = 2.0
# What runs an expression: the evaluator of loops, compiled C++, Triton's interpreter, a GPU.
RUNNERS = ("loops", "cpp", "triton", "gpu")


@dataclass(frozen=True)
class Expected:
    """What one result may be.

    Attributes:
        eager: eager's result.
        exact: the float64 run's.
        bound: how far a result may be from ``exact``; infinite where rounding decides.
        as_eager: no step rounds, so it must be eager's.
    """

    eager: Tensor
    exact: Tensor
    bound: Tensor
    as_eager: bool


def expected_results(expression: Expression, thorough: bool = False) -> list[Expected]:
    """For each result, then for each leaf as it is in the end.

    Args:
        thorough: by many runs that round the parts of operators, too; these are as coarse as kernels may be.

    Raises:
        Exception: what eager raises.
    """
    inputs = expression.inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = expression.run(inputs)
        dtypes = [value.dtype for value in eager]
        exact = _in_float64(expression, dtypes, None, 0)
        factor, coarseness = (1.0, _FACTOR) if thorough else (_FACTOR, 1.0)
        # The first of many is another order of operations, which may cancel out where eager's does not.
        units = [0, *[2 * coarseness] * _MOST_ROUNDED_RUNS] if thorough else [2] * _ROUNDED_RUNS
        generator = torch.Generator().manual_seed(0)
        rounded_runs = [_in_float64(expression, dtypes, generator, round(n), thorough) for n in units]
    rounds = _rounded_values(expression)
    wanted = [*expression.results, *range(len(inputs))]
    return [
        Expected(
            eager[number],
            exact[number],
            error_bound(exact[number], [eager[number], *(run[number] for run in rounded_runs)], factor),
            number not in rounds,
        )
        for number in wanted
    ]


def _rounded_values(expression: Expression) -> set[int]:
    count = len(expression.leaves)
    if any(step.rule.in_place and step.rule.rounding != EXACT for step in expression.steps):
        return set(range(count + len(expression.steps)))
    rounded: set[int] = set()
    for number, step in enumerate(expression.steps, count):
        if step.rule.rounding != EXACT or rounded.intersection(step.arguments):
            rounded.add(number)
    return rounded


class _RoundedParts(TorchDispatchMode):
    """Runs operators as what torch decomposes them into, and rounds the result of each of these."""

    def __init__(self, noisy: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._noisy = noisy

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        decomposition = decomposition_table.get(function)
        if decomposition is not None:
            with self:
                result = decomposition(*arguments, **(named or {}))
            if result is not NotImplemented:
                return result
        result = function(*arguments, **(named or {}))
        return (
            result
            if function.is_view or function._schema.is_mutable
            else tree_map_only(Tensor, self._noisy, result)
        )


def _in_float64(
    expression: Expression,
    dtypes: Sequence[torch.dtype],
    generator: torch.Generator | None,
    most_units: int,
    in_parts: bool = False,
) -> list[Tensor]:
    """All values in float64, rounded by up to so many units of ``dtypes`` if there is a generator."""

    def noisy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if generator is None or not (tensor.dtype.is_floating_point and dtype.is_floating_point):
            return tensor
        kind = torch.finfo(dtype)
        whole = torch.randint(-most_units, most_units + 1, tensor.shape, generator=generator)
        between = (2 * torch.rand(tensor.shape, dtype=torch.float64, generator=generator) - 1) * most_units
        units = torch.where(torch.rand(tensor.shape, generator=generator) < 0.5, whole, between)
        smallest = torch.where(tensor == 0, 0.0, kind.smallest_normal * kind.eps)
        return tensor + units * torch.where(tensor.isfinite(), tensor.abs() * kind.eps + smallest, 0.0)

    def step_in_float64(number: int, step: Step, arguments: list[Tensor]) -> Tensor:
        settings = [
            torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
            for value in step.settings
        ]
        rounding = step.rule.rounding
        if rounding == ACCUMULATES:
            arguments = [
                noisy(argument, dtypes[place])
                for argument, place in zip(arguments, step.arguments, strict=True)
            ]
        # What a kernel computes on the way to a 16-bit result has 32.
        dtype = dtypes[number]
        wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
        is_whole = not in_parts or rounding == EXACT or step.rule.in_place
        with nullcontext() if is_whole else _RoundedParts(lambda part: noisy(part, wide)):
            value = step.rule.function(*arguments, *settings)
        if rounding == EXACT:
            return value
        return value.copy_(noisy(value, dtype)) if step.rule.in_place else noisy(value, dtype)

    inputs = [tensor.double() if tensor.dtype.is_floating_point else tensor for tensor in expression.inputs()]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return expression.run(inputs, step_in_float64)
    finally:
        torch.set_default_dtype(before)


def error_bound(exact: Tensor, others: Sequence[Tensor], factor: float = _FACTOR) -> Tensor:
    """How far a kernel's result may be from ``exact``, by how far others are that rounding made differ."""
    scale = torch.zeros(exact.shape, dtype=torch.float64)
    wide = exact.double()
    for other in others:
        same = (other == exact) | (other.isnan() & exact.isnan())
        distance = (other.double() - wide).abs().nan_to_num(nan=inf, posinf=inf)
        if not exact.dtype.is_floating_point:
            distance = torch.full_like(distance, inf)
        scale = torch.maximum(scale, torch.where(same, 0.0, distance))
    dtype = others[0].dtype
    if not dtype.is_floating_point:
        return scale
    kind = torch.finfo(dtype)
    # A unit in the last place; frexp's mantissa is below 1.
    unit = torch.ldexp(torch.full_like(wide, kind.eps), torch.frexp(wide)[1] - 1)
    unit = torch.where(wide.isfinite(), unit, 0.0).clamp(min=kind.smallest_normal * kind.eps)
    return factor * scale + _UNITS * unit


def difference(expected: Expected, found: Tensor, least: float = 0.0) -> str | None:
    """What is wrong with a result; numbers nearer than ``least`` are equal."""
    eager = expected.eager
    if (found.shape, found.dtype) != (eager.shape, eager.dtype):
        return f"is {found.dtype} {tuple(found.shape)}, not {eager.dtype} {tuple(eager.shape)}"
    wanted = eager if expected.as_eager else expected.exact
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    distance = (found.double() - wanted.double()).abs()
    if found.dtype.is_floating_point:
        same |= distance <= least
    if not expected.as_eager:
        same |= (distance <= expected.bound) | expected.bound.isinf()
    if same.all():
        return None
    place = tuple((~same).nonzero()[0].tolist())
    return (
        f"is {found[place].item()!r} at {list(place)}, eager {eager[place].item()!r}, "
        f"float64 {expected.exact[place].item()!r} ± {expected.bound[place].item():.3g}; "
        f"{int((~same).sum())} of {same.numel()} are wrong"
    )


def _first_difference(expected: Sequence[Expected], found: Sequence[Tensor], least: float) -> str | None:
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        wrong = difference(one, other, least)
        if wrong is not None:
            return f"differs: value {number} {wrong}"
    return None


# ---- running ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """An expression with the program and kernels that it became.

    Attributes:
        strides: those that its results must have.
    """

    expression: Expression
    expected: list[Expected]
    strides: list[tuple[int, ...]]
    program: LoopProgram
    sources: list[KernelSource]


class Checker:
    """Runs expressions one way, keeping what it builds in a folder."""

    def __init__(self, runner: str, folder: Path) -> None:
        self.runner = runner
        # GPUs take denormal numbers for 0 in many functions.
        self.least = torch.finfo(torch.float32).smallest_normal if runner == "gpu" else 0.0
        self.options = CompileOptions(cache_folder=folder, verify=True)

    def prepare(self, expression: Expression) -> Prepared:
        expression = without_denormals(expression) if self.least else expression
        device_type = "cuda" if self.runner in ("triton", "gpu") else "cpu"
        module = trace(expression, *expression.inputs(), device_type=device_type)
        program, sources = generate_region(compute_of(module), self.options, StageDump(None))
        outputs: Any = module.graph.output_node().args[0]
        strides = [tuple(node.meta["val"].stride()) for node in outputs]
        return Prepared(expression, expected_results(expression), strides, program, sources)

    def build(self, prepared: Iterable[Prepared]) -> None:
        """Builds the kernels of many expressions at once; ``run`` finds them."""
        if self.runner in ("cpp", "gpu"):
            sources = [source for one in prepared for source in one.sources]
            named = [replace(source, name=f"{n}_{source.name}") for n, source in enumerate(sources)]
            build(named, self.options.cache_folder)

    def run(self, prepared: Prepared) -> str | None:
        """What is wrong with the expression's results."""
        inputs = prepared.expression.inputs()
        if self.runner == "gpu":
            inputs = [_on_gpu(tensor) for tensor in inputs]
        results = self._results(prepared, inputs)
        for found, wanted in zip(results, prepared.strides, strict=True):
            steps = zip(found.shape, found.stride(), wanted, strict=True)
            if found.numel() and any(size > 1 and mine != theirs for size, mine, theirs in steps):
                return f"strides: {found.stride()}, not {wanted}"
        found = [tensor.cpu() for tensor in (*results, *inputs)]
        wrong = _first_difference(prepared.expected, found, self.least)
        if wrong is not None:
            expected = expected_results(prepared.expression, thorough=True)
            wrong = _first_difference(expected, found, self.least)
        return wrong

    def _results(self, prepared: Prepared, inputs: list[Tensor]) -> Sequence[Any]:
        program, sources = prepared.program, prepared.sources
        if self.runner == "loops":
            return evaluate(program, inputs)
        folder = self.options.cache_folder
        if self.runner == "triton":
            return link_interpreted(program, sources, folder)([*inputs])
        return link_program(program, sources, build(sources, folder))([*inputs])

    def check(self, expressions: Mapping[int, Expression]) -> dict[int, str]:
        """What is wrong with each expression, those that are right left out."""
        found: dict[int, str] = {}
        prepared: dict[int, Prepared] = {}
        for seed, expression in expressions.items():
            with _noted(found, seed, "not compiled"):
                prepared[seed] = self.prepare(expression)
        try:
            self.build(prepared.values())
        except Exception:
            for seed, one in prepared.items():
                with _noted(found, seed, "not built"):
                    self.build([one])
        for seed, one in prepared.items():
            if seed not in found:
                with _noted(found, seed, "not run"):
                    wrong = self.run(one)
                    if wrong is not None:
                        found[seed] = wrong
        return found


def _on_gpu(tensor: Tensor) -> Tensor:
    """The same view of a copy of the memory."""
    memory = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    return torch.as_strided(memory.to(GPU), tensor.shape, tensor.stride(), tensor.storage_offset())


@contextmanager
def _noted(found: dict[int, str], seed: int, stage: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        last = "".join(traceback.format_tb(error.__traceback__)[-3:])
        found[seed] = f"{stage}: {type(error).__name__}: {str(error)[:1500]}\n{last}"


def minimized(checker: Checker, expression: Expression) -> Expression:
    """An expression that is still wrong in the same way, from which nothing can be taken away."""

    def kind(candidate: Expression) -> str:
        return checker.check({0: candidate}).get(0, "").split(":")[0]

    def is_valid(candidate: Expression) -> bool:
        try:
            expected_results(candidate)
        except Exception:
            return False
        return True

    wanted, changed = kind(expression), True
    while changed:
        changed = False
        for candidate in smaller(expression):
            if is_valid(candidate) and kind(candidate) == wanted:
                expression, changed = candidate, True
                break
    return expression


def check_seeds(runner: str, folder: Path, seeds: Sequence[int]) -> dict[int, str]:
    return Checker(runner, folder).check({seed: write_expression(seed) for seed in seeds})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; the others follow it")
    parser.add_argument("--runner", choices=RUNNERS, default="cpp")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--batch", type=int, default=40, help="expressions whose kernels are built at once")
    parser.add_argument("--keep-going", action="store_true", help="name every seed that is wrong")
    arguments = parser.parse_args()
    if arguments.runner == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton looks when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "tests.lowering.random_expressions", *sys.argv[1:]])
    for name in ("gradsplit", "torch._subclasses.fake_tensor"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    first, last = arguments.seed, arguments.seed + arguments.count
    batches = [
        range(start, min(start + arguments.batch, last)) for start in range(first, last, arguments.batch)
    ]
    began, done, wrong = time.monotonic(), 0, {}
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
            running = {
                pool.submit(check_seeds, arguments.runner, Path(folder), batch): batch for batch in batches
            }
            for future in as_completed(running):
                batch = running[future]
                try:
                    found = future.result()
                except BrokenProcessPool:
                    print(f"a process died; seeds from {batch[0]} or others that ran then", flush=True)
                    raise
                wrong.update(found)
                done += len(batch)
                for seed, what in sorted(found.items()):
                    print(f"seed {seed} {what}", flush=True)
                print(f"{done} expressions, {len(wrong)} wrong, {time.monotonic() - began:.0f} s", flush=True)
                if wrong and not arguments.keep_going:
                    pool.shutdown(cancel_futures=True)
                    break
        if wrong and not arguments.keep_going:
            checker = Checker(arguments.runner, Path(folder))
            small = minimized(checker, write_expression(min(wrong)))
            print(f"seed {min(wrong)}, made small:\n{small.text()}\n{checker.check({0: small}).get(0)}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
