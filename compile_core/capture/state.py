"""The state of a capture with its operations, over all families of values."""

from __future__ import annotations

import enum
import importlib.util
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from gradsplit.compile_core import config
from gradsplit.compile_core.capture import rule_files  # noqa: F401  (whoever has a state has the rules)
from gradsplit.compile_core.capture.frames.binding import bind_arguments
from gradsplit.compile_core.capture.frames.frame import Frame
from gradsplit.compile_core.capture.frames.generators import GeneratorValue
from gradsplit.compile_core.capture.graph.output_graph import OutputGraph, is_fake
from gradsplit.compile_core.capture.graph.side_effects import SideEffects
from gradsplit.compile_core.capture.higher_order_calls.bodies import BodyGraph
from gradsplit.compile_core.capture.higher_order_calls.function_transforms import PullBackValue
from gradsplit.compile_core.capture.object_model import enums
from gradsplit.compile_core.capture.object_model.class_entries import find_class_entry
from gradsplit.compile_core.capture.object_model.exceptions import ExceptionValue, raised_during
from gradsplit.compile_core.capture.object_model.functions import FunctionValue
from gradsplit.compile_core.capture.object_model.objects import bind_class_entry
from gradsplit.compile_core.capture.object_model.opaque import wrap_opaque
from gradsplit.compile_core.capture.object_model.type_forms import TYPE_FORMS
from gradsplit.compile_core.capture.object_model.wrappers import tensor_value
from gradsplit.compile_core.capture.open_numbers.conditions import (
    ConditionValue,
    condition_value,
    expected_of,
)
from gradsplit.compile_core.capture.open_numbers.known_numbers import constant_in
from gradsplit.compile_core.capture.open_numbers.open_floats import takes_probability
from gradsplit.compile_core.capture.open_numbers.scalars import (
    check_scalars,
    is_number_in_tensor,
    read_scalar,
)
from gradsplit.compile_core.capture.open_numbers.size_history import SizeHistory
from gradsplit.compile_core.capture.open_numbers.symbolic_numbers import SymbolicInt, open_probability
from gradsplit.compile_core.capture.open_numbers.symbolic_sizes import SymbolicSizes
from gradsplit.compile_core.capture.operations import comparisons, texts
from gradsplit.compile_core.capture.operations.special_methods import special_call
from gradsplit.compile_core.capture.python_rules.drawn_tensors import DefaultGenerator, TensorGenerator
from gradsplit.compile_core.capture.python_rules.library_closures import CLOSURE_RULES
from gradsplit.compile_core.capture.torch_rules import function_overrides
from gradsplit.compile_core.capture.values.base import CaptureState, NotConstant, SymbolicRaise, Value
from gradsplit.compile_core.capture.values.call_rules import DATA_DEPENDENT_RULES
from gradsplit.compile_core.capture.values.constants import ConstantValue, is_folded, is_literal, is_none
from gradsplit.compile_core.capture.values.containers import (
    ListValue,
    SequenceValue,
    SliceValue,
    sequence_fields,
)
from gradsplit.compile_core.capture.values.mappings import DictValue
from gradsplit.compile_core.capture.values.sets import SetValue
from gradsplit.compile_core.capture.values.tensors import TensorValue
from gradsplit.compile_core.capture.values.view_copies import note_perhaps_view
from gradsplit.compile_core.capture.wrap import wrap
from gradsplit.compile_core.errors import InternalError, Unsupported
from gradsplit.compile_core.ir.captured import Guard
from gradsplit.compile_core.ir.data_reads import DataReads
from gradsplit.compile_core.ir.sources import Source
from gradsplit.compile_core.torch_facts.function_overrides import is_overridable
from gradsplit.compile_core.torch_facts.symbolic_numbers import assume
from gradsplit.compile_core.torch_facts.thread_state import device_constructors
from gradsplit.compile_core.torch_facts.wrapper_tensors import is_wrapper

_DEPTH_LIMIT = 120
_PROXIES = frozenset(weakref.ProxyTypes)


