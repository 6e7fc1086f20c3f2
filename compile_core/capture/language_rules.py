"""The files of rules for Python's own functions; naming them here makes sure that they are registered."""

from __future__ import annotations

from typing import Any

from compile_core.capture import iteration_rules, type_tests

LANGUAGE_RULES: tuple[Any, ...] = (iteration_rules, type_tests)
