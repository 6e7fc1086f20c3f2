"""The folder that an export is saved as: texts, tensors as safetensors, and a manifest in JSON that knows all the rest.

A folder is written beside its place and renamed when all of it is on disk, so that nobody finds half of one. The
manifest has the kind and version, the sizes and checksums of the other files, and what JSON can hold; it is written
last. Nothing in a folder is code, nor a pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gradsplit.compile_core.errors import InternalError

MANIFEST = "export.json"
TENSORS = "tensors.safetensors"


class ExportError(ValueError):
    """A folder that holds no export that can be loaded; the message says why and what to do."""


@dataclass(frozen=True)
class FolderContents:
    """What a folder holds: the manifest's data, texts by file name, tensors by name."""

    folder: Path
    data: dict[str, Any]
    texts: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor]

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Makes one clear error of what does not fit together, though each file is whole."""
        try:
            yield
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, InternalError) as error:
            raise ExportError(f"{self.folder} is no export that this gradsplit can load: {error}") from error


def write_folder(
    folder: str | os.PathLike[str],
    kind: str,
    version: int,
    data: Mapping[str, Any],
    texts: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Writes a folder that ``read_folder`` reads. Of meta tensors only what they look like is written.

    Raises:
        FileExistsError: there is something of that name.
    """
    with new_folder(folder) as work:
        for name, text in texts.items():
            (work / name).write_text(text, encoding="utf-8")
        with_data = {name: _plain(tensor) for name, tensor in tensors.items() if not tensor.is_meta}
        save_file(with_data, work / TENSORS)
        manifest = {
            "kind": kind,
            "version": version,
            "torch": torch.__version__,
            "data": dict(data),
            "tensors": {name: _described(tensor) for name, tensor in tensors.items()},
            "files": {name: fingerprint(work / name) for name in (*texts, TENSORS)},
        }
        text = json.dumps(manifest, indent=1, allow_nan=False)
        (work / MANIFEST).write_text(text, encoding="utf-8")


def read_folder(
    folder: str | os.PathLike[str], kind: str, version: int, texts: Sequence[str]
) -> FolderContents:
    """What ``write_folder`` wrote, tensors on the CPU.

    Raises:
        ExportError: see there.
    """
    place = Path(folder)
    manifest = read_manifest(place / MANIFEST, kind, version)
    contents = FolderContents(place, manifest.get("data", {}), {}, {})
    with contents.explained():
        for name in (*texts, TENSORS):
            expected = manifest["files"][name]
            if not (place / name).is_file():
                raise ExportError(f"{place} lacks {name}; copy the whole folder, or export again")
            if fingerprint(place / name) != expected:
                raise ExportError(f"{place / name} is damaged: it is not what was written; export again")
        found = {name: (place / name).read_text(encoding="utf-8") for name in texts}
        try:
            loaded = load_file(place / TENSORS)
        except (SafetensorError, OSError) as error:
            raise ExportError(f"{place / TENSORS} is damaged: {error}; export again") from error
        tensors = {name: _restored(name, as_, loaded) for name, as_ in manifest["tensors"].items()}
    return FolderContents(place, manifest["data"], found, tensors)


@contextmanager
def new_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to fill, which is at its place, on disk, once the block has ended well, and else never was.

    Raises:
        FileExistsError: there is something of that name.
    """
    place = Path(folder)
    if place.exists():
        raise FileExistsError(f"{place} exists; an export is written to a folder of its own")
    place.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        yield work
        for file in work.iterdir():
            if file.is_file():
                with open(file, "rb") as written:
                    os.fsync(written.fileno())
        work.chmod(0o777 & ~_umask())
        work.rename(place)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def read_manifest(path: Path, kind: str, version: int) -> dict[str, Any]:
    """A file of JSON that says of what kind and version its folder is.

    Raises:
        ExportError: it is missing, damaged, or says something else.
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExportError(f"{path.parent} holds no {kind}: there is no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ExportError(f"{path} is damaged: {error}; export again") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != kind:
        raise ExportError(f"{path.parent} holds no {kind}")
    if manifest.get("version") != version:
        raise ExportError(
            f"{path.parent} was written in version {manifest.get('version')} of the format, and this gradsplit reads "
            f"version {version}; export again with it"
        )
    return manifest


def fingerprint(path: Path) -> dict[str, Any]:
    """The size and checksum of a file."""
    with open(path, "rb") as file:
        return {
            "bytes": os.fstat(file.fileno()).st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order, in memory of their own."""
    return tensor.detach().cpu().contiguous().clone()


def _described(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "parameter": isinstance(tensor, torch.nn.Parameter),
        "requires_grad": tensor.requires_grad,
        "data": not tensor.is_meta,
    }


def _restored(name: str, described: Mapping[str, Any], loaded: Mapping[str, torch.Tensor]) -> torch.Tensor:
    dtype = getattr(torch, described["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ExportError(f"the tensor {name} has no dtype")
    device = "cpu" if described["data"] else "meta"
    made = torch.empty_strided(described["shape"], described["stride"], dtype=dtype, device=device)
    if described["data"]:
        given = loaded[name]
        if given.dtype is not dtype or given.shape != made.shape:
            raise ExportError(f"the tensor {name} is another than the manifest says")
        # What was loaded lies anywhere in the file, and kernels round otherwise where memory is not aligned.
        made.copy_(given)
    return torch.nn.Parameter(made, described["requires_grad"]) if described["parameter"] else made


def _umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before
