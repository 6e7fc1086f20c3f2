"""Scenarios: what a user does with a compiled function, and what must be seen then whatever compiled it.

A scenario takes ``compile``, which makes the compiled form of a function or module, and returns all that it observed.
It is run with the functions as they are and with them compiled, from the same random state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import gradsplit
from gradsplit.compile_core.backends.registry import DEFAULT_BACKEND
from tests.capture.same_as_plain import assert_same

Compile = Callable[[Any], Any]
Scenario = Callable[[Compile], Any]

BACKENDS = ["eager", "aot_eager", DEFAULT_BACKEND]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What its backward needs: inputs, and a value made in between."""
    return torch.tanh(x @ w).exp()


def two_results(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x * w).sin(), (x + w).exp()


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """What a call returns, or the type and the first line of what it raises."""
    try:
        return function(*args)
    except Exception as error:
        return type(error).__name__, str(error).partition("\n")[0]


def check_scenario(
    scenario: Scenario, backend: str, *, breaks: bool = False, options: Mapping[str, Any] | None = None
) -> None:
    """The scenario observes the same compiled as plain, and without ``breaks`` all of it is compiled."""
    if backend == DEFAULT_BACKEND:
        options = {"fallback_random": True, **(options or {})}
    expected = _observe(scenario, lambda function: function)
    reports = _Reports()
    logger = logging.getLogger("gradsplit")
    logger.addHandler(reports)
    try:
        found = _observe(
            scenario, lambda function: gradsplit.compile(function, backend=backend, options=options)
        )
    finally:
        logger.removeHandler(reports)
    assert_same(expected, found, "observations")
    assert breaks or not reports.texts, reports.texts


def for_each(table: Mapping[str, Any], argument: str = "scenario") -> pytest.MarkDecorator:
    """A test for each entry of a table."""
    return pytest.mark.parametrize(argument, table.values(), ids=table.keys())


def _observe(scenario: Scenario, compile: Compile) -> Any:
    torch.manual_seed(0)
    return scenario(compile)


class _Reports(logging.Handler):
    """Collects what the compiler warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
