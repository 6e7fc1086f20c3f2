"""The runner of a captured frame: Python source that calls the graph, replays effects and rebuilds values."""

from __future__ import annotations

import math
import types
from typing import Any

import torch
from torch import fx

from gradsplit.compile_core.capture.graph.side_effects import SideEffects
from gradsplit.compile_core.capture.object_model.classes import ClassValue
from gradsplit.compile_core.capture.object_model.exceptions import ExceptionValue
from gradsplit.compile_core.capture.object_model.functions import CellValue, FunctionValue
from gradsplit.compile_core.capture.object_model.hooked_results import take_hooks_of_results
from gradsplit.compile_core.capture.object_model.instance_dict import MISSING
from gradsplit.compile_core.capture.object_model.made_classes import refuse_made
from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.open_numbers.conditions import ConditionValue
from gradsplit.compile_core.capture.open_numbers.growing_lists import GrowingList
from gradsplit.compile_core.capture.open_numbers.scalars import ScalarValue
from gradsplit.compile_core.capture.open_numbers.symbolic_numbers import SymbolicNumber, is_of_data
from gradsplit.compile_core.capture.values.base import CaptureState, LazyValue, Value
from gradsplit.compile_core.capture.values.constants import (
    ConstantValue,
    IteratorValue,
)
from gradsplit.compile_core.capture.values.containers import (
    ContainerValue,
    ListValue,
    SequenceValue,
)
from gradsplit.compile_core.capture.values.deques import DequeValue
from gradsplit.compile_core.capture.values.mappings import DictValue
from gradsplit.compile_core.capture.values.references import ReferenceValue
from gradsplit.compile_core.capture.values.sets import SetValue
from gradsplit.compile_core.capture.values.tensors import TensorValue
from gradsplit.compile_core.capture.values.view_copies import check_view_copies
from gradsplit.compile_core.ir import data_checks
from gradsplit.compile_core.ir.captured import RunnerCode
from gradsplit.compile_core.ir.source_writer import SourceWriter
from gradsplit.compile_core.ir.sources import AttributeSource, variable_of
from gradsplit.compile_core.torch_facts.thread_state import set_grad_enabled
from gradsplit.compile_core.torch_facts.torch_switches import preserved_switches

# How the graph returns a number that only it knows.
_HELD_AS: dict[type, torch.dtype] = {float: torch.float64, int: torch.int64, bool: torch.bool}


