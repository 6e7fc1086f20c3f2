"""The samples of torch's operator database as programs: one a sample, some of them in place, with ``out=`` or broken.

The database is part of torch's wheel. It imports a package for tests that may be missing, which it does not need here.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import random
import sys
import types
import unittest
import warnings
from functools import cache, lru_cache
from typing import Any

import torch

_DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128, torch.float32)
# What reads memory that nobody has written, or takes a function of the database's own that no program would.
_LEFT_OUT = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
WAYS = ("call", "call", "method", "in place", "out", "break", "views")


@cache
def _database() -> list[Any]:
    if importlib.util.find_spec("expecttest") is None and "expecttest" not in sys.modules:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        stand_in.__spec__ = importlib.machinery.ModuleSpec("expecttest", None)
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db  # optional, slow, and may fail
    return list(op_db)


def operator(name: str, variant: str = "") -> Any:
    """The entry of the database."""
    return next(op for op in _database() if op.name == name and op.variant_test_name == variant)


@lru_cache(maxsize=2)
def _samples(index: int) -> list[Any]:
    op = _database()[index]
    dtype = next((d for d in _DTYPES if op.supports_dtype(d, "cpu")), None)
    if dtype is None or op.name in _LEFT_OUT:
        return []
    torch.manual_seed(index)
    random.seed(index)
    requires_grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return list(op.sample_inputs("cpu", dtype, requires_grad=requires_grad))
        except Exception:
            return []


def count_samples(match: str = "") -> list[int]:
    """How many samples each entry whose name has ``match`` has.

    Raises:
        ImportError: the database needs a package that is missing.
    """
    return [len(_samples(index)) if match in op.name else 0 for index, op in enumerate(_database())]


def write_sample(index: int, sample: int) -> str:
    """A sample as a program.

    Raises:
        ValueError: its arguments cannot be written as text.
    """
    op, chosen = _database()[index], _samples(index)[sample]
    way = WAYS[(sample + index) % len(WAYS)]
    lines: list[str] = []
    leaves: list[str] = []
    names: list[str] = []

    def text(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            name = f"x{len(names)}"
            names.append(name)
            lines.append(f"{name} = {_tensor_text(value)}")
            if value.requires_grad:
                lines.append(f"{name}.requires_grad_()")
                leaves.append(name)
            return name
        if isinstance(value, (tuple, list)):
            inner = ", ".join(map(text, value))
            return (
                f"[{inner}]"
                if isinstance(value, list)
                else f"({inner},)"
                if len(value) == 1
                else f"({inner})"
            )
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {text(v)}" for k, v in value.items()) + "}"
        if isinstance(value, float):
            return f"float({str(value)!r})"
        if isinstance(value, slice):
            return f"slice({value.start}, {value.stop}, {value.step})"
        if (
            value is None
            or value is Ellipsis
            or isinstance(value, (bool, int, str, complex, torch.dtype, torch.layout, torch.memory_format))
        ):
            return "..." if value is Ellipsis else repr(value)
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        raise ValueError(f"an argument of type {type(value).__name__}")

    first = text(chosen.input)
    rest = [*map(text, chosen.args), *(f"{k}={text(v)}" for k, v in chosen.kwargs.items())]
    body, attribute = _body(op, way, first, rest)
    return "\n".join(
        [
            "import torch",
            "from tests.differential.operator_samples import operator",
            "",
            "OPTIONS = {'fallback_random': True}",
            "BACKWARD = 'weights'",
            "CHOSEN = 'all'",
            "CALLS = 1",
            f"OP = operator({op.name!r}, {op.variant_test_name!r}).{attribute}",
            "",
            "",
            "def state():",
            *(f"    {line}" for line in lines),
            f"    return [{', '.join(names)}], [{', '.join(leaves)}]",
            "",
            "",
            f"def program(log{''.join(', ' + name for name in names)}):",
            *(f"    {line}" for line in body),
            "",
        ]
    )


def _body(op: Any, way: str, first: str, rest: list[str]) -> tuple[list[str], str]:
    call = f"OP({', '.join([first, *rest])})"
    if way == "in place" and op.inplace_variant is not None and first.startswith("x"):
        inner = ", ".join(["y", *rest])
        return [f"y = {first}.clone()", f"OP({inner})", "return y"], "inplace_variant"
    if way == "method" and op.method_variant is not None:
        return [f"return {call}"], "method_variant"
    if way == "out" and op.supports_out and not any(part.startswith("out=") for part in rest):
        return [
            "with torch.no_grad():",
            f"    shape = {call}",
            "    if not isinstance(shape, torch.Tensor):",
            "        return shape",
            "    memory = torch.zeros_like(shape)",
            f"    OP({', '.join([first, *rest, 'out=memory'])})",
            "return memory",
        ], "op"
    if way == "break":
        return [f"y = {call}", "print(end='')", "return y"], "op"
    if way == "views" and first.startswith("x"):
        inner = ", ".join([f"{first}.unsqueeze(0)[0]", *rest])
        return [f"y = OP({inner})", "return y"], "op"
    return [f"return {call}"], "op"


def _tensor_text(value: torch.Tensor) -> str:
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        raise ValueError(f"a {value.layout} tensor" if type(value) is torch.Tensor else type(value).__name__)
    plain = value.detach().resolve_conj().resolve_neg()
    if plain.numel() > 5000:
        raise ValueError(f"a tensor of {plain.numel()} elements")
    numbers = plain.to(torch.complex128 if plain.is_complex() else plain.dtype).reshape(-1).tolist()
    listed = "[" + ", ".join(_number_text(number) for number in numbers) + "]"
    text = f"torch.tensor({listed}, dtype={value.dtype}).reshape({tuple(value.shape)})"
    if value.numel() and not value.is_contiguous():
        if any(s == 0 and n > 1 for n, s in zip(value.shape, value.stride(), strict=True)):
            kept = tuple(slice(0, 1) if s == 0 else slice(None) for s in value.stride())
            inner = _tensor_text(plain[kept].contiguous())
            return f"{inner}.expand({tuple(value.shape)})"
        text = (
            f"torch.empty_strided({tuple(value.shape)}, {value.stride()}, dtype={value.dtype}).copy_({text})"
        )
    return text


def _number_text(number: Any) -> str:
    text = repr(number)
    return (
        f"float({text!r})"
        if text in ("nan", "inf", "-inf")
        else text
        if "nan" not in text and "inf" not in text
        else f"complex({text!r})"
    )
