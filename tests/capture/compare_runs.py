"""Runs a program plain and compiled and compares all that can be seen: results, identities, mutation, errors."""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.errors import CompileError

_ATOMS = (type(None), bool, int, str, bytes, complex, type, types.FunctionType, types.BuiltinFunctionType)


class Comparison:
    """Compares two object graphs; objects that were one object on one side must be one on the other."""

    def __init__(self) -> None:
        self.partner: dict[int, int] = {}
        self.kept: list[Any] = []

    def same(self, one: Any, other: Any, path: str = "result") -> None:
        assert type(one) is type(other), f"{path}: {one!r} is not like {other!r}"
        if isinstance(one, float):
            assert one == other or (math.isnan(one) and math.isnan(other)), f"{path}: {one} != {other}"
            return
        if isinstance(one, _ATOMS) and not isinstance(one, types.FunctionType):
            assert one == other, f"{path}: {one!r} != {other!r}"
            return
        if not isinstance(one, (tuple, frozenset)):
            seen = self.partner.setdefault(id(one), id(other))
            assert seen == id(other), f"{path}: the plain program has one object here twice"
            back = self.partner.setdefault(-id(other), id(one))
            assert back == id(one), f"{path}: the compiled program has one object here twice"
            if any(one is item for item in self.kept):
                return
            self.kept += [one, other]
        self._contents(one, other, path)

    def _contents(self, one: Any, other: Any, path: str) -> None:
        if isinstance(one, torch.Tensor):
            assert (one.dtype, one.requires_grad, one.shape) == (
                other.dtype,
                other.requires_grad,
                other.shape,
            )
            assert torch.equal(one, other), path
            return
        if isinstance(one, types.FunctionType):
            assert one.__code__ == other.__code__, path
            return
        if isinstance(one, Mapping):
            assert len(one) == len(other), f"{path}: {one} != {other}"
            for left, right in zip(one.items(), other.items(), strict=True):
                self.same(left[0], right[0], f"{path} key")
                self.same(left[1], right[1], f"{path}[{left[0]!r}]")
        elif isinstance(one, AbstractSet):
            assert len(one) == len(other), f"{path}: {one} != {other}"
            if all(isinstance(item, (int, str, float)) for item in one):
                assert one == other, f"{path}: {one} != {other}"
        elif hasattr(one, "__len__") and hasattr(one, "__iter__"):
            assert len(one) == len(other), f"{path}: {one} != {other}"
            for index, (left, right) in enumerate(zip(one, other, strict=True)):
                self.same(left, right, f"{path}[{index}]")
        elif isinstance(one, BaseException):
            self.same(one.args, other.args, f"{path}.args")
            self.same(one.__cause__, other.__cause__, f"{path}.__cause__")
            self.same(one.__context__, other.__context__, f"{path}.__context__")
            assert one.__suppress_context__ == other.__suppress_context__, path
        if hasattr(one, "__dict__") and not isinstance(one, (type, types.ModuleType)):
            left, right = dict(vars(one)), dict(vars(other))
            assert list(left) == list(right), f"{path}: attributes {list(left)} != {list(right)}"
            for name in left:
                self.same(left[name], right[name], f"{path}.{name}")


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        return "returned", function(*arguments), arguments
    except CompileError:
        raise  # the test says why the program was not captured
    except Exception as error:
        return "raised", error, arguments


def default_arguments(seed: int, count: int) -> tuple[Any, ...]:
    """A tensor and, for a program that takes more, a small number that differs from seed to seed."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(2, 3, generator=generator), seed + 1)[:count]


def check_program(
    function: types.FunctionType,
    make_arguments: Callable[[int], tuple[Any, ...]] | None = None,
    *,
    graphs: int | None = 1,
    scope: dict[str, Any] | None = None,
    recompiles: bool = True,
) -> CompiledFunction:
    """Run a program on three inputs, each twice compiled; the second run must find the first one's entry.

    ``graphs`` 1 asks for the whole program in one graph, None allows breaks. Data that the program keeps in the
    globals named by ``scope`` is compared too; ``recompiles`` False asks for one entry for all inputs.
    """
    count = function.__code__.co_argcount
    compiled = CompiledFunction(function, lambda graph, inputs: graph.module, fullgraph=graphs == 1)
    for seed in range(3):
        made = default_arguments(seed, count) if make_arguments is None else make_arguments(seed)
        before = copy.deepcopy(scope)
        plain = _outcome(function, copy.deepcopy(made))
        plain_scope = copy.deepcopy(scope)
        for _ in range(2):
            if scope is not None and before is not None:
                scope.clear()
                scope.update(copy.deepcopy(before))
            entries = len(compiled.entries)
            found = _outcome(compiled, copy.deepcopy(made))
            Comparison().same(plain, found)
            if scope is not None:
                Comparison().same(plain_scope, scope, "globals")
        if plain[0] == "returned":
            assert len(compiled.entries) == entries, "the second call compiled again"
    if not recompiles:
        assert len(compiled.entries) == 1
    return compiled


class Programs:
    """A table of programs: ``@programs`` adds one, ``programs(graphs=None)`` one with settings."""

    def __init__(self) -> None:
        self.table: list[tuple[types.FunctionType, dict[str, Any]]] = []

    def __call__(self, function: Any = None, **settings: Any) -> Any:
        if function is None:
            return lambda made: self(made, **settings)
        self.table.append((function, settings))
        return function

    @property
    def names(self) -> list[str]:
        return [function.__name__ for function, _ in self.table]
