"""Two ranks, many cases: a compiled DDP module beside stock DDP, on equal parameters and data.

Run by ``test_ddp.py`` through the launcher, once for all cases, because starting ranks takes longer than the cases.
Every rank writes what became of each case as JSON to the folder given.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import compile_core
from distributed import inspect_ddp

# The folder for the results, then the kind of device.
FOLDER, DEVICE = Path(sys.argv[1]), sys.argv[2]
CASES: dict[str, Callable[[], None]] = {}
# Sums may be taken in another order inside fused kernels; exponentials differ in the last bits between GPU libraries.
TOLERANCE = {"cpu": 2e-6, "cuda": 1e-5}[DEVICE]


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


class Net(nn.Module):
    """Three layers, a norm, and room for the variations that cases need."""

    def __init__(self, norm: nn.Module | None = None, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = norm or nn.LayerNorm(32)
        self.second = nn.Linear(32, 32)
        self.third = nn.Linear(32, 32)
        if tied:
            self.third.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.gelu(self.norm(self.first(x)))
        return self.third(torch.tanh(self.second(x)))


def pair(
    make: Callable[[], nn.Module] = Net, backend: str = "triton", mode: str | None = None, **ddp_options: Any
) -> tuple[Any, Any]:
    """Stock DDP and compiled DDP of equal modules; small buckets, so that there are several."""
    options = {"bucket_cap_mb": 0.004, **ddp_options}
    modules = []
    for _ in range(2):
        torch.manual_seed(7)
        modules.append(DistributedDataParallel(make().to(DEVICE), **options))
    return modules[0], compile_core.compile(modules[1], backend=backend, mode=mode)


def data(step: int, rows: int = 6) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, 16, generator=generator, device="cpu").to(DEVICE)


def check_close(found: Any, expected: Any, what: str = "value") -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-2)
    assert error <= TOLERANCE, f"{what} differs by {error:.1e}"


def check_gradients(stock: nn.Module, compiled: nn.Module) -> None:
    for (name, expected), (_, found) in zip(
        stock.named_parameters(), compiled.named_parameters(), strict=True
    ):
        if expected.grad is None:
            assert found.grad is None, f"{name} has a gradient in the compiled module only"
        else:
            assert found.grad is not None, f"{name} has no gradient"
            check_close(found.grad, expected.grad, f"gradient of {name}")
            both = [torch.empty_like(found.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(both, found.grad.contiguous())
            assert torch.equal(both[0], both[1]), f"ranks hold different gradients of {name}"


def train(models: Iterable[nn.Module], steps: int = 3, after: Callable[[], None] | None = None) -> None:
    models = list(models)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for step in range(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(data(step)).square().mean().backward()
        check_gradients(*models)
        for optimizer in optimizers:
            optimizer.step()


def is_in_graph(compiled: Any) -> bool:
    return inspect_ddp(compiled).plan is not None


@case
def gradients_equal_stock_ddp() -> None:
    stock, compiled = pair()
    train((stock, compiled))
    assert is_in_graph(compiled)
    assert len(inspect_ddp(compiled).plan.buckets) > 1
    assert len(inspect_ddp(compiled).graphs) == 1


@case
def gradients_are_views_of_buckets() -> None:
    _, compiled = pair()
    compiled(data(0)).sum().backward()
    places = [
        inspect_ddp(compiled).buckets.destination(name) for name, _ in compiled.module.named_parameters()
    ]
    assert all(place is p.grad for place, p in zip(places, compiled.parameters(), strict=True))
    storages = {p.grad.untyped_storage().data_ptr() for p in compiled.parameters()}
    assert len(storages) == len(inspect_ddp(compiled).plan.buckets)


@case
def no_sync_accumulates_locally() -> None:
    stock, compiled = pair()
    for model in (stock, compiled):
        model(data(0)).sum().backward()
        model.zero_grad()
        with model.no_sync():
            model(data(1)).square().mean().backward()
        model(data(2)).square().mean().backward()
    check_gradients(stock, compiled)


@case
def first_call_under_no_sync() -> None:
    stock, compiled = pair()
    for model in (stock, compiled):
        with model.no_sync():
            model(data(1)).square().mean().backward()
        model(data(2)).square().mean().backward()
    check_gradients(stock, compiled)
    assert is_in_graph(compiled)


@case
def gradients_accumulate_without_zero_grad() -> None:
    stock, compiled = pair()
    for step in range(3):
        for model in (stock, compiled):
            model(data(step)).square().mean().backward()
        check_gradients(stock, compiled)


@case
def zero_grad_keeping_tensors() -> None:
    stock, compiled = pair()
    for step in range(3):
        for model in (stock, compiled):
            model.zero_grad(set_to_none=False)
            model(data(step)).square().mean().backward()
        check_gradients(stock, compiled)


@case
def two_forwards_before_two_backwards() -> None:
    _, compiled = pair()
    reference = Net().to(DEVICE)
    reference.load_state_dict(compiled.module.state_dict())
    losses = [compiled(data(step)).square().mean() for step in range(2)]
    for loss in losses:
        loss.backward()
    for step in range(2):
        reference(data(step)).square().mean().backward()
    for expected, found in zip(reference.parameters(), compiled.parameters(), strict=True):
        mean = expected.grad / dist.get_world_size()
        dist.all_reduce(mean)
        check_close(found.grad, mean)


@case
def evaluation_without_gradients() -> None:
    stock, compiled = pair()
    train((stock, compiled), steps=1)
    with torch.no_grad():
        check_close(compiled(data(5)), stock(data(5)))
    compiled.eval(), stock.eval()
    with torch.inference_mode():
        check_close(compiled(data(5)), stock(data(5)))
    compiled.train(), stock.train()
    train((stock, compiled), steps=1)


@case
def short_batch_on_one_rank() -> None:
    stock, compiled = pair()
    train((stock, compiled), steps=1)
    rows = 6 if dist.get_rank() == 0 else 3
    for model in (stock, compiled):
        model.zero_grad()
        model(data(8, rows)).square().mean().backward()
    check_gradients(stock, compiled)


@case
def sizes_that_differ_between_steps() -> None:
    """The second size opens the batch; the buckets of the first graph serve what is compiled for all sizes."""
    stock, compiled = pair()
    for step, rows in enumerate((6, 4, 5, 4, 6 if dist.get_rank() == 0 else 3)):
        for model in (stock, compiled):
            model.zero_grad()
            model(data(step, rows)).square().mean().backward()
        check_gradients(stock, compiled)
    assert is_in_graph(compiled)
    assert len(inspect_ddp(compiled)._in_graph.entries) == 2


@case
def one_program_of_open_sizes_fills_several_buckets() -> None:
    stock, compiled = pair(backend="aot_eager", bucket_cap_mb=0.007)
    for step, rows in enumerate((6, 4, 5, 3)):
        for model in (stock, compiled):
            model.zero_grad()
            model(data(step, rows)).square().mean().backward()
        check_gradients(stock, compiled)
    runner = inspect_ddp(compiled)
    assert is_in_graph(compiled) and len(runner.plan.buckets) > 1
    assert len(runner.graphs) == 2


@case
def parameter_used_outside_the_module_too() -> None:
    stock, compiled = pair()
    for step in range(2):
        for model in (stock, compiled):
            model.zero_grad()
            decay = model.module.second.weight.square().sum() * (1 + dist.get_rank())
            (model(data(step)).square().mean() + 0.1 * decay).backward()
        check_gradients(stock, compiled)


@case
def backward_that_bypasses_the_module() -> None:
    stock, compiled = pair()
    train((stock, compiled), steps=1)
    for model in (stock, compiled):
        model.zero_grad()
        (model.module.second.weight.square().sum() * (1 + dist.get_rank())).backward()
    check_close(compiled.module.second.weight.grad, stock.module.second.weight.grad)


@case
def plain_python_on_one_rank() -> None:
    stock, compiled = pair()
    train((stock, compiled), steps=1)
    assert is_in_graph(compiled)
    if dist.get_rank() == 1:
        handles = [
            model.module.first.weight.register_hook(lambda grad: grad * 2) for model in (stock, compiled)
        ]
    train((stock, compiled), steps=2)
    if dist.get_rank() == 1:
        for handle in handles:
            handle.remove()
    train((stock, compiled), steps=1)


@case
def comm_hook_keeps_the_reducer() -> None:
    stock, compiled = pair()
    for model in (stock, compiled):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    train((stock, compiled))
    assert "hook" in inspect_ddp(compiled).reason_for_reducer


@case
def hooks_of_the_wrapped_module_keep_the_reducer() -> None:
    stock, compiled = pair()
    for model in (stock, compiled):
        model.module.register_forward_hook(lambda module, args, result: result * 2)
    train((stock, compiled))
    assert "wrapped module" in inspect_ddp(compiled).reason_for_reducer


@case
def find_unused_parameters_keeps_the_reducer() -> None:
    class Partial(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.norm(self.first(x)))

    stock, compiled = pair(Partial, find_unused_parameters=True)
    train((stock, compiled))
    assert "find_unused_parameters" in inspect_ddp(compiled).reason_for_reducer


@case
def unused_parameter_is_stock_ddps_error() -> None:
    class Partial(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.norm(self.first(x)))

    _, compiled = pair(Partial)
    compiled(data(0)).sum().backward()
    assert "does not depend on" in inspect_ddp(compiled).reason_for_reducer
    try:
        compiled(data(1))
    except RuntimeError as error:
        assert "unused parameters" in str(error) or "did not receive grad" in str(error), error
    else:
        raise AssertionError("stock DDP reports unused parameters at the second forward")


@case
def one_rank_that_needs_the_reducer_takes_all() -> None:
    stock, compiled = pair()
    if dist.get_rank() == 1:
        compiled.register_forward_hook(lambda module, args, output: None)
    train((stock, compiled))
    assert "rank 1" in inspect_ddp(compiled).reason_for_reducer


@case
def frozen_parameters() -> None:
    def make() -> Net:
        net = Net()
        net.second.weight.requires_grad_(False)
        net.first.bias.requires_grad_(False)
        return net

    stock, compiled = pair(make)
    train((stock, compiled))
    assert is_in_graph(compiled)


@case
def ignored_parameters_stay_local() -> None:
    def make() -> Net:
        net = Net()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["second.weight"])
        return net

    stock, compiled = pair(make)
    for model in (stock, compiled):
        model(data(0)).square().mean().backward()
    for (name, expected), found in zip(stock.named_parameters(), compiled.parameters(), strict=True):
        check_close(found.grad, expected.grad, name)
    assert is_in_graph(compiled)


@case
def tied_weights_are_reduced_once() -> None:
    stock, compiled = pair(lambda: Net(tied=True))
    train((stock, compiled))
    assert is_in_graph(compiled)


@case
def buffers_are_broadcast() -> None:
    stock, compiled = pair(lambda: Net(norm=nn.BatchNorm1d(32)))
    train((stock, compiled))
    assert is_in_graph(compiled)
    for expected, found in zip(stock.buffers(), compiled.buffers(), strict=True):
        check_close(found, expected, "buffer")


@case
def gradient_of_the_input() -> None:
    stock, compiled = pair()
    inputs = [data(0).requires_grad_() for _ in range(2)]
    for model, x in zip((stock, compiled), inputs, strict=True):
        model(x).square().mean().backward()
    check_gradients(stock, compiled)
    check_close(inputs[1].grad, inputs[0].grad)


@case
def first_call_under_a_mode() -> None:
    stock, compiled = pair(lambda: Net(norm=nn.BatchNorm1d(32)))
    with torch.overrides.BaseTorchFunctionMode():
        train((stock, compiled), steps=1)
    train((stock, compiled), steps=1)
    assert "mode of torch" in str(inspect_ddp(compiled).reason_for_reducer)
    for expected, found in zip(stock.buffers(), compiled.buffers(), strict=True):
        check_close(found, expected, "buffer")


@case
def modes_in_later_calls() -> None:
    stock, compiled = pair(lambda: Net(norm=nn.BatchNorm1d(32)))
    train((stock, compiled), steps=1)
    for mode in (torch.overrides.BaseTorchFunctionMode(), torch.device(DEVICE)):
        with mode:
            train((stock, compiled), steps=2)
        assert is_in_graph(compiled)
    for expected, found in zip(stock.buffers(), compiled.buffers(), strict=True):
        check_close(found, expected, "buffer")


@case
def clipping_and_adamw() -> None:
    stock, compiled = pair()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (stock, compiled)]
    for step in range(3):
        for model, optimizer in zip((stock, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            model(data(step)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
    for expected, found in zip(stock.parameters(), compiled.parameters(), strict=True):
        # AdamW divides by the root of squares: rounding of tiny gradients shows in full.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Dropping(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.dropout(torch.tanh(self.second(self.norm(self.first(x)))), 0.5)
        return torch.nn.functional.dropout(self.third(hidden), 0.5)


@case
def fallback_random_draws_what_stock_ddp_draws() -> None:
    stock, plain = (pair(Dropping)[0] for _ in range(2))
    compiled = compile_core.compile(plain, options={"fallback_random": True})
    for step in range(2):
        for model in (stock, compiled):
            torch.manual_seed(10 * step + dist.get_rank())
            model.zero_grad()
            model(data(step)).square().mean().backward()
        check_gradients(stock, compiled)
    assert is_in_graph(compiled)


@case
def ranks_drop_what_their_own_seeds_say() -> None:
    """The gradient of the last bias is the mean of the ranks' masks, which differ."""
    compiled = pair(Dropping)[1]
    torch.manual_seed(dist.get_rank())
    y = compiled(data(0))
    y.sum().backward()
    masks = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(masks, (y.detach() != 0).to(y.dtype))
    assert not torch.equal(masks[0], masks[1])
    check_close(compiled.module.third.bias.grad, 2 * torch.stack(masks).mean(0).sum(0))
    assert is_in_graph(compiled)


