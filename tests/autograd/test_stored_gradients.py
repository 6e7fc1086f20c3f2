"""What of a backward runs for gradients that are to be returned, although the program stores them as a rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradsplit.compile_core.autograd.bound_graphs.stored_gradients import StoredGradients
from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.pick import picker
from gradsplit.compile_core.ir.schedule import Compute, Schedule


def test_only_what_is_wanted_is_computed():
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output([graph.call_function(operator, (x, y)) for operator in (torch.add, torch.mul, torch.sub)])
    backward = torch.fx.GraphModule({}, graph)
    communicator: Any = None
    stored = StoredGradients(
        communicator,
        names=("p", "q"),
        positions={"p": 1, "q": 2},
        anchor=torch.empty(0),
        others=(0,),
        pick_others=picker((0,)),
        others_computed=(0,),
        results_of={},
    )
    module = stored.only_wanted(backward, frozenset({"q"}))
    assert [node.target for node in module.graph.nodes if node.op == "call_function"] == [
        torch.add,
        torch.sub,
    ]
    found = module(torch.tensor(5), torch.tensor(3))
    assert (found[0].item(), found[1], found[2].item()) == (8, None, 2)
    assert stored.only_wanted(backward, frozenset({"q"})) is module


def test_destinations_need_a_communicator():
    step = Compute(
        "region", torch.fx.GraphModule({}, torch.fx.Graph()), ("x",), ("w.stored",), {"w.stored": "w"}
    )
    graph: Any = None
    with pytest.raises(InternalError, match="no communicator"):
        StoredGradients.of(graph, Schedule("backward", ("x",), (step,), ()), None)
    assert StoredGradients.of(graph, Schedule("backward", ("x",), (), ()), None) is None
