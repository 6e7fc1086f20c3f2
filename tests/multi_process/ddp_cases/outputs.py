"""Results of the forward: several, nested, unused by the loss, and such that share memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsplit
from gradsplit.distributed import DDPOptions, compile_ddp
from tests.multi_process.ddp_harness import (
    DEVICE,
    Net,
    case,
    check_close,
    check_gradients,
    check_in_graph,
    check_steps,
    data,
    loss_of,
    pair,
    stock_ddp,
)


class Heads(Net):
    """Two results, of which the second costs parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = super().forward(x)
        return hidden, self.head(hidden)


@case()
def a_result_that_the_loss_does_not_use() -> None:
    """It has parameters in common with the one that is used."""

    class Two(Net):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = super().forward(x)
            return hidden, hidden.softmax(-1)

    stock, compiled = pair(Two, backend="aot_eager")
    check_steps(stock, compiled, lambda model, step: loss_of(model(data(step))[0]).backward())
    check_in_graph(compiled)


@case()
def a_result_whose_parameters_the_loss_does_not_use() -> None:
    """The backward ends without their gradients, which stay as they are, as where stock DDP looks for unused ones; also
    where gradients come through the engine. To the reducer they would be zeros: the backward is the error."""
    for is_hooked in (False, True):
        stock, compiled = stock_ddp(Heads, find_unused_parameters=True), pair(Heads, backend="aot_eager")[1]
        if is_hooked:
            compiled.module.head.weight.register_hook(lambda gradient: gradient)
        check_steps(stock, compiled, lambda model, step: loss_of(model(data(step))[0]).backward())
        check_in_graph(compiled)
    wrapped = DistributedDataParallel(gradsplit.compile(Heads().to(DEVICE), backend="aot_eager"))
    for model in (compile_ddp(stock_ddp(Heads), DDPOptions(overlap="reducer"), backend="aot_eager"), wrapped):
        with model.no_sync():
            loss_of(model(data(0))[0]).backward()
        hidden, logits = model(data(0))
        (loss_of(hidden) + loss_of(logits)).backward()
        with pytest.raises(RuntimeError, match="was not used in producing the loss"):
            loss_of(model(data(1))[0]).backward()


class Dropped(torch.autograd.Function):
    """Gives no gradient to its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


@case()
def gradients_that_functions_behind_the_module_drop() -> None:
    """Stock DDP takes zeros: its hooks run, with nothing. In the first backward of a static graph they are unused."""

    class Apart(Heads):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return Net.forward(self, x), self.head(x.repeat(1, 2))

    def run(model: Any, step: int, on_one_rank: bool) -> None:
        hidden, logits = model(data(step))
        if not on_one_rank or (step > 0 and dist.get_rank() == 0):
            logits = Dropped.apply(logits)
            hidden = Dropped.apply(hidden) if step == 2 else hidden
        (loss_of(hidden) + loss_of(logits)).backward()

    for on_one_rank, options in ((True, {}), (False, {}), (False, {"static_graph": True})):
        stock, compiled = pair(Apart, backend="aot_eager", **options)
        check_steps(stock, compiled, partial(run, on_one_rank=on_one_rank))
        check_in_graph(compiled)


class Named(NamedTuple):
    logits: torch.Tensor
    rest: dict[str, Any]


@dataclass
class Result:
    logits: torch.Tensor
    hidden: list[torch.Tensor]


@case()
def nested_results() -> None:
    class Nested(Heads):
        def forward(self, x: torch.Tensor, how: str) -> Any:
            hidden, logits = super().forward(x)
            if how == "named":
                return Named(logits, {"hidden": [hidden], "count": 3})
            return Result(logits, [hidden])

    stock, compiled = pair(Nested, backend="aot_eager")

    def named(model: Any, step: int) -> None:
        result = model(data(step), how="named")
        assert type(result) is Named and result.rest["count"] == 3
        (loss_of(result.logits) + loss_of(result.rest["hidden"][0])).backward()

    def of_a_class(model: Any, step: int) -> None:
        result = model(data(step), "class")
        assert type(result) is Result
        (loss_of(result.logits) + loss_of(result.hidden[0])).backward()

    check_steps(stock, compiled, named)
    check_steps(stock, compiled, of_a_class)
    check_in_graph(compiled)


@case()
def a_result_that_is_an_input_or_a_parameter() -> None:
    class Returning(Net):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return super().forward(x), x, self.third.weight

    stock, compiled = pair(Returning, backend="aot_eager")

    def run(model: Any, step: int) -> None:
        found, x, weight = model(data(step))
        assert weight is model.module.third.weight
        (loss_of(found) + loss_of(x) + 0.1 * loss_of(weight)).backward()

    check_steps(stock, compiled, run)
    check_in_graph(compiled)


@case()
def losses_made_by_the_module_itself() -> None:
    class WithLoss(Net):
        def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> Any:
            logits = super().forward(x)
            return logits if target is None else (nn.functional.cross_entropy(logits, target), logits)

    stock, compiled = pair(WithLoss, backend="aot_eager")
    target = torch.arange(6, device=data(0).device)
    check_steps(stock, compiled, lambda model, step: model(data(step), target=target)[0].backward())
    check_in_graph(compiled)
    with torch.no_grad():
        check_close(compiled(data(9)), stock(data(9)), exact=True)


@case()
def gradients_of_inputs_and_of_a_module_before() -> None:
    """What comes before the DDP module is each rank's own."""
    stock, compiled = pair(backend="aot_eager")
    before = [nn.Linear(16, 16).to(data(0).device) for _ in range(2)]
    before[1].load_state_dict(before[0].state_dict())
    for step in range(2):
        for model, first in zip((stock, compiled), before, strict=True):
            model.zero_grad()
            first.zero_grad()
            loss_of(model(first(data(step)))).backward()
        check_gradients(stock, compiled, exact=True)
        check_close(before[1].weight.grad, before[0].weight.grad, exact=True)
    check_in_graph(compiled)
