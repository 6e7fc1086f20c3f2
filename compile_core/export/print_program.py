"""An exported graph as text: one line of Python's syntax a node, which ``parse_program`` reads back.

    # in transformer.h.0.mlp
    # at "model.py", line 12, in forward: x = self.c_fc(x)
    linear: "float32[2, 8, 128]" = torch._C._nn.linear(x, c_fc_weight, c_fc_bias)

A state's line names the tensor (``parameter("transformer.wte.weight")``), an argument's its position among the
tensors of the call. The two kinds of comments hold from where they stand on: the module that computes, and the
user's line.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.export.targets import is_method, name_of_target
from gradsplit.compile_core.ir.captured import is_symbolic_number
from gradsplit.compile_core.ir.user_lines import stack_of, user_line

# Words of the text's own, which no node may have for a name.
RESERVED = ("torch", "operator", "math", "gradsplit", "slice", "complex", "float", "result")


def print_program(graph: fx.Graph) -> str:
    """The text of a graph whose nodes have ``spec``, and may have ``module`` and ``place``, in ``meta``.

    Raises:
        Unsupported: a node calls or holds what no text can say.
    """
    lines: list[str] = []
    module, place = "", ""
    for node in graph.nodes:
        now = node.meta.get("module", module)
        if now != module:
            lines.append(f"# in {now or 'the outermost call'}")
            module = now
        now = node.meta.get("place", place)
        if now != place:
            lines.append(f"# at {now}")
            place = now
        lines.append(_print_node(node))
    return "\n".join(lines) + "\n"


def place_of(node: fx.Node) -> str:
    """The user's innermost line that made a captured node."""
    place = user_line(node)
    return (
        "" if place is None else f'"{place.filename}", line {place.line}, in {place.function}: {place.text}'
    )


def show_spec(example: Any) -> str:
    """What a value looks like: ``float32[2, s0, 8]``, ``int``, ``(float32[2], int64[2])``."""
    if isinstance(example, torch.Tensor):
        return f"{str(example.dtype).removeprefix('torch.')}[{', '.join(map(str, example.shape))}]"
    if isinstance(example, (tuple, list)):
        return f"({', '.join(map(show_spec, example))})"
    return f"{example}" if is_symbolic_number(example) else type(example).__name__


def _print_node(node: fx.Node) -> str:
    if node.op == "output":
        return f"result({', '.join(_print(node, item) for item in node.args[0])})"  # type: ignore[union-attr]
    arguments = [_print(node, argument) for argument in node.args]
    arguments += [f"{key}={_print(node, value)}" for key, value in node.kwargs.items()]
    if node.op == "placeholder":
        call = f"{node.meta['kind']}({node.meta['path']!r})"
    elif node.op == "call_method" and isinstance(node.args[0], fx.Node) and is_method(str(node.target)):
        call = f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    else:
        name = name_of_target(node.target) if node.op == "call_function" else None
        if name is None:
            raise unwritable(node, f"a call of {_shown(node)}")
        call = f"{name}({', '.join(arguments)})"
    return f'{node.name}: "{node.meta["spec"]}" = {call}'


def unwritable(node: fx.Node, what: str) -> Unsupported:
    """The refusal of a node that the text of an exported graph has no words for."""
    stack = stack_of(node)
    return Unsupported(
        "export-unwritable",
        f"{what} cannot be written to a file: an exported graph calls torch's functions of tensors, with literals",
        "express it by torch's operators, or make it an operator of its own with torch.library.custom_op",
        user_line(node),
        stack,
    )


def _shown(node: fx.Node) -> str:
    target = node.meta.get("example_value") if node.op == "get_attr" else node.target
    return getattr(target, "__qualname__", None) or (
        target if isinstance(target, str) else type(target).__name__
    )


def _print(node: fx.Node, value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, torch.Size):
        value = tuple(value)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        items = [_print(node, item) for item in value]
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_print(node, key)}: {_print(node, item)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({', '.join(_print(node, part) for part in (value.start, value.stop, value.step))})"
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if type(value) is complex:
        return f"complex({_print(node, value.real)}, {_print(node, value.imag)})"
    if value is None or value is Ellipsis or type(value) in (bool, int, str):
        return "..." if value is Ellipsis else repr(value)
    raise unwritable(node, f"an argument of type {type(value).__name__}")


def rename_reserved(graph: fx.Graph) -> None:
    """Give nodes other names that have words of the text's own."""
    for node in graph.nodes:
        if node.name in RESERVED:
            node._rename(f"{node.name}_")


def nodes_in(arguments: Any) -> list[fx.Node]:
    """The nodes among arguments."""
    found: list[fx.Node] = []
    map_arg(arguments, found.append)
    return found
