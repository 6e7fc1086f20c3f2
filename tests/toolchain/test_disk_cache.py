"""The disk cache: shared by processes, damaged, killed in the middle, full."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gradsplit import config
from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.toolchain import disk_cache
from gradsplit.compile_core.toolchain.disk_cache import DiskCache, content_key

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
    source = """
        import sys, time
        from pathlib import Path
        from gradsplit.compile_core.toolchain.disk_cache import DiskCache
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source) + textwrap.dedent(script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def open_to_all(tmp_path: Path) -> None:
    """Another user may look for what lies there."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder == tmp_path or folder.name.startswith(("pytest-", "popen-")):
            folder.chmod(folder.stat().st_mode & 0o777 | 0o055)


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


def test_who_starts_does_not_look_at_every_entry_again(tmp_path: Path) -> None:
    """As other processes wait for what it is building."""
    read(DiskCache(tmp_path), KEY, "x")
    old = tmp_path / "building-old"
    old.mkdir()
    os.utime(old, (0, 0))
    disk_cache._added_bytes.clear()  # as in a process that has just started
    read(DiskCache(tmp_path), content_key("other"), "x")
    assert old.exists()
    os.utime(tmp_path / "looked", (0, 0))
    read(DiskCache(tmp_path), content_key("third"), "x")
    assert not old.exists()


def test_what_killed_processes_left_is_swept(tmp_path: Path) -> None:
    old, fresh = tmp_path / "building-old", tmp_path / "building-fresh"
    old.mkdir()
    fresh.mkdir()
    os.utime(old, (0, 0))
    read(DiskCache(tmp_path), KEY, "x")
    assert not old.exists()
    assert fresh.exists()


@pytest.mark.parametrize("step", ["fill", "manifest", "rename"])
def test_a_full_disk_costs_the_entry_but_not_the_result(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")

    def fill(folder: Path) -> None:
        if step == "fill" and folder.is_relative_to(tmp_path):
            raise full
        (folder / "result").write_text("built all the same")

    def fail(*arguments) -> None:
        raise full

    with monkeypatch.context() as patch:
        if step == "manifest":
            patch.setattr(disk_cache, "_fingerprint", fail)
        if step == "rename":
            patch.setattr(Path, "rename", fail)
        for key in (KEY, content_key("another")):
            with DiskCache(tmp_path).entry(key, fill) as folder:
                assert (folder / "result").read_text() == "built all the same"
                assert not folder.is_relative_to(tmp_path)
    assert not folder.exists()
    assert [record.getMessage().count("not kept") for record in caplog.records] == [1]
    assert not list(tmp_path.glob("building-*"))
    assert read(DiskCache(tmp_path), KEY, "kept now") == "kept now"


def test_a_compiler_that_meets_a_full_disk_is_called_again_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(folder: Path) -> None:
        if folder.is_relative_to(tmp_path):
            raise CompileError("fatal error: error writing to /tmp/x.s: No space left on device")
        (folder / "result").write_text("built elsewhere")

    with pytest.raises(CompileError), DiskCache(tmp_path).entry(KEY, fill):
        pass  # the disk is not full: the error is about something else
    monkeypatch.setattr(disk_cache, "_is_nearly_full", lambda folder: True)
    with DiskCache(tmp_path).entry(KEY, fill) as folder:
        assert (folder / "result").read_text() == "built elsewhere"


def test_a_folder_that_may_only_be_read_is_read(tmp_path: Path) -> None:
    read(DiskCache(tmp_path), KEY, "kept")
    script = """
        import logging, os
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        if os.geteuid() == 0:
            os.setgid(65534); os.setuid(65534)  # to root no folder is read-only
        def fill(folder):
            (folder / "result").write_text("built")
        cache = DiskCache(Path(sys.argv[1]))
        for key in sys.argv[2:]:
            with cache.entry(key, fill) as folder:
                print((folder / "result").read_text())
        with cache.find(sys.argv[2]) as folder:
            print((folder / "result").read_text())
    """
    for folder in (tmp_path, *tmp_path.rglob("*")):
        folder.chmod(0o555 if folder.is_dir() else 0o444)
    open_to_all(tmp_path)
    other = [content_key("other"), content_key("third")]
    process = start(script, tmp_path, KEY, *other)
    output = process.communicate(timeout=60)[0].splitlines()
    tmp_path.chmod(0o755)
    assert process.returncode == 0
    assert [line for line in output if "not kept" not in line] == ["kept", "built", "built", "kept"]
    assert sum("not kept" in line for line in output) == 1


def test_a_folder_that_may_not_be_entered_is_done_without(tmp_path: Path) -> None:
    script = """
        import os, tempfile
        tempfile.tempdir = sys.argv[3]
        if os.geteuid() == 0:
            os.setgid(65534); os.setuid(65534)
        def fill(folder):
            (folder / "result").write_text("built")
        cache = DiskCache(Path(sys.argv[1]))
        with cache.find(sys.argv[2]) as folder:
            assert folder is None
        with cache.entry(sys.argv[2], fill) as folder:
            print((folder / "result").read_text())
    """
    closed = tmp_path / "closed"
    read(DiskCache(closed), KEY, "kept")
    closed.chmod(0o000)
    open_to_all(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    temporary.chmod(0o1777)
    process = start(script, closed, KEY, temporary)
    output = process.communicate(timeout=60)[0]
    closed.chmod(0o755)
    assert (process.returncode, output) == (0, "built\n")


def test_a_lock_that_never_becomes_free_does_not_stop_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "_LOCK_TIMEOUT_S", 0.1)
    cache = DiskCache(tmp_path)

    def takes_for_ever(folder: Path) -> None:
        assert read(cache, KEY, "built beside") == "built beside"
        (folder / "result").write_text("at last")

    with cache.entry(KEY, takes_for_ever):
        assert read(cache, KEY, "") == "at last"  # what is sound may be read all the same


def test_readers_do_not_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_LOCK_TIMEOUT_S", 5.0)
    cache = DiskCache(tmp_path)
    with cache.find(KEY) as nothing:
        assert nothing is None
    read(cache, KEY, "shared")
    start_s = time.monotonic()
    with cache.find(KEY) as one, cache.find(KEY) as other:
        assert one is not None
        assert one == other
    assert time.monotonic() - start_s < 4.0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_lock_does_not_live_on_in_a_forked_child(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    with cache.entry(KEY, fill_with("first")):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    start_s = time.monotonic()
    try:
        assert read(cache, KEY, "") == "first"
        assert time.monotonic() - start_s < 30
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_limit_is_a_setting(tmp_path: Path) -> None:
    keys = [content_key(str(k)) for k in range(3)]
    with config.patch(disk_cache_bytes=2500):
        for key in keys:
            read(DiskCache(tmp_path), key, "x" * 1000)
            time.sleep(0.02)
    assert {path.name for path in (tmp_path / "entries").iterdir()} == set(keys[1:])


def test_processes_that_write_and_die_at_any_moment_leave_only_sound_entries(tmp_path: Path) -> None:
    script = """
        import contextlib, fcntl, hashlib, random
        def text(key):
            return hashlib.sha256(key.encode()).hexdigest() * 50
        cache = DiskCache(Path(sys.argv[1]), limit_bytes=40_000)
        order = random.Random(int(sys.argv[2]))
        print("started", flush=True)
        for _ in range(int(sys.argv[3])):
            key = f"key{order.randrange(24)}"
            def fill(folder):
                (folder / "a").write_text(text(key)[:1600])
                (folder / "b").write_text(text(key)[1600:])
            with cache.entry(key, fill) as folder:
                found = (folder / "a").read_text() + (folder / "b").read_text()
                assert found == text(key), key
            if order.random() < 0.05:  # somebody damages what is there, while nobody reads it
                key = f"key{order.randrange(24)}"
                with cache._locked(key, fcntl.LOCK_EX), contextlib.suppress(OSError):
                    with open(cache.folder / "entries" / key / "a", "r+") as file:
                        file.seek(order.randrange(1600))
                        file.write("?")
    """
    moments = random.Random(0)
    for round_number in range(2):
        doomed = [start(script, tmp_path, 10 * round_number + k, 100_000) for k in range(3)]
        for process in doomed:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
        time.sleep(moments.uniform(0.05, 0.3))
        for process in doomed:
            assert process.poll() is None
            process.kill()
            process.communicate(timeout=30)
    survivors = [start(script, tmp_path, 100 + k, 150) for k in range(2)]
    for process in survivors:
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert len(list(tmp_path.glob("building-*"))) <= 24
    total = sum(path.stat().st_size for path in tmp_path.glob("entries/*/*"))
    assert total < 60_000
