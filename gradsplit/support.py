"""``python -m gradsplit.support``: which private parts of torch gradsplit relies on, and what goes without those that
this torch does not have."""

from __future__ import annotations

import importlib
import pkgutil
import platform
import shutil
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.table import Table

from gradsplit import __version__
from gradsplit.compile_core import torch_facts
from gradsplit.compile_core.capture.code_objects.python_versions import KNOWN_VERSIONS
from gradsplit.compile_core.torch_facts.private_parts import PRIVATE_PARTS, TESTED_TORCHES


def private_parts_table() -> Table:
    """One line a private part: its name, whether it is there, what it is for and what happens without it."""
    for module in pkgutil.iter_modules(torch_facts.__path__, torch_facts.__name__ + "."):
        importlib.import_module(module.name)
    table = Table("part of torch", "there", "used for", "without it")
    for part in sorted(PRIVATE_PARTS.values(), key=lambda part: (part.present, part.name)):
        table.add_row(part.name, "yes" if part.present else "NO", part.purpose, part.without)
    return table


def versions_table() -> Table:
    """Python, torch and what builds kernels, each with what goes without it."""
    table = Table("", "here", "tested with", "without it")
    known = ", ".join(".".join(map(str, version)) for version in KNOWN_VERSIONS)
    table.add_row("CPython", platform.python_version(), known, "programs run as plain Python")
    table.add_row("torch", torch.__version__, " to ".join(TESTED_TORCHES), "see below, part by part")
    compiler = shutil.which("g++") or "NO"
    table.add_row("C++ compiler", compiler, "g++", "on the CPU, torch's own kernels")
    table.add_row("triton", "yes" if find_spec("triton") else "NO", "", "on GPUs, torch's own kernels")
    return table


def main() -> None:
    console = Console(width=None if Console().is_terminal else 200)
    console.print(f"gradsplit {__version__}")
    console.print(versions_table())
    console.print(private_parts_table())
    missing = [part for part in PRIVATE_PARTS.values() if not part.present]
    console.print(f"{len(PRIVATE_PARTS)} private parts of torch; {len(missing)} are not there")


if __name__ == "__main__":
    main()