class Capture(CaptureState):
    """See CaptureState."""

    equal: Any = comparisons.same_item
    text_of: Any = texts.text
    representation_of: Any = texts.representation
    format_of: Any = texts.formatted
    filled_format: Any = texts.fill_format
    enum_attribute: Any = enums.enum_attribute
    is_overridable: Any = staticmethod(is_overridable)
    through_overrides: Any = function_overrides.through_overrides

    def __init__(
        self,
        original_of: Callable[[Any], Any],
        is_compiled_apart: Callable[[torch.nn.Module], bool],
        history: SizeHistory,
        data_reads: DataReads,
    ) -> None:
        sizes = SymbolicSizes(history, self.location)
        super().__init__(OutputGraph(sizes, data_reads), SideEffects(), sizes, data_reads)
        self.original_of = original_of
        self.is_compiled_apart = is_compiled_apart
        self.generators: list[GeneratorValue] = []

    def wrap(self, real: Any, source: Source | None) -> Value:
        try:
            if type(real) in _PROXIES:
                raise self.unsupported("weak-proxy", "a weak proxy, which passes for what it stands for")
            return wrap(self, real, source)
        except Unsupported as error:
            # The object may still be passed on; the reason comes up if anything else is done with it.
            if source is None:
                raise
            return wrap_opaque(self, real, source, error)

    def from_constant(self, real: Any) -> Value:
        if isinstance(real, torch.SymInt):
            known = self.sizes.expression(real)
            return ConstantValue(int(known)) if known.is_number else SymbolicInt(real)
        if isinstance(real, torch.SymBool):
            return condition_value(real)
        if isinstance(real, Value):
            return real
        if is_literal(real) or type(real) is types.CodeType or is_folded(type(real)):
            return ConstantValue(real)
        if isinstance(real, torch.Size) or type(real) is tuple or sequence_fields(type(real)):
            return SequenceValue([self.from_constant(item) for item in real], type(real))
        if type(real) is list:
            return ListValue([self.from_constant(item) for item in real])
        if type(real) is dict:
            return DictValue(
                {key: (self.from_constant(key), self.from_constant(item)) for key, item in real.items()}
            )
        if type(real) in (set, frozenset):
            members = {item: self.from_constant(item) for item in real}
            return SetValue(members, type(real), None, type(real)(real))
        if type(real) is slice:
            return SliceValue([self.from_constant(part) for part in (real.start, real.stop, real.step)])
        if isinstance(real, (type, enum.EnumMeta, *TYPE_FORMS)):
            return self.wrap(real, None)
        raise self.unsupported("constant", f"a value of type {type(real).__qualname__}")

    def as_index(self, value: Value, refusal: str = "{!r} object cannot be interpreted as an integer") -> int:
        found = special_call(self, value, "__index__", [])
        value = value if found is None else found
        if isinstance(value, TensorValue):
            raise self.unsupported("index", f"{value.describe()} as an index of a sequence")
        try:
            real = value.as_constant()
        except NotConstant:
            real = None
        if not isinstance(real, int):
            raise self.raise_exception(TypeError, refusal.format(value.python_type().__name__))
        return int(real)

    def less(self, one: Value, other: Value) -> bool:
        return comparisons.compare(self, "<", one, other).truth(self)

    def imported_module(self, name: str, package: str | None, wanted: Sequence[str]) -> Value | None:
        if name.startswith(".") and not package:
            return None
        name = importlib.util.resolve_name(name, package)
        if not self._is_imported(name):
            return None
        given = sys.modules[name]
        parts = wanted if hasattr(given, "__path__") else ()
        for part in parts:
            if part != "*" and not hasattr(given, part) and not self._is_imported(f"{name}.{part}"):
                return None
        return self.wrap(sys.modules[name if wanted else name.partition(".")[0]], None)

    def _is_imported(self, module: str) -> bool:
        """Whether a module is loaded, which the capture does where nothing that the program did before waits: the
        program imports it in this very call, and any later import does nothing."""
        if sys.modules.get(module) is not None:
            return True
        if self.effects:
            return False
        try:
            importlib.import_module(module)
        except Exception:
            return False
        return True

    def raise_exception(self, cls: type[BaseException], *args: Any) -> SymbolicRaise:
        values = [self.from_constant(item) for item in args]
        value = ExceptionValue(cls, values)
        raised_during(self, value, self.handled_exception())
        return SymbolicRaise(value)

    def class_attribute(self, owner: Value, name: str) -> Value:
        cls = owner.python_type()
        defining, entry = find_class_entry(self, cls, name)
        if defining is None:
            raise self.raise_exception(AttributeError, f"{cls.__name__!r} object has no attribute {name!r}")
        return bind_class_entry(self, owner, cls, defining, name, entry)

    def inline(self, function: FunctionValue, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if len(self.frames) > _DEPTH_LIMIT:
            explanation = f"{function.describe()} is called deeper than {_DEPTH_LIMIT} calls"
            raise Unsupported("recursion", explanation, location=self.frames[0].location())
        code = function.code
        closure_rule = CLOSURE_RULES.get(code)
        if closure_rule is not None:
            return closure_rule(self, function, args, kwargs)
        if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            raise self.unsupported("async", f"{function.describe()} is asynchronous")
        frame = Frame(self, function, bind_arguments(self, function, args, kwargs))
        if code.co_flags & inspect.CO_GENERATOR:
            made = GeneratorValue(frame)
            self.generators.append(made)
            return made
        frame.run()
        if frame.result is None:
            raise InternalError(f"{function.describe()} ended without a result")
        return frame.result

    def call_tensor_op(self, op: str, target: Any, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if takes_probability(target):
            args = [open_probability(self, argument) for argument in args]
            kwargs = {key: open_probability(self, value) for key, value in kwargs.items()}
        constructs = self.default_device is not None and target in device_constructors()
        if constructs and is_none(kwargs.get("device", ConstantValue(None))):
            kwargs = {**kwargs, "device": ConstantValue(self.default_device)}
        generator = kwargs.get("generator")
        if isinstance(generator, (TensorGenerator, DefaultGenerator)):
            named = {key: value for key, value in kwargs.items() if key != "generator"}
            return generator.draw(self, op, target, args, named)
        graph_args = tuple(argument.graph_argument(self) for argument in args)
        graph_kwargs = {key: value.graph_argument(self) for key, value in kwargs.items()}
        check_scalars(self, target, (graph_args, graph_kwargs))
        try:
            return self._record(op, target, graph_args, graph_kwargs)
        except Unsupported as error:
            needs_data = error.reason_id in ("no-fake-result", "data-dependent-size")
            rule = DATA_DEPENDENT_RULES.get(target) if needs_data else None
            found = None if rule is None or isinstance(self.graph, BodyGraph) else rule(self, args)
            if found is not None:
                return found
            if error.reason_id != "no-fake-result":
                raise
            # Where torch takes a number it reads one out of a tensor, as out of the learning rate of an optimizer.
            tensors = 0 if target in device_constructors() else 1
            given = [*args[tensors:], *kwargs.values()]
            if not any(map(is_number_in_tensor, given)):
                allowed = self._depending_on_data()
                if allowed is None:
                    raise
                with allowed:
                    return self._record(op, target, graph_args, graph_kwargs)
            read = [self._number_in(value) if is_number_in_tensor(value) else value for value in given]
            others = len(args) - tensors
            named = dict(zip(kwargs, read[others:], strict=True))
            return self.call_tensor_op(op, target, [*args[:tensors], *read[:others]], named)

    def _number_in(self, tensor: TensorValue) -> Value:
        known = constant_in(self, tensor.node)
        return read_scalar(self, tensor) if known is None else ConstantValue(known)

    def _depending_on_data(self) -> AbstractContextManager[Any] | None:
        """Inside, fake tensors give new symbols for the numbers and sizes that they cannot tell; None where the
        settings do not say so, and in a body, the symbols of which would be unknown outside of it."""
        if isinstance(self.graph, BodyGraph):
            return None
        scalars = config.capture_scalar_outputs or self.only_checks
        shapes = config.capture_dynamic_output_shape_ops
        if not (scalars and shapes) and self.data_reads.may_stay(self.frames[-1].place()):
            scalars = shapes = True
        return self.sizes.depending_on_data(scalars, shapes) if scalars or shapes else None

    def read_truth(self, tensor: TensorValue) -> Value:
        # By a number that stays open: ``== 1`` would make it a constant.
        read = self.call_torch("item", self.call_torch("long", self.call_torch("ne", tensor, 0)))
        return ConditionValue(read.number > 0, expected=expected_of(tensor.node))

    def assume(self, value: Value, truth: bool) -> bool:
        if isinstance(self.graph, BodyGraph) or not self.graph.may_check():
            return False
        try:
            if isinstance(value, TensorValue):
                with self.sizes.depending_on_data(True, False):
                    value = self.read_truth(value)
            if not isinstance(value, ConditionValue):
                return False
            assume(value.number if truth else torch.sym_not(value.number))
            self.graph.write_checks()
        except Unsupported:
            return False
        return True

    def call_tensor_nodes(
        self, target: Any, nodes: Sequence[Any], example_by: Callable[..., Any] | None = None
    ) -> Value:
        return self._record("call_function", target, tuple(nodes), {}, example_by)

    def _record(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        example_by: Callable[..., Any] | None = None,
    ) -> Value:
        try:
            node = self.graph.call(op, target, args, kwargs, self.stack_trace(), example_by)
        except Unsupported as error:
            raise self.unsupported(error.reason_id, error.explanation, error.hint) from error
        node.meta["module"] = self.modules[-1] if self.modules else ""
        note_perhaps_view(self, target, node)
        return self._wrap_result(node, node.meta["example_value"], target)

    def _wrap_result(self, node: fx.Node, example: Any, target: Any) -> Value:
        if isinstance(example, torch.Tensor):
            if not is_fake(example):
                raise self.unsupported("real-tensor", f"{target} returned a tensor outside of the capture")
            known = self.tensor_of_fake.get(id(example))
            if known is not None:
                if known.version == example._version and not node.users:
                    self.graph.graph.erase_node(node)  # the operation returned its operand as it was
                known.version = example._version
                return known
            value = tensor_value(node, example, type(example) if is_wrapper(example) else torch.Tensor)
            self.tensor_of_fake[id(example)] = value
            if not torch.is_grad_enabled() and example._is_view():
                self._guard_base(example)
            return value
        if isinstance(example, (tuple, list)):
            cls = type(example)
            items: list[Any] = [self._wrap_part(node, at, item, target) for at, item in enumerate(example)]
            if issubclass(cls, list):
                return ListValue(items)
            if cls is tuple or sequence_fields(cls):
                return SequenceValue(items, cls)
        if type(example) is dict and all(is_literal(key) for key in example):
            entries: dict[Any, Any] = {
                key: (ConstantValue(key), self._wrap_part(node, key, item, target))
                for key, item in example.items()
            }
            return DictValue(entries)
        if example is None:
            return ConstantValue(None)
        if isinstance(example, torch.SymInt):
            node.meta["is_pure"] = True
            return self.from_constant(example)
        if isinstance(example, torch.SymBool):
            node.meta["is_pure"] = True
            return ConditionValue(example, node)
        raise self.unsupported(
            "operation-result",
            f"{getattr(target, '__name__', target)} returned {type(example).__name__}, not a tensor",
            "keep data-dependent Python values out of the compiled function",
        )

    def _guard_base(self, view: torch.Tensor) -> None:
        """A view that is made without gradients requires them if its base does, which a leaf need not be."""
        for record in self.graph.records:
            real, fake = record.real, record.entry.example
            if (
                not isinstance(real, torch.Tensor)
                or not real.requires_grad
                or type(real) is torch.nn.Parameter
            ):
                continue
            if view._base is (fake if fake._base is None else fake._base):
                source, needs = record.entry.source, view.requires_grad
                self.guards.add(
                    [source],
                    f"({{0}} if {{0}}._base is None else {{0}}._base).requires_grad is {needs}",
                    [],
                    f"what {source} is a view of, or itself, requires {'a' if needs else 'no'} gradient",
                )

    def _wrap_part(self, node: fx.Node, key: Any, part: Any, target: Any) -> Value:
        """A part of a result. Fakes cannot give numbers that depend on data, so a literal is always the same."""
        if is_literal(part):
            return ConstantValue(part)
        item = self.graph.item(node, key)
        return (
            PullBackValue(item)
            if isinstance(part, types.FunctionType)
            else self._wrap_result(item, part, target)
        )

    def add_scalar_node(self, op: str, target: Any, args: tuple[Any, ...], example: Any) -> fx.Node:
        node = self.graph.graph.create_node(op, target, args, {})
        node.meta["example_value"] = example
        node.meta["stack_trace"] = self.stack_trace()
        return node

    def call_state_op(self, target: Any, args: tuple[Any, ...]) -> Any:
        self.turned.add(target)
        result = target(*(arg.meta["example_value"] if isinstance(arg, fx.Node) else arg for arg in args))
        if hasattr(result, "__exit__"):
            self.open_modes.append(result)
        for arg in args:
            if isinstance(arg, fx.Node):
                self.open_modes.remove(arg.meta["example_value"])
        node = self.add_scalar_node("call_function", target, args, result)
        node.meta["turns_mode"] = True
        return node

    def all_guards(self) -> tuple[Guard, ...]:
        """Everything that was read, and what must hold of the sizes. It may be asked again after a backend looked at
        the sizes."""
        guards = self.guards.copy()
        self.sizes.add_guards(guards)
        return tuple(guards)

    def stack_trace(self) -> str:
        """The user's lines, outermost first, in the form of a traceback."""
        places = [frame.location() for frame in self.frames]
        return "".join(
            f'  File "{p.filename}", line {p.line}, in {p.function}\n    {p.text}\n' for p in places
        )
