"""Names in state_dicts that were saved through a wrapper: ``_orig_mod.`` of ``torch.compile``, ``module.`` of DDP.

A name is a path through submodules. It is walked through the module that loads it: a wrapper's step that the module
does not have is left out, and one that the module has and the name lacks is put in. So a name that fits as it is stays
as it is, and what fits nowhere is an unexpected key as ever. Nothing but these two wrappers is guessed at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_COMPILED, _WRAPPED = "_orig_mod", "module"


def changed_names(names: Iterable[str], module: torch.nn.Module, prefix: str = "") -> dict[str, str]:
    """What names must become for ``module`` to find them; those that stay are left out.

    Args:
        names: of parameters and buffers. Two of them never become the same: then the one that fits stays alone.
        prefix: where the module is in what is loaded; names that do not begin so are not its own.
    """
    used = set(names)
    changed: dict[str, str] = {}
    for name in names:
        if not name.startswith(prefix):
            continue
        *path, last = name[len(prefix) :].split(".")
        fitting = prefix + ".".join([*_fit(path, module), last])
        if fitting not in used:
            changed[name] = fitting
            used.add(fitting)
    return changed


def with_fitting_names(state_dict: Mapping[str, Any], module: torch.nn.Module) -> Mapping[str, Any]:
    """A state_dict with the names that ``module`` has; itself if they fit.

    The versions of modules that torch keeps beside the tensors go with the names.
    """
    changed = changed_names(state_dict, module)
    if not changed:
        return state_dict
    fitting: Any = OrderedDict((changed.get(name, name), value) for name, value in state_dict.items())
    versions: Mapping[str, Any] | None = getattr(state_dict, "_metadata", None)
    if versions is not None:
        # A wrapper and what it wraps may end at one module: the longer path is the module's own, and comes last.
        paths = sorted(versions, key=len)
        fitting._metadata = {
            ".".join(_fit(path.split(".") if path else [], module)): versions[path] for path in paths
        }
    return fitting


def _fit(path: list[str], module: torch.nn.Module) -> list[str]:
    """The path to a submodule, of that module's own tree; from the first step that is unknown on it stays as it is."""
    owner = module
    found: list[str] = []
    for position, step in enumerate(path):
        may_skip = step in (_COMPILED, _WRAPPED)
        while step not in owner._modules and not may_skip and (inner := _wrapped(owner)) is not None:
            found.append(_WRAPPED)
            owner = inner
        child = owner._modules.get(step)
        if child is not None:
            found.append(step)
            owner = child
        elif not may_skip:
            return found + path[position:]
    while (inner := _wrapped(owner)) is not None:
        found.append(_WRAPPED)
        owner = inner
    return found


def _wrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    """The other module, where a module holds nothing else, under the name that DDP gives it."""
    if list(module._modules) == [_WRAPPED] and not module._parameters and not module._buffers:
        return module._modules[_WRAPPED]
    return None
