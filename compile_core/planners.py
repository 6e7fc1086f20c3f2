"""The plug-in point for data parallelism: who compiles a module of a type that this package does not know.

``compile`` must know what to do with a ``DistributedDataParallel`` without this package importing the one that does it.
A plug-in is a ``ModuleCompiler``; it is found under the entry-point group ``compile_core.planners``, or, in a checkout
that was not installed, as the name ``PLUGIN`` in a module ``compile_core_plugin`` of a package beside this one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from compile_core.backends.registry import Backend
from compile_core.options import CompileOptions


@dataclass(frozen=True)
class CompileRequest:
    """The arguments of one ``compile`` call, checked."""

    backend: Backend
    options: CompileOptions
    fullgraph: bool
    dynamic: bool | None = None


@dataclass(frozen=True)
class ModuleCompiler:
    """A plug-in.

    Attributes:
        module_type: the modules it claims, subclasses included.
        compile: module and request -> what calls of the compiled module run.
    """

    module_type: type[torch.nn.Module]
    compile: Callable[[Any, CompileRequest], Callable[..., Any]]


def claim(module: torch.nn.Module) -> ModuleCompiler | None:
    """The plug-in for this module, if there is one."""
    for plugin in _plugins():
        if isinstance(module, plugin.module_type):
            return plugin
    return None


@functools.cache
def _plugins() -> tuple[ModuleCompiler, ...]:
    found = {
        point.value.partition(":")[0]: point.load() for point in entry_points(group="compile_core.planners")
    }
    beside = Path(__file__).parent.parent
    for path in sorted(beside.glob("*/compile_core_plugin.py")):
        name = f"{path.parent.name}.{path.stem}"
        if name not in found:
            found[name] = importlib.import_module(name).PLUGIN
    return tuple(found.values())
