"""A few of the random sequences of ``random_steps.py``."""

from __future__ import annotations

from tests.multi_process.ddp_harness import case
from tests.multi_process.random_steps import run_random_steps


@case("cpu")
def random_sequences() -> None:
    for seed in range(4):
        run_random_steps(seed)
