"""Options: what is allowed, what is refused and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_core.options import (
    CompileOptions,
    default_cache_folder,
    list_mode_options,
    list_options,
    parse_options,
)


def test_nothing_asked_is_the_default():
    assert parse_options(None, None) == CompileOptions() == parse_options("default", {})


def test_options_are_taken_over(tmp_path):
    options = parse_options(None, {"trace_folder": str(tmp_path), "cache_size_limit": 3, "verify": True})
    assert (options.trace_folder, options.cache_size_limit, options.verify) == (tmp_path, 3, True)
    assert parse_options(None, {"trace_folder": None}).trace_folder is None


def test_unknown_option_names_the_nearest_and_all():
    with pytest.raises(ValueError, match=r"unknown option 'verifi'; did you mean 'verify'\?.*cache_folder"):
        parse_options(None, {"verifi": True})


def test_unknown_mode():
    with pytest.raises(ValueError, match=r"unknown mode 'fastest'.*default"):
        parse_options("fastest", None)
    with pytest.raises(ValueError, match="unknown mode"):
        list_mode_options("fastest")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verify", 1),
        ("cache_size_limit", 0),
        ("cache_size_limit", True),
        ("cache_size_limit", "8"),
        ("cache_folder", None),
        ("trace_folder", 3),
        ("activation_memory_budget", 1.5),
        ("activation_memory_budget", True),
    ],
)
def test_wrong_type(name, value):
    with pytest.raises(TypeError, match=f"option '{name}' takes"):
        parse_options(None, {name: value})


def test_lists():
    assert {"cache_folder", "trace_folder", "cache_size_limit", "verify"} <= set(list_options())
    assert list_mode_options()["default"] == list_mode_options("default")


def test_lists_cannot_change_the_modes():
    list_mode_options()["default"]["verify"] = True
    assert "verify" not in list_mode_options("default")


def test_cache_folder_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("GRADSPLIT_CACHE", str(tmp_path / "own"))
    assert default_cache_folder() == tmp_path / "own"
    monkeypatch.delenv("GRADSPLIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "gradsplit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_folder() == Path.home() / ".cache" / "gradsplit"


def test_verification_from_the_environment(monkeypatch):
    monkeypatch.setenv("GRADSPLIT_VERIFY", "1")
    assert CompileOptions().verify
    monkeypatch.setenv("GRADSPLIT_VERIFY", "0")
    assert not CompileOptions().verify
