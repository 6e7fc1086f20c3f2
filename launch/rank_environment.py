"""The environment of a process of the user's program: torchrun's, and nothing of MPI."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path

from gradsplit.launch import job_record
from gradsplit.launch.errors import LaunchError
from gradsplit.launch.launch_spec import LaunchSpec
from gradsplit.launch.mpi_variables import without_mpi_variables
from gradsplit.launch.rank_placement import RankPlacement
from gradsplit.launch.rendezvous import Rendezvous

SPEC_VARIABLE = "GRADSPLIT_LAUNCH_SPEC"
"""Carries the spec (JSON) from the launcher that started ``mpiexec`` to its ranks."""


def inherited_environment(environment: Mapping[str, str], local_world_size: int) -> dict[str, str]:
    """Return this supervisor's ``environment`` as the user's program shall see it."""
    inherited = without_mpi_variables(environment)
    # The last would be left over from an outer torchrun, and be false here: no agent hosts the store, rank 0 does.
    for name in (SPEC_VARIABLE, job_record.VARIABLE, "TORCHELASTIC_USE_AGENT_STORE"):
        inherited.pop(name, None)
    inherited.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if local_world_size > 1:  # With a thread for every processor each, they would get in each other's way.
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        inherited.setdefault("OMP_NUM_THREADS", str(max(1, processors // local_world_size)))
    return inherited


def torchrun_variables(
    spec: LaunchSpec,
    placement: RankPlacement,
    rendezvous: Rendezvous,
    restart_count: int,
    visible_devices: str | None,
    bound: bool = False,
) -> dict[str, str]:
    """Return torchrun's variables, the error file aside. ``visible_devices``: the supervisor's own, if restricted.
    ``bound``: they are one device, which is this rank's alone."""
    variables = {
        **placement.torchrun_variables(),
        **rendezvous.torchrun_variables(),
        "ROLE_NAME": spec.role,
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(signal.Signals(s).name for s in spec.ending_signals),
    }
    if bound:
        variables["LOCAL_RANK"] = "0"
    elif spec.virtual_local_rank:
        devices = visible_devices.split(",") if visible_devices is not None else None
        device = str(placement.local_rank) if devices is None else devices[placement.local_rank].strip()
        variables |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": device}
    return variables


def prepare_ranks(
    spec: LaunchSpec, files: Mapping[RankPlacement, Path], visible_devices: str | None, bound: bool = False
) -> None:
    """Make the folders of ranks' files. Raises `LaunchError` where a rank cannot be started."""
    devices = visible_devices.split(",") if visible_devices is not None else None
    for placement, folder in files.items():
        if (
            spec.virtual_local_rank
            and not bound
            and devices is not None
            and placement.local_rank >= len(devices)
        ):
            raise LaunchError(
                f"--virtual-local-rank: local rank {placement.local_rank} on {placement.hostname} has no device in "
                f"CUDA_VISIBLE_DEVICES={visible_devices}"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"--log-dir: {str(folder)!r} on {placement.hostname}: {error.strerror}"
            ) from error
