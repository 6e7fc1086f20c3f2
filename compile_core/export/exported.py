"""``Exported``: one whole graph of a program, as data."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import fx

from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.export.conditions import ExportedTensor, compile_condition
from gradsplit.compile_core.export.exported_module import ExportedModule
from gradsplit.compile_core.export.folder import read_folder, write_folder
from gradsplit.compile_core.export.module_tree import Tree
from gradsplit.compile_core.export.parse_program import parse_program
from gradsplit.compile_core.export.print_program import print_program
from gradsplit.compile_core.export.structures import Structure

KIND = "gradsplit export"
VERSION = 1


@dataclass(frozen=True)
class Exported:
    """What ``gradsplit.export`` returns: a program without its Python.

    Attributes:
        name: of what was exported.
        graph: torch's operators as the program called them, before autograd: one placeholder for each tensor that is
            read (``meta["kind"]`` is argument, parameter, buffer or constant, ``meta["path"]`` its position among
            ``arguments`` or its name among ``tensors``), one output with a flat tuple. Each node has
            ``meta["spec"]``, what its value looks like, ``meta["module"]``, which module computes it, and
            ``meta["place"]``, the user's line.
        call: the structure of ``[args, kwargs]``; ``parameter_names`` are the names of what was given by position.
        result: the structure of the result.
        arguments: the tensors of a call in the order of ``call``.
        conditions: what must hold of open sizes, as Python over ``args`` and ``kwargs``.
        modules: parameters and buffers by module.
        tensors: parameters, buffers and constants by name, on the meta device where the program's were.
        training: whether the program was in training mode, if it read that; else None.
        devices: the type of device that the graph's own tensors are made on, if it makes any.
    """

    name: str
    graph: fx.Graph = field(repr=False)
    call: Structure = field(repr=False)
    parameter_names: tuple[str, ...]
    result: Structure = field(repr=False)
    arguments: tuple[ExportedTensor, ...]
    conditions: tuple[str, ...]
    modules: Tree = field(repr=False)
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    training: bool | None
    device: str

    def __str__(self) -> str:
        return print_program(self.graph)

    def module(self) -> ExportedModule:
        """A module that runs the graph, with the parameters and buffers of this, under their names.

        It is called as the program was, checks its arguments, trains, and may be compiled with any backend.
        """
        return ExportedModule(
            self.name,
            self.graph,
            self.call,
            self.parameter_names,
            self.result,
            self.arguments,
            self.conditions,
            self.modules,
            self.tensors,
            self.training,
        )

    def on(self, device: torch.device | str) -> Exported:
        """The same on another device: its tensors, and those that its graph makes."""
        device = torch.device(device)
        copy = fx.Graph()
        copy.output(copy.graph_copy(self.graph, {}))
        for node in copy.nodes:
            node.args = _moved(node.args, self.device, device)
            node.kwargs = _moved(node.kwargs, self.device, device)
        moved = {}
        for name, tensor in self.tensors.items():
            moved[name] = tensor if tensor.is_meta else tensor.detach().to(device)
            if isinstance(tensor, torch.nn.Parameter):
                moved[name] = torch.nn.Parameter(moved[name], tensor.requires_grad)
        given = {**self.__dict__, "graph": copy, "tensors": moved, "device": device.type}
        return Exported(**given)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes a folder: ``graph.txt``, ``tensors.safetensors``, ``export.json``. It appears as a whole or not at
        all.

        Raises:
            FileExistsError: there is something of that name.
        """
        data = {
            "name": self.name,
            "call": self.call,
            "parameter_names": list(self.parameter_names),
            "result": self.result,
            "arguments": [asdict(tensor) for tensor in self.arguments],
            "conditions": list(self.conditions),
            "modules": self.modules,
            "training": self.training,
            "device": self.device,
        }
        write_folder(folder, KIND, VERSION, data, {"graph.txt": str(self)}, self.tensors)


def load_export(folder: str | os.PathLike[str], device: torch.device | str | None = None) -> Exported:
    """What ``Exported.save`` wrote, without the program's source, on the CPU or on ``device``.

    Raises:
        ExportError: the folder is no export, damaged, or of another version.
    """
    contents = read_folder(folder, KIND, VERSION, ("graph.txt",))
    with contents.explained():
        data = contents.data
        for text in data["conditions"]:
            compile_condition(text)
        found = Exported(
            data["name"],
            parse_program(contents.texts["graph.txt"]),
            data["call"],
            tuple(data["parameter_names"]),
            data["result"],
            tuple(map(ExportedTensor.read, data["arguments"])),
            tuple(data["conditions"]),
            data["modules"],
            contents.tensors,
            data["training"],
            data["device"],
        )
        verify_exported(found)
        return found if device is None else found.on(device)


def verify_exported(exported: Exported) -> None:
    """Check the promises of ``Exported``; raises InternalError with the node and the rule that it breaks."""
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            kind, path = node.meta["kind"], node.meta["path"]
            known = path in range(len(exported.arguments)) if kind == "argument" else path in exported.tensors
            if not known:
                raise InternalError(f"{node.name}: there is no {kind} {path!r}")
        if node.op == "get_attr" or ("spec" not in node.meta and node.op != "output"):
            raise InternalError(f"{node.name}: not a node of an exported graph")
    output = list(exported.graph.nodes)[-1]
    if output.op != "output" or not all(isinstance(item, fx.Node) for item in output.args[0]):
        raise InternalError("an exported graph ends with a flat tuple of results")
    text = print_program(exported.graph)
    if print_program(parse_program(text)) != text:
        raise InternalError("an exported graph is another after it was written and read")
    if json.loads(json.dumps([exported.call, exported.result])) != [exported.call, exported.result]:
        raise InternalError(
            "the structures of an exported graph are another after they were written and read"
        )


def _moved(arguments: Any, old: str, new: torch.device) -> Any:
    if isinstance(arguments, torch.device):
        return new if arguments.type == old else arguments
    if isinstance(arguments, dict):
        return {key: _moved(value, old, new) for key, value in arguments.items()}
    if isinstance(arguments, (tuple, list)) and not hasattr(arguments, "_fields"):
        return type(arguments)([_moved(value, old, new) for value in arguments])
    return arguments
