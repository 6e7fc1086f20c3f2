"""Logs of one kind of thing each, chosen by ``GRADSPLIT_LOGS``; ``TORCH_LOGS`` is heeded where a name means the same.

``GRADSPLIT_LOGS=graph_breaks,recompiles`` prints these to stderr, whatever ``config.log_level`` is. What is not chosen
costs a look into a set.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable

from gradsplit.compile_core.options import LOG_ARTIFACTS, chosen_logs
from gradsplit.compile_core.run_record import record

_FORMAT = logging.Formatter("[gradsplit %(artifact)s] %(message)s")


class _ToStandardError(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what ``sys.stderr`` is at the time."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_FORMAT)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


_logger = logging.getLogger("gradsplit_logs")
_logger.setLevel(logging.INFO)
_logger.propagate = False
_logger.addHandler(_ToStandardError())

_chosen: set[str] = set()
# What reports have as text; of the rest they have more.
_RECORDED = frozenset({"cache", "cudagraphs", "ddp_graphs", "dynamic", "perf_hints"})


def choose_logs(names: Iterable[str]) -> None:
    """These are written from now on, and no others.

    Raises:
        KeyError: there is no such artifact.
    """
    chosen = set(names)
    for name in chosen:
        LOG_ARTIFACTS[name]  # raises
    _chosen.clear()
    _chosen.update(chosen)


def log_artifact(name: str, text: Callable[[], str]) -> None:
    """Writes a text of this artifact, if it was chosen or the run is recorded; only then is the text made."""
    if name in _RECORDED:
        record("log", lambda: {"artifact": name, "text": text()})
    if name in _chosen:
        _logger.info("%s", text(), extra={"artifact": name})


choose_logs(chosen_logs())
