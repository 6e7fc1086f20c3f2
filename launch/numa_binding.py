"""``--numa-binding``: the processors on which a rank's process runs, near its GPU, as torchrun chooses them.

What torch does in each process after its import (``torch/numa/binding.py``), without that import: the four modes are
described there.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from gradsplit.launch.devices import Gpu, gpu_of
from gradsplit.launch.errors import LaunchError

MODES = ("node", "socket", "exclusive", "core-complex")


def processors_near(
    mode: str, gpus: list[Gpu], visible: str | None, local_rank: int, system: Path = Path("/sys")
) -> list[int]:
    """Return the processors for the process of ``local_rank`` by ``mode``, of those that this process may use."""
    gpu = gpu_of(gpus, visible, local_rank)
    if gpu is None:
        raise LaunchError(f"--numa-binding {mode}: local rank {local_rank} has no GPU that the driver shows")
    allowed = os.sched_getaffinity(0)
    processors = system / "devices/system/cpu"

    def of_node(node: int) -> set[int]:
        return numbers((system / f"devices/system/node/node{node}/cpulist").read_text()) & allowed

    def first_of(file: str) -> Callable[[int], int]:
        return lambda cpu: min(numbers((processors / f"cpu{cpu}" / file).read_text()))

    try:
        node = _node_of(gpu, system)
        chosen = of_node(node)
        # Those that share the node, among which it is divided; each process sees the same.
        others = [gpu_of(gpus, visible, rank) for rank in range(len(gpus))]
        here = [rank for rank, other in enumerate(others) if other and _node_of(other, system) == node]
        place = here.index(local_rank)
        if mode == "socket":
            package = "topology/physical_package_id"
            socket = first_of(package)(min(chosen))
            nodes = numbers((system / "devices/system/node/possible").read_text())
            cpus = set().union(*(of_node(n) for n in nodes))
            chosen = {cpu for cpu in cpus if first_of(package)(cpu) == socket}
        elif mode == "exclusive":
            cores = _groups(chosen, first_of("topology/thread_siblings_list"))
            each, more = divmod(len(cores), len(here))
            start = place * each + min(place, more)
            chosen = set().union(*cores[start : start + each + (place < more)])
        elif mode == "core-complex":
            caches = sorted((processors / f"cpu{min(chosen)}/cache").glob("index*"))
            largest = max(caches, key=lambda cache: int((cache / "level").read_text()))
            complexes = _groups(chosen, first_of(f"cache/{largest.name}/shared_cpu_list"))
            complexes.sort(key=lambda group: (-len(group), min(group)))
            chosen = complexes[place % len(complexes)]
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"--numa-binding {mode}: the system does not tell where {gpu.uuid} is: {error}"
        ) from error
    if not chosen:
        raise LaunchError(f"--numa-binding {mode}: no processor that may be used is near {gpu.uuid}")
    return sorted(chosen)


def _node_of(gpu: Gpu, system: Path) -> int:
    address = gpu.pci_address[-12:].lower()  # The driver writes the domain with eight digits.
    return max(int((system / "bus/pci/devices" / address / "numa_node").read_text()), 0)


def _groups(cpus: Iterable[int], first: Callable[[int], int]) -> list[set[int]]:
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        groups.setdefault(first(cpu), set()).add(cpu)
    return [groups[key] for key in sorted(groups)]


def numbers(text: str) -> set[int]:
    """Return the numbers of the kernel's lists: ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found
