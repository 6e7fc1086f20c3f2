"""Guards as a program for the interpreter of ``guard_interpreter.cpp``.

Every source is read once, into the next register, at its first use. A step or condition that has no instruction of its
own becomes a small Python function, so that any guard can be part of a program. The words of the instructions:

    ATTRIBUTE  object, name                          the attribute, read as Python reads it
    INSTANCE_DICT object                             its ``__dict__``, which the class does not redefine
    ITEM       container, key                        the item
    CALL       -, function, count, operands          what the function returns
    EXPRESSION guard, function, count, operands      the function returns something true
    TYPE, IDENTITY, DISTINCT, EQUAL  guard, one, other
    LENGTH     guard, object, length
    KEYS, PRESENT, ABSENT, ALL_FALSE  guard, container, constant
    TENSOR     guard, tensor, class, lazy keys, requires_grad, dtype, layout, device type, device index or -1,
               dimensions, sizes, strides
    APART      guard, one, other                     two tensors that share no memory
    RETURN     count, operands                       every guard holds
"""

from __future__ import annotations

import types
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from gradsplit.compile_core.guard_checks.guard_interpreter import GuardInterpreter, GuardOpcode
from gradsplit.compile_core.ir.captured import CapturedFrame, Guard
from gradsplit.compile_core.ir.source_writer import evaluate
from gradsplit.compile_core.ir.sources import (
    AttributeSource,
    ContentSource,
    GlobalSource,
    ItemSource,
    LocalSource,
    ModuleEntrySource,
    Reference,
    ReferenceSource,
    Source,
)
from gradsplit.compile_core.toolchain.torch_library import device_codes, dtype_code, strided_code

# Conditions on one source and the guard's last constant.
_AGAINST_CONSTANT = {
    "type": GuardOpcode.TYPE,
    "identity": GuardOpcode.IDENTITY,
    "equal": GuardOpcode.EQUAL,
    "keys": GuardOpcode.KEYS,
    "present": GuardOpcode.PRESENT,
    "absent": GuardOpcode.ABSENT,
    "all_false": GuardOpcode.ALL_FALSE,
}
_BETWEEN_SOURCES = {
    "same": GuardOpcode.IDENTITY,
    "distinct": GuardOpcode.DISTINCT,
    "apart": GuardOpcode.APART,
}
_MAXIMUM_ARGUMENTS = 2048


def compile_program(frame: CapturedFrame, interpreter: GuardInterpreter) -> Callable[..., Any] | None:
    """The check of a frame as ``GuardInterpreter.bind`` makes it; None for a guard over too many sources."""
    if any(len(guard.sources) > _MAXIMUM_ARGUMENTS for guard in frame.guards):
        return None
    writer = _ProgramWriter(interpreter, frame.arguments)
    for index, guard in enumerate(frame.guards):
        writer.add(index, guard)
    return interpreter.bind(
        *writer.finish([] if frame.graph is None else [i.source for i in frame.graph.inputs])
    )


