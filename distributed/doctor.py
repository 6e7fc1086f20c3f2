"""``python -m gradsplit.launch doctor``: what the machines of a job have, how fast their ranks reach each other, and
what is wrong, in words.

The launcher starts this program on all ranks as it would any other. Every step but the last report is collective.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from gradsplit.bucketing.link_model import LinkModel, fit_link_model

_SIZES = tuple(4096 * 16**power for power in range(4))
_REPETITIONS = 7
_CONNECT_S = 3.0
_MEETING_S = 60
SKEW_S = 0.5
"""Clocks that differ by more are reported: the first failure of a job is found by them."""


def machine() -> dict[str, Any]:
    """Return what there is to know of this machine without the others."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = None
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    gpus = [torch.cuda.get_device_properties(i).name for i in range(torch.cuda.device_count())]
    pairs = [(a, b) for a in range(len(gpus)) for b in range(len(gpus)) if a != b]
    return {
        "name": name,
        "address": address,
        "ranks": int(os.environ["LOCAL_WORLD_SIZE"]),
        "torch": torch.__version__,
        "gpus": gpus,
        "apart": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus and dist.is_nccl_available() else None,
        "fabric": {
            str(port.relative_to("/sys/class/infiniband")): (port / "state").read_text().split()[-1]
            for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
        },
        "shared_bytes": None if shared is None else shared.f_frsize * shared.f_blocks,
    }


def complaints(
    machines: Sequence[Mapping[str, Any]],
    unreachable: Sequence[tuple[str, str]],
    ahead_s: Mapping[str, float],
    within: Mapping[str, LinkModel],
) -> list[str]:
    """Return what is wrong, a sentence each. ``unreachable``: from and to; ``ahead_s``: of rank 0's clock."""
    problems = []
    for here in machines:
        name = here["name"]
        if here["address"] is None:
            problems.append(
                f"{name}: its host name has no address; add it to /etc/hosts, or give --master-addr"
            )
        elif len(machines) > 1 and here["address"].startswith("127.0.1."):
            problems.append(
                f"{name}: its host name means {here['address']}, where no other machine reaches it; mend /etc/hosts, "
                "or give --master-addr"
            )
        if 0 < len(here["gpus"]) < here["ranks"]:
            problems.append(
                f"{name}: {here['ranks']} ranks for {len(here['gpus'])} GPUs; give --nproc-per-node gpu"
            )
        if here["gpus"] and here["nccl"] is None:
            problems.append(f"{name}: this torch has no NCCL, and gloo moves GPU tensors through the host")
        if here["apart"]:
            problems.append(
                f"{name}: GPUs {here['apart'][0]} cannot read each other's memory; see nvidia-smi topo -m"
            )
        down = [port for port, state in here["fabric"].items() if state != "ACTIVE"]
        if down:
            problems.append(f"{name}: not active: {', '.join(down)}")
        if here["shared_bytes"] is not None and here["shared_bytes"] < 1 << 30:
            problems.append(
                f"{name}: /dev/shm has {here['shared_bytes'] >> 20} MiB, which NCCL and data loaders share; a "
                "container gets more with --shm-size"
            )
    for what in "torch", "nccl":
        if len({here[what] for here in machines}) > 1:
            held = ", ".join(f"{here[what]} on {here['name']}" for here in machines)
            problems.append(f"the machines differ in {what}: {held}")
    if (
        len(machines) > 1
        and any(here["gpus"] for here in machines)
        and not any(h["fabric"] for h in machines)
    ):
        problems.append("no InfiniBand or RoCE port is seen: NCCL goes over TCP between the machines")
    problems += [f"{a} cannot connect to a fresh port of {b}; is there a firewall?" for a, b in unreachable]
    for name, seconds in ahead_s.items():
        if abs(seconds) > SKEW_S:
            problems.append(
                f"the clock of {name} is {abs(seconds):.1f} s {'ahead' if seconds > 0 else 'late'}: of failures on "
                "several machines the first is found by clocks; see chronyc tracking"
            )
    usual = statistics.median(link.seconds_per_byte for link in within.values()) if within else 0.0
    for name, link in within.items():
        if link.seconds_per_byte > 2 * usual:
            problems.append(
                f"{name}: its ranks all-reduce at less than half the speed of those of other machines"
            )
    return problems


