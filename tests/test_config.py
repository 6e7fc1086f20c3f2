"""``gradsplit.config``: checked names and values, and settings for a while."""

from __future__ import annotations

import importlib
import logging

import pytest
import torch

import gradsplit
from gradsplit import config
from gradsplit.compile_core.config import SETTINGS


def test_it_is_a_module_and_an_attribute():
    assert importlib.import_module("gradsplit.compile_core.config") is gradsplit.config is config


def test_every_setting_has_its_default():
    assert {name: getattr(config, name) for name in SETTINGS} == {
        name: setting.default for name, setting in SETTINGS.items()
    }


@pytest.mark.parametrize(
    "use", [lambda: config.cache_sise_limit, lambda: setattr(config, "cache_sise_limit", 3)]
)
def test_unknown_names_are_told_the_nearest(use):
    with pytest.raises(
        AttributeError, match="no setting 'cache_sise_limit'; did you mean 'cache_size_limit'"
    ):
        use()


@pytest.mark.parametrize(
    ("name", "value"), [("cache_size_limit", 0), ("suppress_errors", 1), ("log_level", "low")]
)
def test_values_are_checked(name, value):
    with pytest.raises(TypeError, match=f"config.{name} takes"):
        setattr(config, name, value)
    with pytest.raises(AttributeError, match="cannot be deleted"):
        delattr(config, name)


def test_patch_forms():
    for patch in (
        config.patch(cache_size_limit=3),
        config.patch("cache_size_limit", 3),
        config.patch({"cache_size_limit": 3}),
    ):
        with patch:
            assert config.cache_size_limit == 3
        assert config.cache_size_limit == 64
    with pytest.raises(TypeError):
        config.patch()


def test_a_decorated_function_is_patched_at_every_call():
    @config.patch(cache_size_limit=2)
    def limit():
        return config.cache_size_limit

    assert [limit(), limit(), config.cache_size_limit] == [2, 2, 64]


def test_a_patch_that_fails_changes_nothing():
    with pytest.raises(TypeError), config.patch(cache_size_limit=3, suppress_errors="yes"):
        pass
    with pytest.raises(AttributeError), config.patch(cache_size_limit=3, nonsense=1):
        pass
    assert config.cache_size_limit == 64


def test_log_level_is_that_of_the_logger():
    with config.patch(log_level=logging.ERROR):
        assert logging.getLogger("gradsplit.compile_core.capture").getEffectiveLevel() == logging.ERROR
    assert logging.getLogger("gradsplit").level == logging.NOTSET


def test_the_cache_limit_holds_for_functions_that_are_compiled_already(caplog):
    graphs = gradsplit.compile(lambda x, n: x + n, backend="eager")
    with config.patch(cache_size_limit=2):
        for n in range(4):
            assert torch.equal(graphs(torch.ones(2), n), torch.ones(2) + n)
    assert len(graphs.entries) == 2
    assert "captured 2 times (the limit)" in caplog.text


def test_a_recompilation_is_an_error_on_request():
    compiled = gradsplit.compile(lambda x, n: x + n, backend="eager")
    compiled(torch.ones(2), 1)
    with config.patch(error_on_recompile=True):
        compiled(torch.ones(2), 1)
        with pytest.raises(gradsplit.CompileError, match=r"would be compiled again.*because not: n == 1"):
            compiled(torch.ones(2), 2)


def test_errors_of_a_backend_are_suppressed_on_request(caplog):
    def broken(module, examples):
        raise KeyError("no such operator")

    compiled = gradsplit.compile(lambda x: x + 1, backend=broken)
    with pytest.raises(KeyError, match="no such operator") as raised:
        compiled(torch.ones(2))
    assert raised.value.__notes__ == ["raised while the backend 'broken' compiled a graph"]
    with config.patch(suppress_errors=True):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert "the backend 'broken' failed" in caplog.text
