"""One compilation serves all sizes that it is right for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import gradsplit
from gradsplit.compile_core.interface.module_compilers import CompileRequest
from gradsplit.distributed.pipeline import stage_programs
from gradsplit.distributed.pipeline.stage_programs import StageProgram


class Padded(nn.Module):
    """What it does with odd lengths is not in its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return F.pad(hidden, (0, 0, 0, 1)) if x.shape[0] % 2 else hidden.view(x.shape[0] // 2, -1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_program_is_compiled_again_only_where_it_must_be(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    real = stage_programs.compile_module

    def counting(*args, **kwargs):
        compiled.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(stage_programs, "compile_module", counting)
    model = Padded()
    exported = gradsplit.export(model, (torch.randn(4, 4),), dynamic_shapes=({0: Dim.DYNAMIC},))
    program = StageProgram(
        exported.graph,
        [node.meta["kind"] == "parameter" for node in exported.graph.find_nodes(op="placeholder")],
        CompileRequest.of(True, None, backend, None, None),
        {0: (0,)},
    )
    placeholders = exported.graph.find_nodes(op="placeholder")
    assert placeholders[0].meta["kind"] == "argument"

    def run(x: Tensor) -> Tensor:
        tensors = dict(model.named_parameters())
        (found,) = program([x, *(tensors[node.meta["path"]] for node in placeholders[1:])])
        return found

    def check(x: Tensor, times: int) -> None:
        expected, found = model(x), run(x)
        assert torch.equal(found, expected) and len(compiled) == times
        gradients = [
            torch.autograd.grad(one.sin().sum(), model.linear.weight)[0] for one in (expected, found)
        ]
        assert torch.equal(*gradients)

    for size in (4, 8, 6, 4):
        check(torch.randn(size, 4), 1)
    # Another layout of an argument; then with gaps between its rows, of one size and another.
    check(torch.randn(4, 8).t(), 2)
    for width in (8, 6, 5, 7):
        check(torch.randn(8, width)[:, :4], 3)
    check(torch.randn(10, 4), 3)
    with torch.no_grad():
        for size in (6, 8):
            x = torch.randn(size, 4)
            assert torch.equal(run(x), model(x)) and len(compiled) == 4
