"""Random differentiable programs with views and changes in place: compiled equals eager, gradients too.

A program is a list of steps over a growing list of tensors: three inputs, then what each step made. Steps view,
compute, or change a tensor in place, with gradients switched off now and then, or are structured (``random_regions``);
results may be inputs, views of inputs or of one another. Eager and compiled runs must agree in results, changed inputs,
who shares memory, gradients, random state, and in whether the backward raises.

    python -m tests.autograd.random_programs --count 10000 [--seed 0] [--backend aot_eager]

prints the first program that differs, made as short as it still differs.
"""

from __future__ import annotations

import argparse
import operator
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track

from gradsplit.compile_core.errors import Unsupported
from tests.autograd.compare_with_eager import assert_same, compile_program
from tests.autograd.random_regions import (
    REGIONS,
    Region,
    doubled,
    new_leaf,
    reversed_gradient,
    secondary_result,
    twice_the_gradient,
)

INPUTS = 3
SHAPE = (4, 4)
MAX_STEPS = 9

Step = tuple[Any, tuple[int, ...], tuple[Any, ...]]


@dataclass(frozen=True)
class Kind:
    """An operation on ``arity`` tensors, with a choice of settings; ``target`` is called or is a method's name."""

    target: Callable[..., Any] | str
    arity: int = 1
    settings: tuple[tuple[Any, ...], ...] = ((),)


