"""Reads the text of an exported graph; nothing of it is run."""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import fx

from gradsplit.compile_core.export.print_program import RESERVED
from gradsplit.compile_core.export.targets import find_target, is_method

_KINDS = ("argument", "parameter", "buffer", "constant")


class UnreadableProgram(ValueError):
    """A text that is no exported graph; the message says in which line."""


def parse_program(text: str) -> fx.Graph:
    """The graph of a text that ``print_program`` wrote.

    Raises:
        UnreadableProgram: it is not such a text.
    """
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            reader.read(line)
        except (SyntaxError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = error.msg if isinstance(error, SyntaxError) else error
            raise UnreadableProgram(f"line {number}: {why}: {line[:120]}") from None
    if not reader.ended:
        raise UnreadableProgram("the text ends before its result")
    return reader.graph


class _Reader:
    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.ended = False
        self._module, self._place = "", ""

    def read(self, line: str) -> None:
        if line.startswith("# in "):
            named = line.removeprefix("# in ")
            self._module = "" if named == "the outermost call" else named
            return
        if line.startswith("# at "):
            self._place = line.removeprefix("# at ")
            return
        if not line.strip() or line.startswith("#"):
            return
        if self.ended:
            raise ValueError("something stands after the result")
        (statement,) = ast.parse(line).body
        if isinstance(statement, ast.Expr) and _called_name(statement.value) == "result":
            call = statement.value
            assert isinstance(call, ast.Call)
            results = tuple(map(self._value, call.args))
            if not all(isinstance(item, fx.Node) for item in results):
                raise ValueError("a result is no value of the graph")
            self.graph.output(results)
            self.ended = True
            return
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            raise ValueError("neither a value nor the result")
        name = statement.target.id
        if name in self.nodes or name in RESERVED:
            raise ValueError(f"the name {name} is taken")
        if not isinstance(statement.annotation, ast.Constant) or not isinstance(statement.value, ast.Call):
            raise ValueError("not a call with what it returns")
        node = self._node(name, statement.value)
        node.meta |= {"spec": str(statement.annotation.value), "module": self._module, "place": self._place}
        self.nodes[name] = node

    def _node(self, name: str, call: ast.Call) -> fx.Node:
        if isinstance(call.func, ast.Name):
            (path,) = map(self._value, call.args)
            if call.func.id not in _KINDS or not isinstance(path, int if call.func.id == "argument" else str):
                raise ValueError("not an input")
            node = self.graph.create_node("placeholder", name, (), {}, name)
            node.meta |= {"kind": call.func.id, "path": path}
            return node
        args = tuple(map(self._value, call.args))
        if any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("keywords that are not written out")
        kwargs = {str(keyword.arg): self._value(keyword.value) for keyword in call.keywords}
        words = _dotted(call.func)
        if words[0] not in RESERVED:
            owner, method = words
            if not is_method(method):
                raise ValueError(f"no exported graph may call the method {method}")
            return self.graph.create_node("call_method", method, (self.nodes[owner], *args), kwargs, name)
        target = find_target(".".join(words))
        if target is None:
            raise ValueError(
                f"no exported graph may call {'.'.join(words)}, or this torch has no such function"
            )
        return self.graph.create_node("call_function", target, args, kwargs, name)

    def _value(self, tree: ast.expr) -> Any:
        if isinstance(tree, ast.Constant):
            return tree.value
        if isinstance(tree, ast.Name):
            return self.nodes[tree.id]
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            return -self._value(tree.operand)
        if isinstance(tree, ast.Tuple):
            return tuple(map(self._value, tree.elts))
        if isinstance(tree, ast.List):
            return list(map(self._value, tree.elts))
        if isinstance(tree, ast.Dict):
            keys = [self._value(key) for key in tree.keys if key is not None]
            return dict(zip(keys, map(self._value, tree.values), strict=True))
        if isinstance(tree, ast.Attribute):
            return _torch_constant(_dotted(tree))
        if isinstance(tree, ast.Call) and not tree.keywords:
            makers = {"slice": slice, "complex": complex, "float": float, "torch.device": torch.device}
            return makers[".".join(_dotted(tree.func))](*map(self._value, tree.args))
        raise ValueError("an argument that is no literal")


def _torch_constant(words: list[str]) -> Any:
    found = getattr(torch, words[1]) if len(words) == 2 and words[0] == "torch" else None
    if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        raise ValueError(f"{'.'.join(words)} is no literal")
    return found


def _called_name(tree: ast.expr) -> str:
    return tree.func.id if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) else ""


def _dotted(tree: ast.expr) -> list[str]:
    """The words of ``a.b.c``."""
    if isinstance(tree, ast.Name):
        return [tree.id]
    if not isinstance(tree, ast.Attribute):
        raise ValueError("not a name")
    return [*_dotted(tree.value), tree.attr]
