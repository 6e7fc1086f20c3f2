"""Forwards that are several graphs: they share the buckets, with each other and with eager code between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradsplit
from gradsplit.distributed import inspect_ddp
from tests.multi_process.ddp_harness import (
    Net,
    case,
    check_in_graph,
    check_steps,
    data,
    loss_of,
    pair,
)


def check_graphs(make: Callable[[], nn.Module], at_least: int, run: Any = None, **ddp_options: Any) -> None:
    """Steps of the module equal stock DDP's, and its gradients come from at least so many compiled graphs."""
    stock, compiled = pair(make, backend="aot_eager", **ddp_options)
    check_steps(stock, compiled, *([] if run is None else [run]))
    check_in_graph(compiled)
    found = sum(graph.backward is not None for graph in inspect_ddp(compiled).graphs)
    assert found >= at_least, f"{found} graphs"


class Broken(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.gelu(self.norm(self.first(x)))
        gradsplit.graph_break()
        x = torch.tanh(self.second(x))
        gradsplit.graph_break()
        return self.third(x)


@case()
def breaks_between_layers() -> None:
    check_graphs(Broken, 3)


@case()
def breaks_between_layers_of_one_bucket() -> None:
    check_graphs(Broken, 3, bucket_cap_mb=25)


@case()
def breaks_in_submodules_of_one_class() -> None:
    """One captured graph serves all of them; their gradients go to places of their own."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            gradsplit.graph_break()
            return x.tanh()

    check_graphs(lambda: nn.Sequential(*(Block() for _ in range(4))), 4)


@case()
def eager_parameters_between_graphs() -> None:
    class Between(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(gradsplit.disable(self.second)(self.first(x).relu()).relu())

    class Partly(Between):
        def __init__(self) -> None:
            super().__init__()
            del self.norm

    check_graphs(Partly, 2)


@case()
def a_parameter_on_both_sides_of_a_break() -> None:
    class Both(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.second(self.norm(self.first(x)))
            gradsplit.graph_break()
            return self.third(self.second(x).tanh())

    check_graphs(Both, 2)


@case()
def a_parameter_in_a_graph_and_in_eager_code() -> None:
    class Both(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.second(self.norm(self.first(x)))
            x = gradsplit.disable(self.second)(x)
            return self.third(self.second(x).tanh())

    check_graphs(Both, 2)


class _Product(torch.autograd.Function):
    """A product with a weight whose gradient may be left undefined."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, is_trained: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.is_trained = is_trained
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ weight, gradient.T @ x if ctx.is_trained else None, None


@case()
def gradients_that_eager_functions_leave_undefined() -> None:
    """They are zeros to stock DDP's reducer: on all ranks, and on one beside what the other has."""

    class Partly(Net):
        @gradsplit.disable
        def product(self, x: torch.Tensor, is_trained: bool) -> torch.Tensor:
            return _Product.apply(x, self.second.weight, is_trained) + self.second.bias

        def forward(self, x: torch.Tensor, is_trained: bool) -> torch.Tensor:
            return self.third(self.product(self.norm(self.first(x)), is_trained).tanh())

    def run(model: Any, step: int) -> None:
        is_trained = step == 0 or (step == 2 and dist.get_rank() == 0)
        loss_of(model(data(step), is_trained)).backward()

    check_graphs(Partly, 2, run)


@case()
def gradients_that_captured_functions_leave_undefined() -> None:
    """Stock DDP takes such parameters for used ones: autograd's graph leads to them."""

    class Whole(Net):
        def forward(self, x: torch.Tensor, is_trained: bool) -> torch.Tensor:
            product = _Product.apply(self.norm(self.first(x)), self.second.weight, is_trained)
            return self.third((product + self.second.bias).tanh())

    def run(model: Any, step: int) -> None:
        loss_of(model(data(step), step == 1)).backward()

    check_graphs(Whole, 2, run)


@case()
def tied_weights_on_both_sides_of_a_break() -> None:
    check_graphs(lambda: Broken(tied=True), 3)


def _backward_of_result(model: Any, step: int) -> None:
    model(data(step)).backward()


@case()
def the_loss_is_computed_behind_a_break() -> None:
    """The backward then begins with a program, and the weight it stores a gradient for gets the last one, too."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.Linear(16, 16)
            self.inner = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.outer(x).tanh()
            gradsplit.graph_break()
            x = self.inner(x).tanh()
            gradsplit.graph_break()
            return self.outer(x).square().mean()

    check_graphs(WithLoss, 3, _backward_of_result)


@case()
def the_loss_is_computed_behind_eager_code() -> None:
    """Autograd's engine accumulates a gradient to which the program adds that the backward begins with."""

    @gradsplit.disable
    def eager(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight.detach() + layer.weight)

    class WithLoss(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.first(x)).tanh()
            return self.third(self.second(eager(x, self.second).tanh())).square().mean()

    check_graphs(WithLoss, 2, _backward_of_result)


@case()
def branches_that_data_decide() -> None:
    """Ranks take the same branch: each has its own data, but the decision is made on something that they share."""

    class Deciding(Net):
        def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.first(x))
            if step.sum() % 2 == 0:
                x = self.second(x).tanh()
            else:
                x = self.second(x.sin())
            return self.third(x)

    def run(model: Any, step: int) -> None:
        loss_of(model(data(step), torch.tensor([step]))).backward()

    check_graphs(Deciding, 3, run)


@case()
def ranks_that_go_their_own_ways_between_parameters() -> None:
    """What holds no parameters, each rank captures and compiles for itself, also a rank alone."""

    class OnRanks(Net):
        def squeezed(self, x: torch.Tensor, step: int) -> torch.Tensor:
            if dist.get_rank() == 0:
                return torch.tanh(x)
            return x.sigmoid() * 2 if step == 1 else x

        def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
            x = self.norm(self.first(x))
            gradsplit.graph_break()
            x = self.squeezed(x, step)
            gradsplit.graph_break()
            return self.third(self.second(x))

    def run(model: Any, step: int) -> None:
        loss_of(model(data(step), step)).backward()

    check_graphs(OnRanks, 3, run)


@case()
def a_loop_that_data_decide() -> None:
    class Looping(Net):
        def forward(self, x: torch.Tensor, rounds: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.first(x))
            for _ in range(int(rounds)):
                x = self.second(x).tanh()
            return self.third(x)

    def run(model: Any, step: int) -> None:
        loss_of(model(data(step), torch.tensor(step + 1))).backward()

    check_graphs(Looping, 1, run)


@case()
def prints_and_numbers_in_the_middle() -> None:
    class Counting(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.first(x))
            scale = x.detach().abs().max().item()
            x = self.second(x / scale)
            repr(x)
            return self.third(x)

    check_graphs(Counting, 2)


@case()
def breaks_under_no_sync() -> None:
    def run(model: Any, step: int) -> None:
        with model.no_sync():
            loss_of(model(data(2 * step))).backward()
        loss_of(model(data(2 * step + 1))).backward()

    check_graphs(Broken, 3, run)


@case()
def breaks_and_several_forwards_before_a_backward() -> None:
    def run(model: Any, step: int) -> None:
        (loss_of(model(data(2 * step))) + loss_of(model(data(2 * step + 1)))).backward()

    check_graphs(Broken, 3, run)


@case()
def breaks_and_other_sizes() -> None:
    def run(model: Any, step: int) -> None:
        loss_of(model(data(step, rows=6 - step))).backward()

    check_graphs(Broken, 3, run)
