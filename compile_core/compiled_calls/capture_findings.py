"""What captures of one code object have shown, and what is logged of it."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.compile_core import config
from gradsplit.compile_core.artifact_logs import log_artifact
from gradsplit.compile_core.capture import COMPILED_APART, SizeHistory
from gradsplit.compile_core.compiled_calls.call_targets import ModulesApart
from gradsplit.compile_core.compiled_calls.entry_table import EntryTable, GuardFailure, RunGraph
from gradsplit.compile_core.errors import CodeLocation, CompileError, InternalError, Unsupported
from gradsplit.compile_core.ir.captured import CapturedFrame, CapturedGraph
from gradsplit.compile_core.ir.data_reads import DataEnds
from gradsplit.compile_core.observe.describe import describe_code, describe_place
from gradsplit.compile_core.observe.observer import Observer
from gradsplit.compile_core.run_record import record

logger = logging.getLogger("gradsplit.compile_core.capture")

CompileGraph = Callable[[CapturedGraph, list[torch.Tensor]], RunGraph]

_logged_locations: set[tuple[str, CodeLocation | None]] = set()


@dataclass(frozen=True)
class CallSettings:
    """How a function and all after its breaks are compiled; see ``CompiledFunction``."""

    compile_graph: CompileGraph
    fullgraph: bool
    dynamic: bool | None
    cache_limit: int | None
    observer: Observer | None
    modules_apart: ModulesApart
    # Where data that the program reads end graphs; None where they do everywhere.
    data_ends: DataEnds | None = None

    @property
    def limit(self) -> int:
        """How many entries a code object may have."""
        return self.cache_limit or config.cache_size_limit

    def may_break(self, reason: Unsupported) -> bool:
        """Whether a graph may end for this."""
        return not self.fullgraph or reason.reason_id == COMPILED_APART


class Findings:
    """Until they are forgotten.

    Args:
        name: of the code, for messages.

    Attributes:
        history: which sizes differ between calls.
        break_reasons: why captures ended early, in the order in which it was found.
        runs_plain: calls that no entry fits run as plain Python.
        expects_wrongly: captures meet exceptions that the calls then do not raise.
    """

    def __init__(self, name: str, settings: CallSettings) -> None:
        self._name, self._settings = name, settings
        self.history = SizeHistory(settings.dynamic)
        self.break_reasons: list[Unsupported] = []
        self.runs_plain = False
        self._wrongly_expected = 0

    def note_wrongly_expected(self) -> None:
        """A capture met an exception that the call then did not raise: each such call is captured in vain."""
        self._wrongly_expected += 1

    @property
    def expects_wrongly(self) -> bool:
        return self._wrongly_expected >= self._settings.limit

    def report_fresh_guards(self, explanation: str) -> None:
        """Something that the function reads changes whenever it is read or compiled: only plain Python is right."""
        shown = f"guards fail for the very call that they were made from: {explanation}"
        if self._settings.fullgraph:
            raise InternalError(f"{self._name}: {shown}")
        self.runs_plain = True
        logger.warning("%s runs as plain Python from now on: its %s", self._name, shown)

    def report_break(self, reason: Unsupported, plain: bool) -> None:
        """A capture ended early; ``plain`` if there is nothing before."""
        if self._settings.fullgraph and (plain or not self._settings.may_break(reason)):
            raise reason.with_traceback(None)
        self.break_reasons.append(reason)
        record(
            "break",
            lambda: {
                "function": self._name,
                "reason": f"[{reason.reason_id}] {reason.explanation}",
                "hint": reason.hint,
                "stack": [describe_place(place) for place in reason.stack],
                "plain": plain,
            },
        )
        log_artifact("graph_breaks", lambda: f"{self._name}: {reason}")
        key = (reason.reason_id, reason.location)
        if key not in _logged_locations:
            _logged_locations.add(key)
            notes = "".join(f"\n{note}" for note in getattr(reason, "__notes__", ()))
            logger.warning("%s is not captured in full: %s%s", self._name, reason, notes)

    def report_guards(self, code: types.CodeType, captured: CapturedFrame) -> None:
        """A new entry has these."""
        log_artifact("guards", lambda: _print_guards(self._name, captured))
        record("guards", lambda: _described_guards(self._name, code, captured))

    def report_recompilation(
        self, reason: str, code: types.CodeType, failure: Callable[[], GuardFailure | None]
    ) -> None:
        """
        Args:
            reason: the guard that does not hold, in words.
            failure: the same with the values of now.

        Raises:
            CompileError: none is allowed.
        """
        if self._settings.observer is not None:
            self._settings.observer.frame_missed(self._name, code, reason)
        record(
            "recompilation",
            lambda: {
                "function": self._name,
                "reason": reason,
                "place": describe_code(code),
                **_described_failure(failure()),
            },
        )
        log_artifact("recompiles", lambda: f"{self._name}: {reason}{_shown_failure(failure())}")
        if config.error_on_recompile:
            raise CompileError(
                f"{self._name} would be compiled again (config.error_on_recompile) because {reason}"
            )
        logger.info("%s: recompiled because %s", self._name, reason)

    def report_limit(self, table: EntryTable) -> None:
        """The table has as many entries as it may have."""
        self.runs_plain = True
        reason, count = table.most_frequent_reason()
        logger.warning(
            "%s was captured %d times (the limit); calls that no capture fits run as plain Python. "
            "The guard that failed most often, %d times: %s",
            self._name,
            self._settings.limit,
            count,
            reason,
        )


def _described_failure(failure: GuardFailure | None) -> dict[str, Any]:
    if failure is None:  # not even what the guard is about can be read
        return {}
    described = {"guard": failure.guard.kind, "found": failure.found}
    place = describe_place(failure.guard.location)
    return described if place is None else {**described, "place": place}


def _shown_failure(failure: GuardFailure | None) -> str:
    if failure is None:
        return ""
    place = failure.guard.location
    return f"; {failure.found}" + ("" if place is None else f"\n  {place}")


def forget_reports() -> None:
    """What was logged once is logged again."""
    _logged_locations.clear()


def _print_guards(name: str, captured: CapturedFrame) -> str:
    lines = [f"  {', '.join(map(str, guard.sources))}: {guard.text}" for guard in captured.guards]
    return "\n".join([f"{name}: {len(lines)} guards", *lines])


def _described_guards(name: str, code: types.CodeType, captured: CapturedFrame) -> dict[str, Any]:
    return {
        "function": name,
        "place": describe_code(code),
        "guards": [
            {
                "of": ", ".join(map(str, guard.sources)),
                "kind": guard.kind,
                "text": guard.text,
                "place": describe_place(guard.location),
            }
            for guard in captured.guards
        ],
    }
