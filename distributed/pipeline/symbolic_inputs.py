"""Fake tensors for a graph's inputs, with symbols for the sizes that differ between calls, and what becomes known of
these as text.

A text is Python over the inputs, such as ``args[0].shape[1] * 32``; ``conditions.compile_condition`` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradsplit.compile_core.capture import SizeHistory
from gradsplit.compile_core.capture.guards.guards import GuardSet
from gradsplit.compile_core.capture.open_numbers.size_history import SPECIAL_SIZES
from gradsplit.compile_core.capture.open_numbers.size_marks import maybe_mark_dynamic
from gradsplit.compile_core.capture.open_numbers.symbolic_sizes import SymbolicSizes
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.export.conditions import ExportedTensor
from gradsplit.compile_core.ir.sources import LocalSource
from gradsplit.compile_core.ir.tensor_spec import contiguous_strides


@dataclass(frozen=True)
class SizedInput:
    """What an input looks like now, and which dims may have another size in a later call.

    ``place`` is Python over ``args`` and ``kwargs``.
    """

    place: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    open_dims: tuple[int, ...] = ()

    @staticmethod
    def of(tensor: torch.Tensor, place: str, open_dims: Sequence[int] = ()) -> SizedInput:
        return SizedInput(
            place,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            tuple(open_dims),
        )

    @staticmethod
    def of_argument(argument: ExportedTensor, device: torch.device) -> SizedInput:
        """As in the call that was exported."""
        return SizedInput(
            argument.place,
            argument.example,
            contiguous_strides(argument.example),
            argument.torch_dtype,
            device,
            argument.requires_grad,
            argument.open_dims,
        )


class SymbolicInputs:
    """Inputs as fake tensors of one mode.

    Args:
        inputs: in order. An open dim of one element or none stays at that, which is a condition.
        history: of strides that follow from no size, and that differed between calls.

    Attributes:
        mode: a ``FakeTensorMode``.
        fakes: the inputs.
    """

    def __init__(self, inputs: Sequence[SizedInput], history: SizeHistory | None = None) -> None:
        self._sizes = SymbolicSizes(history or SizeHistory(), lambda: None)
        self._special = tuple(
            f"{given.place}.shape[{dim}] == {given.shape[dim]}"
            for given in inputs
            for dim in given.open_dims
            if given.shape[dim] in SPECIAL_SIZES
        )
        self.mode = self._sizes.fake_mode
        self.fakes = list(map(self._fake, inputs))

    def _fake(self, given: SizedInput) -> torch.Tensor:
        stand_in = torch.empty_strided(given.shape, given.stride, device="meta")
        maybe_mark_dynamic(stand_in, given.open_dims)
        found = self._sizes.of_tensor(stand_in, LocalSource(given.place))
        shape, stride = (given.shape, given.stride) if found is None else (found.shape, found.stride)
        with self.mode:
            made = torch.empty_strided(shape, stride, dtype=given.dtype, device=given.device)
            return made.requires_grad_(given.requires_grad)

    def text(self, number: int | torch.SymInt) -> int | str:
        """A number that follows from the sizes: itself where it is fixed, else as text.

        Raises:
            Unsupported: Python has no short form of it.
        """
        if isinstance(number, int):
            return number
        expression = self._sizes.expression(number)
        if expression.is_Integer:
            return int(expression)
        try:
            return self._sizes.text(expression, str)
        except NotImplementedError:
            raise Unsupported(
                "pipeline-size",
                f"the size {expression} cannot be written to a file",
                "leave fewer sizes open",
            ) from None

    def conditions(self) -> tuple[str, ...]:
        """What must hold of a call, for all that was derived from the symbols so far to be right for it; some is about
        strides."""
        guards = GuardSet()
        self._sizes.add_guards(guards)
        return (*self._special, *(guard.text for guard in guards))