class _ProgramWriter:
    """Collects the words and the constants that they refer to."""

    def __init__(self, interpreter: GuardInterpreter, arguments: Sequence[str]) -> None:
        self._interpreter = interpreter
        self._words: list[int] = []
        self._constants: list[Any] = []
        self._constant_index: dict[int, int] = {}
        self._registers: dict[Source, int] = {LocalSource(name): k for k, name in enumerate(arguments)}
        self._plain: set[Source] = set()  # the sources whose guarded class has a plain ``__dict__``
        self._first_free = self._next_free = len(arguments)
        self._functions: list[str] = []
        self._function_places: list[int] = []
        self._function_globals: dict[str, Any] = {}

    def add(self, index: int, guard: Guard) -> None:
        """The reads that a guard needs, and its condition."""
        operands = [self.read(source) for source in guard.sources]
        if guard.kind in _AGAINST_CONSTANT:
            constant = self._constant(guard.constants[-1])
            self._words += (_AGAINST_CONSTANT[guard.kind], index, operands[0], constant)
            if guard.kind == "type" and _has_plain_dict(guard.constants[0]):
                self._plain.add(guard.sources[0])
        elif guard.kind in _BETWEEN_SOURCES:
            self._words += (_BETWEEN_SOURCES[guard.kind], index, *operands)
        elif guard.kind == "length":
            self._words += (GuardOpcode.LENGTH, index, operands[0], guard.constants[0])
        elif guard.kind == "tensor":
            self._words += (GuardOpcode.TENSOR, index, operands[0], *self._tensor_words(guard))
        else:
            names = [f"v{number}" for number in range(len(operands))]
            constants = {f"c{k}": self._function_global(value) for k, value in enumerate(guard.constants)}
            function = self._function(names, guard.condition.format(*names, **constants))
            self._words += (GuardOpcode.EXPRESSION, index, function, len(operands), *operands)

    def read(self, source: Source) -> int:
        """The operand that holds what a source holds."""
        if type(source) is ReferenceSource:
            return self._constant(source.reference.value)
        if type(source) is ContentSource:
            return self.read(source.parent)
        register = self._registers.get(source)
        if register is None:
            self._write_read(source)
            register = self._registers[source] = self._next_free
            self._next_free += 1
        return register

    def _write_read(self, source: Source) -> None:
        if type(source) is GlobalSource:
            scope = self._constant(source.scope.value)
            self._words += (GuardOpcode.ITEM, scope, self._constant(source.name))
            return
        bases = [self.read(base) for base in (source.base, source.key_source) if base is not None]
        if type(source) is AttributeSource and source.name == "__dict__" and source.base in self._plain:
            self._words += (GuardOpcode.INSTANCE_DICT, bases[0])
        elif type(source) is AttributeSource:
            self._words += (GuardOpcode.ATTRIBUTE, bases[0], self._constant(source.name))
        elif type(source) in (ItemSource, ModuleEntrySource):
            assert isinstance(source, (ItemSource, ModuleEntrySource))
            self._words += (GuardOpcode.ITEM, bases[0], self._constant(source.key))
        else:
            names = [f"v{number}" for number in range(len(bases))]
            text = source.expression(names[0] if names else "", self._reference)
            function = self._function(names, text.replace("{key}", names[-1]) if source.key_source else text)
            self._words += (GuardOpcode.CALL, 0, function, len(bases), *bases)

    def finish(self, inputs: Sequence[Source]) -> tuple[bytes, tuple[Any, ...]]:
        """The program that returns these inputs, and its constants."""
        operands = [self.read(source) for source in inputs]
        self._words += (GuardOpcode.RETURN, len(operands), *operands)
        if self._functions:
            made = f"functions = ({''.join(f'{text}, ' for text in self._functions)})"
            for place, function in zip(
                self._function_places, evaluate(made, "functions", self._function_globals), strict=True
            ):
                self._constants[place] = function
        words = array("q", [self._next_free - self._first_free, *self._words])
        return words.tobytes(), tuple(self._constants)

    def _constant(self, value: Any) -> int:
        index = self._constant_index.get(id(value))
        if index is None:
            index = self._constant_index[id(value)] = len(self._constants)
            self._constants.append(value)
        return ~index

    def _function(self, parameters: Sequence[str], expression: str) -> int:
        """The constant of a function that all functions of the program are compiled together with."""
        self._function_places.append(len(self._constants))
        self._constants.append(None)
        self._functions.append(f"lambda {', '.join(parameters)}: {expression}")
        return ~self._function_places[-1]

    def _function_global(self, value: Any) -> str:
        name = f"c{~self._constant(value)}"
        self._function_globals[name] = value
        return name

    def _reference(self, reference: Reference) -> str:
        return self._function_global(reference.value)

    def _tensor_words(self, guard: Guard) -> Sequence[int]:
        kind, dtype, device, shape, stride, requires_grad, is_conj, is_neg = guard.constants
        interpreter = self._interpreter
        return (
            self._constant(kind),
            interpreter.lazy_keys(is_conj, is_neg),
            requires_grad,
            dtype_code(dtype),
            strided_code(),
            *device_codes(device),
            len(shape),
            *shape,
            *stride,
        )


def _has_plain_dict(cls: type) -> bool:
    """Whether reading ``__dict__`` of an instance does no more than to fetch its dictionary."""
    found = next((vars(base)["__dict__"] for base in cls.__mro__ if "__dict__" in vars(base)), None)
    return type(found) is types.GetSetDescriptorType and not issubclass(cls, type)
