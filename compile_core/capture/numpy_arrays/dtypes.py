"""What NumPy itself would return: types of elements, shapes and views, found by asking it with arrays of ones, and with
numbers where these are known.

The stand-in for NumPy differs from it in corners, such as the quotients of small integers. Where it does, the graph
ends.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from gradsplit.compile_core.capture.values.base import CaptureState

# Without a dtype the stand-in takes torch's default for these.
_MAKE_FLOATS = frozenset(["identity", "logspace", "tri"])
# NumPy adds up small integers in 64 bits.
_CUMULATE = frozenset(["cumsum", "cumprod", "ndarray.cumsum", "ndarray.cumprod"])
_DIVIDE = frozenset(["operator.truediv", "divide", "true_divide"])


def adjusted(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords with the dtype that NumPy takes by itself."""
    if "dtype" in kwargs:
        return kwargs
    if name in _MAKE_FLOATS:
        return {**kwargs, "dtype": "float64"}
    if name in _CUMULATE and args and isinstance(args[0], Node):
        dtype = args[0].meta["example_value"].dtype
        if dtype in (torch.bool, torch.int8, torch.int16, torch.int32):
            return {**kwargs, "dtype": "int64"}
    return kwargs


def divides_integers(name: str, args: tuple[Any, ...]) -> bool:
    """Whether integers are divided by integers, which gives float64."""
    if name not in _DIVIDE:
        return False
    kinds = [arg.meta["example_value"] if isinstance(arg, Node) else torch.as_tensor(arg) for arg in args]
    return not any(kind.is_floating_point() or kind.is_complex() for kind in kinds)


@dataclass(frozen=True)
class Answer:
    """What NumPy gives for arrays of ones, and whether it lies in the memory of one of them."""

    value: Any
    is_view: bool


def checked_answer(
    state: CaptureState,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: dict[Node, np.generic],
    found: Any,
) -> Any:
    """An ``Answer`` for each result; raises Unsupported where the stand-in's (fake tensors) have other types or
    shapes. ``known`` are the arguments that are numbers, which NumPy is asked with as they are."""
    given: list[np.ndarray[Any, Any]] = []
    answer = _ask(state, name, args, kwargs, known, given)
    expected = [_metadata(leaf) for leaf in pytree.tree_leaves(answer)]
    actual = [_metadata(leaf) for leaf in pytree.tree_leaves(found)]
    if expected != actual:
        raise state.unsupported("numpy-difference", f"NumPy's {name} gives {expected}, its stand-in {actual}")

    def described(leaf: Any) -> Answer:
        is_view = isinstance(leaf, np.ndarray) and any(np.may_share_memory(leaf, array) for array in given)
        return Answer(leaf, is_view)

    return pytree.tree_map(described, answer)


def _ask(
    state: CaptureState,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: dict[Node, np.generic],
    arrays: list[np.ndarray[Any, Any]],
) -> Any:
    """NumPy's answer; the arrays that it is given are added to ``arrays``."""

    def made(node: Node) -> Any:
        arrays.append(np.array(known[node]) if node in known else _ones(name, node))
        return arrays[-1]

    function: Callable[..., Any] = operator if name.startswith("operator.") else np  # type: ignore[assignment]
    for part in name.removeprefix("operator.").split("."):
        function = getattr(function, part)
    given, named = map_arg((args, kwargs), made)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return function(*given, **named)
    except Exception as error:
        raise state.unsupported(
            "numpy-call", f"NumPy's {name} raises {type(error).__name__}: {error}"
        ) from error


def _ones(name: str, node: Node) -> np.ndarray[Any, Any]:
    fake = node.meta["example_value"]
    shape = tuple(int(size) for size in fake.shape)
    dtype = str(fake.dtype).removeprefix("torch.")
    if name.startswith("linalg.") and len(shape) >= 2 and shape[-1] == shape[-2]:
        return np.broadcast_to(np.eye(shape[-1], dtype=dtype), shape).copy()
    # As an index a zero is always inside.
    fill = 0 if name in ("operator.getitem", "operator.setitem") else 1
    if fake.is_contiguous() or 0 in shape:
        return np.full(shape, fill, dtype)
    # What is a view of it depends on how it lies in memory.
    steps = [int(step) for step in fake.stride()]
    whole = np.full(1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True)), fill, dtype)
    return np.lib.stride_tricks.as_strided(whole, shape, [step * whole.itemsize for step in steps])


def _metadata(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape)
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.name, leaf.shape
    return leaf
