"""Hooks of parameters, of modules and of the reducer's communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import gradsplit
from gradsplit import CompileError
from gradsplit.distributed import inspect_ddp
from tests.multi_process.ddp_cases.graph_breaks import Broken
from tests.multi_process.ddp_harness import (
    Net,
    case,
    check_close,
    check_gradients,
    check_in_graph,
    check_reducer,
    check_steps,
    data,
    loss_of,
    pair,
    plain_step,
    stock_ddp,
    train,
)


@case()
def plain_python_on_one_rank() -> None:
    """Also from the first step on, as loggers of gradients register their hooks."""
    stock, compiled = pair()
    if dist.get_rank() == 1:
        for model in (stock, compiled):
            model.module.third.bias.register_hook(lambda grad: grad * 3)
    train((stock, compiled), steps=1)
    check_in_graph(compiled)
    if dist.get_rank() == 1:
        handles = [
            model.module.first.weight.register_hook(lambda grad: grad * 2) for model in (stock, compiled)
        ]
    train((stock, compiled), steps=2)
    if dist.get_rank() == 1:
        for handle in handles:
            handle.remove()
    train((stock, compiled), steps=1)


@case()
def hooks_of_modules() -> None:
    """On the DDP module, the wrapped module and a part of it; they see what they see in stock DDP."""
    stock, compiled = pair()
    seen: list[list[torch.Tensor]] = [[], []]
    for model, values in zip((stock, compiled), seen, strict=True):
        for part in (model, model.module, model.module.second):
            part.register_forward_hook(lambda module, args, result: result * 2)
            part.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
            part.register_full_backward_hook(
                lambda module, inputs, outputs, values=values: values.append(outputs[0].clone())
            )
    train((stock, compiled))
    check_in_graph(compiled)
    assert len(seen[0]) == 9
    for found, expected in zip(seen[1], seen[0], strict=True):
        check_close(found, expected)


def scale_by_rank(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(1 + dist.get_rank())


@case()
def hooks_of_parameters() -> None:
    stock, compiled = pair()
    for model in (stock, compiled):
        model.module.first.weight.register_hook(lambda gradient: gradient * 3)
        model.module.third.bias.register_post_accumulate_grad_hook(scale_by_rank)
    train((stock, compiled))
    check_in_graph(compiled)


@case()
def gradients_that_hooks_of_parameters_take() -> None:
    """As they do to keep them elsewhere: what stock DDP reduces are zeros then."""
    stock, compiled = pair(backend="aot_eager")
    taken: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for model, gradients in zip((stock, compiled), taken, strict=True):

        def take(parameter: torch.Tensor, gradients: list[torch.Tensor] = gradients) -> None:
            assert parameter.grad is not None
            gradients.append(parameter.grad.clone())
            parameter.grad = None

        model.module.second.weight.register_post_accumulate_grad_hook(take)
    for step in range(3):
        for model in (stock, compiled):
            plain_step(model, step)
        check_gradients(stock, compiled, exact=True)
    assert len(taken[0]) == 3
    for expected, found in zip(*taken, strict=True):
        check_close(found, expected, exact=True)
    check_in_graph(compiled)


@case()
def hooks_that_come_and_go() -> None:
    stock, compiled = pair()
    train((stock, compiled), steps=1)
    handles = [model.module.second.weight.register_hook(torch.neg) for model in (stock, compiled)]
    train((stock, compiled), steps=2)
    for handle in handles:
        handle.remove()
    train((stock, compiled), steps=1)
    assert len(inspect_ddp(compiled).graphs) == 2


@case()
def one_rank_that_needs_the_reducer_takes_all() -> None:
    stock, compiled = pair()
    if dist.get_rank() == 1:
        compiled.find_unused_parameters = True
    train((stock, compiled))
    check_reducer(compiled, "rank 1")
    stock, compiled = pair()
    if dist.get_rank() == 1:
        compiled.register_comm_hook(None, default_hooks.allreduce_hook)
    train((stock, compiled))
    check_reducer(compiled, "rank 1: a communication hook")


@case()
def hooks_of_the_ddp_module_itself() -> None:
    """They run round ``DDP.forward``, in stock DDP's order."""
    stock, compiled = pair(backend="aot_eager")
    seen: dict[int, list[str]] = {0: [], 1: []}
    for which, model in enumerate((stock, compiled)):
        note = seen[which].append
        register_all(model, "ddp", note)
        register_all(model.module, "module", note)
        register_all(model.module.second, "second", note)
    check_steps(stock, compiled, lambda model, step: loss_of(model(data(step).requires_grad_())).backward())
    assert seen[0] == seen[1] and len(seen[0]) >= 3 * 3 * 4, seen
    check_in_graph(compiled)


