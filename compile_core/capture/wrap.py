"""From real objects to symbolic values, with the guards that the mere knowledge of a value needs."""

from __future__ import annotations

import collections
import contextvars
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from gradsplit.compile_core.capture.directive_rules import directive_rule
from gradsplit.compile_core.capture.directives import beneath_torch_front_end, compiled_by_torch
from gradsplit.compile_core.capture.numpy_arrays.arrays import NUMPY_FUNCTIONS, wrap_array
from gradsplit.compile_core.capture.numpy_arrays.numpy_wrapper import form_of_torchs_wrapper
from gradsplit.compile_core.capture.object_model.classes import ClassValue
from gradsplit.compile_core.capture.object_model.content import content_base
from gradsplit.compile_core.capture.object_model.existing_objects import (
    CallableReferenceValue,
    PropertyValue,
    PythonModuleValue,
    WeakReferenceValue,
    is_weak_reference,
)
from gradsplit.compile_core.capture.object_model.functions import (
    BoundMethodValue,
    CellValue,
    FunctionValue,
)
from gradsplit.compile_core.capture.object_model.libraries import is_empty_cell, is_library_name
from gradsplit.compile_core.capture.object_model.modules import ModuleValue
from gradsplit.compile_core.capture.object_model.objects import InstanceValue, is_plain_layout
from gradsplit.compile_core.capture.object_model.opaque import ChangingText, wrap_opaque
from gradsplit.compile_core.capture.object_model.overriding_tensors import wrap_overriding
from gradsplit.compile_core.capture.object_model.partials import PartialValue
from gradsplit.compile_core.capture.object_model.type_forms import TYPE_FORMS, TypeFormValue
from gradsplit.compile_core.capture.object_model.wrappers import tensor_value
from gradsplit.compile_core.capture.open_numbers.growing_lists import GrowingList
from gradsplit.compile_core.capture.open_numbers.inner_sizes import guard_wrapper
from gradsplit.compile_core.capture.open_numbers.symbolic_numbers import FloatInput, SymbolicInt
from gradsplit.compile_core.capture.operations.operator_rules import GETTERS, existing_getter
from gradsplit.compile_core.capture.python_rules.builtin_methods import method_of_builtin_type
from gradsplit.compile_core.capture.python_rules.cached_functions import CachedFunctionValue
from gradsplit.compile_core.capture.python_rules.context_variables import ContextVariable
from gradsplit.compile_core.capture.python_rules.drawn_numbers import GENERATORS, wrap_generator
from gradsplit.compile_core.capture.python_rules.locks import LOCKS, LockValue
from gradsplit.compile_core.capture.torch_rules.torch_functions import find_torch_rule
from gradsplit.compile_core.capture.values.base import CaptureState, LazyValue, Value
from gradsplit.compile_core.capture.values.call_rules import find_call_rule
from gradsplit.compile_core.capture.values.constants import (
    FOLDED_TYPES,
    BuiltinMethod,
    ConstantValue,
    is_folded,
    is_literal,
)
from gradsplit.compile_core.capture.values.containers import (
    ListValue,
    SequenceValue,
    SliceValue,
    sequence_fields,
)
from gradsplit.compile_core.capture.values.deques import DequeValue
from gradsplit.compile_core.capture.values.live_iterators import LIVE_ITERATORS, wrap_iterator
from gradsplit.compile_core.capture.values.mappings import DictValue, ReadOnlyView
from gradsplit.compile_core.capture.values.references import ReferenceValue
from gradsplit.compile_core.capture.values.sets import SetValue
from gradsplit.compile_core.capture.values.tensors import check_class
from gradsplit.compile_core.ir.captured import input_kind
from gradsplit.compile_core.ir.sources import (
    AttributeSource,
    ContentSource,
    ItemSource,
    LocalSource,
    Source,
    container_item,
)
from gradsplit.compile_core.torch_facts.bindings import VARIABLE_FUNCTIONS
from gradsplit.compile_core.torch_facts.dispatcher import is_zero_tensor
from gradsplit.compile_core.torch_facts.function_overrides import is_asked
from gradsplit.compile_core.torch_facts.wrapper_tensors import is_wrapper

