"""The modules of a program by name: which tensor each parameter and buffer is, as data, and modules made of that
again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

Tree = dict[str, Any]

# The child of a loaded module that holds what the program read beside its parameters and buffers.
CONSTANTS = "_constants"


def describe_modules(
    module: nn.Module, tensor_names: dict[int, str], path: str = "", seen: dict[int, str] | None = None
) -> Tree:
    """Parameters, buffers and submodules by name. A tensor in several places has its first name in all of them, as
    ``tensor_names`` notes by identity; a module in several places is described once, and by its path elsewhere."""
    seen = {} if seen is None else seen
    if id(module) in seen:
        return {"same_as": seen[id(module)]}
    seen[id(module)] = path
    tree: Tree = {"parameters": {}, "buffers": {}, "modules": {}}
    for name, parameter in module._parameters.items():
        tree["parameters"][name] = (
            parameter if parameter is None else _name(parameter, path, name, tensor_names)
        )
    for name, buffer in module._buffers.items():
        given = None if buffer is None else _name(buffer, path, name, tensor_names)
        tree["buffers"][name] = [given, name not in module._non_persistent_buffers_set]
    for name, child in module._modules.items():
        if child is not None:
            inner = f"{path}.{name}" if path else name
            tree["modules"][name] = describe_modules(child, tensor_names, inner, seen)
    return tree


def _name(tensor: torch.Tensor, path: str, name: str, names: dict[int, str]) -> str:
    return names.setdefault(id(tensor), f"{path}.{name}" if path else name)


def fill_modules(root: nn.Module, tree: Tree, tensors: Mapping[str, torch.Tensor]) -> None:
    """Gives a module the parameters, buffers and submodules of a description; submodules are plain ones."""
    _fill(root, tree, tensors, {"": root}, "")


def _fill(
    module: nn.Module,
    tree: Tree,
    tensors: Mapping[str, torch.Tensor],
    made: dict[str, nn.Module],
    path: str,
) -> None:
    for name, tensor in tree["parameters"].items():
        module.register_parameter(name, None if tensor is None else tensors[tensor])  # type: ignore[arg-type]
    for name, (tensor, persistent) in tree["buffers"].items():
        module.register_buffer(name, None if tensor is None else tensors[tensor], persistent=persistent)
    for name, child in tree["modules"].items():
        inner = f"{path}.{name}" if path else name
        if "same_as" in child:
            module.add_module(name, made[child["same_as"]])
            continue
        made[inner] = nn.Module()
        module.add_module(name, made[inner])
        _fill(made[inner], child, tensors, made, inner)


def add_tensor(tree: Tree, path: str, is_parameter: bool) -> None:
    """Describe one more tensor at ``path``, in modules made for it."""
    *places, name = path.split(".")
    for place in places:
        tree = tree["modules"].setdefault(place, {"parameters": {}, "buffers": {}, "modules": {}})
    if is_parameter:
        tree["parameters"][name] = path
    else:
        tree["buffers"][name] = [path, True]