@case
def state_dict_has_the_plain_names() -> None:
    stock, compiled = pair()
    assert list(compiled.state_dict()) == list(stock.state_dict())


@case
def aot_eager_backend_is_bit_equal() -> None:
    stock, compiled = pair(backend="aot_eager")
    for model in (stock, compiled):
        model(data(0)).square().mean().backward()
    for expected, found in zip(stock.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


@case
def cuda_graphs_leave_the_collectives_out() -> None:
    stock, compiled = pair(mode="reduce-overhead")
    train((stock, compiled), steps=5)
    assert is_in_graph(compiled)


@case
def inductor_backend_fills_the_buckets() -> None:
    stock, compiled = pair(backend="inductor", bucket_cap_mb=0.007)
    train((stock, compiled), steps=2)
    assert is_in_graph(compiled) and len(inspect_ddp(compiled).plan.buckets) > 1


@case
def whole_graph_backend_keeps_the_reducer() -> None:
    stock, compiled = pair(backend="eager")
    train((stock, compiled))
    assert "whole graphs" in inspect_ddp(compiled).reason_for_reducer


def main() -> None:
    logging.disable(logging.WARNING)
    if DEVICE == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    results = {}
    for name, function in CASES.items():
        try:
            function()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    (FOLDER / f"rank_{dist.get_rank()}.json").write_text(json.dumps(results))
    # gloo's threads may be the last to hold the tensors of the last collectives. They need Python to let go of them,
    # and torch aborts a process that is ending by then.
    time.sleep(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
