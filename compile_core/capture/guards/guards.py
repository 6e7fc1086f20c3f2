"""Guards: what was read during capture. ``guard_checks`` makes of them the check that it still holds."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsplit.compile_core.ir.captured import GraphInput, Guard, GuardKind
from gradsplit.compile_core.ir.sources import ContentSource, Source
from gradsplit.compile_core.torch_facts.wrapper_tensors import is_wrapper, share_memory

_IDENTITY_TYPES = (
    type(None),
    bool,
    type(Ellipsis),
    type(NotImplemented),
    torch.dtype,
    torch.layout,
    torch.memory_format,
)


def _has_hidden_parts(value: Any) -> bool:
    """Whether ``==`` cannot tell a number from others: zeros have signs, and nan equals nothing."""
    return isinstance(value, (float, complex)) and (
        value == 0 or value != value or isinstance(value, complex)
    )


def _label(value: Any) -> str:
    """A name for an object, without running any code of its class."""
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)) or type(value) is type:
        return value.__qualname__
    return type(value).__name__


class GuardSet:
    """Guards in the order in which they were found, without repeats.

    Args:
        place: the line of the program that runs now, with its code; ``None`` where none does.
    """

    def __init__(self, place: Callable[[], tuple[types.CodeType, int] | None] = lambda: None) -> None:
        self._guards: dict[Any, Guard] = {}
        self._place = place

    def __iter__(self):
        return iter(self._guards.values())

    def copy(self) -> GuardSet:
        made = GuardSet()
        made._guards = dict(self._guards)
        return made

    def add(
        self,
        sources: Sequence[Source],
        condition: str,
        constants: Sequence[Any],
        text: str,
        kind: GuardKind = "expression",
    ) -> None:
        key = (tuple(sources), condition, tuple(id(constant) for constant in constants))
        if key not in self._guards:
            self._guards[key] = Guard(tuple(sources), condition, tuple(constants), text, kind, self._place())

    def written(self, sources: Sequence[Source], shown: Callable[[Callable[[Source], str]], str]) -> None:
        """What ``shown`` writes as Python over the names of the sources; it may use ``math``."""
        condition = shown(lambda source: f"{{{sources.index(source)}}}").replace("math.", "{c0}.")
        self.add(sources, condition, [math] if "{c0}" in condition else [], shown(str))

    def gives(self, function: Callable[[], Any], result: Any, text: str) -> None:
        self.add([], "{c0}() == {c1}", [function, result], text)

    # What has no source belongs to a library, and is trusted to stay as it is.

    def type_is(self, source: Source | None, cls: type) -> None:
        if source is not None:
            self.add([source], "type({0}) is {c0}", [cls], f"type({source}) is {cls.__qualname__}", "type")

    def is_object(self, source: Source | None, value: Any) -> None:
        if source is not None:
            self.add([source], "{0} is {c0}", [value], f"{source} is the same {_label(value)}", "identity")

    def same(self, one: Source | None, other: Source | None) -> None:
        if one is not None and other is not None and one != other:
            self.add([one, other], "{0} is {1}", [], f"{one} is {other}", "same")

    def distinct(self, one: Source, other: Source) -> None:
        self.add([one, other], "{0} is not {1}", [], f"{one} is not {other}", "distinct")

    def all_distinct(self, changed: Sequence[Source], others: Sequence[Source]) -> None:
        """No two of the changed objects are the same, nor is one of them among the others."""
        names = [f"{{{position}}}" for position in range(len(changed) + len(others))]
        parts = [names[: len(changed)], names[len(changed) :]]
        shown = ", ".join("(" + "".join(f"{name}, " for name in part) + ")" for part in parts)
        text = f"{changed[0]} and what else is changed are different objects, and no others of the call"
        self.add([*changed, *others], f"{{c0}}({shown})", [_all_distinct], text)

    def length(self, source: Source | None, length: int) -> None:
        text = f"len({source}) == {length}"
        if isinstance(source, ContentSource):
            self.add([source], "{c1}.__len__({0}) == {c0}", [length, source.cls], text)
        elif source is not None:
            self.add([source], "len({0}) == {c0}", [length], text, "length")

    def keys(self, source: Source, keys: tuple[Any, ...]) -> None:
        text, kinds_text = f"the keys of {source} are {keys!r}", f"the key types of {source}"
        kinds = tuple(type(key) for key in keys)
        if isinstance(source, ContentSource):
            condition = "tuple({c1}.__iter__({0})) == {c0} and tuple(map(type, {c1}.__iter__({0}))) == {c2}"
            self.add([source], condition, [keys, source.cls, kinds], text)
            return
        self.add([source], "tuple({0}) == {c0}", [keys], text, "keys")
        if any(kind is not str for kind in kinds):
            self.add([source], "tuple(map(type, {0})) == {c0}", [kinds], kinds_text)

    def absent(self, source: Source, key: Any) -> None:
        self._held(source, key, False)

    def present(self, source: Source, key: Any) -> None:
        self._held(source, key, True)

    def _held(self, source: Source, key: Any, is_held: bool) -> None:
        no = "" if is_held else "not "
        text = f"{key!r} {no}in {source}"
        if isinstance(source, ContentSource):
            self.add([source], no + "dict.__contains__({0}, {c0})", [key], text)
        else:
            self.add([source], f"{{c0}} {no}in {{0}}", [key], text, "present" if is_held else "absent")

    def absent_object(self, source: Source, key: Source) -> None:
        self.add([source, key], "{1} not in {0}", [], f"{key} not in {source}")

    def all_false(self, source: Source, keys: tuple[str, ...], text: str) -> None:
        """What a mapping holds under each of these keys is empty, or false."""
        items = " or ".join(f"{{0}}[{key!r}]" for key in keys)
        self.add([source], f"not ({items})", [keys], text, "all_false")

    def constant(self, source: Source, value: Any) -> None:
        """The value is the same literal: type and equality, with 0.0 and -0.0, and nan, told apart."""
        if isinstance(value, _IDENTITY_TYPES):
            self.add([source], "{0} is {c0}", [value], f"{source} is {value!r}", "identity")
            return
        hidden = _has_hidden_parts(value)
        exact = "repr({0}) == repr({c1})" if hidden else "{0} == {c1}"
        self.add(
            [source],
            f"({{0}} is {{c1}} or type({{0}}) is {{c0}} and {exact})",
            [type(value), value],
            f"{source} == {value!r}",
            "expression" if hidden else "equal",
        )

    def tensor(
        self,
        source: Source,
        tensor: torch.Tensor,
        sizes: Sequence[int | None] | None = None,
    ) -> None:
        """Everything that a graph takes for granted about an input tensor.

        ``sizes`` is its shape with None for the dims that are open. What must hold of those, and of the strides of a
        tensor with an open dim, is in guards of its own. Without ``sizes`` nothing is open.
        """
        cls = type(tensor)
        is_conj, is_neg = tensor.is_conj(), tensor.is_neg()
        shape, stride = tuple(tensor.shape), tensor.stride()
        wraps = is_wrapper(tensor)
        if wraps and tensor._has_symbolic_sizes_strides:
            # Of sizes that differ from row to row: its inner tensors tell.
            layout, shown = f"{{0}}.dim() == {tensor.dim()}", f" of {tensor.dim()} dims"
        elif sizes is None:
            layout = f"{{0}}.shape == {shape!r} and {{0}}.stride() == {stride!r}"
            shown = f"{list(shape)}, strides {list(stride)}"
        else:
            layout = f"{{0}}.dim() == {len(sizes)}"
            for dim, size in enumerate(sizes):
                layout += "" if size is None else f" and {{0}}.shape[{dim}] == {size}"
            shown = f"[{', '.join('any' if size is None else str(size) for size in sizes)}]"
        requires = "" if tensor.requires_grad else "not "
        device = "{0}.is_cpu" if tensor.device.type == "cpu" else "{0}.device == {c2}"
        views = f"{{0}}.is_conj() is {is_conj} and {{0}}.is_neg() is {is_neg} and not {{0}}._is_zerotensor()"
        self.add(
            [source],
            "type({0}) is {c0} and {0}.dtype is {c1} and "
            f"{layout} and {requires}{{0}}.requires_grad and {device} and {views}",
            [cls, tensor.dtype, tensor.device, shape, stride, tensor.requires_grad, is_conj, is_neg],
            f"{source} is a {cls.__name__} of {str(tensor.dtype).removeprefix('torch.')}{shown}, on {tensor.device}, "
            + ("requiring grad" if tensor.requires_grad else "not requiring grad"),
            "tensor" if sizes is None and not wraps else "expression",
        )

    # Note [Overlapping inputs]: a graph that writes to an input is wrong when another input shares that
    # memory. Capture refuses inputs that overlap. Later calls compare the tensors that come with the call
    # against those written to; parameters and buffers among each other are not compared again, since 320 of
    # them would cost more than the rest of the check, and they share memory only if the program gives a
    # module's entries new memory between two calls.

    def no_overlap(self, inputs: Sequence[GraphInput], changed: int) -> None:
        """An input that the graph writes to shares no memory with the tensors that come with the call.

        Entries of modules were compared at capture; they change their memory only by being replaced, which
        the program does between, not within, its steps. See Note [Overlapping inputs].
        """
        written = inputs[changed]
        for index, entry in enumerate(inputs):
            moving = "argument" in (entry.kind, written.kind)
            if index != changed and moving:
                wraps = is_wrapper(written.example) or is_wrapper(entry.example)
                self.add(
                    [written.source, entry.source],
                    "{c0}({0}, {1})",
                    [_apart],
                    f"{written.source} and {entry.source} share no memory",
                    "expression" if wraps else "apart",
                )


def _all_distinct(changed: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    found = set(map(id, changed))
    return len(found) == len(changed) and found.isdisjoint(map(id, others))


def _apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is not other and not share_memory(one, other)
