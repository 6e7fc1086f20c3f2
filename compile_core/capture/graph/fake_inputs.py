"""Fake tensors that stand for the graph's inputs during a capture."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradsplit.compile_core.capture.open_numbers.symbolic_sizes import TensorSizes
from gradsplit.compile_core.torch_facts.autograd_engine import is_view_as_leaf
from gradsplit.compile_core.torch_facts.wrapper_tensors import WrapperForm, inner_tensors


def make_fake(
    mode: FakeTensorMode,
    real: torch.Tensor,
    sizes: TensorSizes | None,
    make_inner: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """The fake of an input tensor, with symbolic sizes where some are given; a wrapper has fakes of ``make_inner``."""
    if sizes is not None:
        return _make_symbolic(mode, real, sizes)
    with warnings.catch_warnings():
        # Making a fake of an intermediate result looks at its .grad, which torch warns about.
        warnings.simplefilter("ignore")
        form = WrapperForm.of(real)
        if form is not None and make_inner is not None:
            return _make_wrapper(form, [make_inner(inner) for inner in inner_tensors(real)], real)
        if real.is_inference():
            # Its fake would be one too, and have no version to tell that the program changed it.
            with mode:
                return _empty(real, tuple(real.shape), real.stride())
        return mode.from_tensor(real, static_shapes=True)


class InnerFakes:
    """The fakes of the tensors that wrappers among the inputs hold: one for each, since some share theirs."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        # By the ``id`` of the tensor, which is held.
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, sizes: Mapping[int, TensorSizes], real: torch.Tensor) -> torch.Tensor:
        if id(real) not in self._made:
            fake = make_fake(self._mode, real.detach(), sizes.get(id(real)))
            self._made[id(real)] = real, fake
        return self._made[id(real)][1]


def _make_wrapper(form: WrapperForm, inner: list[torch.Tensor], real: torch.Tensor) -> torch.Tensor:
    fake = form.build(inner).requires_grad_(real.requires_grad)
    if real.is_leaf:
        return fake
    with torch.enable_grad():
        return fake.clone()  # a leaf could not be changed in place


def _make_symbolic(mode: FakeTensorMode, real: torch.Tensor, sizes: TensorSizes) -> torch.Tensor:
    """A view of a tensor without gradients, or none, even if the real tensor is one: where else that matters, for a
    change in place, torch itself decides when the graph runs."""
    with mode:
        fake = _empty(real, sizes.shape, sizes.stride)
        if is_view_as_leaf(real):
            fake = fake.view_as(fake)
        if real.requires_grad and real.is_leaf:
            fake.requires_grad_()
        elif real.requires_grad:
            # A change in place gives it a history, as the real one has; its strides stay.
            seed = torch.zeros((), dtype=real.dtype, device=real.device, requires_grad=True)
            with torch.enable_grad():
                fake.copy_(seed)
    return fake


def _empty(real: torch.Tensor, shape: Any, stride: Any) -> Any:
    return torch.empty_strided(shape, stride, dtype=real.dtype, device=real.device)


def layout_of(fake: torch.Tensor) -> tuple[Any, ...]:
    """Shape and strides."""
    return (*fake.shape, *fake.stride())


def has_layout(fake: torch.Tensor, layout: tuple[Any, ...]) -> bool:
    """Whether shape and strides are still these, without making a condition on sizes."""
    return [_plain(number) for number in layout_of(fake)] == [_plain(number) for number in layout]


def _plain(number: Any) -> Any:
    # The sizes of nested tensors have no expression.
    return getattr(number.node, "expr", number) if isinstance(number, torch.SymInt) else number
