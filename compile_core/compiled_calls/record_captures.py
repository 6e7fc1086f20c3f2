"""Calls whose capture fails, written to files that ``gradsplit.replay`` captures alone.

A file has the frame with all that it reads, by value where a new process could not import it.
"""

from __future__ import annotations

import collections
import importlib
import io
import itertools
import logging
import marshal
import re
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from gradsplit.compile_core import config
from gradsplit.compile_core.capture import PlainCall, SizeHistory
from gradsplit.compile_core.capture.code_objects.resume import Rest, rest_of
from gradsplit.compile_core.compiled_calls.call_targets import Target
from gradsplit.compile_core.options import repro_folder
from gradsplit.compile_core.run_record import folder_of_process

logger = logging.getLogger(__name__)

_numbers = itertools.count(1)
# What was recorded, with what it raised: a loop may meet the same failure in each step.
_recorded: set[tuple[types.CodeType, str]] = set()


@dataclass(frozen=True)
class RecordedCall:
    """One call of a frame.

    Attributes:
        function: the Python function that is captured; of a frame that goes on after a graph break, the one that it
            is a rest of.
        rest: that rest, if it is one.
        arguments, is_module_call, cells_argument, history: as ``capture`` takes them.
    """

    function: Any
    rest: Rest | None
    arguments: tuple[Any, ...]
    is_module_call: bool
    cells_argument: bool
    history: SizeHistory


@contextmanager
def recording_failure(target: Target, arguments: tuple[Any, ...], history: SizeHistory) -> Iterator[None]:
    """What is raised here is noted to be replayed, where the process asks for that."""
    try:
        yield
    except PlainCall:  # the program itself raises
        raise
    except Exception as error:
        if config.replay_record_enabled:
            _record(target, arguments, history, error)
        raise


def _record(target: Target, arguments: tuple[Any, ...], history: SizeHistory, error: Exception) -> None:
    function = target.function
    key = (function.__code__, str(error))
    if key in _recorded:
        return
    _recorded.add(key)
    rest = rest_of(function.__code__)
    if rest is not None:
        # Resume code stands for the function's own, which says what is read.
        cells = tuple(types.CellType() for _ in rest.code.co_freevars)
        function = types.FunctionType(rest.code, function.__globals__, function.__name__, None, cells)
    call = RecordedCall(function, rest, arguments, target.is_module_call, target.cells_argument, history)
    name = re.sub(r"\W+", "_", function.__qualname__).strip("_")
    path = folder_of_process(repro_folder()) / f"capture_{next(_numbers)}_{name}.pickle"
    try:
        pickled = _pickled(call)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickled)
    except Exception as reason:  # whatever the objects of a program raise when they are pickled
        logger.warning("a capture that fails is not recorded: %s: %s", type(reason).__name__, reason)
        return
    logger.warning("a capture that fails was recorded: gradsplit.replay(%r) runs it alone", str(path))
    error.add_note(f"gradsplit.replay({str(path)!r}) runs this capture alone")


def _pickled(call: RecordedCall) -> bytes:
    # An optional package: pickle has functions of the program's main file by name only.
    cloudpickle: Any = importlib.import_module("cloudpickle")

    class Pickler(cloudpickle.CloudPickler):
        # Its own way with code leaves out the file that the lines are of.
        dispatch_table: ClassVar = collections.ChainMap(
            {types.CodeType: lambda code: (marshal.loads, (marshal.dumps(code),))},
            cloudpickle.CloudPickler.dispatch_table,
        )

    written = io.BytesIO()
    Pickler(written).dump(call)
    return written.getvalue()
