"""Which gradients go without the cast to their parameter's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_core.ir.regions import graph_results
from distributed.planning.narrow_gradients import with_narrow_gradients
from tests.distributed.planning.recorded_backwards import recorded

SHAPES = {"table": (64, 32), "weight": (48, 32), "scale": (48,), "double": (48, 48), "both": (48, 48)}


def model(table: Tensor, weight: Tensor, scale: Tensor, double: Tensor, both: Tensor) -> Tensor:
    """As under autocast, which casts a weight once."""
    rows = F.linear((table * 2).bfloat16(), weight.bfloat16())
    rows, narrow = F.layer_norm(rows.float(), (48,), scale).bfloat16(), both.bfloat16()
    rows = F.linear(F.linear(rows, narrow), narrow)
    return F.linear(rows.float(), double)


def test_those_that_end_in_a_cast_are_narrow() -> None:
    backward, gradients = recorded(model, **SHAPES)
    asked: list[str] = []

    def accept(name: str, dtype: torch.dtype) -> bool:
        assert dtype == torch.bfloat16
        asked.append(name)
        return True

    found, dtypes = with_narrow_gradients(backward, gradients, accept)
    # The first's, the norm's and the float32 product's are computed in 32 bits; that of a weight that is used twice
    # under autocast is the cast of a sum.
    assert set(asked) == set(dtypes) == {"weight", "both"}
    results, before = graph_results(found), graph_results(backward)
    for name, position in gradients.items():
        dtype = results[position].meta["val"].dtype
        assert dtype == (torch.bfloat16 if name in dtypes else torch.float32)
        assert (
            results[position].name == (before[position].args[0] if name in dtypes else before[position]).name
        )
    left = {node.name for node in backward.graph.nodes} - {node.name for node in found.graph.nodes}
    assert left == {before[gradients[name]].name for name in dtypes}


def test_what_is_not_accepted_stays() -> None:
    backward, gradients = recorded(model, **SHAPES)
    found, dtypes = with_narrow_gradients(backward, gradients, lambda name, dtype: False)
    assert found is backward and not dtypes
