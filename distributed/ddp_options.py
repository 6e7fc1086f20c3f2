"""What a user may choose about data parallelism."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DDPOptions:
    """Settings of a compiled ``DistributedDataParallel`` module.

    Attributes:
        agreement_timeout_s: seconds that ranks wait for one another to agree on a plan before the job ends with an
            error; the slowest rank's compilation must fit in it.

    Raises:
        ValueError: a time that is not positive.
    """

    agreement_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.agreement_timeout_s > 0:
            raise ValueError(f"agreement_timeout_s must be positive, not {self.agreement_timeout_s!r}")
