"""What a captured graph is made of, as lines that are equal in all processes that run the same program.

Ranks compare the lines before their first collective depends on the graph. A rank whose batch has another size has the
same operators, so numbers are left out: sizes of tensors, nodes that compute with sizes, numbers among the arguments.
An integer stays where the operator's schema calls it a dim, and where it picks one of several results. What is left
says which operators run, on which parameters and in which dtypes. Nothing of it depends on the process: no addresses,
device indices, names of process groups or paths.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import fx

from compile_core.ir.captured import CapturedGraph, GraphInput
from compile_core.ir.sources import path_words

_NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)
_TORCH_FOLDER = str(Path(torch.__file__).parent)
_SHORT_MODULES = {"torch.nn.functional": "F", "torch._C._nn": "F", "_operator": "operator"}
_UNNAMED_MODULES = ("builtins", "torch.functional", "torch._VF")
# Collectives in a graph name their process group.
_COLLECTIVES = re.compile(r"c10d")
_DEVICE = re.compile(r"(cpu|cuda|hip|xpu|mps|meta)(:\d+)?")


@dataclass(frozen=True)
class GraphFingerprint:
    """Lines that say what a graph is, whatever its sizes.

    Attributes:
        lines: its inputs, then its operators.
        places: for each line the user's line that it comes from, or ""; ranks may have their programs in different
            folders, so this is no part of the identity.
        open_sizes: the dims and numbers that may differ between calls, a line for each input that has some; no part of
            the identity either.
    """

    lines: tuple[str, ...]
    places: tuple[str, ...]
    open_sizes: tuple[str, ...]

    @functools.cached_property
    def digest(self) -> str:
        """Equal exactly where the lines are."""
        return digest_of(self.lines)


def digest_of(lines: Sequence[str]) -> str:
    """A short name for lines of text."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def first_difference(ours: Sequence[str], theirs: Sequence[str]) -> int | None:
    """The position of the first line in which two texts differ."""
    pairs = enumerate(itertools.zip_longest(ours, theirs))
    return next((position for position, (mine, other) in pairs if mine != other), None)


def graph_fingerprint(captured: CapturedGraph) -> GraphFingerprint:
    """Describes a captured graph."""
    names = {entry.name: _input_name(entry) for entry in captured.inputs}
    kinds = {entry.name: entry.kind for entry in captured.inputs}
    described = list(_Lines(names, kinds).of_graph(captured.module.graph, ""))
    # Inputs come in the order of their first use, which the operators tell better.
    inputs = sum(node.op == "placeholder" and _matters(node) for node in captured.module.graph.nodes)
    described[:inputs] = sorted(described[:inputs])
    return GraphFingerprint(
        lines=tuple(line for line, _ in described),
        places=tuple(place for _, place in described),
        open_sizes=tuple(shown for entry in captured.inputs if (shown := _open_sizes(entry))),
    )


class _Lines:
    """Writes the lines of one graph and of the graphs that it holds."""

    def __init__(self, names: dict[str, str], kinds: dict[str, str]) -> None:
        self._inputs = names
        self._kinds = kinds
        self._shown: dict[fx.Node, str] = {}
        self._numbers = itertools.count()

    def of_graph(self, graph: fx.Graph, indent: str) -> Any:
        for node in graph.nodes:
            example = node.meta.get("example_value")
            if node.op == "output":
                yield f"{indent}return {self._argument(node.args[0])}", ""
            elif not _matters(node):
                continue
            elif node.op == "get_attr" and isinstance(example, fx.GraphModule):
                self._shown[node] = f"body {next(self._numbers)}"
                yield f"{indent}{self._shown[node]}:", ""
                yield from self.of_graph(example.graph, indent + "    ")
            elif node.op == "get_attr":
                self._shown[node] = _object(example)
            elif node.op == "placeholder":
                kind = self._kinds.get(node.name, "input")
                name = self._shown[node] = self._inputs.get(node.name) or f"%{next(self._numbers)}"
                gradient = " requires_grad" if getattr(example, "requires_grad", False) else ""
                yield f"{indent}{kind} {name}: {_value(example)}{gradient}", ""
            else:
                call = self._call(node)
                self._shown[node] = f"%{next(self._numbers)}"
                yield f"{indent}{self._shown[node]}: {_value(example)} = {call}", _place(node)

    def _call(self, node: fx.Node) -> str:
        name = _target(node.target)
        dims = _dim_arguments(name.rpartition(".")[2])
        picks = name == "operator.getitem" and not isinstance(_example(node.args[0]), torch.Tensor)
        left_out = _sizes_of_bodies(node)
        shown = []
        for position, given in enumerate(node.args):
            if position in left_out:
                continue
            keeps = picks or position in dims or (dims.variadic and position >= min(dims.positions))
            shown.append(self._argument(given, keeps))
        for keyword, given in sorted(node.kwargs.items()):
            shown.append(f"{keyword}={self._argument(given, 'dim' in keyword)}")
        if _COLLECTIVES.search(name):
            shown = [text for text in shown if not text.startswith("'")]
        if node.op == "call_method":
            return f"{shown[0]}.{name}({', '.join(shown[1:])})"
        return f"{name}({', '.join(shown)})"

    def _argument(self, given: Any, keeps_integers: bool = False) -> str:
        if isinstance(given, fx.Node):
            return self._shown.get(given, "n")
        if isinstance(given, (tuple, list)):
            inner = ", ".join(self._argument(item, keeps_integers) for item in given)
            return f"[{inner}]" if isinstance(given, list) else f"({inner})"
        if isinstance(given, dict):
            return f"{{{', '.join(f'{key}: {self._argument(item)}' for key, item in given.items())}}}"
        if isinstance(given, slice):
            return f"{self._argument(given.start)}:{self._argument(given.stop)}:{self._argument(given.step)}"
        if given is None or given is Ellipsis or isinstance(given, (bool, torch.dtype, Enum)):
            return str(given)
        if isinstance(given, _NUMBERS):
            return str(given) if keeps_integers and isinstance(given, int) else "n"
        if isinstance(given, str):
            return repr(_text(given))
        return given.type if isinstance(given, torch.device) else _object(given)


