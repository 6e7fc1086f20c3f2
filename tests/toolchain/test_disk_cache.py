"""The disk cache: shared by processes, damaged, killed in the middle, full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from compile_core.toolchain.disk_cache import DiskCache, content_key

ROOT = Path(__file__).parents[2]
KEY = content_key("something")


def fill_with(text: str, calls: list[str] | None = None):
    def fill(folder: Path) -> None:
        if calls is not None:
            calls.append(text)
        (folder / "result").write_text(text)

    return fill


def read(cache: DiskCache, key: str, text: str, calls: list[str] | None = None) -> str:
    with cache.entry(key, fill_with(text, calls)) as folder:
        return (folder / "result").read_text()


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    source = "import sys, time\nfrom pathlib import Path\nfrom compile_core.toolchain.disk_cache import DiskCache\n"
    return subprocess.Popen(
        [sys.executable, "-c", source + textwrap.dedent(script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_an_entry_is_filled_once(tmp_path: Path) -> None:
    calls: list[str] = []
    assert read(DiskCache(tmp_path), KEY, "first", calls) == "first"
    assert read(DiskCache(tmp_path), KEY, "second", calls) == "first"
    assert calls == ["first"]


def test_keys_tell_parts_apart() -> None:
    assert content_key("ab", "c") != content_key("a", "bc")
    assert content_key("ab", "c") == content_key("ab", "c")


@pytest.mark.parametrize("damage", ["truncate", "change", "remove", "manifest"])
def test_a_damaged_entry_is_filled_again(tmp_path: Path, damage: str) -> None:
    cache = DiskCache(tmp_path)
    with cache.entry(KEY, fill_with("good")) as folder:
        result, manifest = folder / "result", folder / "manifest.json"
    match damage:
        case "truncate":
            result.write_text("go")
        case "change":
            result.write_text("goof")
        case "remove":
            result.unlink()
        case "manifest":
            manifest.write_text(manifest.read_text()[:10])
    assert read(cache, KEY, "again") == "again"
    assert read(cache, KEY, "never") == "again"


def test_a_failure_leaves_no_entry(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "result").write_text("half")
        raise ValueError("no")

    cache = DiskCache(tmp_path)
    with pytest.raises(ValueError, match="no"), cache.entry(KEY, fails):
        pass
    assert read(cache, KEY, "whole") == "whole"
    assert not list(tmp_path.glob("building-*"))


def test_the_second_of_two_processes_waits_and_loads(tmp_path: Path) -> None:
    script = """
        def fill(folder):
            print("filled")
            time.sleep(1.0)
            (folder / "result").write_text("x")
        with DiskCache(Path(sys.argv[1])).entry(sys.argv[2], fill) as folder:
            assert (folder / "result").read_text() == "x"
    """
    processes = [start(script, tmp_path, KEY) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(outputs) == ["", "", "filled\n"]


def test_a_process_killed_while_filling_hurts_nobody(tmp_path: Path) -> None:
    script = """
        def fill(folder):
            (folder / "result").write_text("half")
            print("filling", flush=True)
            time.sleep(60)
        with DiskCache(Path(sys.argv[1])).entry(sys.argv[2], fill):
            pass
    """
    process = start(script, tmp_path, KEY)
    assert process.stdout is not None
    assert process.stdout.readline() == "filling\n"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()
    assert read(DiskCache(tmp_path), KEY, "whole") == "whole"


def test_the_longest_unused_entries_go_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, limit_bytes=5000)
    keys = [content_key(str(k)) for k in range(4)]
    for age, key in zip((40, 30, 20, 10), keys, strict=True):
        with cache.entry(key, fill_with("x" * 1000)) as folder:
            stamp = time.time() - age
            os.utime(folder / "manifest.json", (stamp, stamp))
    read(cache, keys[0], "")  # used just now
    read(cache, content_key("large"), "y" * 2000)
    left = {path.name for path in (tmp_path / "entries").iterdir()}
    assert left == {keys[0], keys[3], content_key("large")}


def test_an_entry_in_use_is_not_evicted(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, limit_bytes=10)
    with cache.entry(KEY, fill_with("in use")) as folder:
        read(cache, content_key("other"), "new")
        assert (folder / "result").read_text() == "in use"
    read(cache, content_key("third"), "new")
    assert not folder.exists()


def test_what_killed_processes_left_is_swept(tmp_path: Path) -> None:
    old, fresh = tmp_path / "building-old", tmp_path / "building-fresh"
    old.mkdir()
    fresh.mkdir()
    os.utime(old, (0, 0))
    read(DiskCache(tmp_path), KEY, "x")
    assert not old.exists()
    assert fresh.exists()
