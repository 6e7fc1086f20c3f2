"""Random sequences of what training programs do with a DDP module, compiled and plain, compared after each.

``python -m gradsplit.launch --nproc-per-node 2 -m tests.multi_process.random_steps COUNT [SEED]`` runs that many; the
first that differs is printed with its seed. Cases run a few of them with every test run.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gradsplit.compile_core.compiled_calls.compiled_module import CompiledModule
from gradsplit.distributed import inspect_ddp
from tests.multi_process.ddp_cases.checkpointing import Checkpointed
from tests.multi_process.ddp_cases.graph_breaks import Broken
from tests.multi_process.ddp_harness import (
    Net,
    check_buffers,
    check_gradients,
    data,
    loss_of,
    pair,
)

MODULES: tuple[Callable[[], nn.Module], ...] = (
    Net,
    Broken,
    lambda: Broken(tied=True),
    lambda: Broken(norm=nn.BatchNorm1d(32)),
    lambda: Checkpointed(use_reentrant=False, together=True, breaks=True),
    lambda: Checkpointed(use_reentrant=True, together=True, breaks=True),
)

Action = Callable[["Trained", int], None]
ACTIONS: list[Action] = []


class Trained:
    """One of the two modules, and what belongs to it."""

    def __init__(self, model: Any, is_reentrant: bool) -> None:
        self.model = model
        # Stock DDP refuses a second use of a parameter there, and autograd.
        self.is_reentrant = is_reentrant
        self.is_compiled = isinstance(model, CompiledModule)
        # Its broadcast of buffers was a change of what an earlier forward had saved.
        was_refused = torch.__version__ < (2, 13) and any(True for _ in model.buffers())
        self.takes_two_forwards = not is_reentrant and not was_refused
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        self.weight = next(parameter for parameter in model.parameters() if parameter.dim() == 2)
        self.handles: dict[str, Any] = {}

    def loss(self, step: int, rows: int = 6) -> torch.Tensor:
        return loss_of(self.model(data(step, rows).requires_grad_()))

    def toggle(self, name: str, register: Callable[[], Any]) -> None:
        handle = self.handles.pop(name, None)
        if handle is None:
            self.handles[name] = register()
        else:
            handle.remove()


def action(function: Action) -> Action:
    ACTIONS.append(function)
    return function


@action
def backward(trained: Trained, seed: int) -> None:
    trained.loss(seed).backward()


@action
def accumulate(trained: Trained, seed: int) -> None:
    with trained.model.no_sync():
        for part in range(1 + dist.get_rank()):
            trained.loss(seed + part).backward()
    trained.loss(seed + 9).backward()


@action
def several_forwards(trained: Trained, seed: int) -> None:
    if trained.takes_two_forwards:
        (trained.loss(seed) + trained.loss(seed + 1)).backward()


@action
def forward_without_backward(trained: Trained, seed: int) -> None:
    trained.loss(seed)


@action
def decay_in_the_loss(trained: Trained, seed: int) -> None:
    if not trained.is_reentrant:
        decay = trained.weight.square().sum() * (1 + dist.get_rank())
        (trained.loss(seed) + 0.1 * decay).backward()


@action
def gradient_of_the_input(trained: Trained, seed: int) -> None:
    if not trained.is_reentrant:
        x = data(seed).requires_grad_()
        torch.autograd.grad(loss_of(trained.model(x)), x)


@action
def backward_for_given_parameters(trained: Trained, seed: int) -> None:
    if not trained.is_reentrant:  # torch refuses it there
        trained.loss(seed).backward(inputs=list(trained.model.parameters()))


@action
def backwards_for_one_half_and_the_other(trained: Trained, seed: int) -> None:
    if not trained.is_reentrant:
        loss, parameters = trained.loss(seed), list(trained.model.parameters())
        loss.backward(inputs=parameters[::2], retain_graph=True)
        loss.backward(inputs=parameters[1::2])


@action
def returned_gradients(trained: Trained, seed: int) -> None:
    if not trained.is_reentrant:
        loss = trained.loss(seed)
        (found,) = torch.autograd.grad(loss, trained.weight, retain_graph=True)
        (loss * found.norm()).backward()


@action
def result_as_input(trained: Trained, seed: int) -> None:
    if trained.takes_two_forwards:
        loss_of(trained.model(trained.model(data(seed).requires_grad_())[:, :16])).backward()


@action
def another_size(trained: Trained, seed: int) -> None:
    trained.loss(seed, rows=4 + seed % 2).backward()


@action
def a_size_of_each_rank(trained: Trained, seed: int) -> None:
    trained.loss(seed, rows=3 + dist.get_rank()).backward()


@action
def evaluation(trained: Trained, seed: int) -> None:
    trained.model.eval()
    with torch.no_grad():
        trained.loss(seed)
    trained.model.train()


@action
def optimizer_step(trained: Trained, seed: int) -> None:
    trained.optimizer.step()


@action
def zero_grad(trained: Trained, seed: int) -> None:
    trained.optimizer.zero_grad(set_to_none=seed % 2 == 0)


@action
def some_gradients_none(trained: Trained, seed: int) -> None:
    for parameter in list(trained.model.parameters())[::3]:
        parameter.grad = None


@action
def a_gradient_of_the_programs(trained: Trained, seed: int) -> None:
    trained.weight.grad = torch.full_like(trained.weight, 0.25)


@action
def gradients_changed_through_their_data(trained: Trained, seed: int) -> None:
    if trained.model.gradient_as_bucket_view:  # stock DDP loses such a gradient
        return
    for parameter in trained.model.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data.clamp(-0.05, 0.05)


@action
def parameters_that_get_other_memory(trained: Trained, seed: int) -> None:
    for parameter in trained.model.parameters():
        parameter.data = parameter.data * 0.9


@action
def forward_of_a_frozen_module(trained: Trained, seed: int) -> None:
    trained.model.requires_grad_(False)
    trained.loss(seed)
    trained.model.requires_grad_(True)


@action
def backward_in_a_thread(trained: Trained, seed: int) -> None:
    loss = trained.loss(seed)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(loss.backward).result()


@action
def backward_that_breaks_off(trained: Trained, seed: int) -> None:
    """On all ranks; what is left of it is nobody's. Stock DDP cannot go on then."""
    trained.optimizer.zero_grad()
    if not trained.is_compiled or trained.is_reentrant or any(True for _ in trained.model.buffers()):
        return

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    x = data(seed).requires_grad_()
    x.register_hook(fail)
    with suppress(ArithmeticError):
        loss_of(trained.model(x)).backward()
    trained.optimizer.zero_grad()


