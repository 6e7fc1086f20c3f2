"""Random programs that are traced and compiled once with open sizes, and run with several."""

from __future__ import annotations

from collections import Counter

import pytest

from gradsplit.compile_core.backends.registry import RegionBackend, resolve_backend
from gradsplit.compile_core.capture.graph.fake_inputs import make_fake
from gradsplit.compile_core.capture.open_numbers.size_history import SizeHistory
from gradsplit.compile_core.capture.open_numbers.symbolic_sizes import SymbolicSizes
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.sources import LocalSource
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.pipeline import compile_stages
from tests.autograd.random_programs import Program, compare, generate, run_program

BATCH = 10


def holds(sizes: SymbolicSizes, side: int) -> bool:
    """Whether what was compiled is right where all sizes are ``side``, by the conditions of the trace."""
    environment = sizes.shape_env
    values = dict.fromkeys(sizes.symbols, side)
    return all(bool(guard.expr.xreplace(values)) for guard in environment.guards) and all(
        environment.replace(symbol).xreplace(values) == side for symbol in sizes.symbols
    )


def check(program: Program, backend: str, sides: tuple[int, ...]) -> Counter[str]:
    sizes = SymbolicSizes(SizeHistory(dynamic=True), lambda: None)
    examples = program.examples()
    fakes = [
        make_fake(sizes.fake_mode, example, sizes.of_tensor(example, LocalSource(f"x{k}")))
        for k, example in enumerate(examples)
    ]
    resolved = resolve_backend(backend)
    assert isinstance(resolved, RegionBackend)
    module = program.graph()
    options = CompileOptions(verify=True, fallback_random=True)
    try:
        compiled = compile_stages(module, fakes, examples, backend=resolved, options=options, planner=None)
    except Unsupported as reason:
        return Counter([reason.reason_id])
    outcomes: Counter[str] = Counter()
    for side in sides:
        if not holds(sizes, side):
            outcomes["another entry"] += 1
            continue
        expected = run_program(module, program, (side, side))
        outcomes[compare(run_program(compiled, program, (side, side)), expected)] += 1
    return outcomes


@pytest.mark.parametrize("first", range(0, 30, BATCH))
def test_one_program_for_several_sizes(first: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + BATCH):
        program = generate(seed)
        try:
            outcomes += check(program, "aot_eager", (4, 6, 5, 9))
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"seed {seed}:\n{program}\n{error}") from None
    assert outcomes["compiled"] > 2 * BATCH, outcomes


def test_generated_kernels() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(60, 64):
        outcomes += check(generate(seed), "triton", (4, 6))
    assert outcomes["compiled"] > 3, outcomes
