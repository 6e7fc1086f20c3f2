"""The files of rules for Python's own functions; naming them here makes sure that they are registered."""

from __future__ import annotations

from typing import Any

from compile_core.capture import (
    builtin_rules,
    heap_rules,
    iteration_rules,
    itertools_rules,
    library_closures,
    logging_rules,
    object_rules,
    operator_rules,
    type_tests,
)

LANGUAGE_RULES: tuple[Any, ...] = (
    builtin_rules,
    library_closures,
    heap_rules,
    iteration_rules,
    itertools_rules,
    logging_rules,
    object_rules,
    operator_rules,
    type_tests,
)
