"""``replay``: a recorded capture, alone."""

from __future__ import annotations

import pickle
import types
from pathlib import Path

from gradsplit.compile_core.capture import capture, resume_function
from gradsplit.compile_core.compiled_calls.call_targets import original_of
from gradsplit.compile_core.compiled_calls.record_captures import RecordedCall
from gradsplit.compile_core.interface.module_compilers import claim
from gradsplit.compile_core.ir.captured import ResumePoint


def replay(filename: str | Path) -> None:
    """Captures a call that ``config.replay_record_enabled`` had recorded, and nothing else: no graph is compiled, and
    nothing of the program runs. The modules that the program imports must be found. The file is a pickle: open none
    that others made.

    Raises:
        Unsupported: where the graph would end, as under ``fullgraph=True``.
        Exception: what the capture raises.
    """
    call: RecordedCall = pickle.loads(Path(filename).read_bytes())
    captured = capture(
        _function_of(call),
        call.arguments,
        is_module_call=call.is_module_call,
        cells_argument=call.cells_argument,
        may_break=lambda reason: False,
        original_of=original_of,
        is_compiled_apart=lambda module: claim(module) is not None,
        history=call.history,
    )
    if captured.break_reason is not None:
        raise captured.break_reason


def _function_of(call: RecordedCall) -> types.FunctionType:
    if call.rest is None:
        return call.function
    return resume_function(ResumePoint("rest", call.rest, call.cells_argument), call.function)
