"""Settings of the process, by name: ``gradsplit.config.cache_size_limit = 8``.

They are what a program sets once for everything that it compiles; what belongs to one compilation is an argument or
option of ``compile``. Every name is checked, and so is the type of every value. A setting is read when it matters, so a
change holds from the next compilation on.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


class _ToStderr(logging.Handler):
    """What is logged is shown also where the program has configured no logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            sys.stderr.write(self.format(record) + "\n")


_to_stderr = _ToStderr()


def _set_log_level(level: Any) -> None:
    logger = logging.getLogger("gradsplit")
    logger.setLevel(logging.NOTSET if level is None else level)
    if level is None:
        logger.removeHandler(_to_stderr)
    else:
        logger.addHandler(_to_stderr)


@dataclass(frozen=True)
class Setting:
    """One name: its default, the test that a value must pass, that test in words, and what setting it does besides."""

    default: Any
    accepts: Callable[[Any], bool]
    allowed: str
    meaning: str
    apply: Callable[[Any], None] | None = None


SETTINGS: Mapping[str, Setting] = {
    "cache_size_limit": Setting(
        64,
        _is_number,
        "a positive number",
        "compiled entries that a function may have; calls that fit none of them then run as plain Python",
    ),
    "sizes_limit": Setting(
        512,
        _is_number,
        "a positive number",
        "combinations of sizes that a graph with open sizes has programs for, about a megabyte each; further ones run "
        "with torch's own kernels",
    ),
    "disk_cache_bytes": Setting(
        2 << 30,
        _is_number,
        "a positive number",
        "about the size to which kept build results may grow; those longest unused are removed then",
    ),
    "error_on_recompile": Setting(
        False,
        _is_flag,
        "True or False",
        "raise CompileError where a compiled function would be compiled again",
    ),
    "suppress_errors": Setting(
        False,
        _is_flag,
        "True or False",
        "where a backend raises, log it and run the graph with torch's own kernels",
    ),
    "verbose": Setting(
        False,
        _is_flag,
        "True or False",
        "graph breaks are logged with the compiler's own stack, too",
    ),
    "replay_record_enabled": Setting(
        False,
        _is_flag,
        "True or False",
        "a call whose capture raises is written to a file, which gradsplit.replay captures alone; needs cloudpickle",
    ),
    "capture_scalar_outputs": Setting(
        False,
        _is_flag,
        "True or False",
        "a number that the program reads out of a tensor, by item(), int() or tolist(), stays in the graph where the "
        "program only computes with it, or makes tensors of that size",
    ),
    "capture_dynamic_output_shape_ops": Setting(
        False,
        _is_flag,
        "True or False",
        "operations whose results have as many elements as the data says (nonzero, unique, x[mask]) stay in the graph",
    ),
    "trace_numpy": Setting(
        True,
        _is_flag,
        "True or False",
        "capture what a function does with NumPy arrays; else NumPy itself runs it, between graphs",
    ),
    "log_level": Setting(
        None,
        lambda value: value is None or _is_number(value),
        "a level of the logging module, or None",
        "level of the logger 'gradsplit': WARNING tells of graph breaks, INFO of recompilations and graphs too, DEBUG "
        "of each instruction that the capture interprets",
        _set_log_level,
    ),
}


class Config(types.ModuleType):
    """The class of this module, which checks names and values."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_unknown(name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
            return
        setting = SETTINGS.get(name)
        if setting is None:
            raise AttributeError(_unknown(name))
        if not setting.accepts(value):
            raise TypeError(f"config.{name} takes {setting.allowed}, not {value!r}")
        if setting.apply is not None:
            setting.apply(value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"config.{name} cannot be deleted; assign its default instead")

    def patch(
        self, settings: Mapping[str, Any] | str | None = None, value: Any = None, /, **named: Any
    ) -> contextlib.AbstractContextManager[None]:
        """Settings for the time of a ``with`` block, or of the calls of a decorated function.

        ``patch(name=value)``, ``patch("name", value)`` and ``patch({"name": value})`` mean the same.

        Raises:
            AttributeError, TypeError: as an assignment does; nothing is changed then.
        """
        given = {settings: value} if isinstance(settings, str) else dict(settings or {})
        changes = {**given, **named}
        if not changes:
            raise TypeError("patch takes at least one setting")
        return _patched(changes)


@contextlib.contextmanager
def _patched(changes: Mapping[str, Any]) -> Iterator[None]:
    module = sys.modules[__name__]
    before = {name: getattr(module, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, SETTINGS, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    return f"config has no setting {name!r}{guess} (there are: {', '.join(sorted(SETTINGS))})"


# Declared for type checkers: the loop below gives the settings their values, the class has ``patch``.
cache_size_limit: int
sizes_limit: int
disk_cache_bytes: int
error_on_recompile: bool
suppress_errors: bool
verbose: bool
replay_record_enabled: bool
log_level: int | None
trace_numpy: bool
capture_scalar_outputs: bool
capture_dynamic_output_shape_ops: bool
patch: Callable[..., contextlib.AbstractContextManager[None]]

for _name, _setting in SETTINGS.items():
    globals()[_name] = _setting.default
del _name, _setting
sys.modules[__name__].__class__ = Config
