"""Operators over lists of tensors are those over each, exactly."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gradsplit.compile_core.lowering.decompositions.decompose_foreach import foreach_decompositions

aten = torch.ops.aten
TABLE = foreach_decompositions()


def _argument(kind: str, name: str) -> object:
    if kind == "List[Tensor]":
        return [torch.rand(3, 2) + 0.5, torch.rand(4) + 0.5]
    if kind == "List[number]":
        return [0.5, 2.5]
    if kind == "Tensor":
        return torch.tensor(1.5)
    assert kind == "number", (kind, name)
    return 2


@pytest.mark.parametrize("operator", TABLE, ids=str)
def test_a_list_is_taken_apart(operator) -> None:
    required = [
        a for a in operator._schema.arguments if not a.has_default_value() or a.name in ("alpha", "value")
    ]
    arguments = [_argument(str(a.type), a.name) for a in required if not a.kwarg_only]
    keywords = {a.name: _argument(str(a.type), a.name) for a in required if a.kwarg_only}
    expected = operator(*arguments, **keywords)
    actual = TABLE[operator](*arguments, **keywords)
    is_reduced = operator._schema.name.endswith("norm")
    for one, other in zip(actual, expected, strict=True):
        tolerance = 1e-6 if is_reduced else 0.0
        torch.testing.assert_close(one, other, rtol=tolerance, atol=0.0, equal_nan=True)


def test_the_trace_holds_no_lists() -> None:
    def step(xs, ys):
        return aten._foreach_addcdiv(aten._foreach_mul(xs, 0.9), ys, aten._foreach_sqrt(ys), value=-0.1)

    lists = [torch.rand(2), torch.rand(3)], [torch.rand(2), torch.rand(3)]
    graph = make_fx(step, decomposition_table=TABLE)(*lists)
    assert not [n for n in graph.graph.nodes if "foreach" in str(n.target)]
    for one, other in zip(graph(*lists), step(*lists), strict=True):
        torch.testing.assert_close(one, other)
