"""The symbols of one capture: sizes, strides and integers that may differ at the next call.

Torch's ShapeEnv does the mathematics. Each symbol stands for what lies at one source, such as ``x.shape[0]``; whatever
the capture derives from the value of a symbol (a comparison, a shape check of an operation) becomes a condition there.
``add_guards`` turns the conditions into guards over the sources. Symbols never share a source nor, unlike torch's duck
shaping, are two symbols one because their values happen to be equal: where a program needs that, it is a condition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint

from gradsplit.compile_core.capture.guards.guards import GuardSet
from gradsplit.compile_core.capture.open_numbers.size_history import SPECIAL_SIZES, SizeHistory
from gradsplit.compile_core.capture.open_numbers.size_marks import SizeMarks, marks_of
from gradsplit.compile_core.errors import CodeLocation, CompileError, Unsupported
from gradsplit.compile_core.ir.sources import (
    AttributeSource,
    CallSource,
    ItemSource,
    ModuleEntrySource,
    Source,
)
from gradsplit.compile_core.torch_facts.fake_modes import QuickFakeMode
from gradsplit.compile_core.torch_facts.symbolic_numbers import (
    PythonPrinter,
    SourceLocation,
    ValueRanges,
    integer_infinity,
)
from gradsplit.compile_core.torch_facts.symbolic_numbers import Source as TorchSource


@dataclass(frozen=True)
class TensorSizes:
    """Sizes and strides of an input tensor: integers where they stay, SymInts where they are open."""

    shape: tuple[int | torch.SymInt, ...]
    stride: tuple[int | torch.SymInt, ...]

    @property
    def static_shape(self) -> tuple[int | None, ...]:
        """The sizes, with None for those that are open."""
        return tuple(size if isinstance(size, int) else None for size in self.shape)


@dataclass(frozen=True)
class Symbol:
    """What one symbol stands for: the ``value`` that lies at ``source`` now, of those from ``least`` to ``greatest``.

    ``marked`` is the pair of bounds of a size that the user marked as dynamic, None for all others; ``name`` is what
    the user knows it by. Of sizes and strides, ``read`` is the tensor, the method and the dim that give it.
    """

    source: Source
    value: int
    name: str
    read: tuple[Source, str, int] | None = None
    least: int | None = None
    greatest: int | None = None
    marked: tuple[int | None, int | None] | None = None


class _LocatedShapeEnv(ShapeEnv):
    """Conditions carry the line of the captured program that they come from; looking for a line in the Python stack
    of the capture itself would find nothing and cost much."""

    def __init__(self, location: Callable[[], CodeLocation | None]) -> None:
        self.reads_scalars = self.reads_shapes = True
        super().__init__()
        self.location = location

    @property
    def allow_scalar_outputs(self) -> bool:
        return self.reads_scalars

    @property
    def allow_dynamic_output_shape_ops(self) -> bool:
        return self.reads_shapes

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: str | None = None) -> tuple[Any, str]:
        del is_debug, framework_loc
        place = self.location()
        return SourceLocation("", None if place is None else str(place)), ""


def _nowhere() -> CodeLocation | None:
    return None


class _Name(str):
    """The name of a source is an attribute in some versions of torch and a method in others."""

    def __call__(self) -> str:
        return str(self)


class _SymbolSource(TorchSource):
    """Torch's notion of a source, which it needs for names only."""

    name: Any = ""

    def __init__(self, source: Source) -> None:
        object.__setattr__(self, "name", _Name(source))


