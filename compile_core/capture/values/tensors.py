"""Tensors: nodes of the graph with their fake tensors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.nn.parameter import is_lazy

from gradsplit.compile_core.capture.values.base import CaptureState, PlainCall, Value, stored_attribute
from gradsplit.compile_core.capture.values.call_rules import entry_of
from gradsplit.compile_core.capture.values.constants import BuiltinMethod, ConstantValue, fold
from gradsplit.compile_core.ir.sources import Source
from gradsplit.compile_core.torch_facts.wrapper_tensors import has_known_form

# Methods that answer from metadata alone, which the guards pin down.
_METADATA_METHODS = frozenset(
    [
        *("size", "stride", "dim", "ndimension", "numel", "nelement", "is_contiguous", "is_floating_point"),
        *("is_complex", "element_size", "get_device", "is_signed", "is_conj", "is_neg"),
    ]
)
_METADATA = frozenset(
    [
        *("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "is_cpu", "is_meta", "is_sparse"),
        *("is_quantized", "is_mkldnn", "is_mps", "is_xpu", "layout", "itemsize", "nbytes", "is_nested"),
        *("is_sparse_csr", "is_mtia", "is_hpu"),
    ]
)
_VIEW_ATTRIBUTES = frozenset(["T", "mT", "H", "mH", "real", "imag"])

# In place or not, these would change what guards and the runner take for granted, or hand out data.
_DENIED_METHODS = frozenset(
    [
        *("item", "tolist", "numpy", "backward", "register_hook", "register_post_accumulate_grad_hook"),
        *("requires_grad_", "retain_grad", "resize_", "resize_as_", "set_", "t_", "transpose_", "swapaxes_"),
        *("swapdims_", "squeeze_", "unsqueeze_", "as_strided_", "detach_", "share_memory_", "data_ptr"),
        *("storage", "untyped_storage", "pin_memory", "record_stream", "apply_", "map_", "map2_"),
        *("is_shared", "is_pinned", "rename", "rename_", "names", "align_to", "align_as", "refine_names"),
        *("to_sparse", "is_set_to", "equal", "allclose"),
        # Views that torch's schema calls new tensors: functionalization would not see writes to one in the others.
        *("unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"),
    ]
)

# What reads memory beside a view's elements: of a view that a graph returns nothing else is computed.
MEMORY_OF_A_VIEW = "memory-of-a-view"
_READ_MEMORY = frozenset(["resize_", "resize_as_", "as_strided_", "storage", "untyped_storage"])


def refuse_unseen(state: CaptureState, what: object) -> None:
    """Where a mode of the program would see more, or other, calls than the capture makes."""
    if state.modes_see:
        raise state.unsupported("torch-function-mode", f"{what} under a mode that sees torch's functions")


def _through(function: Any) -> Callable[[Any], Any]:
    """For a method of a tensor's value that does what this function does, before which torch may ask others."""

    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        def run(tensor: TensorValue, state: CaptureState, *args: Any) -> Any:
            if not state.overriding:
                return method(tensor, state, *args)

            def plain(given: list[Any], kwargs: dict[str, Value]) -> Any:
                names = [argument for argument in args if isinstance(argument, str)]
                return method(tensor, state, *names, *given[1 + len(names) :])

            given = [ConstantValue(argument) if isinstance(argument, str) else argument for argument in args]
            found = state.through_overrides(function, [tensor, *given], {}, plain)
            return None if function in (setattr, operator.setitem) else found

        return run

    return decorate


