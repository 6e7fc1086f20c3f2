"""A folder of build results that several processes share, and that survives whatever happens to them.

An entry is a folder named after the hash of everything that went into it. It is built in a folder beside, described
by a manifest (sizes and hashes of its files), and moved into place by one rename: other processes see all of it or
nothing. A lock per entry makes the second of two processes that want the same thing wait and load instead of building
it twice; the kernel releases the lock of a process that dies. Who builds several entries at once claims them before, so
that processes that want some of the same ones divide them among themselves. An entry that does not match its manifest
(a machine that lost power, a file that somebody wrote into), belongs to another user or may be written to by one is
built again. When the entries outgrow a limit, those that were not used for the longest time go first.

Where nothing can be kept (a folder that may only be read, a full disk, a lock that never becomes free) or loaded,
results are built in a temporary folder, and a line is logged. ``private_folders`` decides where none may be loaded.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gradsplit.compile_core import config
from gradsplit.compile_core.artifact_logs import log_artifact
from gradsplit.compile_core.toolchain.private_folders import (
    MODE,
    fault_of_owner,
    temporary_parent,
    usable_folder,
)

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_ABANDONED_AFTER_S = 24 * 3600.0
# No build takes so long: whoever holds the lock is stopped, or the file system has lost the lock.
_LOCK_TIMEOUT_S = 600.0
_NEARLY_FULL_BYTES = 1 << 24
_Loaded = TypeVar("_Loaded")

# Looking for what to remove means a look at every entry, so it waits until a process has added this share of the limit,
# or until so long after any process looked: not each that starts may, while the others wait for what it is building.
_EVICTION_SHARE = 64
_LOOKED_ENOUGH_S = 3600.0


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
    """Build results under one folder, which is made when it is first needed.

    Attributes:
        wanted: where; may be shared by processes, and by machines if keys tell them apart.
        limit_bytes: about beyond this size the entries longest unused are removed, but never one in use; None is
            ``config.disk_cache_bytes`` at the time.
    """

    wanted: Path
    limit_bytes: int | None = None

    @property
    def folder(self) -> Path:
        """Where the results are: the wanted folder, unless nothing may be loaded from there."""
        return usable_folder(self.wanted)

    def load(self, key: str, fill: Callable[[Path], None], load: Callable[[Path], _Loaded]) -> _Loaded:
        """What ``load`` makes of an entry's folder. Where it raises, the entry is built anew, and then elsewhere: it
        may be of another machine, or the system may refuse to run what lies there.

        Raises:
            Exception: what ``fill`` raises, or ``load`` in the end.
        """
        for _ in range(2):
            with self.entry(key, fill) as place:
                try:
                    return load(place)
                except Exception as error:
                    reason = error
            self.discard(key)
        _log_once(self.folder, _NOT_KEPT, reason)
        with _temporary_folder() as place:
            fill(place)
            return load(place)

    def discard(self, key: str) -> None:
        """Removes an entry that turned out to be of no use, unless another process uses it."""
        with suppress(OSError):
            self._remove_unless_used(self._entries / key)

    @contextmanager
    def entry(self, key: str, fill: Callable[[Path], None]) -> Iterator[Path]:
        """The folder of an entry, which stays in place as long as the context lasts.

        Args:
            key: from ``content_key``.
            fill: writes the entry's files into an empty folder; called if there is no sound entry, and again where it
                turns out that this one cannot be kept. When it raises, there is no entry.
        """
        with ExitStack() as stack:
            found = stack.enter_context(self.find(key))
            log_artifact(
                "cache", lambda: f"{key} was {'built' if found is None else 'found'} in {self.folder}"
            )
            if found is not None:
                yield found
                return
            try:
                place = stack.enter_context(self._kept(key, fill))
            except Exception as error:
                # A compiler that finds the disk full says so in words of its own.
                if not isinstance(error, OSError) and not _is_nearly_full(self.folder):
                    raise
                _log_once(self.folder, _NOT_KEPT, error)
                place = stack.enter_context(_temporary_folder())
                fill(place)
            yield place

    @contextmanager
    def find(self, key: str) -> Iterator[Path | None]:
        """The folder of an entry if there is a sound one; it stays in place as long as the context lasts."""
        place = self._entries / key
        with ExitStack() as stack:
            if os.path.exists(place):  # unlike Path.exists, also where it may not be looked for
                with suppress(OSError):  # a cache that may only be read is still a cache
                    stack.enter_context(self._locked(key, fcntl.LOCK_SH))
                if _is_sound(place):
                    _touch(place)
                    yield place
                    return
        yield None

    @contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Whether this process is to build an entry, perhaps together with others; if so, no other process is as long
        as the context lasts. Where there can be no locks, everybody is."""
        claimed = True
        with ExitStack() as stack:
            try:
                stack.enter_context(self._locked(_claim(key), fcntl.LOCK_EX, timeout_s=0.0))
                stack.callback((self._locks / _claim(key)).unlink, missing_ok=True)
            except TimeoutError:
                claimed = False
            except OSError:
                pass
            yield claimed

    def wait_for_claim(self, key: str) -> bool:
        """Waits until the process that claimed an entry has built it, failed, or died; False if that takes too long."""
        try:
            with self._locked(_claim(key), fcntl.LOCK_SH):
                (self._locks / _claim(key)).unlink(missing_ok=True)
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    @contextmanager
    def _kept(self, key: str, fill: Callable[[Path], None]) -> Iterator[Path]:
        with self._locked(key, fcntl.LOCK_EX):
            place = self._entries / key
            if not _is_sound(place):  # else another process filled it meanwhile
                self._fill(key, place, fill)
            yield place

    @property
    def _entries(self) -> Path:
        return self.folder / "entries"

    @property
    def _locks(self) -> Path:
        return self.folder / "locks"

    def _fill(self, key: str, place: Path, fill: Callable[[Path], None]) -> None:
        self._entries.mkdir(MODE, parents=True, exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        work = self.folder / f"building-{key}"
        shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
        work.mkdir(MODE)
        try:
            fill(work)
            for path in work.iterdir():  # whatever the user's umask is
                path.chmod(path.stat().st_mode & MODE)
            files = {path.name: _fingerprint(path) for path in sorted(work.iterdir())}
            (work / MANIFEST).write_text(json.dumps(files, indent=1))
            (work / MANIFEST).chmod(0o644)
            work.rename(place)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        with suppress(OSError):  # the entry is there; what may go will go another time
            self._evict_sometimes(added_bytes=_size(place), keep=key)

    @contextmanager
    def _locked(self, key: str, operation: int, timeout_s: float | None = None) -> Iterator[None]:
        """Makes other processes and threads wait that want the same key; those with ``LOCK_SH`` not for each other.

        Raises:
            OSError: there can be no lock in this folder, or it did not become free.
        """
        self._locks.mkdir(MODE, parents=True, exist_ok=True)
        path = self._locks / key
        deadline = time.monotonic() + (_LOCK_TIMEOUT_S if timeout_s is None else timeout_s)
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _wait_for_lock(handle, operation, deadline)
                if _is_file_at(handle, path):
                    yield
                    return
                # whoever evicted the entry removed this lock file while we waited for it
            finally:
                _unlock(handle)

    # -- making room

    def _evict_sometimes(self, added_bytes: int, keep: str) -> None:
        limit = config.disk_cache_bytes if self.limit_bytes is None else self.limit_bytes
        _added_bytes[self.folder] += added_bytes
        if _added_bytes[self.folder] > limit // _EVICTION_SHARE or self._was_long_ago():
            # Where another process is at it, this one goes on.
            with suppress(TimeoutError), self._locked("looking", fcntl.LOCK_EX, timeout_s=0.0):
                _added_bytes[self.folder] = 0
                self._evict(limit, keep)

    def _was_long_ago(self) -> bool:
        """Whether no process has looked for what to remove lately; this one is about to, then."""
        mark = self.folder / "looked"
        with suppress(FileNotFoundError):
            if abs(time.time() - mark.stat().st_mtime) < _LOOKED_ENOUGH_S:
                return False
        mark.touch(0o644)
        return True

    def _evict(self, limit: int, keep: str) -> None:
        """Removes entries, the longest unused first, until the rest fits; and what killed processes left."""
        entries = []
        for place in self._entries.iterdir():
            with suppress(OSError):  # another process evicts as well
                manifest = place / MANIFEST
                used = manifest.stat().st_mtime if manifest.exists() else 0.0
                entries.append((used, _size(place), place))
        total = sum(size for _, size, _ in entries)
        for _, size, place in sorted(entries):
            if total <= limit:
                break
            if place.name != keep and self._remove_unless_used(place):
                total -= size
        for left in (*self.folder.glob("building-*"), *self.folder.glob("failed/*")):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _ABANDONED_AFTER_S:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()

    def _remove_unless_used(self, place: Path) -> bool:
        path = self._locks / place.name
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
            _unlock(handle)


# Folder -> bytes that this process added to it since it last looked for what to remove.
_added_bytes: defaultdict[Path, int] = defaultdict(int)
# Folders of which it was said that they keep nothing, or what must not be loaded.
_logged: set[Path] = set()


def _wait_for_lock(handle: int, operation: int, deadline: float) -> None:
    pause_s = 0.001
    while True:
        try:
            fcntl.flock(handle, operation | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process holds a lock for {_LOCK_TIMEOUT_S:.0f} s") from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def _claim(key: str) -> str:
    return f"claim-{key}"


def _unlock(handle: int) -> None:
    """Also for a child that was forked meanwhile and has the file open, too."""
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)
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
    """Whether an entry is what this user, or root, has written there."""
    try:
        files = json.loads((place / MANIFEST).read_text())
        paths = (place, place / MANIFEST, *(place / name for name in files))
        fault = next(filter(None, map(fault_of_owner, paths)), "")
        if fault:
            _log_once(place.parent, "build results in %s are not loaded: %s", fault)
            return False
        return bool(files) and all(_fingerprint(place / name) == expected for name, expected in files.items())
    except (OSError, ValueError, AttributeError):
        return False


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gradsplit-", dir=temporary_parent()) as folder:
        yield Path(folder)


def _touch(place: Path) -> None:
    with suppress(OSError):
        os.utime(place / MANIFEST)


def _size(place: Path) -> int:
    """Bytes of an entry's files; one that other entries hold too counts for each of them in part."""
    found = [path.stat() for path in place.iterdir()]
    return sum(status.st_size // max(1, status.st_nlink) for status in found)


def _is_nearly_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _NEARLY_FULL_BYTES
    except OSError:
        return False


_NOT_KEPT = "build results are not kept for the next run in %s: %s"


def _log_once(folder: Path, message: str, reason: Exception | str) -> None:
    if folder not in _logged:
        _logged.add(folder)
        logger.warning(message, folder, reason)
