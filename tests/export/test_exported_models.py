"""Exported models, loaded without their source, compute what the models do, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsplit
from tests.export.exported_models import MODELS


def steps(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Tensor | None]:
    """All that two training steps determine."""
    torch.manual_seed(3)
    for _ in range(2):
        model.zero_grad()
        out = model(**kwargs)
        out["loss"].backward()
    seen: dict[str, Tensor | None] = {"loss": out["loss"].detach(), "logits": out["logits"].detach()}
    seen |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    return seen | dict(model.state_dict()) | {"random": torch.get_rng_state()}


def assert_same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert list(found) == list(expected)
    for what, value in expected.items():
        other = found[what]
        assert (value is None) == (other is None), what
        assert value is None or torch.equal(value, other), what


@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_plain(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, kwargs = MODELS[name]()
    model.train()
    gradsplit.export(model, (), kwargs).save(tmp_path / "saved")
    loaded = gradsplit.load_export(tmp_path / "saved")
    module, compiled = (
        loaded.module(),
        gradsplit.compile(copy.deepcopy(loaded.module()), backend="aot_eager", fullgraph=True),
    )
    # Transformers takes other kernels where it is told that it is compiled, as it is in a capture.
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    expected = steps(model, kwargs)
    monkeypatch.undo()
    assert_same(steps(module, kwargs), expected)
    assert_same(steps(compiled, kwargs), expected)
    result = module(**kwargs)
    assert name == "unet" or result[0] is result.loss
    with torch.no_grad():
        assert not module(**kwargs)["loss"].requires_grad and not torch.is_grad_enabled()


def test_tied_weights_and_own_memory() -> None:
    model, kwargs = MODELS["gpt2"]()
    module = gradsplit.export(model, (), kwargs).module()
    assert module.lm_head.weight is module.transformer.wte.weight is model.lm_head.weight
    other = copy.deepcopy(module)
    assert other.lm_head.weight is other.transformer.wte.weight is not module.lm_head.weight
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert not other(**kwargs).logits.any() and module(**kwargs).logits.any()
