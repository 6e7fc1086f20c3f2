"""Which GPU is whose: those of this machine, and those that a scheduler has given to single processes."""

import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradsplit.launch.rank_placement import RankPlacement

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_ASKING_S = 8


@dataclass(frozen=True)
class Gpu:
    """What the driver reports of one."""

    index: str
    uuid: str
    driver: str
    pci_address: str


def list_gpus() -> list[Gpu]:
    """Return this machine's NVIDIA GPUs, in the driver's order; of those only that this process may use."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = "--query-gpu=index,uuid,driver_version,pci.bus_id"
    try:
        listed = subprocess.run(
            [program, query, "--format=csv,noheader"],
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASKING_S,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [Gpu(*words) for line in listed.stdout.splitlines() if len(words := line.split(", ")) == 4]


def gpu_of(gpus: Sequence[Gpu], visible: str | None, local_rank: int) -> Gpu | None:
    """Return the GPU that is device ``local_rank`` of a process with this CUDA_VISIBLE_DEVICES; None without one."""
    names = [gpu.index for gpu in gpus] if visible is None else [name.strip() for name in visible.split(",")]
    if local_rank >= len(names) or not names[local_rank]:
        return None
    name = names[local_rank]
    return next((gpu for gpu in gpus if name == gpu.index or gpu.uuid.startswith(name)), None)


def bound_to_one_device(
    world: Any, placements: Sequence[RankPlacement], environment: Mapping[str, str]
) -> bool:
    """Return whether this supervisor's one process has a device of its own, the only one that it sees.

    Then that is device 0, whatever the local rank. Schedulers give each rank another device in a variable, or, with
    control groups, the same number 0: those are distinguished by what the driver shows. Called on all supervisors.
    """
    values = (environment.get(name, "").strip() for name in _VARIABLES)
    own = next((value for value in values if value and "," not in value), None)
    devices = world.gather_everywhere(own)
    if not _all_different(placements, devices) and any(devices):
        seen = list_gpus() if own is not None else []
        devices = world.gather_everywhere(seen[0].uuid if len(seen) == 1 else own)
    return _all_different(placements, devices)


def _all_different(placements: Sequence[RankPlacement], devices: Sequence[str | None]) -> bool:
    """Return whether each rank has a device, and those of a machine have different ones."""
    held = Counter(zip((place.hostname for place in placements), devices, strict=True))
    return None not in devices and max(held.values()) == 1
