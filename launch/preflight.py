"""Before a job on several machines starts: what each rank has, in one table, and in words what differs.

On one machine all ranks have the same Python and the same script: nothing is compared there, and nothing waited for.
Nothing of the user's or of torch is imported to find out: versions of packages stand in files.
"""

import hashlib
import importlib.metadata
import os
import platform
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradsplit.launch.devices import Gpu, gpu_of, list_gpus
from gradsplit.launch.entry import check_entry
from gradsplit.launch.launch_spec import LaunchSpec
from gradsplit.launch.rank_placement import RankPlacement

TIMEOUT_S = 9.0
"""For a machine that is slow to answer, on a file system that hangs for example; the job starts all the same."""


def machine_facts(spec: LaunchSpec) -> dict[str, str]:
    """Return what this machine would run with, within `TIMEOUT_S`; what is not known by then is missing."""
    facts: dict[str, str] = {}

    def find_out() -> None:
        facts["Python"] = platform.python_version()
        facts["torch"] = _version("torch")
        facts["NCCL"] = next(filter(None, (_version(f"nvidia-nccl-cu{n}", "") for n in (13, 12))), "-")
        gpus = list_gpus()
        facts["GPUs"] = "\n".join(
            ",".join((gpu.index, gpu.uuid, gpu.driver, gpu.pci_address)) for gpu in gpus
        )
        facts["driver"] = gpus[0].driver if gpus else "-"
        script = check_entry(spec)
        facts["script"] = "-" if script is None else _hash([script])
        package = Path(__file__).absolute().parents[1]
        sources = (
            Path(folder, name) for folder, _, names in os.walk(package, followlinks=True) for name in names
        )
        facts["gradsplit"] = _hash(sorted(file for file in sources if file.suffix in (".py", ".cpp", ".h")))

    asking = threading.Thread(target=find_out, daemon=True)
    asking.start()
    asking.join(TIMEOUT_S)
    return dict(facts)


def preflight_table(
    placements: Sequence[RankPlacement],
    machines: Mapping[str, Mapping[str, str]],
    visible: Sequence[str | None],
    *,
    bound: bool,
) -> str:
    """Return the table of all ranks, and a line for each thing that is not as it should be.

    ``machines``: `machine_facts` by host name. ``visible``: each rank's CUDA_VISIBLE_DEVICES. ``bound``: each sees its
    own GPU alone.
    """
    titles = ("Python", "torch", "NCCL", "driver", "gradsplit", "script")
    rows: list[tuple[str, ...]] = [("rank", "host", "GPU", *titles)]
    users: dict[tuple[str, str], list[int]] = {}
    for place, devices in zip(placements, visible, strict=True):
        facts = machines[place.hostname]
        gpus = [Gpu(*line.split(",")) for line in facts.get("GPUs", "").splitlines()]
        gpu = gpu_of(gpus, devices, 0 if bound else place.local_rank)
        if gpu is not None:
            users.setdefault((place.hostname, gpu.uuid), []).append(place.rank)
        name = "-" if gpu is None else gpu.uuid
        rows.append((str(place.rank), place.hostname, name, *(facts.get(title, "?") for title in titles)))
    lines = [f"launch: {line}" for line in _aligned(rows)]
    for title in titles:
        holders: dict[str, list[str]] = {}
        for host, facts in machines.items():
            holders.setdefault(facts.get(title, "?"), []).append(host)
        if len(holders) > 1:
            each = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in holders.items())
            lines.append(f"launch: the machines differ in {title}: {each}")
    for (host, uuid), ranks in users.items():
        if len(ranks) > 1:
            lines.append(f"launch: ranks {', '.join(map(str, ranks))} on {host} share {uuid}")
    without = [place.rank for place in placements if not any(place.rank in ranks for ranks in users.values())]
    if users and without:
        lines.append(f"launch: ranks without a GPU: {', '.join(map(str, without))}")
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _version(package: str, otherwise: str = "-") -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return otherwise


def _hash(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:10]
