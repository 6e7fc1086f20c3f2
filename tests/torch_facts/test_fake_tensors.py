"""Fake tensors as the modes of this project show them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradsplit.compile_core.autograd.tracing.record_operators import record
from gradsplit.compile_core.torch_facts.fake_tensors import run_on_fakes


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The operators that fake tensors are asked for."""
    seen: list[object] = []
    dispatch = FakeTensorMode.dispatch

    def noting(self: FakeTensorMode, func: object, *rest: object, **more: object) -> object:
        seen.append(func)
        return dispatch(self, func, *rest, **more)

    monkeypatch.setattr(FakeTensorMode, "dispatch", noting)
    return seen


def test_a_device_is_known_without_an_operator(asked: list[object]) -> None:
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(2, 3, device="cuda:1")
    with run_on_fakes(mode):
        assert x.device == (x @ x.t()).device == torch.device("cuda", 1)
    with mode:
        traced = record(lambda _, given: [(given @ given.t()).to(given.device)], [x], [], {}, mode)
    assert len(traced.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) == 1
    assert torch.ops.aten.mm.default in asked and torch.ops.prim.device.default not in asked