class SymbolicSizes:
    """See the module. ``fake_mode`` is the capture's one fake mode; ``location`` says where the program stands."""

    def __init__(self, history: SizeHistory, location: Callable[[], CodeLocation | None]) -> None:
        self.history = history
        self.fake_mode = QuickFakeMode()
        self._location = location
        self.symbols: dict[sympy.Symbol, Symbol] = {}
        self._integers: dict[Source, torch.SymInt] = {}
        self._strides: dict[Source, tuple[int | torch.SymInt, ...]] = {}

    @functools.cached_property
    def shape_env(self) -> _LocatedShapeEnv:
        """Made for the first symbol: most captures have none, and torch takes a second to load what it needs here."""
        made = self.fake_mode.shape_env = _LocatedShapeEnv(self._location)
        made.reads_scalars = made.reads_shapes = False
        return made

    @contextmanager
    def depending_on_data(self, scalars: bool, shapes: bool) -> Iterator[None]:
        """Inside, fake tensors give new symbols for numbers that they would have to read, and for sizes of results."""
        env = self.shape_env
        env.reads_scalars, env.reads_shapes = scalars, shapes
        try:
            yield
        finally:
            env.reads_scalars = env.reads_shapes = False

    def of_tensor(
        self, real: torch.Tensor, source: Source, marks: SizeMarks | None = None
    ) -> TensorSizes | None:
        """Sizes and strides of an input tensor, None where all of them stay. ``marks`` are the user's.

        Raises:
            CompileError: a size that the user marked as dynamic is 0 or 1, or outside of the range given.
        """
        if self.history.dynamic is False or real.is_conj() or real.is_neg():
            return None
        marks = marks_of(real) if marks is None else marks
        shape = tuple(real.shape)
        opened = self.history.open_sizes(source, shape) | marks.dynamic.keys() | marks.maybe_dynamic
        opened -= marks.static
        if not opened and isinstance(source, ModuleEntrySource):
            return None
        place = AttributeSource(source, "shape")
        sizes: list[Any] = list(shape)
        for dim in sorted(opened):
            sizes[dim] = self._size(shape[dim], ItemSource(place, dim), source, dim, marks)
        strides, found = _derived_strides(sizes, real)
        places = CallSource(AttributeSource(source, "stride"))
        rest = [0 if known else stride for known, stride in zip(found, real.stride(), strict=True)]
        for dim in self.history.open_strides(source, rest):
            if not found[dim] and strides[dim] not in SPECIAL_SIZES:
                place = ItemSource(places, dim)
                strides[dim] = self._make(
                    Symbol(place, strides[dim], str(place), (source, "stride", dim), least=2)
                )
        if all(type(number) is int for number in (*sizes, *strides)):
            return None
        self._strides[places] = tuple(strides)
        return TensorSizes(tuple(sizes), tuple(strides))

    def of_integer(self, real: int, source: Source) -> torch.SymInt | None:
        """The symbol of an integer of the program, None where it stays."""
        known = self._integers.get(source)
        if known is None and self.history.is_open(source, real):
            known = self._integers[source] = self._make(Symbol(source, real, str(source)))
        return known

    def _size(
        self, value: int, place: Source, tensor: Source, dim: int, marks: SizeMarks
    ) -> int | torch.SymInt:
        name = f"dim {dim} of {tensor}"
        bounds = marks.dynamic.get(dim)
        least, greatest = bounds or (None, None)
        if bounds is not None and value in SPECIAL_SIZES:
            raise CompileError(
                f"{name} is marked as dynamic, but every program is specialised to the size {value}"
            )
        if not (least or 0) <= value <= (greatest or value):
            raise CompileError(f"{name} is {value}, which is outside of the range it is marked with")
        if value in SPECIAL_SIZES:
            return value
        return self._make(
            Symbol(place, value, name, (tensor, "size", dim), max(least or 2, 2), greatest, bounds)
        )

    def _make(self, symbol: Symbol) -> torch.SymInt:
        name = _SymbolSource(symbol.source)
        if symbol.least is None:
            made = self.shape_env.create_unspecified_symbol(symbol.value, name, DimDynamic.DYNAMIC)
        else:
            limits = ValueRanges(
                symbol.least, integer_infinity if symbol.greatest is None else symbol.greatest
            )
            constraint = StrictMinMaxConstraint(warn_only=False, vr=limits)
            made = self.shape_env.create_symbol(symbol.value, name, DimDynamic.DYNAMIC, constraint)
        assert isinstance(made, sympy.Symbol)
        self.symbols[made] = symbol
        return self.number(made)

    def number(self, symbol: sympy.Symbol) -> torch.SymInt:
        """The SymInt of a symbol."""
        number = self.shape_env.create_symintnode(symbol, hint=self.symbols[symbol].value)
        assert isinstance(number, torch.SymInt)
        return number

    def expression(self, number: torch.SymInt) -> sympy.Expr:
        """The number in terms of the symbols, with what is known of them by now."""
        return self.shape_env.replace(number.node.expr)

    def value_of(self, expression: sympy.Expr) -> Any:
        """The value at this call."""
        return expression.xreplace({symbol: sympy.Integer(at.value) for symbol, at in self.symbols.items()})

    def text(self, expression: sympy.Basic, names: Callable[[Source], str]) -> str:
        """An expression as Python. It may use ``math``.

        Raises:
            NotImplementedError: Python has no short form of it.
        """
        return SizePrinter(lambda symbol: names(self.symbols[symbol].source)).doprint(expression)

    def end_of_capture(self) -> None:
        """Let go of the capture; conditions may still come, from backends that look at sizes."""
        self._location = _nowhere
        if "shape_env" in self.__dict__:
            self.shape_env.location = _nowhere
            # For those who run the graph on fake tensors again.
            self.shape_env.reads_scalars = self.shape_env.reads_shapes = True

    def add_guards(self, guards: GuardSet) -> None:
        """Add what must hold of the symbols for the capture to be right.

        Raises:
            CompileError: a size that the user marked as dynamic must have one value.
            Unsupported: a size of an input is to be what data says.
        """
        for made, symbol in self.symbols.items():
            replaced = self.shape_env.replace(made)
            if symbol.marked is not None:
                self._check_marked(made, symbol)
            if replaced != made:
                self._guard(guards, sympy.Eq(made, replaced, evaluate=False))
                continue
            if symbol.least is not None:
                self._guard(guards, sympy.Ge(made, symbol.least, evaluate=False))
            if symbol.greatest is not None:
                self._guard(guards, sympy.Le(made, symbol.greatest, evaluate=False))
        if not self.symbols:
            return
        for condition in self.shape_env.guards:
            self._guard(guards, self.shape_env.replace(condition.expr))
        for place, strides in self._strides.items():
            self._guard_strides(guards, place, strides)

    def _guard(self, guards: GuardSet, condition: sympy.Basic) -> None:
        if condition is sympy.true:
            return
        if any(symbol not in self.symbols for symbol in condition.free_symbols):
            raise Unsupported("data-dependent-guard", f"a size of an input that data decides: {condition}")
        sources = self.sources(condition)
        try:
            guards.written(sources, functools.partial(self.text, condition))
        except NotImplementedError:
            for symbol, at in self.symbols.items():
                if at.source in sources:
                    self._guard(guards, sympy.Eq(symbol, at.value, evaluate=False))

    def _guard_strides(self, guards: GuardSet, place: Source, strides: Sequence[int | torch.SymInt]) -> None:
        """Strides are products of sizes and strides."""
        expected = [
            self.expression(stride) if isinstance(stride, torch.SymInt) else sympy.Integer(stride)
            for stride in strides
        ]
        sources = [place, *dict.fromkeys(source for stride in expected for source in self.sources(stride))]

        def shown(names: Callable[[Source], str]) -> str:
            return f"{names(place)} == ({', '.join(self.text(stride, names) for stride in expected)},)"

        guards.written(sources, shown)

    def sources(self, expression: sympy.Basic) -> list[Source]:
        """Where the symbols of an expression lie."""
        used = expression.free_symbols
        return [at.source for symbol, at in self.symbols.items() if symbol in used]

    def _check_marked(self, made: sympy.Symbol, symbol: Symbol) -> None:
        """A size that the user marked as dynamic has not come to be one value, nor in a smaller range than given."""
        assert symbol.marked is not None
        least, greatest = symbol.marked
        value, known = self.shape_env.replace(made), self.shape_env.var_to_range[made]
        if value.is_number:
            only = f"the size {value}"
        elif (least is not None and known.lower > symbol.least) or (
            greatest is not None and known.upper < greatest
        ):
            only = f"sizes from {known.lower} to {known.upper}"
        else:
            return
        shown = f"{symbol.name} is marked as dynamic, but the program as captured only works for {only}"
        for condition in self.shape_env.guards:
            if made in condition.expr.free_symbols and not isinstance(condition.expr, sympy.Ne):
                place = condition.sloc.maybe_user_loc
                raise CompileError(
                    f"{shown}: {self.text(condition.expr, str)}" + (f", at {place}" if place else "")
                )
        raise CompileError(shown)


