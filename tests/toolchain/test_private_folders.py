"""What is loaded, and from where: other users, file systems that hold no programs, users without a home."""

from __future__ import annotations

import json
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gradsplit
from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.lowering.cpp_kernels import build_cpp
from gradsplit.compile_core.lowering.triton_kernels import build_triton
from gradsplit.compile_core.options import default_cache_folder
from gradsplit.compile_core.toolchain import disk_cache, private_folders
from gradsplit.compile_core.toolchain.disk_cache import DiskCache, content_key

KEY = content_key("something")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files of this test's own; what was found out about folders is forgotten."""
    folder = tmp_path / "temporary"
    folder.mkdir(0o755)
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    found = (private_folders.usable_folder, private_folders.temporary_parent)
    for function in found:
        function.cache_clear()
    disk_cache._logged.clear()
    yield folder
    for function in found:
        function.cache_clear()


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a path another user's."""
    if os.geteuid() == 0:
        os.lchown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def fill(folder: Path) -> None:
    (folder / "result").write_text("ours")


def read(cache: DiskCache) -> str:
    return cache.load(KEY, fill, lambda folder: (folder / "result").read_text())


def tamper(cache: DiskCache) -> Path:
    """Another result, for which the manifest vouches."""
    place = cache.folder / "entries" / KEY
    (place / "result").write_text("theirs")
    files = {"result": disk_cache._fingerprint(place / "result")}
    (place / disk_cache.MANIFEST).write_text(json.dumps(files))
    return place


@pytest.mark.parametrize(
    ("whose", "is_open"),
    [
        ("cache", False),
        ("cache", True),
        ("cache/entries", False),
        ("cache/entries", True),
        (f"cache/entries/{KEY}", False),
        (f"cache/entries/{KEY}", True),
        (f"cache/entries/{KEY}/result", False),
        (f"cache/entries/{KEY}/result", True),
        (f"cache/entries/{KEY}/manifest.json", True),
        (".", True),
    ],
)
def test_nothing_is_loaded_that_another_user_owns_or_may_write(
    tmp_path: Path,
    whose: str,
    is_open: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    base = tmp_path / "base"
    cache = DiskCache(base / "cache")
    assert read(cache) == "ours"
    tamper(cache)
    assert read(cache) == "theirs"  # what the manifest says
    private_folders.usable_folder.cache_clear()
    if is_open:
        (base / whose).chmod((base / whose).stat().st_mode | stat.S_IWGRP)
    else:
        give_away(base / whose, monkeypatch)
    assert read(cache) == read(cache) == "ours"
    assert len(caplog.records) == 1, caplog.text


def test_a_link_to_another_users_folder_is_followed_once(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    link = temporary / "link"  # in a folder that all may write to
    link.symlink_to(tmp_path / "one")
    cache = DiskCache(link / "cache")
    assert read(cache) == "ours"
    link.unlink()
    link.symlink_to(tmp_path / "other")
    assert cache.folder == tmp_path / "one" / "cache"


def test_a_folder_will_do_while_another_process_builds_an_entry_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An entry that is built is listed, and has its place before it is looked at."""
    folder = tmp_path / "cache"
    building, built = folder / f"building-{KEY}", folder / "built"
    building.mkdir(parents=True)
    real = os.lstat

    def lstat(path: str | Path) -> os.stat_result:
        if path == building:
            building.rename(built)
        return real(path)

    monkeypatch.setattr(private_folders.os, "lstat", lstat)
    assert private_folders.usable_folder(folder) == folder
    assert not caplog.records
    built.chmod(0o777)
    private_folders.usable_folder.cache_clear()
    assert private_folders.usable_folder(folder) != folder, "others may write to what lies there"


def test_what_is_built_is_ours_alone_with_any_umask(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = os.umask(0)
    try:
        assert read(DiskCache(tmp_path / "made" / "cache")) == "ours"
    finally:
        os.umask(before)
    private_folders.usable_folder.cache_clear()
    tamper(DiskCache(tmp_path / "made" / "cache"))
    assert read(DiskCache(tmp_path / "made" / "cache")) == "theirs"
    assert not caplog.records


def test_what_stands_in_for_a_folder_is_kept_too_unless_somebody_else_made_it(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    kept = temporary / f"gradsplit-{os.geteuid()}"
    assert private_folders.usable_folder(tmp_path / "open") == kept
    private_folders.usable_folder.cache_clear()
    kept.chmod(0o777)
    private = private_folders.usable_folder(tmp_path / "open")
    assert private.parent == temporary
    assert private != kept
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    monkeypatch.setattr(private_folders, "_fault", lambda folder, is_shared=False: f"not {folder}")
    private_folders.usable_folder.cache_clear()
    private_folders.temporary_parent.cache_clear()
    with pytest.raises(CompileError, match="Set GRADSPLIT_CACHE, or TMPDIR"):
        private_folders.usable_folder(tmp_path / "open")


def test_programs_are_not_kept_where_none_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.statvfs

    def statvfs(path):
        flags = os.ST_NOEXEC if Path(path) == tmp_path / "cache" else 0
        return type("Status", (), {"f_flag": real(path).f_flag | flags})()

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert read(DiskCache(tmp_path / "cache")) == "ours"
    assert not list((tmp_path / "cache").iterdir())
    assert [("noexec" in record.getMessage()) for record in caplog.records] == [True]


def test_kernels_that_do_not_load_are_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The manifest is right, as for what a machine with other libraries has built."""
    cache, x = tmp_path / "cache", torch.randn(4)

    def call() -> None:
        monkeypatch.setattr(build_cpp, "_loaded", {})
        gradsplit.reset()  # equal code is one program
        compiled = gradsplit.compile(lambda a: a.sin() + 1, options={"cache_folder": cache})
        torch.testing.assert_close(compiled(x), x.sin() + 1)

    call()
    objects = list(cache.glob("entries/*/kernels.so"))
    assert len(objects) == 2  # the unit's, and its only kernel's
    for built in objects:
        built.unlink()  # it is in use
        built.write_bytes(b"of another machine")
        manifest = built.with_name(disk_cache.MANIFEST)
        files = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**files, built.name: disk_cache._fingerprint(built)}))
    private_folders.usable_folder.cache_clear()
    call()
    call()
    assert not caplog.records
    loaded = build_cpp.ctypes.CDLL

    def refuse(path: str) -> object:
        if Path(path).is_relative_to(cache):
            raise OSError(f"{path}: failed to map segment from shared object")
        return loaded(path)

    monkeypatch.setattr(build_cpp.ctypes, "CDLL", refuse)
    call()
    assert [("failed to map" in record.getMessage()) for record in caplog.records] == [True]


def test_a_user_without_a_home_has_a_cache(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "GRADSPLIT_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for _ in range(2):
        assert read(DiskCache(default_cache_folder())) == "ours"
    assert list(temporary.glob(f"gradsplit-*/entries/{KEY}"))
    assert [("no home" in record.getMessage()) for record in caplog.records] == [True]


def test_tritons_launchers_are_not_loaded_from_an_open_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    for name, mode in (("closed", 0o755), ("open", 0o777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / name))
        build_triton.keep_tritons_cache_private.cache_clear()
        build_triton.keep_tritons_cache_private()
        assert (os.environ["TRITON_CACHE_DIR"] == str(tmp_path / name)) == (name == "closed")
