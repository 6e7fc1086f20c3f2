"""The base of symbolic values, and the state that one capture carries.

A symbolic value stands for a Python object of the captured frame. Each family of values has its own file and answers
the protocol of ``Value``; whatever a family does not answer raises Unsupported, so that nothing is ever guessed.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from gradsplit.compile_core import config
from gradsplit.compile_core.capture.guards.guards import GuardSet
from gradsplit.compile_core.errors import CodeLocation, Unsupported
from gradsplit.compile_core.ir.sources import AttributeSource, ItemSource, Reference, ReferenceSource, Source
from gradsplit.compile_core.ir.user_lines import is_users_file

# Other classes are named with their module in messages.
_HEAP_TYPE, _IMMUTABLE = 1 << 9, 1 << 8


class PlainCall(Exception):
    """This one call should run as plain Python: the user's program raises, or depends on something
    transient. ``has_symbols``: sizes were open in the capture, which may be why. ``of_this_call``: the program is
    expected to raise nothing, and the next call to be another."""

    has_symbols = False

    def __init__(self, why: str, of_this_call: bool = False) -> None:
        super().__init__(why)
        self.of_this_call = of_this_call


class SymbolicRaise(Exception):
    """A Python exception of the captured program, on its way through the symbolic frames."""

    def __init__(self, value: Value) -> None:
        super().__init__(value)
        self.value = value


_serials = itertools.count()


class Value:
    """A symbolic Python object. ``source`` says where the object was before the call, None if it did not
    exist. ``serial`` numbers the values of a process in the order in which they were made. ``stopped`` is what an
    iterator of the program's own raised at its end."""

    source: Source | None = None
    stopped: SymbolicRaise | None = None
    serial: int
    cls: type

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = object.__new__(cls)
        made.serial = next(_serials)
        return made

    def python_type(self) -> type:
        """The type of the object."""
        return self.cls

    def describe(self) -> str:
        """A few words for error messages."""
        return f"a {self.python_type().__name__}"

    def settle(self, state: CaptureState) -> Value:
        """The object as it can be compared."""
        return self

    def truth(self, state: CaptureState) -> bool:
        cls = self.python_type()
        if not hasattr(cls, "__bool__") and not hasattr(cls, "__len__"):
            return True
        raise state.unsupported("truth-value", f"no rule for the truth value of {self.describe()}")

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name == "__class__":
            return state.wrap(self.python_type(), None)
        raise state.unsupported("attribute", f"no rule for the attribute {name!r} of {self.describe()}")

    def has_attribute(self, state: CaptureState, name: str) -> bool:
        try:
            self.get_attribute(state, name)
        except SymbolicRaise as raised:
            if issubclass(raised.value.python_type(), AttributeError):
                return False
            raise
        return True

    def set_attribute(self, state: CaptureState, name: str, value: Value) -> None:
        raise state.unsupported(
            "attribute-store", f"no rule to store the attribute {name!r} of {self.describe()}"
        )

    def delete_attribute(self, state: CaptureState, name: str) -> None:
        raise state.unsupported("attribute-delete", f"no rule to delete {name!r} of {self.describe()}")

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        raise state.unsupported("call", f"no rule for a call of {self.describe()}")

    def call_method(
        self, state: CaptureState, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        """Call a method; families with a table of methods override this."""
        return self.get_attribute(state, name).call(state, args, kwargs)

    def iterate(self, state: CaptureState) -> Value:
        """What ``iter()`` returns: a value with ``advance``."""
        raise state.unsupported("iteration", f"no rule to iterate over {self.describe()}")

    def advance(self, state: CaptureState) -> Value | None:
        """The next item of an iterator, None at its end."""
        raise state.unsupported("iteration", f"{self.describe()} is not an iterator with a rule")

    def advance_unread(self, state: CaptureState) -> Value | LazyValue | None:
        """The same for who only stores the item: of an item that nobody reads nothing is guarded."""
        return self.advance(state)

    def returned(self) -> Value | None:
        """What a generator returned, or ``StopIteration`` of the program's own holds; None for other iterators."""
        stopped, self.stopped = self.stopped, None
        raised: Any = None if stopped is None else stopped.value
        return raised.args[0] if raised is not None and raised.args else None

    def length(self, state: CaptureState) -> int:
        raise state.unsupported("length", f"no rule for the length of {self.describe()}")

    def get_item(self, state: CaptureState, key: Value) -> Value:
        raise state.unsupported("subscript", f"no rule for a subscript of {self.describe()}")

    def set_item(self, state: CaptureState, key: Value, value: Value) -> None:
        raise state.unsupported("subscript-store", f"no rule for a subscript store to {self.describe()}")

    def delete_item(self, state: CaptureState, key: Value) -> None:
        raise state.unsupported("subscript-delete", f"no rule for a subscript deletion of {self.describe()}")

    def contains(self, state: CaptureState, item: Value) -> bool:
        raise state.unsupported("containment", f"no rule for `in` of {self.describe()}")

    def as_constant(self) -> Any:
        """The real object, if it is known in full; else raises NotConstant."""
        raise NotConstant(self)

    def refuse_argument(self, state: CaptureState, callee: str) -> Unsupported:
        """The reason why a function of known values cannot take the object."""
        return state.unsupported(
            "call-of-builtin", f"no rule for {callee} with {self.describe()} as an argument"
        )

    def hash_key(self, state: CaptureState) -> Any:
        """A real object that hashes and compares as the object does in a dictionary."""
        raise state.unsupported("hash", f"no rule to use {self.describe()} as a dictionary key")

    def before_change_of_content(self, state: CaptureState) -> None:
        """The container that an object of the program's class consists of is about to change."""

    def move(self, writer: Any) -> str:
        """The statement by which a runner makes an existing object go on as the call did; ``writer`` writes it."""
        raise NotImplementedError

    def rebuild(self, writer: Any) -> str | None:
        """The name of such an object in a runner, made by lines of ``writer``; None where its family does not say."""

    def graph_argument(self, state: CaptureState) -> Any:
        """The argument of a graph node that stands for the object."""
        raise state.unsupported(
            "graph-argument", f"{self.describe()} cannot be an argument of a tensor operation"
        )


class NotConstant(Exception):
    """The object behind a value is not known in full."""


class NullValue(Value):
    """The NULL that CPython pushes below or above a callable, and an unset local variable."""

    cls = type(None)


NULL = NullValue()


class HandledBefore(Value):
    """The exception that was handled before the one that is being handled: POP_EXCEPT drops it."""

    cls = type(None)


HANDLED_BEFORE = HandledBefore()


class LastInstruction(Value):
    """The place of an instruction that raised, which RERAISE uses for the line of the traceback."""

    cls = int

    def __init__(self, index: int) -> None:
        self.index = index


# The frame that stands for the call of an object is nobody's line.
_ENTRY = "gradsplit.compile_core.compiled_calls.call_targets"


def calling_line() -> CodeLocation:
    """The line of the program that runs now, for real."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame):
        frame = frame.f_back
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return CodeLocation(code.co_filename, frame.f_lineno, code.co_name, text)


def _is_ours(frame: types.FrameType) -> bool:
    root = str(frame.f_globals.get("__name__", "builtins")).split(".", 1)[0]
    return root in ("gradsplit", "torch", "contextlib", "builtins") or frame.f_code.co_filename[0] == "<"


@dataclass(frozen=True)
class LazyValue:
    """An item of an existing container that was not read yet, and is hence not guarded."""

    real: Any
    source: Source | None


class FrameLike(Protocol):
    """What the state needs of a symbolic frame."""

    # The exceptions whose handlers the frame is in, innermost last.
    handled: list[Value]
    # The instruction that runs, and the code it is in.
    current: int
    code: Any
    # The FunctionValue that runs.
    function: Any

    def location(self) -> CodeLocation: ...
    def place(self) -> tuple[types.CodeType, int]: ...
    def module_name(self) -> str: ...
    def held_values(self) -> Iterator[Any]: ...
    def dropped_arguments(self) -> bool: ...


def _users_place(frames: Sequence[FrameLike]) -> tuple[types.CodeType, int] | None:
    """The innermost line that runs outside of torch's files; of theirs, the outermost."""
    place = None
    for frame in reversed(frames):
        place = frame.place()
        if is_users_file(place[0].co_filename):
            break
    return place


class CaptureState:
    """All that one capture changes; nothing of it outlives a capture that fails.

    Families of values see this class only; ``state.Capture`` fills in the operations that need several families.
    """

    def __init__(self, graph: Any, effects: Any, sizes: Any, data_reads: Any) -> None:
        self.graph = graph
        self.data_reads = data_reads
        self.effects = effects
        self.frames: list[FrameLike] = []
        self.guards = GuardSet(functools.partial(_users_place, self.frames))
        # Where factory functions put tensors that no device is given for; None is the CPU, without a mode.
        self.default_device: torch.device | None = None
        self.autocast_at_start: tuple[Any, ...] = ()
        # The symbols of sizes and integers that differ between calls.
        self.sizes: Any = sizes
        # Existing objects with identity that were met, so that a second path to one finds the same value.
        self.known: dict[int, tuple[Any, Value]] = {}
        # What names of classes were found to mean, with the guards for it made: (class, name, after) -> class, entry.
        self.class_entries: dict[tuple[type, str, type | None], tuple[type | None, Any]] = {}
        # In-place operations return their operand: the same fake tensor means the same tensor.
        self.tensor_of_fake: dict[int, Any] = {}
        # The arrays of NumPy, by the identity of the tensor that stands for each.
        self.array_of_tensor: dict[int, Any] = {}
        # What nested tensors among the inputs hold.
        self.inner_places: list[tuple[torch.Tensor, Source]] = []
        # Classes that the frame made (``object_model/made_classes.py``).
        self.made_classes: list[type] = []
        # Copies that stand for views (``values/view_copies.py``).
        self.view_copies: list[Any] = []
        # Hooks of gradients of what the graph computes (``object_model/hooked_results.py``).
        self.hooks_in_graph: list[Any] = []
        # What turns modes and switches of torch in the graph; the settings before the capture turned any.
        self.turned: set[Any] = set()
        self.switches_at_start: tuple[tuple[Any, ...], ...] = ()
        self.attention_at_start: tuple[Any, ...] = ()
        # Context managers of torch that the capture has entered and not left.
        self.open_modes: list[Any] = []
        # That of the program; the capture itself runs outside of it.
        self.inference_mode = torch.is_inference_mode_enabled()
        # Those among them that must be entered for real where the capture ends inside of them.
        self.entered_modes: list[Any] = []
        # Drawn numbers that decided what the program does, with the instructions where.
        self.decisions_by_draws: dict[Source, Any] = {}
        # Existing iterators that a copy tells the items of.
        self.live_iterators: list[Any] = []
        # Modes that see every call of torch's functions, with what torch's own makes of reading an item of a tensor.
        self.function_modes: list[
            tuple[Value, Callable[[CaptureState, Any, Value], Value | None] | None]
        ] = []
        # Whether anything may be asked in the place of torch's functions, and how often it was said not to ask classes.
        self.overriding = False
        self.functions_disabled = 0
        # Whether the captured function is what goes on behind a graph break.
        self.is_continuation = False
        # The paths of the modules whose calls run, outermost first.
        self.modules: list[str] = []
        # The objects whose ``__repr__`` runs.
        self.running_texts: list[Value] = []
        self._references: dict[int, Reference] = {}

    def location(self) -> CodeLocation | None:
        return self.frames[-1].location() if self.frames else None

    @property
    def only_checks(self) -> bool:
        """Whether the program only asks whether to raise for what it reads."""
        frame = self.frames[-1]
        return frame.code.leads_to_check(frame.current + 1)

    def keeps_numbers(self, unasked: bool = True) -> bool:
        """Whether numbers that are read out of tensors stay in the graph: the settings say so, or what is captured
        has use for no value so far."""
        return config.capture_scalar_outputs or (
            unasked and self.data_reads.may_stay(self.frames[-1].place())
        )

    @property
    def modes_see(self) -> bool:
        """Whether a mode of the program sees each call of torch's functions."""
        return bool(self.function_modes) and self.function_modes[-1][1] is None

    def calling_module(self) -> str:
        """The name of the Python module whose code runs now."""
        return self.frames[-1].module_name()

    def unsupported(self, reason_id: str, explanation: str, hint: str = "") -> Unsupported:
        """An Unsupported that points at the user's line."""
        stack = [frame.location() for frame in self.frames if frame.module_name() != _ENTRY]
        stack = stack or [calling_line()]
        return Unsupported(reason_id, explanation, hint, stack[-1], stack)

    def reference(self, label: str, value: Any) -> Reference:
        """The one reference to an object that the compiled function holds."""
        found = self._references.get(id(value))
        if found is None:
            found = self._references[id(value)] = Reference(label, value)
        return found

    def reference_source(self, label: str, value: Any) -> Source:
        return ReferenceSource(self.reference(label, value))

    def realize(self, item: Value | LazyValue) -> Value:
        return self.wrap(item.real, item.source) if isinstance(item, LazyValue) else item

    def no_attribute(self, cls: type, name: str) -> SymbolicRaise:
        """What reading an attribute raises that objects of a class do not have."""
        is_made_in_c = (
            cls.__flags__ & (_HEAP_TYPE | _IMMUTABLE) != _HEAP_TYPE and cls.__module__ != "builtins"
        )
        shown = f"{cls.__module__}.{cls.__name__}" if is_made_in_c else cls.__name__
        return self.raise_exception(AttributeError, f"{shown!r} object has no attribute {name!r}")

    def handled_exception(self) -> Value | None:
        """The exception whose handler runs: of this frame, or of one that called it."""
        return next((frame.handled[-1] for frame in reversed(self.frames) if frame.handled), None)

    def items_of(self, value: Value, hinted: bool = False) -> list[Value]:
        """All items of an iterable; ``hinted`` by who asks for the length, too, as ``list`` does."""
        items = []
        iterator = value.iterate(self)
        if hinted and self.overriding and issubclass(value.python_type(), torch.Tensor):
            value.length(self)
        while (item := iterator.advance(self)) is not None:
            items.append(item)
        return items

    def call_torch(self, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The value of an operation, a method where it is a name, on values and constants: as a rule a tensor."""
        op = "call_method" if isinstance(target, str) else "call_function"
        named = {key: self.from_constant(value) for key, value in kwargs.items()}
        return self.call_tensor_op(op, target, [*map(self.from_constant, args)], named)

    def wrap_trusted_function(self, function: Any) -> Value:
        """The value of a function that a class holds in a descriptor; the class entry is guarded elsewhere."""
        return self.wrap(function, None)

    # What needs several families of values: ``state.Capture`` has it.

    # The value of an existing object. Without a source it is trusted to be the same at every call.
    wrap: Callable[[Any, Source | None], Value]
    # What a compiled function was made from; anything else is returned as it is.
    original_of: Callable[[Any], Any]
    # Whether calls of this module run a compiled form of its own, and hence are in no graph.
    is_compiled_apart: Callable[[torch.nn.Module], bool]
    # The value of what a pure function of constants returned.
    from_constant: Callable[[Any], Value]
    # Run a Python function symbolically.
    inline: Callable[[Any, list[Value], dict[str, Value]], Value]
    # An exception that the captured program raises here, of a class with arguments; the caller raises the result.
    raise_exception: Callable[..., SymbolicRaise]
    # Whether containers take one for the other, by identity or ``==``, where the answer is known.
    equal: Callable[[Value, Value], bool]
    # ``operator.index(value)``; the text is that of the TypeError for something else.
    as_index: Callable[..., int]
    # ``one < other``.
    less: Callable[[Value, Value], bool]
    # ``str(value)``, ``repr(value)``, ``format(value, spec)`` and ``pattern.format(*args, **kwargs)``.
    text_of: Callable[[Value], Value]
    representation_of: Callable[[Value], Value]
    format_of: Callable[[Value, Value], Value]
    filled_format: Callable[[str, list[Value], dict[str, Value]], Value]
    # An attribute of a member of an enumeration, and one that is looked up on the class of a value and bound to it.
    enum_attribute: Callable[[Value, str], Value]
    class_attribute: Callable[[Value, str], Value]
    # Record an operation on tensors: call_function or call_method, the target, arguments, keywords.
    call_tensor_op: Callable[[str, Any, list[Value], dict[str, Value]], Value]
    # Whether torch may ask a class or a mode before this function; a call of one, and what it does if none is asked.
    is_overridable: Callable[[Any], bool]
    through_overrides: Callable[[Any, list[Value], dict[str, Value], Callable[..., Any]], Any]
    # Record a call whose arguments are nodes already; a function after these computes its example in its stead.
    call_tensor_nodes: Callable[..., Value]
    # Take the truth of a tensor or a comparison for granted, with a check in the graph; False where no graph has room
    # for one.
    assume: Callable[[Value, bool], bool]
    # The truth of a tensor of one element, as a condition that the graph computes.
    read_truth: Callable[[Any], Value]
    # Record an operation whose result is a Python number, with the example of it; gives the node.
    add_scalar_node: Callable[[str, Any, tuple[Any, ...], Any], Any]
    # Record a change of a mode of torch and make it for the rest of the capture; gives the node.
    call_state_op: Callable[[Any, tuple[Any, ...]], Any]
    # The user's lines, outermost first, in the form of a traceback.
    stack_trace: Callable[[], str]
    # What an import statement of a module's code gives, which takes these names out of it; None where the import must
    # be left to Python.
    imported_module: Callable[[str, str | None, Sequence[str]], Value | None]


def stored_attribute(state: CaptureState, owner: Any, real: Any, name: str) -> Value:
    """What the program has stored on an object as an attribute: in the frame, or before on ``real``."""
    if name in owner.changes:
        return owner.changes[name]
    place = None if owner.source is None else AttributeSource(owner.source, "__dict__")
    if real is not None and name in real.__dict__:
        return state.wrap(real.__dict__[name], None if place is None else ItemSource(place, name))
    if place is not None:
        state.guards.absent(place, name)
    raise state.no_attribute(owner.python_type(), name)


def constants_of(values: list[Value]) -> list[Any]:
    """The real objects of values that are all known; raises NotConstant."""
    return [value.as_constant() for value in values]
