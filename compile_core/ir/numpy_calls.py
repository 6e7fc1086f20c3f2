"""NumPy in captured graphs: arrays are tensors there, and NumPy's functions those of ``torch._numpy``.

``torch._numpy`` is NumPy's interface written in torch's operations; it comes with torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from gradsplit.compile_core.torch_facts.bindings import numpy_of_torch as torch_numpy

# The types of elements that torch._numpy knows.
DTYPES = frozenset(
    np.dtype(name)
    for name in (
        "bool", "uint8", "int8", "int16", "int32", "int64",
        "float16", "float32", "float64", "complex64", "complex128",
    )
)  # fmt: skip


def numpy_call(name: str, device: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function by its dotted name: ``"linalg.norm"``, ``"ndarray.sum"``, ``"operator.add"``.

    Tensors go in as arrays, arrays come out as tensors, tuples and lists of arrays as tuples. What makes an array from
    nothing makes it on ``device``.
    """
    function = _find(name)
    with nullcontext() if device is None else torch.device(device):
        return _to_tensors(function(*_to_arrays(args), **_to_arrays(kwargs)))


def _find(name: str) -> Callable[..., Any]:
    root, _, rest = name.partition(".")
    if root == "operator":
        return getattr(operator, rest)
    found: Any = torch_numpy
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _to_arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch_numpy.ndarray(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_to_arrays(item) for item in value)
    if isinstance(value, dict):
        return {key: _to_arrays(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_to_arrays(part) for part in (value.start, value.stop, value.step)))
    return value


def _to_tensors(value: Any) -> Any:
    if isinstance(value, torch_numpy.ndarray):
        return value.tensor
    if isinstance(value, (tuple, list)):
        return tuple(_to_tensors(item) for item in value)
    return value


def numpy_attribute(name: str, tensor: torch.Tensor) -> Any:
    """An attribute of an array that is an array."""
    return getattr(torch_numpy.ndarray(tensor), name).tensor


def tensor_of_array(array: Any) -> torch.Tensor:
    """The tensor that shares the array's memory; a copy of a NumPy scalar."""
    return (
        torch.from_numpy(array) if type(array) is np.ndarray else torch.from_numpy(np.asarray(array).copy())
    )


def array_of_tensor(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The array that shares the tensor's memory, if that lies in main memory."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
