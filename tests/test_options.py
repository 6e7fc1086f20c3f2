"""Options: what is allowed, what is refused and how it is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import gradsplit
from gradsplit.compile_core.options import (
    OPTIONS,
    CompileOptions,
    default_cache_folder,
    list_mode_options,
    list_options,
    parse_options,
)


def test_nothing_asked_is_the_default():
    assert parse_options(None, None) == CompileOptions() == parse_options("default", None)


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
        ("trace.enabled", "yes"),
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


def test_mode_and_options_exclude_each_other():
    with pytest.raises(RuntimeError, match="a mode or options, not both"):
        parse_options("default", {"verify": True})
    with pytest.raises(RuntimeError, match="not both"):
        gradsplit.compile(lambda x: x, backend=lambda module, examples: module, mode="any", options={"a": 1})


def test_options_must_be_a_dictionary():
    with pytest.raises(TypeError, match="options must be a dictionary"):
        parse_options(None, ["verify"])  # type: ignore[arg-type]


def test_every_option_has_a_meaning_and_a_default_it_accepts():
    for name, option in OPTIONS.items():
        assert option.name == name and len(option.meaning) > 20 and option.allowed
    for mode in list_mode_options():
        assert isinstance(parse_options(mode, None), CompileOptions)


def test_a_backend_that_has_no_use_for_an_option_says_so(caplog):
    gradsplit.compile(lambda x: x, backend="aot_eager", mode="max-autotune-no-cudagraphs")
    assert "'aot_eager' has no use for the options ['max_autotune']" in caplog.text
    caplog.clear()
    gradsplit.compile(lambda x: x, mode="max-autotune")
    gradsplit.compile(lambda x: x, backend="eager", options={"cache_size_limit": 3})
    assert not caplog.records


@pytest.mark.parametrize("mode", list_mode_options())
def test_every_mode_runs_everywhere(mode):
    x = torch.linspace(-1, 1, 8)
    assert torch.allclose(gradsplit.compile(lambda x: (x * 2).relu(), mode=mode)(x), (x * 2).relu())


def test_traces_are_written_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gradsplit.compile(lambda x: x + 3, backend="aot_eager", options={"trace.enabled": True})(torch.ones(2))
    folder = tmp_path / "gradsplit_trace" / f"pid_{os.getpid()}"
    assert any("add.Tensor" in path.read_text() for path in folder.glob("graph_*.joint.txt"))


def test_modes_of_torch():
    assert set(list_mode_options()) == set(torch._inductor.list_mode_options()) - {"lite"}
    assert list_mode_options("max-autotune") == {"max_autotune": True, "triton.cudagraphs": True}


def test_folders_of_traces(tmp_path):
    def folders(**options):
        chosen = parse_options(None, {name.replace("__", "."): value for name, value in options.items()})
        return chosen.text_folder, chosen.diagram_folder

    here = Path("gradsplit_trace") / f"pid_{os.getpid()}"
    assert folders() == (None, None)
    assert folders(trace__enabled=True) == (here, None)
    assert folders(trace__graph_diagram=True) == (None, here)
    assert folders(trace_folder=tmp_path, trace__graph_diagram=True) == (tmp_path, tmp_path)


def test_changed_options_are_named():
    assert parse_options(None, {"trace.enabled": True, "activation_memory_budget": 1}).changed == {
        "trace.enabled"
    }


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
