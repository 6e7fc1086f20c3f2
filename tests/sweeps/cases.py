"""The models of a sweep: how each is made, small and with random weights, and what it is called with."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: ``library/model``.
        make: makes the model, and the keyword arguments of its call. What it raises is the reason why the model is
            not in the sweep.
    """

    name: str
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
