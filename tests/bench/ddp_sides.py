"""What ``ddp_training`` measures: stock DDP, eager and under ``torch.compile``; ours; and the floors under both.

Not all that DDP costs is a matter of when all-reduces start. What any schedule pays is measured by our step without DDP
and something beside it: a tiny all-reduce at its end, for which ranks wait as for gradients (``ours-joined``), and one
of as many bytes as all gradients have, which nothing waits for before the backward ends (``ours-beside``): it takes
power, memory bandwidth and multiprocessors from what is computed meanwhile.

A side is a context manager that takes a model and its inputs, and gives a step to call again and again. Settings that
a side needs hold inside of the context only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd, trace_rules
from torch.nn.parallel import DistributedDataParallel

import gradsplit
from gradsplit.distributed import DDPOptions, compile_ddp

Inputs = Mapping[str, Tensor]
Call = Callable[..., Tensor]
MEBIBYTE = 2**20
# All-reduces beside a backward: many would cost start-ups.
_FEW = 4


@dataclass(frozen=True)
class Running:
    """A side that is set up.

    Attributes:
        step: one step; returns its loss, or nothing.
        call: what the step calls, for questions about it; ``None`` where nothing is called.
        model: what is trained, if anything is.
        forward: the step without its backward; there with a model.
    """

    step: Callable[[], Tensor | None]
    call: Any = None
    model: nn.Module | None = None
    forward: Callable[[], Tensor] | None = None


Side = Callable[[nn.Module, Inputs], AbstractContextManager[Running]]
# Another step with what a side has compiled.
Variant = Callable[[Running], Running]


@contextmanager
def _training(
    wrap: Callable[[nn.Module], Call],
    model: nn.Module,
    inputs: Inputs,
    settings: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Running]:
    with settings():
        call = wrap(model)
        device_type = next(model.parameters()).device.type

        def forward() -> Tensor:
            model.zero_grad()
            with torch.autocast(device_type, torch.bfloat16):
                return call(**inputs)

        def step() -> Tensor:
            loss = forward()
            loss.backward()
            return loss.detach()

        yield Running(step, call, model, forward)


def _forward_only(running: Running) -> Running:
    def step() -> Tensor:
        assert running.forward is not None
        return running.forward().detach()

    return replace(running, step=step)


def _joined(running: Running) -> Running:
    assert running.model is not None
    one = _like_all_gradients(running.model)[:1].clone()

    def step() -> Tensor | None:
        loss = running.step()
        dist.all_reduce(one)
        return loss

    return replace(running, step=step)


def _beside(running: Running) -> Running:
    assert running.model is not None
    flat = _like_all_gradients(running.model)
    buffers = flat.chunk(_FEW)

    def step() -> Tensor:
        assert running.forward is not None
        loss = running.forward()
        works = _started(buffers)
        loss.backward()
        _wait(works)
        return loss.detach()

    return replace(running, step=step)


@contextmanager
def _all_reduces(bucket_bytes: int | None, model: nn.Module, inputs: Inputs) -> Iterator[Running]:
    """All gradients and nothing else, in buffers of this size or in one."""
    flat = _like_all_gradients(model)
    buckets: Sequence[Tensor] = [flat] if bucket_bytes is None else flat.split(bucket_bytes // flat.itemsize)

    def step() -> None:
        _wait(_started(buckets))

    yield Running(step)


def _like_all_gradients(model: nn.Module) -> Tensor:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numel = sum(parameter.numel() for parameter in parameters)
    return torch.zeros(numel, dtype=parameters[0].dtype, device=parameters[0].device)


def _started(buffers: Sequence[Tensor]) -> list[Any]:
    return [dist.all_reduce(buffer, async_op=True) for buffer in buffers]


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _ddp(module: nn.Module) -> DistributedDataParallel:
    device = next(module.parameters()).device
    return DistributedDataParallel(module, device_ids=[device.index] if device.type == "cuda" else None)


def _compiled_ddp(module: nn.Module, ddp_options: DDPOptions | None = None, **options: Any) -> Call:
    return compile_ddp(_ddp(module), ddp_options, **options)


@contextmanager
def _optimize_ddp(mode: str) -> Iterator[None]:
    with torch._dynamo.config.patch(optimize_ddp=mode):
        yield


@contextmanager
def _python_reducer() -> Iterator[None]:
    """Torch's Python reducer, which compiled autograd traces; DDP's constructor changes global settings for it."""
    inlined = "torch.nn.parallel.distributed"
    known = inlined in trace_rules.LEGACY_MOD_INLINELIST
    with (
        _optimize_ddp("python_reducer"),
        inductor_config.patch(_fuse_ddp_communication=False, _fuse_ddp_bucket_size=25),
        compiled_autograd._enable(torch.compile, dynamic=False),
    ):
        try:
            yield
        finally:
            if not known:
                trace_rules.LEGACY_MOD_INLINELIST.discard(inlined)
                trace_rules.get_legacy_mod_inlinelist.cache_clear()


def _stock(mode: str) -> Side:
    return partial(
        _training, lambda module: torch.compile(_ddp(module)), settings=partial(_optimize_ddp, mode)
    )


# What takes little time and says most comes first.
SIDES: Mapping[str, Side] = {
    "all-reduce": partial(_all_reduces, None),
    "ours": partial(_training, gradsplit.compile),
    "ours-ddp": partial(_training, _compiled_ddp),
    "ours-overhead": partial(_training, partial(gradsplit.compile, mode="reduce-overhead")),
    "ours-ddp-overhead": partial(_training, partial(_compiled_ddp, mode="reduce-overhead")),
    "ours-ddp-nccl": partial(_training, partial(_compiled_ddp, ddp_options=DDPOptions(copy_engines=False))),
    "eager-ddp": partial(_training, _ddp),
    "inductor": partial(_training, torch.compile),
    "no-optimization": _stock("no_optimization"),
    "ddp-optimizer": _stock("ddp_optimizer"),
    "python-reducer": partial(
        _training, lambda module: torch.compile(_ddp(module)), settings=_python_reducer
    ),
    "bridge": partial(_training, partial(gradsplit.compile, backend="inductor")),
    "bridge-ddp": partial(_training, partial(_compiled_ddp, backend="inductor")),
    "all-reduce-25mb": partial(_all_reduces, 25 * MEBIBYTE),
}
# By name: which side's step is varied, and how.
VARIANTS: Mapping[str, tuple[str, Variant]] = {
    "ours-forward": ("ours", _forward_only),
    "ours-joined": ("ours", _joined),
    "ours-beside": ("ours", _beside),
}
# The peers whose best we compare with.
PEERS = ("ddp-optimizer", "python-reducer", "no-optimization")
# Ours under DDP.
OURS_UNDER_DDP = ("ours-ddp", "ours-ddp-nccl", "ours-ddp-overhead", "bridge-ddp")
# What each is compared with, and hence measured in turns with.
COMPARED_WITH: Mapping[str, str] = {
    "all-reduce": "ours",
    "ours-ddp": "ours",
    "ours-ddp-nccl": "ours",
    "ours-ddp-overhead": "ours-overhead",
    "bridge-ddp": "bridge",
    **{name: side for name, (side, _) in VARIANTS.items()},
}


def in_groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Sides and variants in groups that are measured together. A variant brings the side that it is of."""
    with_bases = [base for name in names for base in (*VARIANTS.get(name, ())[:1], name)]
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(with_bases):
        groups.setdefault(COMPARED_WITH.get(name, name), []).append(name)
    return [tuple(group) for group in groups.values()]
