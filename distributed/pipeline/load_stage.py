"""``load_stage``: a stage of an exported pipeline, on the rank that runs it."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from gradsplit.compile_core.export.folder import ExportError
from gradsplit.compile_core.interface.module_compilers import CompileRequest
from gradsplit.distributed.agreement.agreement import agreement_of
from gradsplit.distributed.group_backend import backend_of
from gradsplit.distributed.pipeline.export_folder import read_layout, read_stage
from gradsplit.distributed.pipeline.pipeline_stage import CompiledStage
from gradsplit.distributed.pipeline.rank_step import RankStep

# The largest block, with its header, whose release makes glibc keep twice as much, instead of what it measured so far.
_LARGEST_MEASURED_BYTES = (32 << 20) - (64 << 10)
# How long ranks that load a stage wait for one that does not come to an agreement.
_MEETING_S = 60.0

# By pipeline, the steps of this rank's stages.
_steps: weakref.WeakValueDictionary[tuple[str, int], RankStep] = weakref.WeakValueDictionary()


def load_stage(
    path: str | os.PathLike[str],
    stage: int,
    device: torch.device | str = "cpu",
    *,
    backend: str | Callable[..., Any] | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    replicas: dist.ProcessGroup | None = None,
) -> CompiledStage:
    """A stage for torch's pipeline schedules. All ranks of the group call it, each as often as it has stages.

    Args:
        path: a folder that ``export_pipeline`` has written, of which only this stage is read.
        stage: which.
        device: where it runs.
        backend, mode, options: as ``gradsplit.compile`` takes them.
        group: of the pipeline's ranks; the default group without.
        replicas: of the ranks that have this stage, one in each of several pipelines; its gradients are averaged.

    Raises:
        ExportError: on every rank, if any rank's stage is missing or damaged, or ranks have different exports.
        ValueError: an unknown backend or option.
    """
    request = CompileRequest.of(True, None, backend, mode, options)
    place = torch.device(device)
    problem, checksum, layout, part = "", "", None, None
    try:
        layout, checksum = read_layout(path)
        part = read_stage(path, stage, place)
    except ExportError as error:
        problem = str(error)
    key = ("" if layout is None else layout.identity, id(group))
    step = _steps.get(key)
    loaded, term, is_known = _compare(problem, checksum, stage, group, "" if step is None else step.name)
    if replicas is not None:
        stages, _, _ = _compare("", checksum, stage, replicas)
        if len(set(stages)) > 1:
            raise ValueError(f"replicas have one stage in common, and these ranks load {stages}")
    assert layout is not None and part is not None
    # From here on ranks look after one another: who waits for one that has failed raises an error that names it.
    agreement_of(group or dist.group.WORLD).settle("loads a stage of a pipeline", _MEETING_S)  # type: ignore[arg-type]
    if place.type == "cpu":
        _keep_freed_memory()
    if step is None or not is_known:
        # Of the backends that torch has, one; NCCL reads what was sent in the order in which it was sent.
        has_tags = backend_of(group or dist.group.WORLD, place) == "gloo"  # type: ignore[arg-type]
        _steps[key] = step = RankStep(term, layout, place, group, has_tags)
    step.note_loaded(loaded, term)
    return CompiledStage(layout, stage, part, place, request, group, step, replicas)


def _keep_freed_memory() -> None:
    """Makes the C library keep up to 64 MiB at the end of its heap that are free.

    What microbatches in flight hold comes and goes in each step. When more than twice the largest block that was ever
    freed is free, glibc gives the end of its heap back to the kernel, to take it again page by page.
    """
    torch.empty(_LARGEST_MEASURED_BYTES, dtype=torch.uint8)  # freed at once; not a page of it is touched


def _compare(
    problem: str, checksum: str, stage: int, group: dist.ProcessGroup | None, known: str = ""
) -> tuple[list[int], str, bool]:
    """The stages that the ranks of a group load, a new name that all of them have now, and whether they know the same
    step; each rank raises what any of them has met.

    Args:
        known: the name of this rank's step. One rank may still have that of stages which are gone, and which another
            has collected already: such a rank would use communicators that the other makes anew.

    Raises:
        ExportError: one of them cannot, or they have different exports.
    """
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (problem, checksum, stage, uuid.uuid4().hex, known), group=group)
    for rank, (theirs, *_) in enumerate(found):
        if theirs:
            raise ExportError(f"rank {rank} cannot load its stage: {theirs}")
    others = [rank for rank, (_, theirs, *_) in enumerate(found) if theirs != found[0][1]]
    if others:
        raise ExportError(
            f"ranks 0 and {others[0]} load stages of different exports; give all ranks the same folder"
        )
    is_known = bool(known) and all(theirs == known for *_, theirs in found)
    return [stage for _, _, stage, _, _ in found], found[0][3], is_known
