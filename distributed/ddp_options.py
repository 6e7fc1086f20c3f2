"""What a user may choose about data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from gradsplit.distributed.collectives.averaging import WIRE_TYPES

Overlap = Literal["in_graph", "reducer"]


@dataclass(frozen=True)
class DDPOptions:
    """Settings of a compiled ``DistributedDataParallel`` module.

    Attributes:
        agreement_timeout_s: seconds that ranks wait at the first synchronised call of a module for one that does not
            come to it, before the job ends with an error on all of them. One that compiles is waited for longer.
        gradient_compression: ``"bf16"`` or ``"fp16"``: float32 gradients are averaged over ranks in this type, and are
            float32 again in ``param.grad``, as with stock DDP's ``bf16_compress_hook``. ``None``: as they are. Stock
            DDP's reducer does not heed it: it has communication hooks.
        copy_engines: GPUs of one host that reach one another's memory average gradients by copies, which leave the
            multiprocessors to the backward, instead of by NCCL's kernels. ``None``: of two ranks, those in buckets of
            at least 1 MiB. ``True``: all, of any number of ranks. ``False``: none. Where it cannot be, NCCL is used,
            with the reason logged. Such buckets are not in the memory that ``torch.cuda.memory_allocated`` counts.
        step_in_backward: an optimizer over parameters of the module, which every synchronised backward steps: those
            of a bucket when its all-reduce is done and the rest of the backward does not read them.
            ``optimizer.step()`` is not called then. Gradients are as ever, to be set to zero as ever. It is for loops
            in which nothing happens between backward and step: no clipping, no GradScaler, one backward a step.
        overlap: what hides the all-reduces under the backward. ``in_graph``: the compiled backward, cut where gradients
            are ready, which fills buckets of ours; where that does not apply, ``reducer`` is taken, with the reason
            logged. ``reducer``: stock DDP's reducer, with the forward cut on its buckets.

    Raises:
        ValueError: a time that is not positive, an unknown compression or ``overlap``, or copy engines for gradients
            that are to be compressed.
    """

    agreement_timeout_s: float = 60.0
    gradient_compression: str | None = None
    copy_engines: bool | None = None
    step_in_backward: torch.optim.Optimizer | None = None
    overlap: Overlap = "in_graph"

    def __post_init__(self) -> None:
        if self.overlap not in get_args(Overlap):
            raise ValueError(f"overlap must be one of {', '.join(get_args(Overlap))}, not {self.overlap!r}")
        if not self.agreement_timeout_s > 0:
            raise ValueError(f"agreement_timeout_s must be positive, not {self.agreement_timeout_s!r}")
        if self.gradient_compression not in (None, *WIRE_TYPES):
            known = ", ".join(map(repr, WIRE_TYPES))
            raise ValueError(
                f"gradient_compression must be None or one of {known}, not {self.gradient_compression!r}"
            )
        if self.copy_engines and self.gradient_compression:
            raise ValueError("copy_engines average gradients as they are: leave out gradient_compression")