@dataclass(eq=False, repr=False)
class TensorValue(Value):
    """A tensor: ``node`` in the graph, ``fake`` for its metadata.

    An input that was not rebound has a source and ``real``, the tensor of this call. ``changes`` holds its
    attributes that were stored in the frame.
    """

    node: fx.Node
    fake: torch.Tensor
    cls: type
    source: Source | None = None
    real: torch.Tensor | None = None
    changes: dict[str, Value] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        # The version of the data after the last operation that returned this tensor.
        self.version = self.fake._version

    # Whether it lies in another object of the program, too, of a class that answers functions.
    is_shared = False

    def describe(self) -> str:
        return f"the tensor {self.source or self.node.name}"

    def graph_argument(self, state: CaptureState) -> Any:
        return self.node

    def hash_key(self, state: CaptureState) -> Any:
        return self if self.real is None else self.real

    def truth(self, state: CaptureState) -> bool:
        refuse_unseen(state, "a decision by a tensor")
        known = METHOD_RULES["__bool__"](state, self)
        if known is not None:
            return known.truth(state)
        raise state.unsupported(
            "data-dependent-branch",
            f"the truth value of {self.describe()} depends on its data",
            "use torch.where, or keep the branch out of the compiled function",
        )

    @_through(getattr)
    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name in own_names(self.cls):
            return self._of_subclass(state, name)
        if name in _METADATA:
            return state.from_constant(getattr(self.fake, name))
        if name in _VIEW_ATTRIBUTES:
            return state.call_tensor_op("call_function", getattr, [self, ConstantValue(name)], {})
        read = ATTRIBUTE_READS.get(name)
        if read is not None:
            return read(state, self)
        # What classes have of their own class, instances have not.
        if not any(name in vars(base) for base in torch.Tensor.__mro__):
            return stored_attribute(state, self, self.real, name)
        static = getattr(torch.Tensor, name)
        if callable(static) and not isinstance(static, type):
            return BuiltinMethod(self, name)
        return super().get_attribute(state, name)

    def _of_subclass(self, state: CaptureState, name: str) -> Value:
        own = {} if self.real is None else self.real.__dict__
        if name in self.changes or name in own:
            raise state.unsupported(
                "tensor-attribute", f"{name!r}, which both {self.describe()} and its class have"
            )
        return state.class_attribute(self, name)

    @_through(setattr)
    def set_attribute(self, state: CaptureState, name: str, value: Value) -> None:
        store = ATTRIBUTE_STORES.get(name)
        if store is not None:
            store(state, self, value)
        elif hasattr(self.cls, name) or name.startswith("__"):
            super().set_attribute(state, name, value)
        else:
            self.changes[name] = value
            state.effects.attribute_changed(self, name)

    def call_method(
        self, state: CaptureState, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        if not hasattr(torch.Tensor, name) or name in own_names(self.cls):
            return self.get_attribute(state, name).call(state, args, kwargs)
        if not state.overriding:
            return self._call_method(state, name, args, kwargs)
        return state.through_overrides(
            getattr(torch.Tensor, name), [self, *args], kwargs,
            lambda given, named: self._call_method(state, name, given[1:], named),
        )  # fmt: skip

    def _call_method(
        self, state: CaptureState, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        if name in _METADATA_METHODS:
            return fold(state, getattr(self.fake, name), args, kwargs)
        if name == "type" and not args and not kwargs:
            return ConstantValue(type_name(self.fake))
        if name == "__len__":
            return ConstantValue(self.length(state))
        rule = METHOD_RULES.get(name)
        if rule is not None:
            found = rule(state, self, *args, **kwargs)
            if found is not None:
                return found
        if name in _DENIED_METHODS or (name.startswith("__") and name not in _OPERATORS):
            is_of_view = name in _READ_MEMORY and self.source is None and self.fake._is_view()
            raise state.unsupported(
                MEMORY_OF_A_VIEW if is_of_view else "tensor-method",
                f"no rule for the method {name!r} of {self.describe()}",
                "keep data-dependent Python values and autograd bookkeeping out of the compiled function",
            )
        return state.call_tensor_op("call_method", name, [self, *args], kwargs)

    def iterate(self, state: CaptureState) -> Value:
        if state.modes_see:
            return state.wrap(torch.Tensor.__iter__, None).call(state, [self], {})
        if self.fake.dim() == 0:
            raise state.raise_exception(TypeError, "iteration over a 0-d tensor")
        return state.call_tensor_op("call_method", "unbind", [self, ConstantValue(0)], {}).iterate(state)

    def length(self, state: CaptureState) -> int:
        refuse_unseen(state, "the length of a tensor")
        if self.fake.dim() == 0:
            raise state.raise_exception(TypeError, "len() of a 0-d tensor")
        return int(self.fake.shape[0])

    @_through(operator.getitem)
    def get_item(self, state: CaptureState, key: Value) -> Value:
        for _, read in reversed(state.function_modes):
            found = None if read is None else read(state, self, key)
            if found is not None:
                return found
        return state.call_tensor_op("call_function", operator.getitem, [self, key], {})

    @_through(operator.setitem)
    def set_item(self, state: CaptureState, key: Value, value: Value) -> None:
        state.call_tensor_op("call_function", operator.setitem, [self, key, value], {})


@functools.cache
def own_names(cls: type) -> frozenset[str]:
    """What a subclass of the program's has beside, or in place of, what a tensor has."""
    own = (base for base in cls.__mro__[: cls.__mro__.index(torch.Tensor)] if base is not torch.nn.Parameter)
    return frozenset(name for base in own for name in vars(base)) - _OF_EVERY_CLASS


# What a class has anyway, or what says how one is made, shown and kept.
_OF_EVERY_CLASS = frozenset(
    f"__{name}__"
    for name in [
        *("module", "doc", "dict", "weakref", "annotations", "static_attributes", "firstlineno"),
        *("orig_bases", "parameters", "new", "init", "repr", "reduce_ex", "deepcopy", "torch_function"),
    ]
)


def check_class(state: CaptureState, real: torch.Tensor) -> None:
    """Refuse a tensor whose class means something to operations."""
    if is_lazy(real):
        raise PlainCall("the first call gives lazy modules their parameters", of_this_call=True)
    if not _computes_as_tensor(type(real)) and not has_known_form(real):
        raise state.unsupported("tensor-subclass", f"a tensor of the subclass {type(real).__qualname__}")


@functools.cache
def _computes_as_tensor(cls: type) -> bool:
    """Whether operations on tensors of a class are those on plain tensors, and so are their results: it hooks into none
    and has no operators of its own."""
    if cls in (torch.Tensor, torch.nn.Parameter):
        return True
    plain: Any = torch.Tensor
    same = cls.__torch_function__ == torch.nn.Parameter.__torch_function__
    same = same and cls.__torch_dispatch__ == plain.__torch_dispatch__
    known = type(cls) in (type(torch.Tensor), type(torch.nn.Parameter))
    return same and known and not any(name.startswith("__") for name in own_names(cls))


def without_attributes(state: CaptureState, values: Iterable[Value]) -> None:
    """Refuse tensors on which the program has stored attributes: what reads these while the graph runs finds none yet,
    and beyond a body another tensor takes their place."""
    for value in values:
        if isinstance(value, TensorValue) and value.changes.keys() - {"grad"}:
            raise state.unsupported(
                "tensor-with-attributes", f"{value.describe()}, which has got attributes, here"
            )


# Attributes with rules of their own, filled in by the files of rules.
AttributeRead = Callable[[CaptureState, TensorValue], Value]
ATTRIBUTE_READS: dict[str, AttributeRead] = {}
ATTRIBUTE_STORES: dict[str, Callable[[CaptureState, TensorValue, Value], None]] = {}

# Methods with rules of their own; a rule that gives None leaves the call to what holds for all methods.
MethodRule = Callable[..., Value | None]
METHOD_RULES: dict[str, MethodRule] = {}


# Register what reading an attribute of a tensor gives, what a store to one does, and the rules of methods.
attribute_read = entry_of(ATTRIBUTE_READS)
attribute_store = entry_of(ATTRIBUTE_STORES)
method_rule = entry_of(METHOD_RULES)

# The operators of two sides, with what the names of their methods are made of.
OPERATOR_STEMS = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow", "@": "matmul",
    "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift",
}  # fmt: skip
_OPERATORS = frozenset(f"__{way}{stem}__" for way in ("", "r", "i") for stem in OPERATOR_STEMS.values()) | {
    f"__{name}__" for name in ("neg", "pos", "invert", "abs", "eq", "ne", "lt", "le", "gt", "ge")
}


def type_name(fake: torch.Tensor) -> str:
    """The name of the class that was a tensor's type before there were dtypes."""
    name = torch.empty(0, dtype=fake.dtype, device="cpu").type()
    return name if fake.device.type == "cpu" else name.replace("torch.", f"torch.{fake.device.type}.", 1)
