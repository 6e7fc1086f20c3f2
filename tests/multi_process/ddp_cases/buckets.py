"""The buckets themselves: gradients written into them by compiled backwards."""

from __future__ import annotations

from distributed import inspect_ddp
from tests.multi_process.ddp_harness import (
    Net,
    case,
    check_close,
    check_gradients,
    check_in_graph,
    data,
    pair,
    train,
)


@case()
def gradients_equal_stock_ddp() -> None:
    stock, compiled = pair()
    train((stock, compiled))
    check_in_graph(compiled)
    assert len(inspect_ddp(compiled).plan.buckets) > 1
    assert len(inspect_ddp(compiled).graphs) == 1


@case()
def gradients_are_views_of_buckets() -> None:
    _, compiled = pair()
    compiled(data(0)).sum().backward()
    places = [
        inspect_ddp(compiled).buckets.destination(name) for name, _ in compiled.module.named_parameters()
    ]
    assert all(place is p.grad for place, p in zip(places, compiled.parameters(), strict=True))
    storages = {p.grad.untyped_storage().data_ptr() for p in compiled.parameters()}
    assert len(storages) == len(inspect_ddp(compiled).plan.buckets)


@case()
def tied_weights_are_reduced_once() -> None:
    stock, compiled = pair(lambda: Net(tied=True))
    train((stock, compiled))
    check_in_graph(compiled)


@case()
def gradient_of_the_input() -> None:
    stock, compiled = pair()
    inputs = [data(0).requires_grad_() for _ in range(2)]
    for model, x in zip((stock, compiled), inputs, strict=True):
        model(x).square().mean().backward()
    check_gradients(stock, compiled)
    check_close(inputs[1].grad, inputs[0].grad)
