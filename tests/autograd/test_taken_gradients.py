"""What of a backward runs for gradients that are to be returned, although a communicator takes them."""

from __future__ import annotations

from typing import Any

import torch

from gradsplit.compile_core.autograd.bound_graphs.taken_gradients import TakenGradients
from gradsplit.compile_core.ir.pick import picker


def test_only_what_is_wanted_is_computed():
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output([graph.call_function(operator, (x, y)) for operator in (torch.add, torch.mul, torch.sub)])
    backward = torch.fx.GraphModule({}, graph)
    communicator: Any = None
    taken = TakenGradients(
        communicator,
        names=("p", "q"),
        positions={"p": 1, "q": 2},
        anchor=torch.empty(0),
        others=(0,),
        pick_others=picker((0,)),
        others_computed=(0,),
        results_of={},
    )
    module = taken.only_wanted(backward, frozenset({"q"}))
    assert [node.target for node in module.graph.nodes if node.op == "call_function"] == [
        torch.add,
        torch.sub,
    ]
    found = module(torch.tensor(5), torch.tensor(3))
    assert (found[0].item(), found[1], found[2].item()) == (8, None, 2)
    assert taken.only_wanted(backward, frozenset({"q"})) is module