def measure(group: Any, device: torch.device) -> dict[int, float]:
    """Return the seconds of an all-reduce by bytes, those of the slowest rank of ``group``."""
    found = {}
    for size in _SIZES:
        data = torch.zeros(size // 4, device=device)
        seconds = []
        for _ in range(_REPETITIONS):
            dist.barrier(group)
            start = time.perf_counter()
            dist.all_reduce(data, group=group)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        slowest = torch.tensor(statistics.median(seconds[2:]), device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        found[size] = float(slowest)
    return found


def _gather(value: Any) -> list[Any]:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    return everywhere


def _connections(leads: bool, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return which machines of ``names`` cannot be reached from which others, by ranks that lead one each."""
    listener = socket.create_server(("", 0)) if leads else None
    own = socket.gethostname()
    ports = [place for place in _gather(listener and (own, listener.getsockname()[1])) if place]
    failed = []
    for name, port in ports if leads else []:
        try:
            socket.create_connection((name, port), _CONNECT_S).close()
        except OSError:
            failed.append((own, name))
    gathered = _gather(failed)  # All have tried: what listens may end.
    if listener is not None:
        listener.close()
    return [pair for pairs in gathered for pair in pairs if len(names) > 1]


def _clocks(leaders: Sequence[int]) -> dict[int, float]:
    """Return by how much the clock of each leader is ahead of rank 0's; known to rank 0."""
    ahead: dict[int, float] = {}
    rank, when = dist.get_rank(), torch.zeros(1, dtype=torch.float64)
    for leader in leaders:
        best_s = float("inf")
        for _ in range(10 * (leader != 0)):
            if rank == 0:
                start = time.time()
                dist.send(when, leader)
                dist.recv(when, leader)
                end = time.time()
                if end - start < best_s:  # The quickest answer is the most exact one.
                    best_s, ahead[leader] = end - start, float(when) - (start + end) / 2
            elif rank == leader:
                dist.recv(when, 0)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
    return ahead


def main() -> int:
    """Examine the machines together; rank 0 prints the report. Returns 1 where the ranks do not meet."""
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_MEETING_S))
    except Exception as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        print(f"the ranks do not meet at {place}: {error}; is the port open between the machines?")
        return 1
    local_rank, rank = int(os.environ["LOCAL_RANK"]), dist.get_rank()
    places = _gather((int(os.environ["GROUP_RANK"]), local_rank < torch.cuda.device_count()))
    by_node: dict[int, list[int]] = {}
    for other, (node, _) in enumerate(places):
        by_node.setdefault(node, []).append(other)
    leaders = [ranks[0] for ranks in by_node.values()]
    found = _gather(machine() if rank in leaders else None)
    machines = [found[leader] for leader in leaders]
    names = [here["name"] for here in machines]
    unreachable = _connections(rank in leaders, names)
    ahead = {found[leader]["name"]: seconds for leader, seconds in _clocks(leaders).items()}
    nccl = all(has_gpu for _, has_gpu in places) and dist.is_nccl_available()
    device = torch.device("cuda", local_rank) if nccl else torch.device("cpu")
    if nccl:
        torch.cuda.set_device(device)
    backend = "nccl" if nccl else "gloo"
    groups = {f"the ranks of {name}": ranks for name, ranks in zip(names, by_node.values(), strict=True)}
    groups |= {"one rank a machine": leaders, "all ranks": list(range(len(places)))}
    groups = {what: ranks for what, ranks in groups.items() if len(ranks) > 1}
    if len(machines) == 1:
        groups.pop("all ranks", None)
    times = {}
    for what, ranks in groups.items():  # One after another: they do not share a link.
        group = dist.new_group(ranks, backend=backend)
        mine = measure(group, device) if rank in ranks else None
        times[what] = _gather(mine)[ranks[0]]
    links = {what: fit_link_model(list(measured.items())) for what, measured in times.items()}
    within = {name: links[what] for name in names if (what := f"the ranks of {name}") in links}
    problems = complaints(machines, unreachable, ahead, within)
    if rank == 0:
        _report(machines, backend, groups, times, links, ahead, problems)
    dist.destroy_process_group()
    return 0


def _report(
    machines: Sequence[Mapping[str, Any]],
    backend: str,
    groups: Mapping[str, Sequence[int]],
    times: Mapping[str, Mapping[int, float]],
    links: Mapping[str, LinkModel],
    ahead: Mapping[str, float],
    problems: Sequence[str],
) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table("machine", "address", "ranks", "GPUs", "torch", "NCCL", "fabric", "clock", box=None)
    for here in machines:
        gpus = f"{len(here['gpus'])} {here['gpus'][0]}" if here["gpus"] else "none"
        fabric = ", ".join(f"{port} {state}" for port, state in here["fabric"].items()) or "TCP"
        skew = f"{ahead.get(here['name'], 0.0) * 1e3:+.1f} ms"
        cells = (
            here["address"] or "none",
            str(here["ranks"]),
            gpus,
            here["torch"],
            here["nccl"] or "-",
            fabric,
        )
        table.add_row(here["name"], *cells, skew)
    console.print(table)
    if times:
        table = Table(f"all-reduce by {backend}", *(f"{size >> 10} KiB" for size in _SIZES), "GB/s", box=None)
        for what, measured in times.items():
            count, largest = len(groups[what]), max(measured)
            speed = 2 * (count - 1) / count * largest / measured[largest] / 1e9
            cells = (f"{seconds * 1e6:.0f} µs" for seconds in measured.values())
            table.add_row(f"{what} ({count})", *cells, f"{speed:.2f}")
        console.print(table)
        for what, link in links.items():
            console.print(f"{what}: {link}", soft_wrap=True, highlight=False)
    for line in problems or ["nothing is wrong"]:
        console.print(line, soft_wrap=True, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
