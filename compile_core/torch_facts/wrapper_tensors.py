"""Tensors that wrap others: of classes whose operators are computed on inner tensors, as DTensor's are.

An instance tells by ``__tensor_flatten__`` which inner tensors it has and what else it is (its context), its class
makes one of them by ``__tensor_unflatten__``, and ``__torch_dispatch__`` computes operators by the inner ones.
Source: torch.utils._python_dispatch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.torch_facts.private_parts import PROGRAMS_RUN_PLAIN, private


def _wraps_nothing(_: object) -> bool:
    """In a torch that does not tell."""
    return False


# Whether tensors of a class wrap others; asked of the classes of each operator of a trace.
is_wrapper_class = functools.cache(
    private(
        "torch.utils._python_dispatch:is_traceable_wrapper_subclass_type",
        "tensors of classes that wrap others",
        PROGRAMS_RUN_PLAIN,
        _wraps_nothing,
    )
)


def is_wrapper(value: object) -> bool:
    return is_wrapper_class(type(value))


def is_in_flight(tensor: torch.Tensor) -> bool:
    """Whether it is the result of a collective that nobody has waited for: its inner tensor is not filled yet."""
    collectives: Any = sys.modules.get("torch.distributed._functional_collectives")
    return collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor)


@dataclass(frozen=True)
class Flattened:
    """What ``__tensor_flatten__`` tells.

    Attributes:
        names: the attributes that hold the inner tensors.
        held: what else it names, such as a mesh of devices.
        context: what it tells beside.
    """

    names: tuple[str, ...]
    held: dict[str, Any]
    context: Any

    @staticmethod
    def of(tensor: Any) -> Flattened:
        names, context = tensor.__tensor_flatten__()
        values = {name: getattr(tensor, name) for name in names}
        held = {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}
        return Flattened(tuple(name for name in names if name not in held), held, context)

    def is_of(self, tensor: Any) -> bool:
        """Whether a tensor of the same class has inner tensors of these names, and what its class calls the same
        context."""
        found = Flattened.of(tensor)
        compare = getattr(type(tensor), "__metadata_guard__", None)
        same = found.context == self.context if compare is None else compare(self.context, found.context)
        return found.names == self.names and found.held == self.held and bool(same)


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the data: itself, or those that it wraps, directly or through others."""
    if not is_wrapper(tensor) or is_in_flight(tensor):
        return [tensor]
    names = Flattened.of(tensor).names
    return [inner for name in names for inner in inner_tensors(getattr(tensor, name))]


def memory_of(tensor: torch.Tensor) -> int:
    """What tells the memory of one tensor that wraps nothing from that of others; of meta tensors it is nowhere, and
    different ones have different storages."""
    storage = tensor.untyped_storage()
    return storage._cdata if tensor.is_meta else storage.data_ptr()


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the data of two tensors, neither of them on the device meta, may lie in one memory."""
    memories = [
        {memory_of(inner) for inner in inner_tensors(tensor) if inner.numel()} for tensor in (one, other)
    ]
    return not memories[0].isdisjoint(memories[1])


def has_known_form(tensor: torch.Tensor) -> bool:
    """Whether it is a wrapper whose data are in its inner tensors alone: filled by now, and none in its context."""
    if not is_wrapper(tensor) or is_in_flight(tensor):
        return False
    parts = Flattened.of(tensor)
    inner = [getattr(tensor, name) for name in parts.names]
    return not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(parts.context)) and all(
        has_known_form(each) if is_wrapper(each) else type(each) is torch.Tensor for each in inner
    )


def _is_empty(tensor: torch.Tensor) -> bool:
    return any(type(size) is int and size == 0 for size in tensor.shape)


def _takes_gradients(inner: Sequence[torch.Tensor]) -> list[bool]:
    """Which of a wrapper's inner tensors that wrap nothing take gradients. One without elements, beside others that
    have some, is a number told by its size, as the greatest length of a nested tensor's rows is."""
    floating = [tensor.is_floating_point() or tensor.is_complex() for tensor in inner]
    filled = [takes and not _is_empty(tensor) for takes, tensor in zip(floating, inner, strict=True)]
    return filled if any(filled) else floating


@dataclass(frozen=True)
class WrapperForm:
    """What a wrapper is beside the data of its inner tensors.

    Attributes:
        cls: its class.
        parts: what ``__tensor_flatten__`` told.
        size: its own sizes, of the whole tensor.
        stride: and strides.
        inner: for each inner tensor its form; of one that wraps nothing, whether it takes gradients.
    """

    cls: Any
    parts: Flattened
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    inner: tuple[WrapperForm | bool, ...]

    @staticmethod
    def of(tensor: Any) -> WrapperForm | None:
        """The form of a wrapper, ``None`` for other tensors."""
        if not is_wrapper(tensor):
            return None
        parts = Flattened.of(tensor)
        inner = [getattr(tensor, name) for name in parts.names]
        forms = [WrapperForm.of(each) for each in inner]
        takes = _takes_gradients(inner)
        found = tuple(form or flag for form, flag in zip(forms, takes, strict=True))
        return WrapperForm(type(tensor), parts, tuple(tensor.shape), tuple(tensor.stride()), found)

    @property
    def takes(self) -> list[bool]:
        """Which of the tensors that hold the data take gradients."""
        return [takes for _, takes in self.leaves]

    @functools.cached_property
    def leaves(self) -> tuple[tuple[tuple[str, ...], bool], ...]:
        """The tensors that hold the data, as ``inner_tensors`` gives them: by what attributes each is reached, and
        whether it takes gradients."""
        found: list[tuple[tuple[str, ...], bool]] = []
        for name, form in zip(self.parts.names, self.inner, strict=True):
            below = form.leaves if isinstance(form, WrapperForm) else (((), form),)
            found += [((name, *path), takes) for path, takes in below]
        return tuple(found)

    def build(self, data: Sequence[torch.Tensor]) -> torch.Tensor:
        """A wrapper of this form of the tensors that hold its data, without gradients."""
        return self._build(iter(data))

    def _build(self, data: Iterator[torch.Tensor]) -> torch.Tensor:
        inner = {
            name: form._build(data) if isinstance(form, WrapperForm) else next(data)
            for name, form in zip(self.parts.names, self.inner, strict=True)
        }
        made = self.cls.__tensor_unflatten__(
            {**inner, **self.parts.held}, self.parts.context, self.size, self.stride
        )
        return made.requires_grad_(False)

    def fits(self, tensor: Any) -> bool:
        """Whether a tensor is a wrapper of this form."""
        return (
            type(tensor) is self.cls
            and self.parts.is_of(tensor)
            # Of nested tensors, only their inner ones tell the sizes.
            and (tensor._has_symbolic_sizes_strides or tuple(tensor.shape) == self.size)
            and all(
                form.fits(inner) if isinstance(form, WrapperForm) else type(inner) is torch.Tensor
                for inner, form in zip(
                    [getattr(tensor, name) for name in self.parts.names], self.inner, strict=True
                )
            )
        )