# Literals of which Python may hold several equal ones.
_OBJECTS_OF_THEIR_OWN = (float, complex, *FOLDED_TYPES)

_BUILTIN_CALLABLES = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.ClassMethodDescriptorType),
    *(types.WrapperDescriptorType, types.MethodWrapperType),
)


def _wrap_builtin(real: Any, source: Source | None) -> Value:
    rule = directive_rule(real) or find_call_rule(real) or find_torch_rule(real)
    if rule is None and isinstance(real, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        rule = method_of_builtin_type(real)
    return CallableReferenceValue(real, rule, source)


# The values of objects that are known by identity.
_BY_IDENTITY: dict[Any, Callable[[Any, Source | None], Value]] = {
    types.ModuleType: PythonModuleValue,
    type: ClassValue,
    functools._lru_cache_wrapper: CachedFunctionValue,
    (property, types.GetSetDescriptorType, type(VARIABLE_FUNCTIONS)): PropertyValue,
    TYPE_FORMS: TypeFormValue,
    contextvars.ContextVar: ContextVariable,
    (torch._ops.OpOverloadPacket, torch._ops.OpOverload, *NUMPY_FUNCTIONS): _wrap_builtin,
}


@functools.cache
def _known_by_identity(cls: type) -> Callable[[Any, Source | None], Value] | None:
    return next((make for kind, make in _BY_IDENTITY.items() if issubclass(cls, kind)), None)


# Objects whose methods are values of their own: the methods are made anew at each look-up.
_OWNERS = (*GENERATORS, *LOCKS)


def wrap(state: CaptureState, real: Any, source: Source | None) -> Value:
    """The value of an existing object; the guards make sure that the object is the same kind next time."""
    attribute = "original" if state.original_of(real) is not real else compiled_by_torch(real)
    if attribute is not None:
        state.guards.is_object(source, real)
        return wrap(state, getattr(real, attribute), source and AttributeSource(source, attribute))
    if is_literal(real) or is_folded(type(real)):
        return _wrap_literal(state, real, source)
    if type(real) in (tuple, frozenset, torch.Size) or (
        isinstance(real, tuple) and sequence_fields(type(real))
    ):
        state.guards.type_is(source, type(real))
        return _container(state, real, type(real), source)
    found = state.known.get(id(real))
    if found is not None:
        value = found[1]
        state.guards.same(value.source, source)
        if value.source is None:
            state.guards.is_object(source, real)
        return value
    value = _wrap_object(state, real, source)
    state.known[id(real)] = (real, value)
    return value


def _wrap_literal(state: CaptureState, real: Any, source: Source | None) -> Value:
    if source is not None:
        number = state.sizes.of_integer(real, source) if type(real) is int else None
        if number is not None:
            state.guards.type_is(source, int)
            return SymbolicInt(number, source)
        # What ``.item()`` gave before a break, or its text, differs at every call; most uses of it are not worth a
        # capture each.
        passed_on = state.is_continuation and isinstance(source, LocalSource)
        if type(real) is float and state.sizes.history.is_open_float(source, real):
            state.guards.type_is(source, float)
            return FloatInput(state, source, real, never_stays=passed_on)
        if passed_on and type(real) is str and state.sizes.history.has_changed(source, real):
            state.guards.type_is(source, str)
            return ChangingText(real, source, None)
        state.guards.constant(source, real)
    made = ConstantValue(real)
    if type(real) in _OBJECTS_OF_THEIR_OWN:
        made.source = source  # handed on as the object that it is, which ``is`` tells, and containers of nan
    return made


def _lazy_items(real: Any, source: Source | None) -> list[Any]:
    return [
        LazyValue(item, None if source is None else container_item(source, index))
        for index, item in enumerate(real)
    ]


def _wrap_set(state: CaptureState, real: Any, source: Source | None) -> Value:
    cls: Any = set if isinstance(real, set) else frozenset
    members = list(cls.__iter__(real))
    known = (type, *_BUILTIN_CALLABLES)
    if not all(is_literal(item) or isinstance(item, known) or is_weak_reference(item) for item in members):
        raise state.unsupported(
            "set", "an existing set of other things than literals, classes and functions in C"
        )
    if source is not None:
        # The order too, in which equal sets may differ: texts show it, and loops follow it.
        shown = f"{source} holds {members!r}, in this order"
        state.guards.add([source], "[*{c0}.__iter__({0})] == {c1}", [cls, members], shown)
        if any(isinstance(item, (int, float, complex)) for item in members):
            # Numbers of different types may be equal.
            constants = [_kinds_of, _kinds_of(members)]
            state.guards.add([source], "{c0}({0}) == {c1}", constants, f"types of {source}")
    mirror = cls(real) if source is None or cls is frozenset else _SetOrder(members)
    places = [state.reference_source("member", m) if is_weak_reference(m) else None for m in members]
    held = {item: state.wrap(item, place) for item, place in zip(members, places, strict=True)}
    value = SetValue(held, cls, source, mirror)
    value.trusted = source is None
    return value


class _SetOrder(list[Any]):
    """The order of an existing set, as long as it does not change."""


def _kinds_of(members: Any) -> frozenset[Any]:
    return frozenset((type(item), item) for item in members)


def _wrap_object(state: CaptureState, real: Any, source: Source | None) -> Value:
    if isinstance(real, torch.Tensor):
        return _wrap_tensor(state, real, source)
    if isinstance(real, (np.ndarray, np.generic)):
        return wrap_array(state, real, source)
    if isinstance(real, torch.nn.Module):
        state.guards.type_is(source, type(real))
        return ModuleValue(type(real), real, source)
    if isinstance(real, types.FunctionType):
        return _wrap_function(state, real, source)
    make = _known_by_identity(type(real))
    if make is not None:
        state.guards.is_object(source, real)
        return make(real, source)
    drawing = wrap_generator(state, real, source)
    if drawing is not None:
        return drawing
    if type(real) in LOCKS:
        state.guards.type_is(source, type(real))
        return LockValue(real, source or state.reference_source("lock", real))
    if isinstance(real, (types.MethodType, types.BuiltinFunctionType)) and _is_owned(real):
        return _wrap_owned(state, real, source)
    if isinstance(real, types.MethodType):
        state.guards.type_is(source, types.MethodType)
        return BoundMethodValue(*_attributes(state, real, source, "__func__", "__self__"), source=source)
    if isinstance(real, _BUILTIN_CALLABLES):
        owner = getattr(real, "__self__", None)
        is_bound = owner is not None and not isinstance(owner, (types.ModuleType, type))
        if is_bound and source is not None and isinstance(source.root, LocalSource):
            return wrap_opaque(state, real, source, None)  # made anew at each look-up
        state.guards.is_object(source, real)
        return _wrap_builtin(real, source)
    if type(real) is functools.partial:
        state.guards.type_is(source, functools.partial)
        function, args, kwargs = _attributes(state, real, source, "func", "args", "keywords")
        assert isinstance(args, SequenceValue) and isinstance(kwargs, DictValue)
        return PartialValue(function, args, kwargs, source)
    if is_weak_reference(real):
        state.guards.type_is(source, type(real))
        return WeakReferenceValue(real, source)
    container = _wrap_container(state, real, source)
    if container is not None:
        return container
    if type(real) in LIVE_ITERATORS and source is not None:
        return wrap_iterator(state, real, source) or wrap_opaque(state, real, source, None)
    if type(real) in GETTERS:
        state.guards.is_object(source, real)
        return existing_getter(state, real, source or state.reference_source(type(real).__name__, real))
    instance = _wrap_instance(state, real, source)
    if instance is not None:
        return instance
    if source is not None and isinstance(source.root, LocalSource):
        return wrap_opaque(state, real, source, None)
    state.guards.is_object(source, real)
    return ReferenceValue(real, source)


def _wrap_tensor(state: CaptureState, real: torch.Tensor, source: Source | None) -> Value:
    if is_asked(real):
        return wrap_overriding(state, real, source)
    check_class(state, real)
    if source is None:
        raise state.unsupported("library-tensor", "a tensor that belongs to a library or a class")
    wraps = is_wrapper(real)
    has_layout = real.layout == torch.strided or wraps
    if not has_layout or real.is_quantized or is_zero_tensor(real):
        kind = "zeros without memory" if is_zero_tensor(real) else f"the layout {real.layout}"
        raise state.unsupported("tensor-layout", f"{source} has {kind}")
    sizes = None if wraps else state.sizes.of_tensor(real, source)
    state.guards.tensor(source, real, None if sizes is None else sizes.static_shape)
    inner_sizes = guard_wrapper(state, real, source) if wraps else {}
    node = state.graph.add_input(real, source, input_kind(source), sizes, inner_sizes)
    fake = node.meta["example_value"]
    value = tensor_value(node, fake, type(real), source, real)
    state.tensor_of_fake[id(fake)] = value
    return value


def _wrap_function(state: CaptureState, real: types.FunctionType, source: Source | None) -> Value:
    included = form_of_torchs_wrapper(real) or beneath_torch_front_end(real)
    if included is not None:
        state.guards.is_object(source, real)
        return state.wrap(included, None)
    rule = directive_rule(real) or find_call_rule(real) or find_torch_rule(real)
    if rule is not None:
        state.guards.is_object(source, real)
        return CallableReferenceValue(real, rule, source)
    library = is_library_name(real.__globals__.get("__name__"))
    if source is not None and isinstance(source.root, LocalSource):
        # A function that is passed in may be made anew for each call: its code, not its identity, must stay.
        state.guards.type_is(source, types.FunctionType)
        state.guards.is_object(AttributeSource(source, "__code__"), real.__code__)
        state.guards.is_object(AttributeSource(source, "__globals__"), real.__globals__)
        owner: Source | None = source
    else:
        state.guards.is_object(source, real)
        owner = None if library else state.reference_source(real.__qualname__, real)
        if owner is not None:
            state.guards.is_object(AttributeSource(owner, "__code__"), real.__code__)
    cells = []
    for index, cell in enumerate(real.__closure__ or ()):
        name = real.__code__.co_freevars[index]
        if library:
            place: Source | None = None
        elif owner is source and source is not None:
            place = ItemSource(AttributeSource(source, "__closure__"), index)
        else:
            place = state.reference_source(name, cell)
        cells.append(wrap_cell(state, cell, place))
    place = owner and AttributeSource(owner, "__defaults__")
    if real.__defaults__ is not None:
        state.guards.length(place, len(real.__defaults__))
    defaults = _lazy_items(real.__defaults__ or (), place)
    keyword_defaults = {
        name: state.wrap(value, owner and ItemSource(AttributeSource(owner, "__kwdefaults__"), name))
        for name, value in (real.__kwdefaults__ or {}).items()
    }
    place = owner if source is None else source
    return FunctionValue(
        real.__code__, real.__globals__, tuple(cells), defaults, keyword_defaults, real, place
    )


def wrap_cell(state: CaptureState, cell: types.CellType, source: Source | None) -> CellValue:
    """The one value of an existing cell, which lies at ``source``; its content is read when it is used."""
    found = state.known.get(id(cell))
    if found is not None:
        value = found[1]
        assert isinstance(value, CellValue)
        state.guards.same(value.source, source)
        return value
    content: Any = None
    if not is_empty_cell(cell):
        content = LazyValue(cell.cell_contents, source and AttributeSource(source, "cell_contents"))
    elif source is not None:
        state.guards.add([source], "{c0}({0})", [is_empty_cell], f"{source} is empty")
    value = CellValue(content, cell, source)
    state.known[id(cell)] = (cell, value)
    return value


def _attributes(state: CaptureState, real: Any, source: Source | None, *names: str) -> list[Value]:
    """The values of what an object consists of."""
    return [state.wrap(getattr(real, name), source and AttributeSource(source, name)) for name in names]


def _is_owned(real: Any) -> bool:
    """Whether it is a method of an object that answers for its own, as ``random.random`` is."""
    cls, function = type(real.__self__), getattr(real, "__func__", None)
    return cls in _OWNERS and function in (None, getattr(cls, real.__name__, None))


def _wrap_owned(state: CaptureState, real: Any, source: Source | None) -> Value:
    name, function = real.__name__, getattr(real, "__func__", None)
    state.guards.type_is(source, type(real))
    if source is not None and function is None:
        state.guards.constant(AttributeSource(source, "__name__"), name)
    elif source is not None:
        state.guards.is_object(AttributeSource(source, "__func__"), function)
    return BuiltinMethod(state.wrap(real.__self__, source and AttributeSource(source, "__self__")), name)


def _wrap_container(state: CaptureState, real: Any, source: Source | None) -> Value | None:
    cls = type(real)
    if cls is slice:
        return SliceValue(_attributes(state, real, source, "start", "stop", "step"))
    kinds = (list, dict, collections.OrderedDict, collections.defaultdict, collections.deque, set)
    if cls not in kinds and cls is not types.MappingProxyType:
        return None
    state.guards.type_is(source, cls)
    if cls is types.MappingProxyType:
        return ReadOnlyView(_dictionary(real.items(), dict, source), source)
    return _container(state, real, cls, source)


def _container(state: CaptureState, real: Any, cls: type, source: Source | None) -> Value:
    """A tuple, list, set or dictionary, read by the methods of ``cls``, which may be a base of the object's class."""
    if cls is set or cls is frozenset:
        return _wrap_set(state, real, source)
    if issubclass(cls, tuple):
        items = list(tuple.__iter__(real))
        state.guards.length(source, len(items))
        return SequenceValue(_lazy_items(items, source), cls, source)
    if cls is list or cls is collections.deque:
        items = list(cls.__iter__(real))
        if type(real) is list and source is not None and state.sizes.history.has_grown(source, len(items)):
            return GrowingList(state, _lazy_items(items, source), source)
        state.guards.length(source, len(items))
        made: Any = ListValue(_lazy_items(items, source), source)
        if isinstance(real, collections.deque):
            made = DequeValue(_lazy_items(items, source), real.maxlen, source)
            if source is not None:
                state.guards.add([source], f"{{0}}.maxlen == {real.maxlen}", [], f"{source}.maxlen")
    else:
        made = _dictionary(cls.items(real), cls, source)
        made.real_owner = real if type(real) is cls else None
        if cls is collections.defaultdict:
            if any(isinstance(key, ConstantValue) for key, _ in made.entries.values()):
                made.guard_keys(state)  # reading an entry that is gone would make a new one
            factory = None if source is None else AttributeSource(source, "default_factory")
            if real.default_factory is not None:
                made.default_factory = state.wrap(real.default_factory, factory)
    made.trusted = source is None
    return made


def _dictionary(items: Iterable[tuple[Any, Any]], cls: type, source: Source | None) -> DictValue:
    entries: dict[Any, tuple[Value, Any]] = {
        key: (_key_value(key), LazyValue(item, None if source is None else container_item(source, key)))
        for key, item in items
    }
    return DictValue(entries, cls, source)


def _wrap_instance(state: CaptureState, real: Any, source: Source | None) -> Value | None:
    """An object of a class of the program, None for an opaque object."""
    cls = type(real)
    base = content_base(cls)
    if base is None and not is_plain_layout(cls):
        return None
    state.guards.type_is(source, cls)
    if base is None:
        return InstanceValue(cls, real, source)
    place = None if source is None else ContentSource(source, base)
    if base in (str, bytes, int, float, complex):
        held = getattr(base, f"__{base.__name__}__")(real)
        if place is not None:
            state.guards.add([place], "{c0}.__eq__({0}, {c1})", [base, held], f"{source} == {held!r}")
        content: Value = ConstantValue(held)
    else:
        content = _container(state, real, base, place)
    return InstanceValue(cls, real, source, content)


def _key_value(key: Any) -> Value:
    """A key of an existing dictionary; its hash and equality are the key's own."""
    if is_literal(key):
        return ConstantValue(key)
    if type(key) is tuple:
        return SequenceValue([_key_value(item) for item in key], tuple)
    return ClassValue(key, None) if isinstance(key, type) else ReferenceValue(key)
