"""Writes what each stage made, for people who look for a fault or are curious."""

from __future__ import annotations

import itertools
from pathlib import Path

_numbers = itertools.count()


class StageDump:
    """``dump(stage, text)`` writes ``graph_<n>.<stage>.txt`` into a folder; without a folder it does nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._number = next(_numbers)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, stage: str, text: str) -> None:
        if self._folder is not None:
            (self._folder / f"graph_{self._number}.{stage}.txt").write_text(text, encoding="utf-8")
