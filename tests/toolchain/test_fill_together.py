"""Entries of the cache that are filled together: what is missing, what fails, who waits for whom."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from gradsplit.compile_core.toolchain.disk_cache import DiskCache, content_key
from gradsplit.compile_core.toolchain.fill_together import load_together

KEYS = [content_key(str(number)) for number in range(4)]


class Filler:
    """Writes an entry's key into it, and notes what is filled together; some entries fail, some end the call."""

    def __init__(self, failing: str = "", ending: str = "") -> None:
        self.calls: list[list[str]] = []
        self._failing, self._ending = failing, ending

    def __call__(self, folders: Mapping[str, Path]) -> dict[str, Exception]:
        self.calls.append(sorted(folders))
        if self._ending in folders:
            raise OSError("the process that fills died")
        for key, folder in folders.items():
            (folder / "result").write_text(key)
        return {key: ValueError(f"cannot make {key}") for key in folders if key == self._failing}


def read(key: str, folder: Path) -> str:
    return (folder / "result").read_text()


def test_what_is_missing_is_filled_at_once(tmp_path: Path) -> None:
    disk, fill = DiskCache(tmp_path), Filler()
    for keys in (KEYS[1:2], KEYS, [*KEYS, *KEYS], []):
        assert load_together(disk, keys, fill, read) == {key: key for key in keys}
    assert fill.calls == [KEYS[1:2], sorted({*KEYS} - {KEYS[1]})]


@pytest.mark.parametrize("failing", KEYS)
def test_what_fails_is_an_exception_and_the_others_are_there(tmp_path: Path, failing: str) -> None:
    disk, fill = DiskCache(tmp_path), Filler(failing)
    results = load_together(disk, KEYS, fill, read)
    assert isinstance(results.pop(failing), ValueError)
    assert results == {key: key for key in KEYS if key != failing}
    assert fill.calls == [sorted(KEYS)]
    assert load_together(disk, KEYS, Filler(), read)[failing] == failing, "it is tried again"


@pytest.mark.parametrize("ending", KEYS)
def test_what_ends_the_whole_is_found_by_filling_each_alone(tmp_path: Path, ending: str) -> None:
    results = load_together(DiskCache(tmp_path), KEYS, Filler(ending=ending), read)
    assert isinstance(results.pop(ending), OSError)
    assert results == {key: key for key in KEYS if key != ending}


@pytest.mark.parametrize("spoilt", KEYS)
def test_what_cannot_be_loaded_is_filled_again_alone(tmp_path: Path, spoilt: str) -> None:
    fill, loaded = Filler(), []

    def load(key: str, folder: Path) -> str:
        loaded.append(key)
        if key == spoilt and loaded.count(key) == 1:
            raise OSError("another machine's")
        return read(key, folder)

    assert load_together(DiskCache(tmp_path), KEYS, fill, load) == {key: key for key in KEYS}
    assert fill.calls == [sorted(KEYS), [spoilt]]


def test_a_folder_that_keeps_nothing_does_no_harm(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.touch()
    assert load_together(DiskCache(place), KEYS, Filler(), read) == {key: key for key in KEYS}


_PROCESS = """
import random, sys, time
from pathlib import Path
from gradsplit.compile_core.toolchain.disk_cache import DiskCache, content_key
from gradsplit.compile_core.toolchain.fill_together import load_together
keys = [content_key(str(number)) for number in range(12)]
random.Random(sys.argv[2]).shuffle(keys)
def fill(folders):
    time.sleep(0.02)
    for key, folder in folders.items():
        (folder / "result").write_text(key)
        with Path(sys.argv[1], "log").open("a") as log:
            log.write(key + "\\n")
    return {}
for start in range(0, 12, 4):
    part = keys[start : start + 4]
    found = load_together(DiskCache(Path(sys.argv[1])), part, fill, lambda key, f: (f / "result").read_text())
    assert found == {key: key for key in part}
"""


@pytest.mark.multi_process
def test_processes_that_want_the_same_in_other_groups_make_each_entry_once(tmp_path: Path) -> None:
    started = [subprocess.Popen([sys.executable, "-c", _PROCESS, str(tmp_path), str(n)]) for n in range(4)]
    assert [process.wait(60) for process in started] == [0] * 4
    made = (tmp_path / "log").read_text().splitlines()
    assert len(made) == len({*made}) == 12
