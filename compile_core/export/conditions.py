"""What an exported graph takes for granted about the tensors it is called with, and the check of it.

Of each tensor its dtype and all sizes but the open ones; of open sizes conditions, as Python over ``args`` and
``kwargs``: ``args[0].shape[1] <= 1024``. The text may come from a file, so it is parsed, and only what such
conditions consist of is let through before it is compiled.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.compile_core.ir.captured import Guard
from gradsplit.compile_core.ir.source_writer import compile_function
from gradsplit.compile_core.ir.sources import LocalSource, Source

_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.Not, ast.UnaryOp, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult,
    ast.FloorDiv, ast.Div, ast.Mod, ast.Pow, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
    ast.IfExp, ast.Constant, ast.Tuple, ast.Load, ast.Subscript,
)  # fmt: skip
_NAMES = ("args", "kwargs", "math", "max", "min", "abs", "int")
_FUNCTIONS = ("max", "min", "abs", "int", "floor", "ceil", "trunc", "sqrt", "stride")


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor among the arguments: ``place`` as Python over ``args`` and ``kwargs``, ``sizes`` with None for open
    ones.

    ``example`` has the sizes of the call that was exported; ``same_as`` is the position of a tensor that this one
    must be.
    """

    place: str
    dtype: str
    device: str
    sizes: tuple[int | None, ...]
    example: tuple[int, ...]
    requires_grad: bool
    same_as: int | None = None

    @staticmethod
    def read(data: dict[str, Any]) -> ExportedTensor:
        """The inverse of ``dataclasses.asdict``."""
        return ExportedTensor(**{**data, "sizes": tuple(data["sizes"]), "example": tuple(data["example"])})

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def open_dims(self) -> tuple[int, ...]:
        """The dims whose sizes may differ."""
        return tuple(dim for dim, size in enumerate(self.sizes) if size is None)

    def check(self, given: torch.Tensor) -> None:
        """Raises ValueError where a tensor is not one that the graph was exported for."""
        shown = f"the exported graph takes {self} there"
        if given.dtype is not self.torch_dtype:
            raise ValueError(f"{self.place} has dtype {given.dtype}; {shown}")
        if given.dim() != len(self.sizes):
            raise ValueError(f"{self.place} has {given.dim()} dims; {shown}")
        for dim, size in enumerate(self.sizes):
            if size is not None and given.shape[dim] != size:
                raise ValueError(
                    f"{self.place} has size {given.shape[dim]} in dim {dim}; {shown}. To leave it open, export with "
                    f"dynamic_shapes that name this dim"
                )

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('any' if size is None else str(size) for size in self.sizes)}]"


def conditions_of(guards: Sequence[Guard]) -> list[str]:
    """The guards that are about open sizes of arguments, as Python over ``args`` and ``kwargs``."""
    found = []
    for guard in guards:
        about_arguments = guard.sources and all(_is_size_of_argument(source) for source in guard.sources)
        if guard.kind == "expression" and about_arguments and ".stride()" not in guard.text:
            found.append(guard.text)
    return found


def _is_size_of_argument(source: Source) -> bool:
    is_argument = isinstance(source.root, LocalSource) and source.root.name in ("args", "kwargs")
    return is_argument and ".shape[" in str(source)


@functools.cache
def compile_condition(text: str) -> Callable[[Sequence[Any], dict[str, Any]], Any]:
    """The function of a condition on sizes, or of a number that follows from them.

    Raises:
        ValueError: the text is neither.
    """
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        raise ValueError(f"not a condition on sizes: {text}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            allowed = node.id in _NAMES
        elif isinstance(node, ast.Attribute):
            allowed = node.attr in ("shape", *_FUNCTIONS)
        elif isinstance(node, ast.Call):
            allowed = (
                not node.keywords and getattr(node.func, "attr", getattr(node.func, "id", "")) in _FUNCTIONS
            )
        else:
            allowed = isinstance(node, _ALLOWED)
        if not allowed:
            raise ValueError(f"not a condition on sizes: {text}")
    return compile_function(
        f"def holds(args, kwargs): return ({ast.unparse(tree)})\n", "holds", {"math": math}
    )
