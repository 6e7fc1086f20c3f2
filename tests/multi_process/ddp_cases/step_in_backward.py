"""Optimizer steps under the backward, beside stock DDP and ``optimizer.step()`` behind it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import gradsplit
from gradsplit.compile_core.ir.regions import graph_results
from gradsplit.distributed import DDPOptions, compile_ddp, inspect_ddp
from gradsplit.distributed.optimizer_steps.step_in_backward import StepInBackward
from gradsplit.distributed.planning import ddp_planner
from gradsplit.distributed.planning.cut_backward import Segment
from tests.distributed.planning.test_cut_backward import cut_behind
from tests.multi_process.ddp_cases.cuda_graphs import recording
from tests.multi_process.ddp_harness import (
    DEVICE,
    Net,
    PartlyPlain,
    case,
    check_close,
    check_gradients,
    check_in_graph,
    check_same_on_all_ranks,
    data,
    gradients_are_exact,
    loss_of,
    stock_ddp,
)

Make = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def stepping(
    ddp: Any, optimizer: torch.optim.Optimizer, backend: str = "aot_eager", mode: str | None = None
) -> Any:
    return compile_ddp(ddp, DDPOptions(step_in_backward=optimizer), backend=backend, mode=mode)


def both(
    make_optimizer: Make = sgd,
    make: Callable[[], nn.Module] = Net,
    bucket_cap_mb: float = 0.004,
    **settings: Any,
) -> tuple[list[Any], list[torch.optim.Optimizer]]:
    """Stock DDP and compiled DDP that steps in its backward, with their optimizers."""
    stock, other = (stock_ddp(make, bucket_cap_mb=bucket_cap_mb) for _ in range(2))
    optimizers = [make_optimizer(model) for model in (stock, other)]
    return [stock, stepping(other, optimizers[1], **settings)], optimizers


def train(
    models: list[Any],
    optimizers: list[torch.optim.Optimizer],
    steps: int = 3,
    exact: bool = True,
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = lambda model, x: loss_of(model(x)),
    schedulers: tuple[Any, ...] = (),
) -> None:
    for step in range(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss(model, data(step)).backward()
        optimizers[0].step()
        for scheduler in schedulers:
            scheduler.step()
        check_gradients(*models, exact=exact)
        check_parameters(models, exact)


def check_parameters(models: list[Any], exact: bool = True) -> None:
    stock, compiled = (dict(model.named_parameters()) for model in models)
    for name, expected in stock.items():
        check_close(compiled[name], expected, name, exact=exact and gradients_are_exact())
        check_same_on_all_ranks(compiled[name].detach(), name)


def two_groups(kind: type[torch.optim.Optimizer], **settings: Any) -> Make:
    """The second group, of weights, has a rate of its own."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        return kind([{"params": others}, {"params": weights, "lr": 0.003}], lr=0.01, **settings)  # type: ignore[call-arg]

    return make


