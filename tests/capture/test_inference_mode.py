"""Calls under ``torch.inference_mode()``, whose tensors have no version counter."""

import torch

import gradsplit


def test_module_called_in_and_out_of_inference_mode() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    compiled = gradsplit.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 4)
    with torch.inference_mode():
        made_inside = torch.randn(3, 4)
        assert torch.equal(compiled(x), model(x))
        assert torch.equal(compiled(made_inside), model(made_inside))
        assert compiled(x).is_inference()
    assert compiled(x).requires_grad


def test_buffers_change_in_inference_mode() -> None:
    norm = torch.nn.BatchNorm1d(4)
    compiled = gradsplit.compile(norm, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        compiled(torch.randn(3, 4))
    assert norm.num_batches_tracked == 1
