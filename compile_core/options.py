"""What a user may ask of a compilation, and the one place that reads the environment."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any


def default_cache_folder() -> Path:
    """Where built kernels are kept: ``GRADSPLIT_CACHE``, else a folder of the user's cache."""
    chosen = os.environ.get("GRADSPLIT_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradsplit"


@dataclass(frozen=True)
class CompileOptions:
    """One compilation's settings, passed from ``compile`` to every stage that reads one.

    Attributes:
        cache_folder: where built kernels are kept between runs.
        trace_folder: if given, every stage writes what it made there, one file a graph and stage.
        cache_size_limit: compiled entries a function may have before it runs as plain Python; None is
            ``config.cache_size_limit`` at the time.
        activation_memory_budget: what may be kept between forward and backward, as a share of what is cheapest in time:
            1.0 keeps that, smaller numbers compute more again in the backward, 0.0 all but random numbers.
        verify: check what every stage hands on; costs compile time.
    """

    cache_folder: Path = field(default_factory=default_cache_folder)
    trace_folder: Path | None = None
    cache_size_limit: int | None = None
    activation_memory_budget: float = 1.0
    verify: bool = field(default_factory=lambda: os.environ.get("GRADSPLIT_VERIFY", "0") != "0")


# What each mode sets.
MODES: Mapping[str, Mapping[str, Any]] = {"default": {}}


def list_mode_options(mode: str | None = None) -> dict[str, Any]:
    """The options that each mode sets, or those of one mode."""
    if mode is None:
        return {name: dict(settings) for name, settings in MODES.items()}
    return dict(MODES[_known(mode, MODES, "mode")])


def list_options() -> list[str]:
    """The names that ``compile(options=...)`` takes."""
    return sorted(option.name for option in fields(CompileOptions))


def parse_options(mode: str | None, options: Mapping[str, Any] | None) -> CompileOptions:
    """The settings of a mode, changed by the user's options.

    Raises:
        ValueError: an unknown mode or option; the message lists the nearest names and what is allowed.
        TypeError: an option's value has the wrong type.
    """
    chosen = list_mode_options(mode or "default")
    for name, value in (options or {}).items():
        known = _known(name, list_options(), "option")
        chosen[known] = _checked(known, value)
    return CompileOptions(**chosen)


def _checked(name: str, value: Any) -> Any:
    if name in ("cache_folder", "trace_folder"):
        if value is None and name == "trace_folder":
            return None
        if not isinstance(value, (str, Path)):
            raise TypeError(f"option {name!r} takes a path, not {value!r}")
        return Path(value)
    if name == "activation_memory_budget":
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
            raise TypeError(f"option {name!r} takes a number from 0.0 to 1.0, not {value!r}")
        return float(value)
    if name == "cache_size_limit":
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise TypeError(f"option {name!r} takes a positive number, not {value!r}")
        return value
    if not isinstance(value, bool):
        raise TypeError(f"option {name!r} takes True or False, not {value!r}")
    return value


def _known(name: str, allowed: Iterable[str], kind: str) -> str:
    names = sorted(allowed)
    if name in names:
        return name
    raise ValueError(unknown_name(name, names, kind))


def unknown_name(name: object, allowed: Iterable[str], kind: str) -> str:
    """One line that names the fault, the nearest allowed names, and all of them."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(name), names, n=3)
    guess = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"unknown {kind} {name!r}{guess} (allowed: {', '.join(names)})"
