"""Open sizes, what is checked of a call, tensors without data, torch's own form."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

import gradsplit
from gradsplit.compile_core.export.torch_form import to_torch


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.table = torch.randn(8)

    def forward(self, x: Tensor, y: Tensor, scale: float = 2.0) -> dict[str, Any]:
        z = self.norm(self.linear(x)) * scale + self.table
        return {"z": z, "more": [z.sum(0), y, scale], "none": None}


@pytest.fixture
def exported() -> gradsplit.Exported:
    batch = {0: Dim("batch", max=64)}
    return gradsplit.export(
        Scaled(), (torch.randn(3, 4),), {"y": torch.ones(3)}, dynamic_shapes={"x": batch, "y": batch}
    )


def test_sizes_that_were_left_open_may_differ(exported: gradsplit.Exported) -> None:
    module = exported.module()
    compiled = gradsplit.compile(copy.deepcopy(module), backend="aot_eager", fullgraph=True)
    for size in (3, 5, 64):
        x, y = torch.randn(size, 4), torch.randn(size)
        found, other = module(x, y), compiled(x, y=y)
        assert found["z"].shape == (size, 8) and torch.equal(found["z"], other["z"])
        assert found["more"][1] is y and found["more"][2] == 2.0 and found["none"] is None
    assert list(module.state_dict()) == list(Scaled().state_dict())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: m(torch.randn(3, 5), torch.ones(3)),
            r"args\[0\] has size 5 in dim 1; .* float32\[any, 4\]",
        ),
        (lambda m: m(torch.randn(3, 4).double(), torch.ones(3)), "float64"),
        (lambda m: m(torch.randn(65, 4), torch.ones(65)), r"only where .*shape\[0\] <= 64"),
        (lambda m: m(torch.randn(1, 4), torch.ones(1)), r"only where .*shape\[0\] >= 2"),
        (lambda m: m(torch.randn(3, 4)), r"kwargs is a dict of 0 items; .*\['y'\]"),
        (lambda m: m(torch.randn(3, 4), torch.ones(3), scale=3.0), "kwargs is a dict of 2 items"),
        (lambda m: m(torch.randn(3, 4), None), r"kwargs\['y'\] is a NoneType"),
        (lambda m: m.eval(), "exported in training mode"),
    ],
)
def test_other_calls_are_refused(exported: gradsplit.Exported, call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(exported.module())


def test_a_size_that_cannot_be_open() -> None:
    def program(x: Tensor) -> Tensor:
        return x + torch.ones(3)

    with pytest.raises(gradsplit.CompileError, match="dim 0"):
        gradsplit.export(program, (torch.ones(3),), dynamic_shapes=({0: Dim.DYNAMIC},))
    x = torch.ones(3)
    with pytest.raises(ValueError, match="names 'y'; the arguments are x"):
        gradsplit.export(program, (x,), dynamic_shapes={"y": None})
    assert not x.__dict__


def test_torchs_form(exported: gradsplit.Exported) -> None:
    with pytest.raises(gradsplit.Unsupported, match="open sizes"):
        to_torch(exported)
    x, y = torch.randn(7, 4), torch.ones(7)
    static = gradsplit.export(Scaled().eval(), (x,), {"y": y})
    assert torch.equal(to_torch(static).module()(x, y=y)["z"], static.module()(x, y)["z"])


def test_models_larger_than_the_machine() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False))
        kwargs = {"input_ids": torch.zeros(1, 128, dtype=torch.long)}
    exported = gradsplit.export(model, (), kwargs)
    assert sum(math.prod(tensor.shape) for tensor in exported.tensors.values()) > 6e9
    assert exported.module()(**kwargs).logits.shape == (1, 128, 32000)


def test_fake_tensors() -> None:
    with FakeTensorMode():
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), torch.randn(2, 4)
    exported = gradsplit.export(model, (x,))
    assert exported.device == "cpu" and exported.tensors["0.weight"].is_meta
    module = exported.module().to_empty(device="cpu")
    nn.init.ones_(module.get_parameter("0.weight"))
    assert module(torch.ones(2, 4)).shape == (2, 4)


def test_what_is_assumed_of_data_is_checked_in_the_loaded_graph(tmp_path) -> None:
    class Checked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.isnan().any():
                raise ValueError("not a number")
            return x * 2

    gradsplit.export(Checked(), (torch.ones(3),)).save(tmp_path / "checked")
    loaded = gradsplit.load_export(tmp_path / "checked").module()
    for module in (loaded, gradsplit.compile(loaded, backend="aot_eager")):
        assert torch.equal(module(torch.ones(3)), torch.full((3,), 2.0))
        with pytest.raises(RuntimeError, match="assumed of data"):
            module(torch.full((3,), math.nan))