@case()
def optimizers_of_torch() -> None:
    """Groups, schedulers, state and its loading are as with a step of all parameters at once."""
    makes = [
        two_groups(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
        two_groups(torch.optim.Adam, foreach=False, amsgrad=True),
        two_groups(torch.optim.AdamW, foreach=True),
        two_groups(torch.optim.AdamW, fused=True),
    ]
    if DEVICE == "cuda":
        makes.append(two_groups(torch.optim.AdamW, capturable=True))
    for make in makes:
        models, optimizers = both(make)
        schedulers = tuple(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers)
        train(models, optimizers, steps=2, schedulers=schedulers)
        check_in_graph(models[1])
        expected, found = (optimizer.state_dict() for optimizer in optimizers)
        assert expected["param_groups"] == found["param_groups"]
        check_states(expected["state"], found["state"])
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        train(models, optimizers, steps=1)


def check_states(expected: dict[int, Any], found: dict[int, Any]) -> None:
    assert expected.keys() == found.keys()
    for position, values in expected.items():
        for name, value in values.items():
            torch.testing.assert_close(found[position][name], value, rtol=1e-5, atol=1e-7, msg=name)


@case()
def generated_kernels() -> None:
    models, optimizers = both(backend="triton")
    train(models, optimizers, exact=False)
    check_in_graph(models[1])


@case()
def replayed_backwards() -> None:
    with recording() as recorder:
        models, optimizers = both(
            backend="aot_eager" if DEVICE == "cpu" else "triton", mode="reduce-overhead"
        )
        train(models, optimizers, steps=6, exact=DEVICE == "cpu")
        assert recorder.segmented > 0


class Recorded(torch.optim.SGD):
    """Notes how many parameters each step has."""

    events: list[Any]

    def step(self, closure: Any = None) -> Any:
        self.events.append(sum(len(group["params"]) for group in self.param_groups))
        return super().step(closure)


class Slow(torch.autograd.Function):
    """Its backward gives all-reduces time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Any) -> torch.Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.module.seconds)
        return gradients[0], None


class WithSlowMiddle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(), Net()
        self.between = nn.Linear(32, 16)
        self.events: list[Any] = []
        self.seconds = 0.15

    @gradsplit.disable
    def wait(self, x: torch.Tensor) -> torch.Tensor:
        return Slow.apply(x, self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.wait(self.between(self.first(x))))


@case()
def steps_begin_before_the_backward_ends() -> None:
    def make_optimizer(model: Any) -> torch.optim.Optimizer:
        optimizer = Recorded(model.parameters(), lr=0.1)
        optimizer.events = model.module.events
        return optimizer

    models, _ = both(make_optimizer, WithSlowMiddle)
    events = models[1].module.events
    x = data(0).requires_grad_()
    for _ in range(2):
        events.clear()
        hook = x.register_hook(lambda gradient: events.append("end of the backward"))
        loss_of(models[1](x)).backward()
        hook.remove()
    steps = [position for position, event in enumerate(events) if isinstance(event, int)]
    assert steps[0] < events.index("end of the backward"), events
    assert sum(event for event in events if isinstance(event, int)) == len([*models[1].parameters()])


@case()
def plans_that_change() -> None:
    """Also in the rounds that are measured, and with the plan that is chosen then."""
    models, optimizers = both()
    train(models, optimizers, steps=7)
    assert inspect_ddp(models[1]).merge_plan is not None


class ReadLate(nn.Module):
    """A tied weight, and one whose gradient is complete long before the backward has read it for the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(16, 16)
        self.late = nn.Parameter(torch.randn(16, 16))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(x @ self.late.detach().T)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.tied(x @ self.late)


def one_by_one(backward: torch.fx.GraphModule, gradients: Any) -> list[Segment]:
    """A region for each gradient."""
    place = {node: number for number, node in enumerate(backward.graph.nodes)}
    results = graph_results(backward)
    ready = sorted(gradients, key=lambda name: place[results[gradients[name]]])
    return cut_behind(backward, gradients, [[name] for name in ready])


def step_at_once(stepper: StepInBackward, values: Any, usual: Any = StepInBackward.region_ended) -> None:
    """As if collectives took no time."""
    for _, work in stepper._reduced:
        work.wait()
    usual(stepper, values)


@case()
def what_is_read_later_is_stepped_later() -> None:
    with (
        mock.patch.object(ddp_planner, "plan_segments", one_by_one),
        mock.patch.object(StepInBackward, "region_ended", step_at_once),
    ):
        models, optimizers = both(make=ReadLate, bucket_cap_mb=0.0001)
        train(models, optimizers, steps=2)
        (graph,) = inspect_ddp(models[1]).graphs
        assert len(graph.backward.schedule.computes) == len([*models[1].parameters()])
        assert len(inspect_ddp(models[1]).plan.buckets) > 4


@case()
def parameters_that_autograd_reads_itself() -> None:
    """Used in plain code between graphs, or in the loss."""

    def decayed(model: Any, x: torch.Tensor) -> torch.Tensor:
        decay = sum(parameter.square().sum() for parameter in model.module.second.parameters())
        return loss_of(model(x)) + 0.01 * decay

    models, optimizers = both(make=PartlyPlain)
    train(models, optimizers, loss=decayed, exact=False)  # contributions add up in another order


class AllPlain(Net):
    """No program stores a gradient, and the result is in an object of the program's."""

    @gradsplit.disable
    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(value=super().forward(x))


@case()
def results_that_are_not_found() -> None:
    models, optimizers = both(make=AllPlain)
    train(models, optimizers, loss=lambda model, x: loss_of(model(x).value))


@case()
def accumulation() -> None:
    """Nothing is stepped under ``no_sync()``, also behind a forward without a backward; two calls may share a
    backward."""
    models, optimizers = both()
    before = [parameter.clone() for parameter in models[1].parameters()]
    for model in models:
        for step in range(2):
            with model.no_sync():
                loss_of(model(data(7 + step))).backward()
            model(data(0))
    assert all(map(torch.equal, before, models[1].parameters()))
    for model in models:
        (loss_of(model(data(1))) + loss_of(model(data(2)))).backward()
    optimizers[0].step()
    check_parameters(models)
    # Gradients that are not set to zero add up.
    for model in models:
        loss_of(model(data(3))).backward()
    optimizers[0].step()
    check_parameters(models)


@case()
def gradients_set_to_zero_in_place_and_others_to_none() -> None:
    models, optimizers = both()
    for step in range(3):
        for model in models:
            for parameter in list(model.parameters())[::2]:
                parameter.grad = None
            model.zero_grad(set_to_none=False)
            loss_of(model(data(step))).backward()
        optimizers[0].step()
        check_parameters(models)


@case()
def some_parameters_have_another_optimizer() -> None:
    def of_first(model: Any) -> torch.optim.Optimizer:
        return sgd(model.module.first)

    models, optimizers = both(of_first)
    others = [torch.optim.SGD(model.module.third.parameters(), lr=0.1) for model in models]
    for step in range(4):
        for model, optimizer, other in zip(models, optimizers, others, strict=True):
            # Gradients of the parameters that it does not step go on accumulating in the first half.
            (optimizer if step < 2 else model).zero_grad(set_to_none=False)
            loss_of(model(data(step))).backward()
            other.step()
        optimizers[0].step()
        check_parameters(models)


@case()
def what_comes_too_late_is_an_error() -> None:
    models, optimizers = both()
    compiled = models[1]
    loss_of(compiled(data(0))).backward()
    with pytest.raises(RuntimeError, match="leave the call out"):
        optimizers[1].step()
    nn.utils.clip_grad_norm_(compiled.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="clip_grad_norm_"):
        compiled(data(1))
    output = compiled(data(1))
    loss_of(output).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(output).backward()


@case()
def clipped_gradients_of_which_nothing_is_left() -> None:
    """They are set to zero in place, so that only how often they were changed tells; or they are tensors of the
    program's, which puts others in their places."""

    def renew(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    clears: list[Callable[[nn.Module], None]] = [lambda model: model.zero_grad(set_to_none=False), renew]
    for clear in clears:
        models, optimizers = both()
        compiled = models[1]
        for step in range(3):  # without clipping all is well
            for model in models:
                clear(model)
                loss_of(model(data(step))).backward()
            optimizers[0].step()
            check_parameters(models)
        nn.utils.clip_grad_norm_(compiled.parameters(), 1e-3)
        clear(compiled)
        with pytest.raises(RuntimeError, match="clip_grad_norm_"):
            compiled(data(3))


@case()
def scaled_losses_are_an_error() -> None:
    """Also where gradients are infinite, so that the step would be left out."""
    for factor in (1.0, torch.inf):
        models, optimizers = both()
        scaler = torch.amp.GradScaler(DEVICE)
        scaler.scale(factor * loss_of(models[1](data(0)))).backward()
        with pytest.raises(RuntimeError, match="GradScaler"):
            scaler.step(optimizers[1])


@case()
def a_backward_that_breaks_off_is_told_of() -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("broken off")

    compiled = both(make=WithSlowMiddle)[0][1]
    x = data(0).requires_grad_()
    loss_of(compiled(x)).backward()
    hook = x.register_hook(fail)
    with pytest.raises(ValueError, match="broken off"):
        loss_of(compiled(x)).backward()
    hook.remove()
    with pytest.raises(RuntimeError, match="had made their step"):
        compiled(x)
    loss_of(compiled(x)).backward()


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        return super().step(closure)


@case()
def optimizers_that_cannot_be_stepped_in_parts() -> None:
    ddp = stock_ddp()
    stranger = torch.optim.SGD([*ddp.parameters(), nn.Parameter(torch.ones(2, device=DEVICE))], lr=0.1)
    for optimizer, why in ((torch.optim.LBFGS(ddp.parameters()), "the loss itself"), (stranger, "1 param")):
        with pytest.raises(ValueError, match=why):
            stepping(ddp, optimizer)
    counting = stepping(ddp, Counting(ddp.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="'count'"):
        loss_of(counting(data(0))).backward()
    hooked = sgd(ddp)
    hooked.register_step_post_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="hooks on its step"):
        loss_of(stepping(ddp, hooked)(data(0))).backward()
    handle = register_optimizer_step_post_hook(lambda *_: None)
    with handle, pytest.raises(RuntimeError, match="hooks on its step"):
        loss_of(stepping(ddp, sgd(ddp))(data(0))).backward()
    # Importing it warns, which is an error where tests are collected.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    # It broadcasts what it has stepped, and which bucket is stepped when differs between ranks.
    sharded = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="collectives"):
        stepping(ddp, sharded)


@case()
def parameters_that_are_trained_later_are_an_error() -> None:
    """The module does not reduce them, and nobody would step them: those that it froze, and those from elsewhere."""

    def make() -> nn.Module:
        net = Net()
        net.first.weight.requires_grad_(False)
        return net

    for thaws in (True, False):
        models, optimizers = both(make=make)
        train(models, optimizers, steps=1)
        if thaws:
            models[1].module.first.weight.requires_grad_(True)
        else:
            optimizers[1].add_param_group({"params": [nn.Parameter(torch.ones(2, device=DEVICE))]})
        with pytest.raises(RuntimeError, match="1 parameters of the optimizer"):
            loss_of(models[1](data(1))).backward()


@case()
def optimizers_that_are_given_back() -> None:
    """A form without ``step_in_backward`` steps nothing; the one before takes the optimizer again when it is used."""
    models, optimizers = both()
    train(models, optimizers, steps=1)
    first = models[1]
    again = compile_ddp(first, backend="aot_eager")
    for step in range(2):
        for model, optimizer in zip((models[0], again), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model(data(step))).backward()
            optimizer.step()
        check_parameters(models)
    scaler = torch.amp.GradScaler(DEVICE)
    loss = loss_of(again(data(2)))
    optimizers[1].zero_grad()
    scaler.scale(loss * torch.inf).backward()
    before = [parameter.clone() for parameter in again.parameters()]
    scaler.step(optimizers[1])  # leaves it out
    assert all(map(torch.equal, before, again.parameters()))
    train(models, optimizers, steps=1)
    with pytest.raises(RuntimeError, match="leave the call out"):
        optimizers[1].step()


@case()
def stock_ddps_reducer_steps_nothing() -> None:
    ddp = stock_ddp(find_unused_parameters=True)
    with pytest.raises(ValueError, match="find_unused_parameters=True"):
        stepping(ddp, sgd(ddp))
    ddp = stock_ddp()
    compiled = stepping(ddp, sgd(ddp))
    loss_of(compiled(data(0))).backward()
    check_in_graph(compiled)
    with ddp.join(), pytest.raises(gradsplit.CompileError, match="join"):
        compiled(data(0))
    # What the error says: call it.
    inspect_ddp(compiled).options.step_in_backward.step()
