"""The folder of an exported pipeline: a manifest, and a folder for each stage, of which a rank reads its own only."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from gradsplit.compile_core.export.exported import Exported, load_export
from gradsplit.compile_core.export.folder import (
    MANIFEST,
    ExportError,
    fingerprint,
    new_folder,
    read_manifest,
)
from gradsplit.distributed.pipeline.layout import PipelineLayout
from gradsplit.distributed.pipeline.split_graph import Split

KIND = "gradsplit pipeline"
VERSION = 3
PIPELINE = "pipeline.json"


def write_pipeline(folder: str | os.PathLike[str], split: Split) -> None:
    """Writes the folder, which appears as a whole or not at all.

    Raises:
        FileExistsError: there is something of that name.
    """
    with new_folder(folder) as work:
        for stage, part in enumerate(split.stages):
            part.save(work / _name(stage))
        # A stage's own manifest has the fingerprints of its files.
        stages = [fingerprint(work / _name(stage) / MANIFEST) for stage in range(len(split.stages))]
        content: dict[str, Any] = {
            "kind": KIND,
            "version": VERSION,
            "layout": split.layout.as_data(),
            "stages": stages,
        }
        content["checksum"] = _checksum(content)
        (work / PIPELINE).write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")


def read_layout(folder: str | os.PathLike[str]) -> tuple[PipelineLayout, str]:
    """The layout of an exported pipeline, and the checksum of all of it.

    Raises:
        ExportError: it is none, damaged, or of another version.
    """
    content = _read(Path(folder))
    return PipelineLayout.read(content["layout"]), content["checksum"]


def read_stage(folder: str | os.PathLike[str], stage: int, device: torch.device | str) -> Exported:
    """One stage of an exported pipeline, on a device.

    Raises:
        ExportError: the stage is missing, damaged, or another export's.
    """
    place = Path(folder)
    content = _read(place)
    count = len(content["stages"])
    if not 0 <= stage < count:
        raise ExportError(f"{place} has the stages 0 to {count - 1}, and no stage {stage}")
    path = place / _name(stage)
    if not (path / MANIFEST).is_file():
        raise ExportError(
            f"{place} lacks stage {stage}: there is no {path.name}/{MANIFEST}; copy the whole folder"
        )
    exported = load_export(path, device)
    if fingerprint(path / MANIFEST) != content["stages"][stage]:
        raise ExportError(
            f"{path} is no stage of this pipeline: it is of another export; copy the whole folder"
        )
    return exported


def _read(place: Path) -> dict[str, Any]:
    content = read_manifest(place / PIPELINE, KIND, VERSION)
    written = content.pop("checksum", None)
    if written != _checksum(content):
        raise ExportError(f"{place / PIPELINE} is damaged: it is not what was written; export again")
    return {**content, "checksum": written}


def _name(stage: int) -> str:
    return f"stage_{stage}"


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
