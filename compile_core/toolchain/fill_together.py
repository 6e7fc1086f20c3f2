"""Entries of the cache on disk that are filled together, where several cost less than each alone.

Each entry is locked while it is filled, inside the lock of the one before it. All processes go by the order of keys, so
none waits for one that waits for it; an entry that another process has filled meanwhile is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gradsplit.compile_core.toolchain.disk_cache import DiskCache

# Writes the files of entries into empty folders, and returns why it failed for some.
Fill = Callable[[Mapping[str, Path]], Mapping[str, Exception]]


def load_together(
    disk: DiskCache, keys: Iterable[str], fill: Fill, load: Callable[[str, Path], Any]
) -> dict[str, Any]:
    """``DiskCache.load`` for several entries.

    Args:
        fill: called once with all entries that are missing; with one alone where that raises, or where what was written
            is of no use.
        load: what it makes of an entry's key and folder is the result.

    Returns:
        The results by key; of an entry that cannot be had the exception.
    """
    order = sorted({*keys})
    results: dict[str, Any] = {}
    begun: dict[str, Path] = {}
    failed: dict[str, Exception] = {}

    def fill_from(position: int, folder: Path) -> None:
        key = order[position]
        if key in begun:
            failed.pop(key, None)
            failed.update(fill({key: folder}))
        else:
            begun[key] = folder
            go_on(position + 1)
        if key in failed:
            raise failed[key]

    def go_on(position: int) -> None:
        if position < len(order):
            key = order[position]
            try:
                results[key] = disk.load(key, partial(fill_from, position), partial(load, key))
            except Exception as error:
                results[key] = error
            if key not in begun:
                go_on(position + 1)
        elif begun:
            failed.update(_filled(fill, begun))

    go_on(0)
    return results


def _filled(fill: Fill, folders: Mapping[str, Path]) -> Mapping[str, Exception]:
    try:
        return fill(folders)
    except Exception as error:
        if len(folders) == 1:
            return dict.fromkeys(folders, error)
    failed: dict[str, Exception] = {}
    for key, folder in folders.items():
        failed.update(_filled(fill, {key: folder}))
    return failed
