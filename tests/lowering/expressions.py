"""Expressions over tensors as data: what can be run in several ways, printed, and made smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from tests.lowering.expression_operations import OPERATIONS, Operation

# What a leaf of special values has some of: signs of zero, infinities, NaN, ties, large numbers, the smallest.
_SPECIAL = (
    0.0,
    -0.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    1.0,
    -1.0,
    0.5,
    -2.5,
    6e4,
    3e38,
    1e-40,
    -1e-45,
)
_DENORMALS = 2


@dataclass(frozen=True)
class Leaf:
    """An input.

    Attributes:
        shape, dtype: of the tensor.
        order: its dims from the slowest in memory to the fastest.
        expanded: whether a dim has stride 0.
        steps: how far apart in memory neighbours of a dim are, in elements of that dim.
        start: elements in memory before the first.
        values: ``"normal"``, ``"ties"`` (few different values), ``"special"``, or ``"no denormals"``: special, too.
        seed: of the values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    expanded: tuple[bool, ...]
    steps: tuple[int, ...]
    start: int
    values: str
    seed: int

    def tensor(self) -> Tensor:
        sizes = [
            1 if flat else size * step
            for size, step, flat in zip(self.shape, self.steps, self.expanded, strict=True)
        ]
        generator = torch.Generator().manual_seed(self.seed)
        memory = self._contents(self.start + prod(sizes), generator)[self.start :]
        dense = memory.view([sizes[dim] for dim in self.order])
        tensor = dense.permute([self.order.index(dim) for dim in range(len(sizes))])
        for dim, step in enumerate(self.steps):
            if step > 1 and not self.expanded[dim]:
                tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
        return tensor.expand(self.shape)

    def _contents(self, count: int, generator: torch.Generator) -> Tensor:
        if self.dtype == torch.bool:
            return torch.randint(0, 2, (count,), generator=generator).bool()
        if not self.dtype.is_floating_point:
            low, high = (0, 9) if self.values == "ties" else (-9, 100)
            values = torch.randint(low, high, (count,), generator=generator)
            if self.values in ("special", "no denormals") and count:
                limits = torch.iinfo(self.dtype)
                extremes = torch.tensor([limits.min, limits.max, limits.max - 1, 0, 1])
                chosen = torch.randint(0, count, (count // 4,), generator=generator)
                values[chosen] = extremes[torch.randint(0, 5, (count // 4,), generator=generator)]
            return values.to(self.dtype)
        if self.values == "ties":
            return torch.randint(-3, 4, (count,), generator=generator).to(self.dtype) * 0.5
        values = torch.randn(count, generator=generator, dtype=torch.float64) * 2
        if self.values in ("special", "no denormals") and count:
            kinds_count = len(_SPECIAL) - (_DENORMALS if self.values == "no denormals" else 0)
            chosen = torch.randint(0, count, (count // 4,), generator=generator)
            kinds = torch.randint(0, kinds_count, (count // 4,), generator=generator)
            values[chosen] = torch.tensor(_SPECIAL, dtype=torch.float64)[kinds]
        return values.to(self.dtype)


@dataclass(frozen=True)
class Step:
    """One operation of ``OPERATIONS``: on values by number, with settings that are no tensors."""

    operation: str
    arguments: tuple[int, ...]
    settings: tuple[Any, ...] = ()

    @property
    def rule(self) -> Operation:
        return OPERATIONS[self.operation]


@dataclass(frozen=True)
class Expression:
    """Leaves are the first values, each step defines the next one; ``results`` are values by number."""

    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    def inputs(self) -> list[Tensor]:
        return [leaf.tensor() for leaf in self.leaves]

    def run(
        self,
        inputs: Sequence[Tensor],
        evaluate: Callable[[int, Step, list[Tensor]], Tensor] | None = None,
    ) -> list[Tensor]:
        """All values; ``evaluate`` gets a value's number, its step and its arguments, and is the operation itself
        by default."""
        values = list(inputs)
        for step in self.steps:
            arguments = [values[argument] for argument in step.arguments]
            if evaluate is None:
                values.append(step.rule.function(*arguments, *step.settings))
            else:
                values.append(evaluate(len(values), step, arguments))
        return values

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        values = self.run(inputs)
        return [values[number] for number in self.results]

    def text(self) -> str:
        """The expression as lines that people read."""
        lines = []
        for number, leaf in enumerate(self.leaves):
            tensor = leaf.tensor()
            lines.append(
                f"v{number} = {leaf.values} {tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()}"
                f"  # {leaf!r}"
            )
        for number, step in enumerate(self.steps, len(self.leaves)):
            operands = [*(f"v{argument}" for argument in step.arguments), *map(repr, step.settings)]
            lines.append(f"v{number} = {step.operation}({', '.join(operands)})")
        return "\n".join([*lines, f"return {', '.join(f'v{number}' for number in self.results)}"])


def without_denormals(expression: Expression) -> Expression:
    leaves = [
        replace(leaf, values="no denormals") if leaf.values == "special" else leaf
        for leaf in expression.leaves
    ]
    return replace(expression, leaves=tuple(leaves))


def without_dead_steps(expression: Expression) -> Expression:
    """The same results (and changes of inputs) from the steps that these need."""
    count = len(expression.leaves)
    needed = set(expression.results)
    for number in reversed(range(count, count + len(expression.steps))):
        step = expression.steps[number - count]
        if number in needed or step.rule.in_place:
            needed |= {number, *step.arguments}
    kept = sorted(needed)
    places = {number: place for place, number in enumerate(kept)}
    return Expression(
        tuple(leaf for number, leaf in enumerate(expression.leaves) if number in needed),
        tuple(
            replace(step, arguments=tuple(places[argument] for argument in step.arguments))
            for number, step in enumerate(expression.steps, count)
            if number in needed
        ),
        tuple(places[number] for number in expression.results),
    )


def smaller(expression: Expression) -> Iterator[Expression]:
    """Expressions with less in them: fewer results, a step's argument in its place, simpler leaves."""
    if len(expression.results) > 1:
        for result in expression.results:
            yield without_dead_steps(replace(expression, results=(result,)))
    count = len(expression.leaves)
    for position, step in enumerate(expression.steps):
        for stand_in in dict.fromkeys(step.arguments):
            yield without_dead_steps(_replaced(expression, count + position, stand_in))
    for position, leaf in enumerate(expression.leaves):
        rank = len(leaf.shape)
        simpler = (
            replace(leaf, order=tuple(range(rank))),
            replace(leaf, steps=(1,) * rank),
            replace(leaf, expanded=(False,) * rank),
            replace(leaf, start=0),
            replace(leaf, values="normal"),
            *(
                replace(leaf, shape=(*leaf.shape[:dim], size // 2, *leaf.shape[dim + 1 :]))
                for dim, size in enumerate(leaf.shape)
                if size > 1
            ),
        )
        for candidate in simpler:
            if candidate != leaf:
                leaves = (*expression.leaves[:position], candidate, *expression.leaves[position + 1 :])
                yield replace(expression, leaves=leaves)


def _replaced(expression: Expression, number: int, stand_in: int) -> Expression:
    """Without the step that defines a value; what read it reads another one."""

    def renamed(value: int) -> int:
        value = stand_in if value == number else value
        return value - 1 if value > number else value

    position = number - len(expression.leaves)
    steps = [
        replace(step, arguments=tuple(map(renamed, step.arguments)))
        for step in (*expression.steps[:position], *expression.steps[position + 1 :])
    ]
    return replace(expression, steps=tuple(steps), results=tuple(map(renamed, expression.results)))
