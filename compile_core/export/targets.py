"""The functions and methods that an exported graph may call, and their names in its text.

A file is material of somebody else's, so a name is not looked up wherever it leads: only functions that compute with
tensors, in the places listed here, can be called by a graph that was loaded.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from gradsplit.compile_core.ir import data_checks
from gradsplit.compile_core.torch_facts.bindings import NATIVE_NN, VARIABLE_FUNCTIONS, torch_native

# Reads files, shares memory with processes, or calls what it is given.
_NEVER = {
    "from_file",
    "apply_",
    "map_",
    "map2_",
    "share_memory_",
    "attrgetter",
    "itemgetter",
    "methodcaller",
    "call",
}

# Modules -> the names in them that may be called, None for all functions of tensors.
_PLACES: dict[str, tuple[Any, tuple[str, ...] | None]] = {
    "torch": (torch, None),
    "torch.nn.functional": (F, None),
    "torch.functional": (torch.functional, None),
    "torch.fft": (torch.fft, None),
    "torch.linalg": (torch.linalg, None),
    "torch.special": (torch.special, None),
    "torch._C._nn": (NATIVE_NN, None),
    "torch._C": (torch_native, ("_set_grad_enabled",)),
    "torch.amp.autocast_mode": (torch.amp.autocast_mode, ("_enter_autocast", "_exit_autocast")),
    "operator": (operator, None),
    "gradsplit": (data_checks, ("check_assumption",)),
    "math": (math, None),
}
# What of torch itself is no native function and yet one of numbers.
_OF_NUMBERS = ("sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sum", "sym_sqrt")


def _functions(place: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    module, names = _PLACES[place]
    if names is None:
        native = dir(VARIABLE_FUNCTIONS)
        names = tuple(name for name in (*native, *_OF_NUMBERS)) if place == "torch" else tuple(dir(module))
        names = tuple(name for name in names if not name.startswith("__") and name not in _NEVER)
    for name in names:
        found = getattr(module, name, None)
        if callable(found) and not isinstance(found, type):
            yield name, found


@functools.cache
def _names() -> dict[Any, str]:
    """The name of each function; of several, that of the place which is listed first."""
    found: dict[Any, str] = {}
    for place in _PLACES:
        for name, function in _functions(place):
            found.setdefault(function, f"{place}.{name}")
    return found


@functools.cache
def _known() -> dict[str, Any]:
    return {f"{place}.{name}": function for place in _PLACES for name, function in _functions(place)}


def name_of_target(target: Any) -> str | None:
    """The name by which a graph's text calls a function, None where it cannot."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{target}"
    try:
        return _names().get(target)
    except TypeError:  # not hashable
        return None


def find_target(name: str) -> Any:
    """The function of a name, None where no exported graph may call it."""
    if not name.startswith("torch.ops."):
        return _known().get(name)
    found: Any = torch.ops
    for part in name.split(".")[2:]:
        found = None if part.startswith("_") and found is torch.ops else getattr(found, part, None)
    return found if isinstance(found, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) else None


def is_method(name: str) -> bool:
    """Whether a graph may call a method of this name on a value: those of tensors that stay within tensors."""
    return not name.startswith("__") and name not in _NEVER and callable(getattr(torch.Tensor, name, None))
