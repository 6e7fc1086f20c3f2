"""What a run leaves for ``python -m gradsplit.report``: with ``GRADSPLIT_DEBUG=folder`` each process writes its events.

Each event is a JSON file of its own, written under another name first: a process that is killed leaves whole files, and
ranks share nothing. Where the variable is not set, an event costs a look at a constant.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradsplit.compile_core.options import debug_folder, rank_given

logger = logging.getLogger(__name__)

_folder: Path | None = debug_folder()
_numbers = itertools.count()
_begun_by = 0


def is_recording() -> bool:
    """Whether ``record`` writes anything."""
    return _folder is not None


def record_into(folder: Path | None) -> None:
    """From now on, whatever the environment says."""
    global _folder, _begun_by
    _folder, _begun_by = folder, 0


def record(kind: str, fields: Callable[[], Mapping[str, Any]]) -> None:
    """Writes an event; its fields, which are made only then, are what JSON can say. Where writing fails, the run goes
    on and nothing more is written."""
    global _begun_by
    if _folder is None:
        return
    try:
        folder = _folder / f"{platform.node()}-{os.getpid()}"
        if _begun_by != os.getpid():  # also in a child that was forked
            _begun_by = os.getpid()
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder, "process", {"command": sys.argv, "torch": torch.__version__, "pid": os.getpid()})
        _write(folder, kind, fields())
    except Exception:
        record_into(None)
        logger.warning("nothing more is recorded for a report", exc_info=True)


def rank_of_process() -> int | None:
    """This process's rank, if it has one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else rank_given()


def folder_of_process(folder: Path) -> Path:
    """Where this process writes of what all ranks write to a folder."""
    rank = rank_of_process()
    return folder if rank is None else folder / f"rank_{rank}"


def _write(folder: Path, kind: str, fields: Mapping[str, Any]) -> None:
    rank = rank_of_process()
    name = f"{next(_numbers):06d}_{kind}.json"
    unfinished = folder / f".{name}"
    unfinished.write_text(
        json.dumps({"kind": kind, "rank": rank, "time_s": time.time(), **fields}, default=str)
    )
    unfinished.replace(folder / name)