def _derived_strides(sizes: Sequence[Any], real: torch.Tensor) -> tuple[list[Any], list[bool]]:
    """The strides, each as the product of another dim's size and stride if there is one; and whether there is."""
    strides: list[Any] = list(real.stride())
    found = [False] * len(strides)
    products: dict[int, Any] = {1: 1}
    for dim in sorted(range(len(strides)), key=lambda dim: (real.stride(dim), -dim)):
        plain = real.stride(dim)
        if plain in products:
            strides[dim], found[dim] = products[plain], True
        product = plain * max(real.size(dim), 1)
        if product not in products or type(products[product]) is int:
            products[product] = strides[dim] * sizes[dim] if real.size(dim) else strides[dim]
    return strides, found


# Expressions over symbols as Python text.
#
# Torch's printer is for conditions that may be evaluated on symbolic numbers again; ours run on plain numbers only.


class SizePrinter(PythonPrinter):
    """Python over the names of symbols; may use ``math``. Raises NotImplementedError for what Python has no name of."""

    def __init__(self, name_of: Callable[[sympy.Symbol], str]) -> None:
        super().__init__()
        self._name_of = name_of

    def _print_Symbol(self, expr: sympy.Symbol) -> str:  # noqa: N802  (sympy looks methods up by these names)
        return self._name_of(expr)

    def _print_ToFloat(self, expr: sympy.Expr) -> str:  # noqa: N802
        return f"float({self._print(expr.args[0])})"

    def _helper_sqrt(self, expr: sympy.Expr) -> str:
        return f"math.sqrt({self._print(expr)})"

    def _print_Rational(self, expr: sympy.Rational) -> str:  # noqa: N802
        raise NotImplementedError(f"the fraction {expr}")

    def _print_Function(self, expr: Any) -> str:  # noqa: N802
        raise NotImplementedError(type(expr).__name__)

    def emptyPrinter(self, expr: Any) -> str:  # noqa: N802
        raise NotImplementedError(type(expr).__name__)
