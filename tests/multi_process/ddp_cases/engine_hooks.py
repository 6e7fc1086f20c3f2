"""Hooks that wait in autograd's engine for gradients of parameters: on accumulation nodes, and for several at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

from gradsplit.distributed import inspect_ddp
from tests.multi_process.ddp_cases.graph_breaks import Broken
from tests.multi_process.ddp_harness import (
    Net,
    case,
    check_close,
    check_in_graph,
    check_steps,
    data,
    loss_of,
    pair,
)


@case()
def hooks_of_accumulation_nodes() -> None:
    """They see the rank's own gradient behind its accumulation; stock DDP has taken it by then, so changes of it have
    no effect, and those of a hook before the node have one."""
    stock, compiled = pair(backend="aot_eager")
    seen: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    handles = []
    for model, gradients in zip((stock, compiled), seen, strict=True):
        parameter = model.module.second.weight

        def note(*_: Any, parameter: Any = parameter, gradients: list[torch.Tensor] = gradients) -> None:
            gradients.append(parameter.grad.clone())
            parameter.grad.mul_(3)

        node = get_gradient_edge(parameter).node
        other = get_gradient_edge(model.module.first.bias).node
        handles += [node.register_hook(note), other.register_prehook(lambda arriving: (arriving[0] * 2,))]
    check_steps(stock, compiled, steps=2)
    for expected, found in zip(*seen, strict=True):
        check_close(found, expected, "gradient that a hook saw", exact=True)
    assert len(seen[0]) == 2
    for handle in handles:
        handle.remove()
    check_steps(stock, compiled, steps=1)
    check_in_graph(compiled)
    stored = [graph.run.differentiable.stored.names for graph in inspect_ddp(compiled).graphs]
    assert [len(names) for names in stored] == [6, 8]


@case()
def hooks_for_several_gradients() -> None:
    """In mode "any" the first of them; a compiled backward has them at once."""
    for make in (Net, Broken):
        stock, compiled = pair(make, backend="aot_eager")
        every: tuple[list[Any], list[Any]] = ([], [])
        first: tuple[list[Any], list[Any]] = ([], [])
        for model, gradients, firsts in zip((stock, compiled), every, first, strict=True):
            watched = (model.module.first.weight, model.module.third.bias)
            register_multi_grad_hook(watched, gradients.append)
            register_multi_grad_hook(watched, firsts.append, mode="any")
        check_steps(stock, compiled, steps=2)
        assert [len(calls) for calls in (*every, *first)] == [2, 2, 2, 2]
        for some, others, one in zip(*every, first[1], strict=True):
            for expected, found in zip(some, others, strict=True):
                check_close(found, expected, "gradient that a hook saw", exact=True)
            assert any(torch.equal(one, gradient) for gradient in some)
        check_in_graph(compiled)


@case()
def hooks_of_nodes_registered_behind_the_forward() -> None:
    seen: list[torch.Tensor] = []

    def run(model: Any, step: int) -> None:
        loss = loss_of(model(data(step)))
        node = get_gradient_edge(model.module.second.weight).node
        handles = [node.register_hook(lambda *_: seen.append(model.module.second.weight.grad.clone()))]
        handles.append(node.register_prehook(lambda arriving: (arriving[0] * 1.5,)))
        loss.backward()
        for handle in handles:
            handle.remove()

    stock, compiled = pair(backend="aot_eager")
    check_steps(stock, compiled, run)
    assert len(seen) == 6
    check_in_graph(compiled)