def register_all(module: nn.Module, name: str, note: Callable[[str], None]) -> None:
    def before(module: nn.Module, args: Any) -> Any:
        note(f"before {name}")
        return (args[0] * 1.5,)

    def after(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        note(f"after {name}")
        return output * 0.5

    def backward_before(module: nn.Module, gradients: Any) -> None:
        note(f"before backward of {name}")

    def backward(module: nn.Module, inputs: Any, outputs: Any) -> None:
        note(f"backward of {name}")

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    module.register_full_backward_pre_hook(backward_before)
    module.register_full_backward_hook(backward)


@case()
def forward_hooks_with_keywords_on_the_ddp_module() -> None:
    stock, compiled = pair(backend="aot_eager")

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (), {"x": args[0] * 2}

    for model in (stock, compiled):
        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(lambda module, args, kwargs, output: output + 1, with_kwargs=True)
    check_steps(stock, compiled)
    check_in_graph(compiled)


@case()
def hooks_of_submodules_are_captured() -> None:
    stock, compiled = pair(backend="aot_eager")
    for model in (stock, compiled):
        model.module.second.register_forward_hook(lambda module, args, output: output * 2)
        model.module.norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    check_steps(stock, compiled)
    check_in_graph(compiled)
    assert len(inspect_ddp(compiled).graphs) == 1


@case()
def hooks_of_modules_that_come_and_go() -> None:
    stock, compiled = pair(backend="aot_eager")
    check_steps(stock, compiled, steps=1)
    handles = [
        model.module.second.register_forward_hook(lambda module, args, output: output * 2)
        for model in (stock, compiled)
    ]
    handles += [model.register_forward_hook(lambda m, args, output: -output) for model in (stock, compiled)]
    check_steps(stock, compiled, steps=1)
    for handle in handles:
        handle.remove()
    check_steps(stock, compiled, steps=1)
    check_in_graph(compiled)


@case()
def what_hooks_of_parameters_see() -> None:
    """``register_hook`` sees and changes each rank's own gradient, before it is reduced."""
    stock, compiled = pair(backend="aot_eager")
    seen: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])

    def hook_of(gradients: list[torch.Tensor], factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            gradients.append(gradient.clone())
            return gradient * factor

        return hook

    for model, gradients in zip((stock, compiled), seen, strict=True):
        for factor, parameter in enumerate((model.module.first.weight, model.module.third.bias), start=2):
            parameter.register_hook(hook_of(gradients, factor))
    check_steps(stock, compiled)
    assert len(seen[0]) == len(seen[1]) == 6
    for expected, found in zip(*map(sorted_by_size, seen), strict=True):
        check_close(found, expected, "gradient that a hook saw", exact=True)
    check_in_graph(compiled)


def sorted_by_size(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return sorted(tensors, key=torch.numel)


@case()
def hooks_after_gradients_are_accumulated() -> None:
    """Stock DDP accumulates before it reduces, so such a hook sees the rank's own gradient."""
    stock, compiled = pair(backend="aot_eager")
    seen: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for model, gradients in zip((stock, compiled), seen, strict=True):

        def note(parameter: torch.Tensor, gradients: list[torch.Tensor] = gradients) -> None:
            gradients.append(parameter.grad.clone())

        model.module.second.weight.register_post_accumulate_grad_hook(note)
        model.module.first.bias.register_post_accumulate_grad_hook(note)
    check_steps(stock, compiled)
    assert len(seen[0]) == len(seen[1]) == 6
    check_in_graph(compiled)


@case("cuda")
def hooks_that_compress_to_bfloat16() -> None:
    """Which gloo cannot add up."""
    stock, compiled = pair(backend="aot_eager")
    for model in (stock, compiled):
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    check_steps(stock, compiled)
    check_reducer(compiled, "communication hook")


@case()
def communication_hooks_registered_after_steps() -> None:
    """From then on calls take stock DDP's reducer, on all ranks."""
    calls: list[list[int]] = [[], []]
    stock, compiled = pair(backend="aot_eager")
    check_steps(stock, compiled)
    for model, mine in zip((stock, compiled), calls, strict=True):
        model(data(9))  # which has no backward, so the next one is the reducer's

        # Annotations would be looked at, and are texts here.
        def hook(seen, bucket):
            seen.append(bucket.index())
            return default_hooks.allreduce_hook(None, bucket)

        model.register_comm_hook(mine, hook)
    check_steps(stock, compiled)
    assert calls[0] and calls[1]
    check_reducer(compiled, "communication hook")


@case()
def communication_hooks_registered_before_a_backward() -> None:
    """The backward is a compiled one already; and the hook must not be lost with the reducer that has it."""
    for register in (
        lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook),
        lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    ):
        _, compiled = pair(backend="aot_eager")
        loss_of(compiled(data(0))).backward()
        loss = loss_of(compiled(data(1)))
        register(compiled)
        with pytest.raises(CompileError, match="communication hook was registered between"):
            loss.backward()


@case()
def communication_hooks_that_come_with_the_reducer() -> None:
    """They are known to it alone; registered before the first step, or later."""
    for steps in (0, 2):
        stock, compiled = pair(backend="aot_eager")
        check_steps(stock, compiled, steps=steps)
        for model in (stock, compiled):
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        check_steps(stock, compiled)
        check_reducer(compiled, "communication hook")


@case("cuda")
def optimizers_that_step_in_the_backward() -> None:
    """They hang on nodes of the engine; stock DDP runs them when it has reduced, on a stream of its own."""
    models = [stock_ddp_with_optimizers(), stock_ddp_with_optimizers()]
    stock, compiled = models[0], gradsplit.compile(models[1], backend="aot_eager")
    for step in range(3):
        for model in (stock, compiled):
            loss_of(model(data(step))).backward()
        for (name, expected), found in zip(stock.named_parameters(), compiled.parameters(), strict=True):
            check_close(found, expected, name)
    check_reducer(compiled, "optimizers step in the backward")


def stock_ddp_with_optimizers() -> nn.Module:
    # Importing it warns, which is an error where tests are collected.
    from torch.distributed.optim import _apply_optimizer_in_backward

    def make() -> nn.Module:
        net = Net()
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.05})
        return net

    return stock_ddp(make)


@case()
def hooks_of_parameters_registered_behind_the_forward() -> None:
    """They see the whole gradient of the rank, before it is reduced: also of a weight that two graphs use, and where
    ``autograd.grad`` asks for it; hooks of one rank are no matter to the others."""

    def halve(tensor: torch.Tensor) -> None:
        assert tensor.grad is not None
        tensor.grad.mul_(0.5)

    def run(model: Any, step: int) -> None:
        loss, weight = loss_of(model(data(step))), model.module.second.weight
        handles = [weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01) * 2)]
        if dist.get_rank() == 1 or step == 2:
            handles.append(weight.register_post_accumulate_grad_hook(halve))
        if step == 1:
            (found,) = torch.autograd.grad(loss, weight, retain_graph=True)
            loss = loss + found.norm()
        loss.backward()
        if step == 2:
            with model.no_sync():
                loss_of(model(data(step))).backward()
        for handle in handles:
            handle.remove()

    for make in (Net, Broken, lambda: Broken(tied=True)):
        stock, compiled = pair(make, backend="aot_eager")
        check_steps(stock, compiled, run, steps=4, synchronised=False)
        check_in_graph(compiled)
