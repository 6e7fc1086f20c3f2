"""Tensors that a program draws from a ``torch.Generator`` of its own.

The generator's state is a tensor of the graph, each draw a node that takes it and gives the next one
(``ir/generator_draws.py``). The last one is stored in the generator when the graph has run, with the other effects.
"""

from __future__ import annotations

from typing import Any

import torch

from gradsplit.compile_core.capture.open_numbers.symbolic_numbers import SymbolicInt
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to
from gradsplit.compile_core.capture.values.constants import BuiltinMethod, ConstantValue
from gradsplit.compile_core.capture.values.references import ReferenceValue
from gradsplit.compile_core.capture.values.tensors import TensorValue
from gradsplit.compile_core.ir.generator_draws import with_generator
from gradsplit.compile_core.ir.sources import AttributeSource, ConvertedSource, Reference, Source

# Torch's functions that fill a new tensor by a method, which a tensor of an open size can be given to.
_FILLED_BY = {torch.rand: "uniform_", torch.randn: "normal_"}
_STATE = Reference("state", torch.Generator.get_state)
_SEED = Reference("initial_seed", torch.Generator.initial_seed)


def is_of_torch(generator: torch.Generator) -> bool:
    """Whether functions draw from it that are given none."""
    return any(generator is own for own in (torch.default_generator, *torch.cuda.default_generators))


class TensorGenerator(Value):
    """A generator of the program's own: one that existed, or one made in the frame as ``real`` is."""

    cls = torch.Generator

    def __init__(self, state: CaptureState, real: torch.Generator, source: Source | None) -> None:
        self.source: Any = source
        self.device = real.device
        self._seed: int | None = real.initial_seed()
        if source is None:
            size = (real.get_state().numel(),)
            self._held = state.call_torch(torch.empty, size, dtype=torch.uint8, device="cpu")
            self._run(state, "Generator.manual_seed", [ConstantValue(self._seed)], {})
            return
        state.guards.type_is(source, torch.Generator)
        state.guards.add([source], "not {c0}({0})", [is_of_torch], f"{source} is not torch's own")
        state.guards.constant(AttributeSource(source, "device"), real.device)
        for _, other in state.known.values():
            if isinstance(other, TensorGenerator):
                state.guards.distinct(source, other.source)
        self._held = state.wrap(real.get_state(), ConvertedSource(source, _STATE))
        self._given = self._held

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name == "device":
            return ConstantValue(self.device)
        if name in ("manual_seed", "initial_seed", "get_state", "set_state"):
            return BuiltinMethod(self, name)
        return super().get_attribute(state, name)

    def call_method(
        self, state: CaptureState, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        args = [*args, *kwargs.values()]
        if name == "initial_seed" and self._seed is not None and not args:
            if self.source is not None and self._held is self._given:
                state.guards.constant(ConvertedSource(self.source, _SEED), self._seed)
            return ConstantValue(self._seed)
        if name == "get_state" and not args:
            return state.call_torch("clone", self._held)
        if len(args) != 1 or not self._takes(name, args[0]):
            shown = ", ".join(argument.describe() for argument in args)
            raise state.unsupported("generator-method", f"{name!r} of a torch.Generator with ({shown})")
        self._seed = args[0].value if isinstance(args[0], ConstantValue) else None
        self._run(state, f"Generator.{name}", args, {})
        return self

    def _takes(self, name: str, argument: Value) -> bool:
        if name == "manual_seed":
            return isinstance(argument, (ConstantValue, SymbolicInt)) and argument.python_type() is int
        like = self._held.fake if isinstance(self._held, TensorValue) else None
        given = argument.fake if isinstance(argument, TensorValue) else None
        if name != "set_state" or like is None or given is None:
            return False
        return (given.shape, given.dtype, given.device) == (like.shape, like.dtype, like.device)

    def _run(
        self, state: CaptureState, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> list[Value]:
        found = state.call_torch(with_generator, name, str(self.device), self._held, tuple(args), kwargs)
        self._held, *drawn = state.items_of(found)
        state.effects.moved_on(self)
        return drawn

    def draw(
        self, state: CaptureState, op: str, target: Any, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        """What a function or a method of tensors gives that is called with this generator."""
        name = target if op == "call_method" else target.__name__
        in_place = op == "call_method" and name.endswith("_")
        if "out" in kwargs or (op == "call_function" and getattr(torch, name, None) != target):
            raise state.unsupported("generator-argument", f"{target} with a generator")
        if target in _FILLED_BY and "requires_grad" not in kwargs:
            args, kwargs = [state.call_torch(torch.empty, *args, **kwargs)], {}
            name = f"Tensor.{_FILLED_BY[target]}"
        else:
            name = f"Tensor.{name}" if in_place else f"torch.{name}"
        (drawn,) = self._run(state, name, args, kwargs)
        if isinstance(drawn, TensorValue) and drawn.fake.requires_grad:
            raise state.unsupported("generator-gradient", f"{name} with a generator, which autograd sees")
        return state.call_torch("copy_", args[0], drawn) if in_place else drawn

    def move(self, writer: Any) -> str:
        return f"{writer.emit(self)}.set_state({writer.emit(self._held)})"

    def rebuild(self, writer: Any) -> str:
        """The name of a generator in the same state."""
        name: str = writer.bind(f"{writer.constant(torch.Generator)}({str(self.device)!r})")
        writer.lines.append(f"{name}.set_state({writer.emit(self._held)})")
        return name


class DefaultGenerator(ReferenceValue):
    """The CPU's generator of torch, from which operators draw that are given none."""

    def draw(
        self, state: CaptureState, op: str, target: Any, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        drawn = state.call_tensor_op(op, target, args, kwargs)
        if not isinstance(drawn, TensorValue) or drawn.fake.device != self.real.device:
            raise state.unsupported("generator-argument", f"{target} with the generator of another device")
        return drawn


@answer_to(torch.Generator)
def _make(state: CaptureState, device: Value | None = None) -> Any:
    given = "cpu" if device is None else device.as_constant()
    return TensorGenerator(state, torch.Generator(given), None)
