"""A folder of build results that several processes share, and that survives whatever happens to them.

An entry is a folder named after the hash of everything that went into it. It is built in a temporary folder
beside, described by a manifest (sizes and hashes of its files), and moved into place by one rename: other
processes see all of it or nothing. A lock per entry makes the second of two processes that want the same
thing wait and load instead of building it twice; the kernel releases the lock of a process that dies. An
entry that does not match its manifest (a full disk, a machine that lost power) is built again. When the
entries outgrow a limit, those that were not used for the longest time go first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_MANIFEST = "manifest.json"
_ABANDONED_AFTER_S = 24 * 3600.0
DEFAULT_LIMIT_BYTES = 2 << 30


def content_key(*parts: str) -> str:
    """A name for what these texts determine."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()[:40]


@dataclass(frozen=True)
class DiskCache:
    """Build results under one folder; the folder is made when it is first needed.

    Attributes:
        folder: where; may be shared by processes, and by machines if keys tell them apart.
        limit_bytes: beyond this size the oldest entries are removed, but never the one just built.
    """

    folder: Path
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    @contextmanager
    def entry(self, key: str, fill: Callable[[Path], None]) -> Iterator[Path]:
        """The folder of an entry, which stays in place as long as the context lasts.

        Args:
            key: from ``content_key``.
            fill: writes the entry's files into an empty folder; called if there is no sound entry. When it
                raises, there is no entry.
        """
        place = self._entries / key
        with self.lock(key):
            if not _is_sound(place):
                self._fill(place, fill)
                self._evict(keep=key)
            else:
                with suppress(OSError):  # a read-only cache is still a cache
                    os.utime(place / _MANIFEST)
            yield place

    @property
    def _entries(self) -> Path:
        return self.folder / "entries"

    def _fill(self, place: Path, fill: Callable[[Path], None]) -> None:
        self._entries.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix="building-", dir=self.folder))
        try:
            fill(work)
            files = {path.name: _fingerprint(path) for path in sorted(work.iterdir())}
            (work / _MANIFEST).write_text(json.dumps(files, indent=1))
            work.rename(place)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Makes other processes and threads wait that want the same key."""
        locks = self.folder / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        path = locks / key
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_file_at(handle, path):
                break
            os.close(handle)  # whoever evicted the entry removed this lock file while we waited for it
        try:
            yield
        finally:
            os.close(handle)

    def _evict(self, keep: str) -> None:
        """Removes entries, the longest unused first, until the rest fits; and what killed processes left
        behind."""
        entries = []
        for place in self._entries.iterdir():
            with suppress(OSError):  # another process evicts as well
                manifest = place / _MANIFEST
                size = sum(path.stat().st_size for path in place.iterdir())
                entries.append((manifest.stat().st_mtime if manifest.exists() else 0.0, size, place))
        total = sum(size for _, size, _ in entries)
        for _, size, place in sorted(entries, key=lambda entry: entry[0]):
            if total <= self.limit_bytes:
                break
            if place.name != keep and self._remove_unless_used(place):
                total -= size
        for work in self.folder.glob("building-*"):
            with suppress(OSError):
                if time.time() - work.stat().st_mtime > _ABANDONED_AFTER_S:
                    shutil.rmtree(work, ignore_errors=True)

    def _remove_unless_used(self, place: Path) -> bool:
        path = self.folder / "locks" / place.name
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_file_at(handle, path):
                return False
            shutil.rmtree(place, ignore_errors=True)
            path.unlink(missing_ok=True)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(handle)


def _is_file_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _fingerprint(path: Path) -> list[int | str]:
    content = path.read_bytes()
    return [len(content), hashlib.sha256(content).hexdigest()]


def _is_sound(place: Path) -> bool:
    try:
        files = json.loads((place / _MANIFEST).read_text())
        return bool(files) and all(_fingerprint(place / name) == expected for name, expected in files.items())
    except (OSError, ValueError, AttributeError):
        return False