def _mask_fill(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.masked_fill_(y > 0, 0.5)


def _where(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, y)


def _assign(x: torch.Tensor, y: torch.Tensor, where: Any) -> torch.Tensor:
    x[where] = y[where]
    return x


def _part(x: torch.Tensor, index: int) -> torch.Tensor:
    return x.chunk(2, -1)[index]


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.max(-1, keepdim=True).values


def _bounded_exp(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(max=2).exp()


def _scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x / (y.abs() + 1)


COMPUTE = [
    Kind("sin"), Kind("sigmoid"), Kind("relu"), Kind(_bounded_exp), Kind("clone"), Kind("contiguous"),
    Kind(operator.mul, 1, ((0.5,), (-2.0,))), Kind("softmax", 1, ((-1,), (0,))), Kind("sum", 1, ((0,), (-1,))),
    Kind(_largest), Kind(F.dropout, 1, ((0.5,),)), Kind("tril"), Kind("flip", 1, (((0,),),)),
    Kind("cumsum", 1, ((0,),)),
    Kind(operator.getitem, 1, (([0, 2, 1, 0],),)), Kind(operator.add, 2), Kind(operator.mul, 2), Kind(operator.sub, 2),
    Kind(operator.matmul, 2), Kind(_scaled, 2), Kind(torch.maximum, 2), Kind(_where, 2), Kind(torch.outer, 2),
]  # fmt: skip
VIEWS = [
    Kind("t"), Kind("view", 1, ((-1,), (2, -1))), Kind("reshape", 1, ((-1,), (4, -1))),
    Kind("unsqueeze", 1, ((0,), (-1,))),
    Kind("expand", 1, ((3, -1, -1), (4, 4))), Kind("diagonal"), Kind("detach"),
    Kind("narrow", 1, ((0, 1, 2), (-1, 0, 2))),
    Kind(operator.getitem, 1, ((1,), (slice(1, 3),), ((Ellipsis, slice(None, None, 2)),))),
    Kind(_part, 1, ((0,), (1,))), Kind("view_as", 2),
]  # fmt: skip
CHANGES = [
    Kind("mul_", 1, ((2.0,), (-0.5,))), Kind("add_", 1, ((1.0,),)), Kind("add_", 2), Kind("mul_", 2), Kind("copy_", 2),
    Kind("sin_"), Kind("relu_"), Kind("zero_"), Kind("clamp_", 1, ((-0.5, 0.5),)), Kind("fill_diagonal_", 1, ((1.0,),)),
    Kind(_mask_fill, 2), Kind(_assign, 2, ((0,), (slice(1, 3),), ((Ellipsis, 1),))), Kind(operator.imul, 2),
    Kind(doubled),
]  # fmt: skip
STRUCTURED = [
    *(Kind(region, 2) for region in REGIONS),
    Kind(twice_the_gradient), Kind(reversed_gradient), Kind(secondary_result, 2), Kind(new_leaf),
]  # fmt: skip


@dataclass(frozen=True)
class Program:
    """Steps, the positions of what is returned, and for each input whether it requires gradients and is no leaf."""

    steps: tuple[Step, ...]
    returned: tuple[int, ...]
    inputs: tuple[tuple[bool, bool], ...]

    def graph(self) -> torch.fx.GraphModule:
        root, graph = torch.nn.Module(), torch.fx.Graph()
        values = [graph.placeholder(f"x{k}") for k in range(INPUTS)]
        for target, operands, settings in self.steps:
            without_gradients = bool(settings) and settings[0] is _NO_GRAD
            if without_gradients:
                graph.call_function(torch._C._set_grad_enabled, (False,))
            if isinstance(target, Region):
                values.append(target.emit(root, graph, *(values[k] for k in operands)))
            else:
                arguments = (*(values[k] for k in operands), *settings[without_gradients:])
                call = graph.call_method if isinstance(target, str) else graph.call_function
                values.append(call(target, arguments))
            if without_gradients:
                graph.call_function(torch._C._set_grad_enabled, (True,))
        graph.output(tuple(values[k] for k in self.returned))
        return torch.fx.GraphModule(root, graph)

    def examples(self) -> list[torch.Tensor]:
        """Inputs of the shape that the program was made for."""
        return _inputs(_leaves(self.inputs), self.inputs)

    def __str__(self) -> str:
        return f"inputs (requires grad, no leaf): {self.inputs}\n{self.graph().code}"


class _NoGrad:
    """Marks a step that runs with gradients switched off."""


_NO_GRAD = _NoGrad()


def generate(seed: int) -> Program:
    """A program whose steps all run eagerly."""
    choose = random.Random(seed)
    flags = tuple((choose.random() < 0.6, choose.random() < 0.5) for _ in range(INPUTS))
    leaves = _leaves(flags)
    values = _inputs(leaves, flags)
    steps: list[Step] = []
    while len(steps) < choose.randint(2, MAX_STEPS):
        kind = choose.choice(
            choose.choice([COMPUTE, COMPUTE, VIEWS, VIEWS, VIEWS, CHANGES, CHANGES, STRUCTURED])
        )
        operands = tuple(choose.randrange(len(values)) for _ in range(kind.arity))
        settings = choose.choice(kind.settings)
        if choose.random() < (0.2 if kind in CHANGES else 0.05):
            settings = (_NO_GRAD, *settings)
        step = (kind.target, operands, settings)
        try:
            _refuse_change_of_recomputed(step, steps, values)
            made = [*values, _run(step, values)]
            for value in made:
                _ = value.grad_fn  # eager refuses some changes only when it is asked for a history
            values = made
            steps.append(step)
        except (RuntimeError, IndexError):
            # The shapes do not fit, or eager refuses to change this tensor; it may be half changed, so all is run anew.
            values = _inputs(_leaves(flags), flags)
            for done in steps:
                values.append(_run(done, values))
    count = choose.randint(1, 3)
    returned = tuple(choose.randrange(len(values)) for _ in range(count))
    return Program(tuple(steps), returned, flags)


def _run(step: Step, values: Sequence[torch.Tensor]) -> torch.Tensor:
    target, operands, settings = step
    tensors = [values[k] for k in operands]
    if any(kind.target is target for kind in CHANGES):
        _refuse_order_dependence(tensors[0], tensors[1:])
    without_gradients = bool(settings) and settings[0] is _NO_GRAD
    with torch.set_grad_enabled(not without_gradients):
        rest = settings[without_gradients:]
        result = (
            getattr(tensors[0], target)(*tensors[1:], *rest)
            if isinstance(target, str)
            else target(*tensors, *rest)
        )
    if not isinstance(result, torch.Tensor) or result.numel() > 4096:
        raise IndexError("not a step of a program")
    return result


def _refuse_change_of_recomputed(step: Step, before: Sequence[Step], values: Sequence[torch.Tensor]) -> None:
    """Eager does not notice that what a checkpoint reads again has changed, and gives other gradients."""
    if any(kind.target is step[0] for kind in CHANGES):
        place = values[step[1][0]].untyped_storage().data_ptr()
        read_again = [k for target, operands, _ in before if isinstance(target, Region) for k in operands]
        if any(values[k].untyped_storage().data_ptr() == place for k in read_again):
            raise IndexError("a checkpoint reads this again")


def _refuse_order_dependence(changed: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
    """What eager gives when it reads what it writes, or writes one place twice, depends on the elements' order."""
    place = changed.untyped_storage().data_ptr()
    expanded = any(n > 1 and t == 0 for n, t in zip(changed.shape, changed.stride(), strict=True))
    if expanded or any(
        other.untyped_storage().data_ptr() == place for other in others if other is not changed
    ):
        raise IndexError("the result depends on the order of elements")


def _leaves(flags: Sequence[tuple[bool, bool]], shape: tuple[int, int] = SHAPE) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)
        for requires_grad, _ in flags
    ]


def _inputs(leaves: Sequence[torch.Tensor], flags: Sequence[tuple[bool, bool]]) -> list[torch.Tensor]:
    return [leaf * 1 if activation else leaf for leaf, (_, activation) in zip(leaves, flags, strict=True)]


@dataclass(frozen=True)
class Outcome:
    """What one run leaves behind; ``error`` if its backward raised."""

    tensors: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    sharing: list[tuple[int, int]]
    random_state: torch.Tensor
    error: str | None


def run_program(run: Callable[..., Any], program: Program, shape: tuple[int, int] = SHAPE) -> Outcome:
    """Runs a program, or what it was compiled to, on inputs of a shape."""
    torch.manual_seed(3)
    leaves = _leaves(program.inputs, shape)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    inputs = _inputs(leaves, program.inputs)
    results = list(run(*inputs))
    tensors = [*results, *inputs]
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    sharing = [(j, k) for k in range(len(tensors)) for j in range(k) if places[j] == places[k]]
    state = torch.get_rng_state()
    roots = [tensor for tensor in results if tensor.requires_grad]
    # An input that was changed under autograd goes on being used by its owner.
    roots += [tensor for tensor in inputs if tensor.requires_grad and not tensor.is_leaf]
    generator = torch.Generator().manual_seed(1)
    tangents = [torch.randn(root.shape, generator=generator, dtype=root.dtype) for root in roots]
    error = None
    gradients: list[torch.Tensor | None] = []
    if roots:
        try:
            gradients = list(torch.autograd.grad(roots, wanted, tangents, allow_unused=True))
        except RuntimeError as raised:
            error = str(raised)
    return Outcome([tensor.detach().clone() for tensor in tensors], gradients, sharing, state, error)


def check(program: Program, backend: str = "aot_eager") -> str:
    """``compiled``, or the reason why the program is left to eager.

    Raises:
        AssertionError: compiled and plain run differ.
    """
    module = program.graph()
    expected = _outcome_or_error(module, program)
    examples = program.examples()
    try:
        compiled = compile_program(module, examples, backend=backend)
    except Unsupported as reason:
        if isinstance(expected, RuntimeError):
            return "eager raises"
        return reason.reason_id if expected.error is None else "eager's backward raises"
    actual = _outcome_or_error(compiled, program)
    if isinstance(expected, RuntimeError):
        assert isinstance(actual, RuntimeError), f"eager raises {expected}"
        return "eager raises"
    if isinstance(actual, RuntimeError):
        raise actual
    return compare(actual, expected)


def _outcome_or_error(run: Callable[..., Any], program: Program) -> Outcome | RuntimeError:
    """Eager may refuse a program whose steps it took one by one: what it knows of a view depends on who holds it."""
    try:
        return run_program(run, program)
    except RuntimeError as error:
        return error


def compare(actual: Outcome, expected: Outcome) -> str:
    """As ``check``."""
    for one, other in zip(actual.tensors, expected.tensors, strict=True):
        assert_same(one, other, rtol=1e-10, atol=1e-10)
    assert actual.sharing == expected.sharing, f"memory is shared by {actual.sharing}, not {expected.sharing}"
    assert torch.equal(actual.random_state, expected.random_state)
    if expected.error is not None:
        # The graph is functional: what eager refuses because a saved value was changed, it can differentiate.
        return "eager's backward raises"
    assert actual.error is None, actual.error
    for one, other in zip(actual.gradients, expected.gradients, strict=True):
        assert (one is None) == (other is None), f"a gradient is {one}, not {other}"
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, equal_nan=True)
    return "compiled"