@action
def hook_of_a_parameter(trained: Trained, seed: int) -> None:
    trained.toggle("gradient", lambda: trained.weight.register_hook(lambda gradient: gradient * 2))


@action
def hook_behind_accumulation(trained: Trained, seed: int) -> None:
    trained.toggle("accumulated", lambda: trained.weight.register_post_accumulate_grad_hook(_shrink))


@action
def hook_of_a_node(trained: Trained, seed: int) -> None:
    node = get_gradient_edge(trained.weight).node
    trained.toggle("node", lambda: node.register_prehook(lambda arriving: (arriving[0] * 1.5,)))


@action
def hook_of_the_module(trained: Trained, seed: int) -> None:
    trained.toggle(
        "module", lambda: trained.model.register_forward_hook(lambda module, args, output: output * 0.5)
    )


def _shrink(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.9)


def run_random_steps(seed: int, length: int = 14) -> None:
    """One sequence; raises where the two modules differ, and says after which actions."""
    choices = random.Random(seed)
    make = choices.choice(MODULES)
    is_static = choices.random() < 0.3
    models = pair(
        make,
        backend="aot_eager",
        broadcast_buffers=choices.random() < 0.7,
        gradient_as_bucket_view=choices.random() < 0.3,
        bucket_cap_mb=choices.choice([0.001, 0.004, 25]),
        static_graph=is_static,
    )
    both = [Trained(model, is_reentrant=make is MODULES[-1]) for model in models]
    done: list[str] = []
    if is_static:
        # The first backward tells of all others. In stock DDP it must be one that is reduced.
        for trained in both:
            backward(trained, seed)
    try:
        for _ in range(length):
            chosen, number = choices.choice(ACTIONS), choices.randrange(1000)
            done.append(chosen.__name__)
            for trained in both:
                chosen(trained, number)
            check_gradients(*models)
            check_buffers(*models)
        # A sequence may have no step at all, and then no plan.
        assert inspect_ddp(models[1]).reason_for_reducer is None
    except Exception as error:
        raise AssertionError(f"seed {seed}, after {done}: {error}") from error


def main(count: int, first_seed: int) -> None:
    dist.init_process_group("gloo")
    for seed in range(first_seed, first_seed + count):
        run_random_steps(seed)
    print(f"rank {dist.get_rank()}: {count} sequences are alike")
    time.sleep(1)  # see run_ddp_cases.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
