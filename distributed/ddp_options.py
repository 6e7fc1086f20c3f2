"""What a user may choose about data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distributed.averaging import WIRE_TYPES


@dataclass(frozen=True)
class DDPOptions:
    """Settings of a compiled ``DistributedDataParallel`` module.

    Attributes:
        agreement_timeout_s: seconds that ranks wait for one another to agree on a plan before the job ends with an
            error; the slowest rank's compilation must fit in it.
        gradient_compression: ``"bf16"`` or ``"fp16"``: float32 gradients are averaged over ranks in this type, and are
            float32 again in ``param.grad``, as with stock DDP's ``bf16_compress_hook``. ``None``: as they are.
        step_in_backward: an optimizer over parameters of the module, which every synchronised backward steps: those
            of a bucket when its all-reduce is done and the rest of the backward does not read them.
            ``optimizer.step()`` is not called then. Gradients are as ever, to be set to zero as ever. It is for loops
            in which nothing happens between backward and step: no clipping, no GradScaler, one backward a step.

    Raises:
        ValueError: a time that is not positive, or an unknown compression.
    """

    agreement_timeout_s: float = 60.0
    gradient_compression: str | None = None
    step_in_backward: torch.optim.Optimizer | None = None

    def __post_init__(self) -> None:
        if not self.agreement_timeout_s > 0:
            raise ValueError(f"agreement_timeout_s must be positive, not {self.agreement_timeout_s!r}")
        if self.gradient_compression not in (None, *WIRE_TYPES):
            known = ", ".join(map(repr, WIRE_TYPES))
            raise ValueError(
                f"gradient_compression must be None or one of {known}, not {self.gradient_compression!r}"
            )
