"""Random expressions, one a seed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from tests.lowering.expression_operations import FAMILIES, FLOATS, INTEGERS, OPERATIONS
from tests.lowering.expressions import Expression, Leaf, Step, without_dead_steps

_DTYPES = (*FLOATS, torch.float32, *INTEGERS, torch.bool)
_SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 16, 17)
_LARGE_SIZES = (33, 64, 100, 130, 257, 1000)
_MOST_ELEMENTS = 4000
_LARGE_ELEMENTS = 70_000
_ATTEMPTS = 12


def write_expression(seed: int) -> Expression:
    """The expression of a seed; torch runs it without an error."""
    rng = random.Random(seed)
    limit = _LARGE_ELEMENTS if rng.random() < 0.06 else _MOST_ELEMENTS
    shape = _shape(rng, limit)
    leaves = tuple(_leaf(rng, shape, number) for number in range(rng.randint(1, 3)))
    values = [leaf.tensor() for leaf in leaves]
    steps: list[Step] = []
    for _ in range(rng.randint(1, 7)):
        step = _step(rng, values, len(leaves), limit)
        if step is not None:
            steps.append(step)
    numbers = range(len(values))
    results = {len(values) - 1, *rng.sample(numbers, min(len(values), rng.randint(0, 2)))}
    return without_dead_steps(Expression(leaves, tuple(steps), tuple(sorted(results, reverse=True))))


def _shape(rng: random.Random, limit: int) -> tuple[int, ...]:
    while True:
        sizes = _LARGE_SIZES + _SIZES if limit > _MOST_ELEMENTS else _SIZES
        shape = tuple(rng.choice(sizes) for _ in range(rng.choice([0, 1, 2, 2, 3, 3, 4])))
        if rng.random() < 0.03 and shape:
            shape = (*shape[:-1], 0) if rng.random() < 0.5 else (0, *shape[1:])
        if rng.random() < 0.1 and shape:
            shape = (*shape[:-1], rng.choice(_LARGE_SIZES))
        if prod(shape) <= limit:
            return shape


def _leaf(rng: random.Random, shape: tuple[int, ...], number: int) -> Leaf:
    """A tensor of a shape that broadcasts with the others."""
    if number:
        shape = tuple(1 if rng.random() < 0.2 else size for size in shape[rng.choice([0, 0, 0, 1]) :])
    rank = len(shape)
    order, expanded, steps, start = tuple(range(rank)), (False,) * rank, (1,) * rank, 0
    kind = rng.choice(["dense", "dense", "permuted", "expanded", "gaps", "all"])
    if kind in ("permuted", "all"):
        order = tuple(rng.sample(range(rank), rank))
    if kind in ("expanded", "all"):
        expanded = tuple(rng.random() < 0.3 for _ in shape)
    if kind in ("gaps", "all"):
        steps = tuple(rng.choice([1, 1, 2, 3]) for _ in shape)
        start = rng.choice([0, 0, 1, 4])
    dtype = rng.choice(_DTYPES)
    values = rng.choice(["normal", "normal", "ties", "special"])
    return Leaf(shape, dtype, order, expanded, steps, start, values, rng.randrange(1 << 30))


def _step(rng: random.Random, values: list[Tensor], leaves: int, limit: int) -> Step | None:
    """A step that torch runs; its value is appended."""
    for _ in range(_ATTEMPTS):
        name = rng.choice(FAMILIES[rng.choice(list(FAMILIES))])
        operation = OPERATIONS[name]
        candidates = range(leaves) if operation.in_place else range(len(values))
        # What came last is read more often than the rest, so that chains are long.
        numbers = [rng.choice([candidates[-1], rng.choice(candidates)]) for _ in range(operation.arity)]
        arguments = [values[number] for number in numbers]
        value = _attempt(rng, name, arguments)
        if value is not None and value[1].numel() <= limit:
            settings, result = value
            values.append(result)
            return Step(name, tuple(numbers), settings)
    return None


def _attempt(rng: random.Random, name: str, arguments: Sequence[Tensor]) -> tuple[tuple, Tensor] | None:
    operation = OPERATIONS[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings = operation.choose(rng, *arguments)
            if settings is None:
                return None
            result = operation.function(*arguments, *settings)
    except (RuntimeError, IndexError, ValueError, NotImplementedError, TypeError, ZeroDivisionError):
        return None  # it does not fit these arguments
    return (settings, result) if isinstance(result, Tensor) and not result.is_complex() else None
