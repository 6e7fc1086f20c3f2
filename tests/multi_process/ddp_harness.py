"""What the cases in ``ddp_cases/`` share: a compiled DDP module beside stock DDP, on equal parameters and data.

A case is a function that every rank runs; it raises where the two modules differ. ``run_ddp_cases.py`` runs all of them
in one start of ranks, and ``test_ddp.py`` makes a test of each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsplit
from gradsplit.distributed import inspect_ddp

# Set by the test that starts the ranks.
DEVICE = os.environ.get("DDP_CASES_DEVICE", "cpu")
# Sums may be taken in another order inside fused kernels; exponentials differ in the last bits between GPU libraries.
TOLERANCE = {"cpu": 2e-6, "cuda": 1e-5}[DEVICE]


def start_process_group(**arguments: Any) -> None:
    """gloo; on GPUs NCCL, with this rank's device as the current one.

    Args:
        arguments: more of ``init_process_group``'s.
    """
    if DEVICE == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **arguments)
    else:
        dist.init_process_group("gloo", **arguments)


@dataclass(frozen=True)
class Case:
    """One case: its name is that of its file and its function."""

    name: str
    run: Callable[[], None]
    devices: tuple[str, ...]


CASES: dict[str, Case] = {}


def case(*devices: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers a case that runs on these kinds of devices; on all, if none is named."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        assert name not in CASES, f"two cases are called {name}"
        CASES[name] = Case(name, function, devices or ("cpu", "cuda"))
        return function

    return register


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


class ThreeTypes(nn.Module):
    """A layer each of float32, float64 and bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16, dtype=torch.float64)
        self.third = nn.Linear(16, 16, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)).double()
        return self.third(torch.tanh(self.second(x)).bfloat16()).float()


class PartlyPlain(Net):
    """One layer, of which autograd reads the weight itself, lies between two graphs and is used in the second again."""

    @gradsplit.disable
    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.plain(torch.tanh(self.first(x)))
        return self.third(torch.tanh(self.norm(hidden))) + self.second(hidden)


def stock_ddp(make: Callable[[], nn.Module] = Net, **ddp_options: Any) -> DistributedDataParallel:
    """Stock DDP of a module that is the same at every call and on every rank; small buckets, so that there are
    several."""
    torch.manual_seed(7)
    return DistributedDataParallel(make().to(DEVICE), **{"bucket_cap_mb": 0.004, **ddp_options})


def pair(
    make: Callable[[], nn.Module] = Net,
    backend: Any = "triton",
    mode: str | None = None,
    fullgraph: bool = False,
    options: dict[str, Any] | None = None,
    **ddp_options: Any,
) -> tuple[Any, Any]:
    """Stock DDP and compiled DDP of equal modules."""
    compiled = stock_ddp(make, **ddp_options)
    return stock_ddp(make, **ddp_options), gradsplit.compile(
        compiled, backend=backend, mode=mode, fullgraph=fullgraph, options=options
    )


def data(step: int, rows: int = 6) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, 16, generator=generator, device="cpu").to(DEVICE)


def check_close(found: Any, expected: Any, what: str = "value", exact: bool = False) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-2)
    assert error <= TOLERANCE, f"{what} differs by {error:.1e}"
    assert not exact or torch.equal(found, expected), f"{what} differs by {error:.1e} and should be equal"


def gradients_are_exact() -> bool:
    """Whether torch's kernels and a sum over these ranks give the very bits: two summands have one order only."""
    return dist.get_world_size() == 2


def check_gradients(
    stock: nn.Module, compiled: nn.Module, exact: bool = False, synchronised: bool = True
) -> None:
    """The compiled module's gradients are stock DDP's, and the same on all ranks.

    Args:
        exact: to the bit, where the ranks are two: the backend must be one that runs torch's own kernels.
        synchronised: if False, ranks may hold gradients of their own.
    """
    exact = exact and gradients_are_exact()
    for (name, expected), (_, found) in zip(
        stock.named_parameters(), compiled.named_parameters(), strict=True
    ):
        if expected.grad is None:
            assert found.grad is None, f"{name} has a gradient in the compiled module only"
        else:
            assert found.grad is not None, f"{name} has no gradient"
            check_close(found.grad, expected.grad, f"gradient of {name}", exact)
            if synchronised:
                check_same_on_all_ranks(found.grad, f"gradient of {name}")


def check_same_on_all_ranks(tensor: torch.Tensor, what: str) -> None:
    held = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(held, tensor.contiguous())
    for rank, other in enumerate(held):
        assert torch.equal(tensor, other), f"rank {rank} holds another {what}"


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def train(
    models: Iterable[nn.Module],
    steps: int = 3,
    exact: bool = False,
    loss: Callable[[torch.Tensor], torch.Tensor] = loss_of,
    first_step: int = 0,
) -> None:
    """The same steps of SGD on both modules; after each backward the gradients are compared.

    The batches live together, so that each lies elsewhere: whether a module is ready for that is no matter of luck.
    """
    models = list(models)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for batch in [data(step) for step in range(first_step, first_step + steps)]:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss(model(batch)).backward()
        check_gradients(*models, exact=exact)
        for optimizer in optimizers:
            optimizer.step()


Step = Callable[[Any, int], None]


def plain_step(model: nn.Module, step: int) -> None:
    """What most cases do in a step: a forward and a backward."""
    loss_of(model(data(step))).backward()


def check_steps(
    stock: nn.Module,
    compiled: nn.Module,
    run: Step = plain_step,
    steps: int = 3,
    exact: bool = True,
    synchronised: bool = True,
) -> None:
    """``run(model, step)`` on both, with SGD behind it; gradients are compared after each, and parameters at the end.

    Args:
        exact, synchronised: see ``check_gradients``.
    """
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (stock, compiled)]
    for step in range(steps):
        for model, optimizer in zip((stock, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            run(model, step)
        check_gradients(stock, compiled, exact, synchronised)
        for optimizer in optimizers:
            optimizer.step()
    for (name, expected), (_, found) in zip(
        stock.named_parameters(), compiled.named_parameters(), strict=True
    ):
        check_close(found, expected, name, exact and gradients_are_exact())


def check_buffers(stock: nn.Module, compiled: nn.Module, exact: bool = False) -> None:
    for (name, expected), (_, found) in zip(stock.named_buffers(), compiled.named_buffers(), strict=True):
        check_close(found, expected, f"buffer {name}", exact)


def is_in_graph(compiled: Any) -> bool:
    return inspect_ddp(compiled).plan is not None


def check_in_graph(compiled: Any) -> None:
    """The module's gradients are reduced inside its compiled backwards, also if it were called now."""
    assert is_in_graph(compiled), _reason(compiled)


def check_reducer(compiled: Any, reason: str) -> None:
    """The module keeps stock DDP's reducer, also if it were called now, for a reason that says this."""
    assert not is_in_graph(compiled), "the module took the in-graph way"
    assert reason in _reason(compiled), f"the reason is {_reason(compiled)!r}"


def _reason(compiled: Any) -> str:
    return inspect_ddp(compiled).reason_for_reducer or ""
