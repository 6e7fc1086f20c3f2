"""Files that were saved through ``torch.compile``'s wrapper or DDP's load into compiled modules of either kind."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from gradsplit.compile_core.compiled_calls.compiled_module import wrap_module
from gradsplit.compile_core.compiled_calls.state_dict_names import changed_names

PREFIXES = ("", "_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod.")


class Versioned(nn.Linear):
    """Tells which version of itself a file has."""

    _version = 3
    found: object = None

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.found = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Versioned(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.randn(3))


class Wrapper(nn.Module):
    """As DDP holds its module, and as ``torch.compile`` does."""

    def __init__(self, module: nn.Module, name: str = "module") -> None:
        super().__init__()
        self.add_module(name, module)


def plain(net: nn.Module) -> nn.Module:
    return wrap_module(net, lambda: None)


def saved(net: nn.Module, prefix: str) -> OrderedDict:
    for name in reversed(prefix.rstrip(".").split(".") if prefix else []):
        net = Wrapper(net, name)
    return net.state_dict()


def check_loaded(into: Net, source: Net) -> None:
    for found, expected in zip(into.state_dict().values(), source.state_dict().values(), strict=True):
        assert torch.equal(found, expected)
    assert into.first.found == 3


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("wrapped", [False, True])
def test_every_form_loads_into_every_form(prefix, wrapped):
    source, into = Net(), Net()
    state = saved(source, prefix)
    names, versions = list(state), dict(state._metadata)
    result = plain(Wrapper(into) if wrapped else into).load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    assert list(state) == names and state._metadata == versions
    check_loaded(into, source)


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_a_compiled_part_of_a_module_that_is_not(prefix):
    """As in ``DDP(compile(net))``. The versions of the parts are found by the names in the file alone."""
    source, into = Net(), Net()
    state = OrderedDict((f"module.{name}", value) for name, value in saved(source, prefix).items())
    Wrapper(plain(into)).load_state_dict(state)
    assert torch.equal(into.scale, source.scale) and torch.equal(into.first.weight, source.first.weight)


def test_a_part_that_was_compiled_by_torch():
    source, into = Net(), Net()
    state = OrderedDict(
        (name.replace("first.", "first._orig_mod."), value) for name, value in source.state_dict().items()
    )
    plain(into).load_state_dict(state)
    assert torch.equal(into.first.weight, source.first.weight)


def test_missing_and_unexpected_names():
    state = saved(Net(), "_orig_mod.module.")
    del state["_orig_mod.module.scale"]
    state["_orig_mod.module.extra.weight"] = torch.ones(1)
    state["other"] = torch.ones(1)
    module = plain(Net())
    result = module.load_state_dict(state, strict=False)
    assert result.missing_keys == ["scale"]
    assert sorted(result.unexpected_keys) == ["extra.weight", "other"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "scale"'):
        module.load_state_dict(state)
    with pytest.raises(TypeError, match="dict-like"):
        module.load_state_dict(3)


def test_two_names_never_become_one():
    net = Net()
    ones, twos = torch.ones(3), torch.full((3,), 2.0)
    result = plain(net).load_state_dict({"module.scale": twos, "scale": ones}, strict=False)
    assert torch.equal(net.scale, ones)
    assert result.unexpected_keys == ["module.scale"]


def test_names_that_the_module_has_itself_stay():
    """A child that is called ``module`` or ``_orig_mod`` is no wrapper's."""
    for name in ("module", "_orig_mod"):
        outer = Wrapper(Net(), name)
        outer.scale = nn.Parameter(torch.ones(2))
        assert not changed_names(outer.state_dict(), outer)
        assert changed_names(["first.weight"], outer) == {}


def test_a_submodule_that_is_a_wrapper_gets_its_step():
    outer = nn.Sequential(Wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert changed_names(["0.weight", "1.weight"], outer) == {"0.weight": "0.module.weight"}


def test_assigning():
    net, state = Net(), saved(Net(), "module.")
    plain(net).load_state_dict(state, assign=True)
    assert net.first.weight.data_ptr() == state["module.first.weight"].data_ptr()
