"""The folder of an exported pipeline: a manifest, and a folder for each stage, of which a rank reads its own only."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from gradsplit.compile_core.export.exported import Exported, load_export
from gradsplit.compile_core.export.folder import MANIFEST, ExportError
from gradsplit.distributed.pipeline.layout import PipelineLayout
from gradsplit.distributed.pipeline.split_graph import Split

KIND = "gradsplit pipeline"
VERSION = 1
PIPELINE = "pipeline.json"


def write_pipeline(folder: str | os.PathLike[str], split: Split) -> None:
    """Writes the folder, which appears as a whole or not at all.

    Raises:
        FileExistsError: there is something of that name.
    """
    place = Path(folder)
    if place.exists():
        raise FileExistsError(f"{place} exists; a pipeline is exported to a folder of its own")
    place.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        for stage, part in enumerate(split.stages):
            part.save(work / _name(stage))
        data = split.layout.as_data()
        # A stage's own manifest has the checksums of its files.
        stages = [
            _checksum((work / _name(stage) / MANIFEST).read_bytes()) for stage in range(len(split.stages))
        ]
        content: dict[str, Any] = {"kind": KIND, "version": VERSION, "layout": data, "stages": stages}
        content["checksum"] = _checksum(json.dumps(content, sort_keys=True).encode())
        (work / PIPELINE).write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
        work.chmod(0o755)
        work.rename(place)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def read_layout(folder: str | os.PathLike[str]) -> tuple[PipelineLayout, str]:
    """The layout of an exported pipeline, and the checksum of all of it.

    Raises:
        ExportError: it is none, damaged, or of another version.
    """
    place = Path(folder) / PIPELINE
    content = _read(place)
    return PipelineLayout.read(content["layout"]), content["checksum"]


def read_stage(folder: str | os.PathLike[str], stage: int, device: torch.device | str) -> Exported:
    """One stage of an exported pipeline, on a device.

    Raises:
        ExportError: the stage is missing, damaged, or another export's.
    """
    place = Path(folder)
    content = _read(place / PIPELINE)
    count = len(content["stages"])
    if not 0 <= stage < count:
        raise ExportError(f"{place} has the stages 0 to {count - 1}, and no stage {stage}")
    path = place / _name(stage)
    if not (path / MANIFEST).is_file():
        raise ExportError(
            f"{place} lacks stage {stage}: there is no {path.name}/{MANIFEST}; copy the whole folder"
        )
    exported = load_export(path)
    if _checksum((path / MANIFEST).read_bytes()) != content["stages"][stage]:
        raise ExportError(
            f"{path} is no stage of this pipeline: it is of another export; copy the whole folder"
        )
    return exported.on(device) if torch.device(device).type != exported.device else exported


def _read(place: Path) -> dict[str, Any]:
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExportError(f"{place.parent} holds no exported pipeline: there is no {place.name}") from None
    except (OSError, ValueError) as error:
        raise ExportError(f"{place} is damaged: {error}; export again") from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise ExportError(f"{place.parent} holds no {KIND}")
    if content.get("version") != VERSION:
        raise ExportError(
            f"{place} was written in version {content.get('version')} of the format, and this gradsplit reads version "
            f"{VERSION}; export again with it"
        )
    expected = content.pop("checksum", None)
    if expected != _checksum(json.dumps(content, sort_keys=True).encode()):
        raise ExportError(f"{place} is damaged: it is not what was written; export again")
    return {**content, "checksum": expected}


def _name(stage: int) -> str:
    return f"stage_{stage}"


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
