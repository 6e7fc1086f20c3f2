"""Times of steps in rows, for things that are compared: they take turns, so that all see the same machine.

In training the host runs ahead of the GPU. A step behind a synchronisation begins with an idle GPU, a host that was
asleep, and ranks that come out of a barrier at different times; so a row begins with steps in which the host gets ahead
and the ranks fall into step, and which are not timed. A GPU that begins to work is cool and fast; after about a second
it is at its power limit and stays there, so the first seconds do not count.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

# Steps at the beginning of a row on a GPU. CUDA queues about a thousand launches, which is a few steps.
LEAD_IN = 5


@dataclass(frozen=True)
class Row:
    """Some steps in a row, as one rank saw them.

    Attributes:
        step_ms: the median of them; by CUDA events, where there are any.
        sm_mhz: the GPU's clock in the middle of them; 0 without a GPU.
        watts: the GPU's power, of which the driver gives the mean over about the last second.
    """

    step_ms: float
    sm_mhz: float = 0.0
    watts: float = 0.0


def run_row(step: Callable[[], object], device: torch.device, length: int) -> Row:
    synchronise(device)
    if device.type != "cuda":
        moments_s = [time.perf_counter()]
        for _ in range(length):
            step()
            moments_s.append(time.perf_counter())
        return Row(1e3 * statistics.median(end - begin for begin, end in pairwise(moments_s)))
    for _ in range(LEAD_IN):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(length + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    sm_mhz, watts = torch.cuda.clock_rate(), torch.cuda.power_draw() / 1e3
    torch.cuda.synchronize()
    steps_ms = [begin.elapsed_time(end) for begin, end in pairwise(events)]
    return Row(statistics.median(steps_ms), sm_mhz, watts)


def rows_in_turn(
    runs: Mapping[str, Callable[[], Row]],
    warm_up_s: float,
    rows: int,
    agree: Callable[[bool], bool] = lambda mine: mine,
) -> dict[str, list[Row]]:
    """By name, rows of each. Each round has another order: what a GPU at its power limit did before shows in a row.

    Args:
        agree: makes one answer of all ranks' where runs are collective.
    """
    begin = time.monotonic()
    while agree(time.monotonic() - begin < warm_up_s):
        for run in runs.values():
            run()
    found: dict[str, list[Row]] = {name: [] for name in runs}
    names, orders = [*runs], random.Random(0)
    for _ in range(rows):
        orders.shuffle(names)
        for name in names:
            found[name].append(runs[name]())
    return found


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
