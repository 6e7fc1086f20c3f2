"""The models of a sweep: how each is made, small and with random weights, and what it is called with."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: ``library/model``.
        family: models of one name are much alike.
        make: makes the model, and the keyword arguments of its call. What it raises is the reason why the model is
            not in the sweep.
    """

    name: str
    family: str
    make: Callable[[], tuple[nn.Module, dict[str, Any]]]


LIBRARIES = ("transformers", "timm", "torchvision")


def cases_of(library: str) -> dict[str, Case]:
    """The cases of an installed library by name; none where it is not installed."""
    if importlib.util.find_spec(library) is None:
        return {}
    module = importlib.import_module(f"tests.sweeps.{library}_cases")
    return {case.name: case for case in module.cases()}


def case_named(name: str) -> Case:
    return cases_of(name.partition("/")[0])[name]


def in_order(libraries: Sequence[Sequence[Case]]) -> list[Case]:
    """Of each family the first, then of each the second, and so on; among these the libraries are mixed evenly, so that
    a sweep which is stopped has seen something of everything."""
    rounds: dict[int, list[list[Case]]] = {}
    for cases in libraries:
        seen, of_library = Counter[str](), dict[int, list[Case]]()
        for case in cases:
            of_library.setdefault(seen[case.family], []).append(case)
            seen[case.family] += 1
        for number, of_round in of_library.items():
            rounds.setdefault(number, []).append(of_round)
    found = []
    for _, lists in sorted(rounds.items()):
        placed = [
            (place / len(cases), index, case)
            for index, cases in enumerate(lists)
            for place, case in enumerate(cases)
        ]
        found += [case for *_, case in sorted(placed, key=lambda item: item[:2])]
    return found