@dataclass(frozen=True)
class _DimArguments:
    """Which positions of an operator's arguments are dims; all that follow too if ``variadic``, as in ``permute``."""

    positions: frozenset[int]
    variadic: bool

    def __contains__(self, position: int) -> bool:
        return position in self.positions


def _matters(node: fx.Node) -> bool:
    """Whether a node is more than a number, or a tensor of which only sizes are read: those are inputs if open."""
    if _is_number(node.meta.get("example_value")):
        return False
    return node.op != "placeholder" or any(map(_matters, node.users))


def _sizes_of_bodies(call: fx.Node) -> set[int]:
    """Of a call that is given bodies, the positions of arguments of which these read only sizes."""
    bodies = [example for given in call.args if isinstance(example := _example(given), fx.GraphModule)]
    if not bodies:
        return set()
    inputs = [body.graph.find_nodes(op="placeholder") for body in bodies]
    first = len(call.args) - len(inputs[0])  # what a body takes comes last
    return {
        first + position
        for position, nodes in enumerate(zip(*inputs, strict=False))
        if not any(map(_matters, nodes))
    }


@functools.cache
def _dim_arguments(name: str) -> _DimArguments:
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    schemas = [] if packet is None else [getattr(packet, overload)._schema for overload in packet.overloads()]
    positions = frozenset(
        position
        for schema in schemas
        for position, argument in enumerate(schema.arguments)
        if "dim" in argument.name and not argument.kwarg_only and "bool" not in str(argument.type)
    )
    return _DimArguments(positions, name in ("permute", "flip") and bool(positions))


def _target(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    name = getattr(target, "__qualname__", None)
    if name is None:
        return _object(target)
    module = getattr(target, "__module__", None)
    if not module:
        return name.rpartition(".")[2]
    if module == "torch":  # functions in C are methods of a class that is no matter
        name = name.rpartition(".")[2]
    return name if module in _UNNAMED_MODULES else f"{_SHORT_MODULES.get(module, module)}.{name}"


def _object(value: Any) -> str:
    """What the graph holds, by its type; functions and classes by name."""
    if isinstance(value, torch.Tensor):
        return f"constant {_value(value)}"
    named = value if callable(value) and hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _value(example: Any) -> str:
    if isinstance(example, torch.Tensor):
        dtype = str(example.dtype).removeprefix("torch.")
        return f"{dtype} {example.device.type}"
    if isinstance(example, (tuple, list)):
        return f"({', '.join(map(_value, example))})"
    return "n" if isinstance(example, _NUMBERS) else type(example).__name__


def _text(given: str) -> str:
    """A string without what differs between processes."""
    device = _DEVICE.fullmatch(given)
    if device is not None:
        return device[1]
    return "..." if given.isdigit() or "/" in given else given


def _is_number(example: Any) -> bool:
    if isinstance(example, (tuple, list)):
        return bool(example) and all(map(_is_number, example))
    return isinstance(example, _NUMBERS) and not isinstance(example, bool)


def _example(given: Any) -> Any:
    return given.meta.get("example_value") if isinstance(given, fx.Node) else given


def _input_name(entry: GraphInput) -> str:
    words = path_words(entry.source)
    return ".".join(words[1:] if words[0] == "self" and len(words) > 1 else words)


def _open_sizes(entry: GraphInput) -> str:
    if not isinstance(entry.example, torch.Tensor):
        return f"{_input_name(entry)} is open" if entry.is_open else ""
    if not entry.is_open:
        return ""
    dims = [str(dim) for dim, size in enumerate(entry.example.shape) if isinstance(size, torch.SymInt)]
    return f"{_input_name(entry)} has open dims {', '.join(dims) or '(strides only)'}"


def _place(node: fx.Node) -> str:
    """The innermost line of the program that is not torch's own."""
    lines = [line.strip() for line in node.meta.get("stack_trace", "").splitlines()]
    places = list(itertools.pairwise(lines))
    users = [
        f"{where}: {text}"
        for where, text in places
        if where.startswith("File ") and not where.startswith(f'File "{_TORCH_FOLDER}')
    ]
    return users[-1] if users else ""