def minimise(program: Program, backend: str) -> Program:
    """A program that still differs, with steps left out one after the other."""
    for k in reversed(range(len(program.steps))):
        place = INPUTS + k
        used = (
            any(place in operands for _, operands, _ in program.steps[k + 1 :]) or place in program.returned
        )
        if used:
            continue

        def shifted(position: int, place: int = place) -> int:
            return position - (position > place)

        steps = tuple(
            (target, tuple(map(shifted, operands)), settings)
            for target, operands, settings in (*program.steps[:k], *program.steps[k + 1 :])
        )
        shorter = Program(steps, tuple(map(shifted, program.returned)), program.inputs)
        if _differs(shorter, backend):
            return minimise(shorter, backend)
    return program


def _differs(program: Program, backend: str) -> str | None:
    try:
        check(program, backend)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="aot_eager")
    arguments = parser.parse_args()
    outcomes: Counter[str] = Counter()
    for seed in track(range(arguments.seed, arguments.seed + arguments.count), "programs"):
        program = generate(seed)
        try:
            outcomes[check(program, arguments.backend)] += 1
        except Exception:
            shortest = minimise(program, arguments.backend)
            print(f"seed {seed} differs:\n{shortest}\n{_differs(shortest, arguments.backend)}")
            sys.exit(1)
    print(f"{arguments.count} programs, none different: {dict(outcomes.most_common())}")


if __name__ == "__main__":
    main()
