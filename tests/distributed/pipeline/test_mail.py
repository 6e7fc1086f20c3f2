from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gradsplit.distributed.pipeline.layout import Edge
from gradsplit.distributed.pipeline.mail import BACKWARD, FORWARD, Lane, lanes_of


def edge(producer: int, *consumers: int, is_state: bool = False, requires_grad: bool = True) -> Edge:
    return Edge("x", producer, consumers, (2,), (1,), "float32", requires_grad, is_state)


def test_lanes_are_where_torchs_schedules_bring_nothing() -> None:
    """Gradients go from reader to reader; of two edges between the same stages the lane is one."""
    layout: Any = SimpleNamespace(
        edges=(
            edge(0, 1),
            edge(0, 1, 3),
            edge(0, 3, requires_grad=False),
            edge(1, 2, is_state=True),
        )
    )
    assert lanes_of(layout) == [
        Lane(FORWARD, 0, 3),
        Lane(FORWARD, 1, 2),
        Lane(BACKWARD, 2, 1),
        Lane(BACKWARD, 3, 1),
    ]