class RunnerWriter(SourceWriter):
    """Collects lines. Values are built first, then effects are stored, so that no fetch sees a changed
    object."""

    def __init__(self, state: CaptureState) -> None:
        super().__init__()
        self.state = state
        self.outputs: dict[fx.Node, int] = {}  # the graph's results, and which each is
        self._effects: list[str] = []
        self._changes: list[str] = []
        # What must come after the effects: iterators over lists that these change.
        self.late: list[str] = []
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []

    def emit(self, value: Value | LazyValue) -> str:
        """The name of a value in the runner; the same value always has the same name."""
        if isinstance(value, LazyValue):
            return self.constant(value.real) if value.source is None else self.read(value.source)
        if value.source is not None:
            return self.read(value.source)
        name = self._names.get(id(value))
        if name is None:
            self._kept.append(value)
            name = self._names[id(value)] = self._build(value)
            for attribute, item in getattr(value, "changes", {}).items():
                if item is not MISSING:
                    self.lines.append(f"object.__setattr__({name}, {attribute!r}, {self.emit(item)})")
        return name

    def made(self, maker: Any, *args: Any, **kwargs: Any) -> str:
        """The name of what a call gives, whose arguments are values, tuples of them, or constants."""
        named = [f"{key}={self._argument(argument)}" for key, argument in kwargs.items()]
        return self.bind(f"{self.constant(maker)}({', '.join([*map(self._argument, args), *named])})")

    def _argument(self, argument: Any) -> str:
        if isinstance(argument, tuple):
            return f"({''.join(f'{self._argument(part)}, ' for part in argument)})"
        return self.emit(argument) if isinstance(argument, (Value, LazyValue)) else self.constant(argument)

    def _name(self, value: Value, expression: str) -> str:
        """Bind a value that may be part of itself before its parts are built."""
        name = self._names[id(value)] = self.bind(expression)
        return name

    def _build(self, value: Value) -> str:
        if self.state.made_classes:
            refuse_made(self.state, value.real if isinstance(value, ClassValue) else value.python_type())
        made = value.rebuild(self)
        if made is not None:
            return made
        if isinstance(value, (ScalarValue, ConditionValue)) or is_of_data(value):
            given: list[Value] = [SequenceValue([], tuple), value]
            dtype = ConstantValue(_HELD_AS[value.python_type()])
            held = self.state.call_tensor_op("call_function", torch.full, given, {"dtype": dtype})
            return self.bind(f"{self.emit(held)}.item()")
        if isinstance(value, SymbolicNumber):
            text = value.text(self.state, self.read)
            return self.bind(text.replace("math.", f"{self.constant(math)}."))
        if isinstance(value, ConstantValue):
            plain = type(value.value) in (type(None), bool, int, str)
            return repr(value.value) if plain else self.constant(value.value)
        if isinstance(value, TensorValue):
            result = f"out[{self.outputs.setdefault(value.node, len(self.outputs))}]"
            if value.cls is torch.nn.Parameter and not value.fake.requires_grad:
                # Of a leaf's class a backend keeps nothing where no gradients are gathered.
                result = self.bind(f"{self.constant(torch.nn.Parameter)}({result}, False)")
            return result
        if isinstance(value, (ListValue, DictValue)):
            return self._build_container(value)
        if isinstance(value, SequenceValue):
            if value.cls is tuple:
                return self.bind(f"({''.join(f'{self.emit(item)}, ' for item in value.items)})")
            return self.made(getattr(value.cls, "_make", value.cls), tuple(value.items))
        if isinstance(value, FunctionValue):
            return self.constant(value.real) if value.real is not None else self._build_function(value)
        if isinstance(value, CellValue):
            return self._build_cell(value)
        if isinstance(value, ReferenceValue):
            return self.constant(value.real)
        if isinstance(value, ExceptionValue):
            return self._build_exception(value)
        if isinstance(value, InstanceValue):
            return self.constant(value.real) if value.real is not None else self._build_instance(value)
        if isinstance(value, IteratorValue):
            kind = value.python_type().__name__
            raise self.state.unsupported("live-iterator", f"a {kind} that has begun and cannot be made anew")
        raise self.state.unsupported("result", f"no rule to hand out {value.describe()}")

    def _build_instance(self, value: InstanceValue) -> str:
        """An object made in the frame: what its constructors did is its content and its attributes."""
        content, cls = value.content, self.constant(value.cls)
        if content is None or isinstance(content, (DictValue, ListValue)) or content.python_type() is set:
            layout = next(base for base in value.cls.__mro__ if base in (object, types.SimpleNamespace))
            maker = self.constant(layout if content is None else content.python_type())
            name = self._name(value, f"{maker}.__new__({cls})")
        else:
            name = self._name(
                value, f"{self.constant(content.python_type())}.__new__({cls}, {self.emit(content)})"
            )
        if isinstance(content, ContainerValue):
            self.lines += self._content_lines(content, name)
        return name

    def _content_lines(self, content: ContainerValue, name: str) -> list[str]:
        """Statements that give a mutable container at ``name`` its content, by methods of its built-in class."""
        cls = "" if content.owner is None else self.constant(content.cls)
        if isinstance(content, GrowingList) and not content.is_read:
            return [f"{name}.extend([{', '.join(self.emit(item) for item in content.appended)}])"]
        if isinstance(content, DequeValue):
            items = ", ".join(self.emit(item) for item in content.items)
            return [f"{name}.clear()", f"{name}.extend([{items}])"]
        if isinstance(content, ListValue):
            items = ", ".join(self.emit(item) for item in content.items)
            return [f"{cls}.__setitem__({name}, slice(None), [{items}])" if cls else f"{name}[:] = [{items}]"]
        if isinstance(content, DictValue):
            return self._dict_lines(content, name, cls)
        if isinstance(content, SetValue) and content.cls is set:
            return self._set_lines(content, name)
        return []

    def _dict_lines(self, content: DictValue, name: str, cls: str) -> list[str]:
        entries = content.entries
        # Iterators stand at places of a dictionary, which keeps them as long as it keeps its keys.
        has_same_keys = content.source is not None and content.original_keys == tuple(entries)
        stored = [pair for pair in entries.values() if not (has_same_keys and isinstance(pair[1], LazyValue))]
        pairs = [(self.emit(key), self.emit(item)) for key, item in stored]
        begin = [] if has_same_keys else [f"{cls}.clear({name})" if cls else f"{name}.clear()"]
        if cls:
            return [*begin, *(f"{cls}.__setitem__({name}, {key}, {item})" for key, item in pairs)]
        return [*begin, f"{name}.update({{{', '.join(f'{key}: {item}' for key, item in pairs)}}})"]

    def _set_lines(self, content: SetValue, name: str) -> list[str]:
        """A set keeps the members that stay, and with them as much of its order as it can."""
        gone = [member for key, member in content.original.items() if key not in content.members]
        new = [member for member in content.arranged() if member not in content.original.values()]
        lines = []
        for method, members in (("difference_update", gone), ("update", new)):
            if members:
                shown = "".join(f"{self.emit(member)}, " for member in members)
                lines.append(f"set.{method}({name}, ({shown}))")
        return lines

    def _build_exception(self, value: ExceptionValue) -> str:
        if value.was_raised:
            raise self.state.unsupported(
                "exception-traceback", f"{value.describe()} is kept after it was raised"
            )
        args = ", ".join(self.emit(item) for item in value.args)
        name = self._name(value, f"{self.constant(value.cls.__new__)}({self.constant(value.cls)}, {args})")
        self.lines.append(f"{self.constant(value.builtin_class.__init__)}({name}, {args})")
        self.lines += [f"{name}.{link} = {self.emit(item)}" for link, item in value.links.items()]
        return name

    def _build_container(self, value: ListValue | DictValue) -> str:
        """It is empty first, as it may be part of itself."""
        given = ""
        if isinstance(value, DequeValue):
            given = f"(), {value.limit}"
        elif isinstance(value, DictValue) and value.default_factory is not None:
            given = self.emit(value.default_factory)
        name = self._name(value, f"{self.constant(value.cls)}({given})")
        self.lines += self._content_lines(value, name)
        return name

    def _build_function(self, value: FunctionValue) -> str:
        cells = "".join(f"{self.emit(cell)}, " for cell in value.closure)
        defaults = "".join(f"{self.emit(item)}, " for item in value.defaults)
        name = self._name(
            value,
            f"{self.constant(types.FunctionType)}({self.constant(value.code)}, {self.constant(value.scope)}, "
            f"{value.code.co_name!r}, ({defaults}) or None, ({cells}))",
        )
        if value.keyword_defaults:
            items = ", ".join(f"{key!r}: {self.emit(item)}" for key, item in value.keyword_defaults.items())
            self.lines.append(f"{name}.__kwdefaults__ = {{{items}}}")
        if value.annotations is not None:
            self.lines.append(f"{name}.__annotations__ = {self.emit(value.annotations)}")
        return name

    def _build_cell(self, value: CellValue) -> str:
        if value.real is not None:
            return self.constant(value.real)  # of a library, which is trusted to stay
        name = self._name(value, f"{self.constant(types.CellType)}()")
        if value.content is not None:
            self.lines.append(f"{name}.cell_contents = {self.emit(value.content)}")
        return name

    def replay(self, effects: SideEffects) -> None:
        """Store the final state of everything that the captured call changed. Comes after all that is handed out."""
        self._changes += effects.changes()
        for value in effects.moved.values():
            self._effects.append(value.move(self))
        for container in effects.containers.values():
            assert isinstance(container, ContainerValue)
            self._effects += self._content_lines(container, self.emit(container))
        for (_, attribute), owner in effects.attributes.items():
            # What the class itself does at a store was run by the capture.
            changed: Any = owner
            name, now = self.emit(owner), changed.changes[attribute]
            if attribute in getattr(owner, "deleted", ()):
                self._effects.append(f"object.__delattr__({name}, {attribute!r})")
            if now is not MISSING:
                self._effects.append(f"object.__setattr__({name}, {attribute!r}, {self.emit(now)})")
        for cell in effects.cells.values():
            assert isinstance(cell, CellValue)
            place = f"{self.emit(cell)}.cell_contents"
            self._effects.append(
                f"del {place}" if cell.content is None else f"{place} = {self.emit(cell.content)}"
            )
        for (_, variable), (scope, value) in effects.globals.items():
            place = f"{self.constant(scope)}[{variable!r}]"
            gone = f"{self.constant(scope)}.pop({variable!r}, None)"
            self._effects.append(gone if value is MISSING else f"{place} = {self.emit(value)}")

        for (cls, attribute), value in effects.classes.items():
            name = self.constant(cls)
            stored = "" if value is MISSING else f"setattr({name}, {attribute!r}, {self.emit(value)})"
            self._effects.append(stored or f"delattr({name}, {attribute!r})")
        for tensor, hook in take_hooks_of_results(self.state, self.outputs):
            self._effects.append(
                f"{self.constant(torch.Tensor.register_hook)}({self.emit(tensor)}, {self.emit(hook)})"
            )
        # A lock is let go of when all is stored.
        for give, arguments in effects.messages:
            self._effects.append(f"{self.constant(give)}({', '.join(map(self.emit, arguments))})")
        check_view_copies(self.state, [*self.outputs])

    def finish(
        self, arguments: tuple[str, ...], has_graph: bool, writes_inputs: bool, last_lines: list[str]
    ) -> RunnerCode:
        """The whole runner; ``last_lines`` return or go on after the effects.

        Where the graph raises, no effect of the program has happened yet, not even those before the operation that
        raised. If the graph itself has changed nothing either, the call is made again, as plain Python; so it is where
        a check fails, which comes before all changes. The exception is handed on in a list: in a variable of the frame
        that it went through, it would keep all values of it alive.
        """
        names = list(map(variable_of, arguments))
        lines = [*self.lines, *self._effects, *self.late, *last_lines]
        # Shape rules, too, take for granted what a graph that has read data checks before it changes anything.
        is_checked = data_checks.has_checks(self.state.graph.graph) or self.state.data_reads.changes_last
        if has_graph and writes_inputs and not is_checked:
            lines = [*self._free_gradients(), *self._call_graph(), *lines]
        elif has_graph:
            noted, only_checks, went_back = [], [], []
            if is_checked:
                noted = [f"drawn = {self.constant(data_checks.generator_states)}()"]
                went_back = [
                    f"    if {self.constant(data_checks.is_failed_assumption)}(error):",
                    f"        {self.constant(data_checks.draw_again)}(drawn)",
                ]
                only_checks = ["    else:", "        raise"] if writes_inputs else []
            lines = [
                *noted,
                "try:",
                *(f"    {line}" for line in self._call_graph()),
                "except Exception as error:",
                *went_back,
                *only_checks,
                "    failed = [error]",
                "else:",
                *(f"    {line}" for line in lines),
                f"return run_again({', '.join(['failed', *names])})",
            ]
        body = "\n".join(f"    {line}" for line in lines)
        text = f"def run({', '.join(['graph', 'inputs', *names])}):\n{body}\n"
        result_lines = (*self.lines, *self.late, *last_lines[-1:])
        return RunnerCode(text, self.constants, result_lines, tuple(self._changes))

    def _free_gradients(self) -> list[str]:
        """Where the call is not made again, whatever is raised, old gradients need not lie in memory beside the new."""
        used = [record.node for record in self.state.graph.records if record.node.users]
        freed = [
            used.index(leaf.node)
            for leaf in self.state.effects.freed_gradients
            if leaf.node in used and AttributeSource(leaf.source, "grad") not in self._read
        ]
        return [f"for place in {freed}: inputs[place].grad = None"] if freed else []

    def _call_graph(self) -> list[str]:
        """The call of the graph. What it turns is turned back by nodes of it, which do not run where another raises."""
        turned = self.state.turned
        if not turned:
            return ["out = graph(*inputs)"]
        if turned == {set_grad_enabled}:
            # Grad mode is guarded, so it is the same at every call.
            turn_back = f"    {self.constant(set_grad_enabled)}({torch.is_grad_enabled()})"
            return ["try:", "    out = graph(*inputs)", "except BaseException:", turn_back, "    raise"]
        return [f"with {self.constant(preserved_switches)}():", "    out = graph(*inputs)"]
