"""Whether the GPUs of a process group's ranks reach one another's memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradsplit.distributed.group_backend import backend_of

# Distinguishes hosts of one name.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class _RankPlace:
    """What ranks must know of one another before they share memory."""

    host: str
    device: int | None
    reachable: frozenset[int]
    backend: str
    forbidden: str = ""


def reason_against(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why the ranks of this group cannot share memory, or "". A collective; all ranks get the same answer."""
    boot_id = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    others = (index for index in range(count) if index != device.index)
    reachable = frozenset(
        index for index in others if torch.cuda.can_device_access_peer(device.index or 0, index)
    )
    host = socket.gethostname() + boot_id
    mine = _RankPlace(host, device.index, reachable, backend_of(group, device), _forbidding_setting())
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return _reason_of(found)


def _forbidding_setting() -> str:
    """The setting that keeps NCCL from copying between GPUs directly, as ``NAME=value``; empty if there is none."""
    for name, forbids in (("NCCL_P2P_DISABLE", ("1",)), ("NCCL_P2P_LEVEL", ("LOC", "0"))):
        if os.environ.get(name) in forbids:
            return f"{name}={os.environ[name]}"
    return ""


def _reason_of(places: Sequence[_RankPlace]) -> str:
    """The same, of the places of all ranks."""
    if len(places) == 1:
        return "there is one rank"
    if any(place.backend != "nccl" for place in places):
        return "the process group is not NCCL's"
    if settings := {place.forbidden for place in places} - {""}:
        return f"{min(settings)} is set"
    if len({place.host for place in places}) > 1:
        return "ranks are on several hosts"
    devices = {place.device for place in places}
    if len(devices) < len(places):
        return "each process sees its GPU alone"
    for place in places:
        if missing := devices - place.reachable - {place.device}:
            return f"GPU {place.device} does not reach the memory of GPU {min(map(str, missing))}"
    return ""
