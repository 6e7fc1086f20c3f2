"""NumPy arrays: each is a tensor of the graph, and what NumPy would do with it is a node (see ``ir.numpy_calls``).

Where the stand-in for NumPy has no answer the graph ends, and NumPy itself goes on with the real array.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from gradsplit.compile_core import config
from gradsplit.compile_core.capture.numpy_arrays.dtypes import (
    adjusted,
    checked_answer,
    divides_integers,
)
from gradsplit.compile_core.capture.open_numbers.symbolic_numbers import FloatInput, SymbolicNumber
from gradsplit.compile_core.capture.values.base import CaptureState, NotConstant, PlainCall, Value
from gradsplit.compile_core.capture.values.constants import (
    BuiltinMethod,
    ConstantValue,
    SequenceIterator,
    is_none,
)
from gradsplit.compile_core.capture.values.containers import ListValue, SequenceValue, SliceValue
from gradsplit.compile_core.capture.values.references import ReferenceValue
from gradsplit.compile_core.capture.values.structures import map_parts
from gradsplit.compile_core.capture.values.tensors import TensorValue
from gradsplit.compile_core.capture.values.view_copies import (
    is_view_copy,
    memory_of,
    nodes_in,
    note_view_copy,
)
from gradsplit.compile_core.ir import numpy_calls
from gradsplit.compile_core.ir.sources import ConvertedSource, Source

_ARRAY_ATTRIBUTES = ("T", "real", "imag")
_METHODS = frozenset(
    name
    for name in vars(numpy_calls.torch_numpy.ndarray)
    if not name.startswith("_") and callable(getattr(numpy_calls.torch_numpy.ndarray, name))
) - {"item", "tolist", "view", "resize", "is_integer"}


# What the functions of NumPy are, besides those of Python.
NUMPY_FUNCTIONS = (np.ufunc, type(np.sum))


@dataclass(eq=False, repr=False)
class ArrayValue(Value):
    """An array, or a NumPy scalar, which counts as an array without dims. ``tensor`` stands for it in the graph.

    ``number`` is what a scalar is that NumPy computed of nothing but numbers, or a float that differs between calls;
    None for all others. With tensors torch takes either for the number that it is.
    """

    tensor: TensorValue
    source: Source | None = None
    cls: type = np.ndarray
    number: ConstantValue | None = None
    real: Any = field(default=None, init=False)

    @property
    def is_known(self) -> bool:
        return self.number is not None and not isinstance(self.number, SymbolicNumber)

    @property
    def is_scalar(self) -> bool:
        return self.cls is not np.ndarray

    def describe(self) -> str:
        return f"the array {self.source or self.tensor.node.name}"

    def as_constant(self) -> Any:
        if self.number is None or not self.is_known:
            raise NotConstant(self)
        return self.cls(self.number.value)

    def truth(self, state: CaptureState) -> bool:
        if self.is_known:
            return bool(self.as_constant())
        raise state.unsupported(
            "data-dependent-branch",
            f"the truth value of {self.describe()} depends on its data",
            "use np.where",
        )

    def graph_argument(self, state: CaptureState) -> Any:
        return super().graph_argument(state) if self.number is None else self.number.graph_argument(state)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(str(self.tensor.fake.dtype).removeprefix("torch."))

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        fake = self.tensor.fake
        if name in _ARRAY_ATTRIBUTES:
            tensor = state.call_tensor_nodes(numpy_calls.numpy_attribute, [name, self.tensor.node])
            return as_array(state, tensor)
        if name == "shape":
            return state.from_constant(tuple(fake.shape))
        if name in ("ndim", "size", "itemsize", "nbytes"):
            counts = {
                "ndim": fake.dim(), "size": fake.numel(), "itemsize": fake.dtype.itemsize,
                "nbytes": fake.numel() * fake.dtype.itemsize,
            }  # fmt: skip
            return state.from_constant(counts[name])
        if name == "dtype":
            return ConstantValue(self.dtype)
        if name == "strides":
            refuse_view_copy(state, self)
            return state.from_constant(tuple(step * fake.dtype.itemsize for step in fake.stride()))
        if name in _METHODS or (name == "item" and self.number is not None):
            return BuiltinMethod(self, name)
        return super().get_attribute(state, name)

    def call_method(
        self, state: CaptureState, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        if name == "item" and self.number is not None and not args:
            return self.number
        if name == "copy" and not (
            args or kwargs or self.is_scalar
        ):  # row by row, whatever the array's order is
            order = {"memory_format": state.from_constant(torch.contiguous_format)}
            return as_array(state, state.call_tensor_op("call_method", "clone", [self.tensor], order))
        if name not in _METHODS:
            raise state.unsupported("array-method", f"no rule for the method {name!r} of {self.describe()}")
        return call_numpy(state, f"ndarray.{name}", [self, *args], kwargs)

    def set_attribute(self, state: CaptureState, name: str, value: Value) -> None:
        raise state.unsupported("array-attribute", f"a store to {name!r} of {self.describe()}")

    def iterate(self, state: CaptureState) -> Value:
        items = [self.get_item(state, ConstantValue(index)) for index in range(self.length(state))]
        return SequenceIterator(list(items))

    def length(self, state: CaptureState) -> int:
        if self.tensor.fake.dim() == 0:
            raise state.raise_exception(TypeError, "len() of unsized object")
        return int(self.tensor.fake.shape[0])

    def get_item(self, state: CaptureState, key: Value) -> Value:
        return call_numpy(state, "operator.getitem", [self, key], {})

    def set_item(self, state: CaptureState, key: Value, value: Value) -> None:
        call_numpy(state, "operator.setitem", [self, key, value], {})

    def rebuild(self, writer: Any) -> str:
        element = "[()]" if self.is_scalar else ""
        array = f"{writer.constant(numpy_calls.array_of_tensor)}({writer.emit(self.tensor)})"
        name: str = writer.bind(array + element)
        return name


def wrap_array(state: CaptureState, real: Any, source: Source | None) -> ArrayValue:
    """The value of an existing array or NumPy scalar."""
    if not config.trace_numpy:
        raise state.unsupported("numpy", "an array, while config.trace_numpy is False")
    if type(real) is not np.ndarray and not isinstance(real, np.generic):
        raise state.unsupported("array-subclass", f"an array of the subclass {type(real).__qualname__}")
    if real.dtype not in numpy_calls.DTYPES or not real.dtype.isnative:
        raise state.unsupported("array-dtype", f"an array of {real.dtype}")
    source = source or state.reference_source("array", real)
    if isinstance(real, np.generic) and not _differs(state, real, source):
        return _constant_scalar(state, real, source)
    state.guards.type_is(source, type(real))
    if type(real) is np.ndarray:
        if not real.flags.writeable or any(step < 0 for step in real.strides):
            raise state.unsupported("array-layout", f"{source} is read-only or has negative strides")
        state.guards.add([source], "{0}.flags.writeable", [], f"{source} may be written")
    converted = ConvertedSource(source, state.reference("tensor_of_array", numpy_calls.tensor_of_array))
    try:
        tensor = numpy_calls.tensor_of_array(real)
    except ValueError as error:
        raise state.unsupported("array-layout", f"{source}: {error}") from error
    state.guards.tensor(converted, tensor)
    node = state.graph.add_input(tensor, converted, "argument", None)
    made = TensorValue(node, node.meta["example_value"], torch.Tensor, converted)
    state.tensor_of_fake[id(made.fake)] = made
    device = state.default_device
    if device is not None and device.type != "cpu":
        moved = state.call_tensor_op("call_method", "to", [made, ConstantValue(device)], {})
        assert isinstance(moved, TensorValue)
        made = moved
    number = None
    if isinstance(real, np.floating):
        to_float = state.reference("float", float)
        number = FloatInput(state, ConvertedSource(source, to_float), float(real))
    array = ArrayValue(made, source, type(real), number)
    array.real = real
    state.array_of_tensor[id(made)] = array
    return array


def _differs(state: CaptureState, real: np.generic, source: Source) -> bool:
    return not isinstance(real, np.bool_) and state.sizes.history.has_changed(source, repr(real))


def _constant_scalar(state: CaptureState, real: np.generic, source: Source) -> ArrayValue:
    """A scalar that has not differed between calls, such as a factor that a module took the root of, is a number."""
    state.guards.add(
        [source],
        "({0} is {c0} or type({0}) is {c1} and {0}.tobytes() == {c2})",
        [real, type(real), real.tobytes()],
        f"{source} == {real!r}",
    )
    make = "bool_" if isinstance(real, np.bool_) else real.dtype.name
    made = call_numpy(state, make, [ConstantValue(real.item())], {})
    assert isinstance(made, ArrayValue)
    made.source, made.real = source, real
    return made


def as_array(state: CaptureState, value: Value) -> Value:
    """The array of a tensor, the same one for the same tensor."""
    if not isinstance(value, TensorValue):
        raise state.unsupported("numpy-call", f"NumPy returned {value.describe()}")
    found = state.array_of_tensor.get(id(value))
    if found is None:
        found = state.array_of_tensor[id(value)] = ArrayValue(value)
    return found


def call_numpy(state: CaptureState, name: str, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """Record a call of a function of NumPy, a method of arrays, or an operator."""
    if not config.trace_numpy:
        raise state.unsupported("numpy", f"a call of NumPy's {name}, while config.trace_numpy is False")
    given = tuple(numpy_argument(state, value) for value in args)
    named = {key: numpy_argument(state, value) for key, value in kwargs.items()}
    if divides_integers(name, given):
        floats = (value.call_method(state, "astype", [ConstantValue("float64")], {})
                  if isinstance(value, ArrayValue) else value for value in args)  # fmt: skip
        return call_numpy(state, name, list(floats), kwargs)
    named = adjusted(name, given, named)
    device = None if state.default_device is None else str(state.default_device)
    written = [value for value in args if isinstance(value, ArrayValue) and value.source is not None]
    versions = [value.tensor.fake._version for value in written]
    try:
        result = state.call_tensor_nodes(numpy_calls.numpy_call, [name, device, given, named])
    except PlainCall as error:
        # NumPy may take what its stand-in does not, and else raises the error that the user should see.
        raise state.unsupported("numpy-call", f"NumPy's {name}: {error}") from error
    if versions != [value.tensor.fake._version for value in written] and device not in (None, "cpu"):
        raise state.unsupported("array-store", "a change of an array that lives on another device meanwhile")
    if name in _OF_ALL_ELEMENTS and isinstance(result, TensorValue) and result.fake.shape == (1,):
        # The stand-in keeps a dim, which a check of the answer finds where it should.
        result = state.call_tensor_op("call_method", "view", [result, SequenceValue([], tuple)], {})
    fakes: list[Any] = []

    def array_of(part: Value) -> Value:
        fakes.append(part.fake if isinstance(part, TensorValue) else None)
        return part if is_none(part) else as_array(state, part)

    arrays = map_parts(state, result, array_of)
    changes = name.startswith("operator.i") and name != "operator.invert"
    if changes or name == "operator.setitem":
        return arrays
    known = {
        value.tensor.node: value.as_constant()
        for value in (*args, *kwargs.values())
        if isinstance(value, ArrayValue) and value.is_known
    }
    answer = checked_answer(state, name, given, named, known, fakes)
    of_scalar = name.startswith("ndarray.") and isinstance(args[0], ArrayValue) and args[0].is_scalar
    arguments = nodes_in((given, named))
    return _like_numpys(state, arrays, answer, of_scalar, arguments, known.keys() >= set(arguments))


_OF_ALL_ELEMENTS = ("median", "percentile", "quantile")


def _like_numpys(
    state: CaptureState, value: Value, answer: Any, of_scalar: bool, arguments: list[Node], is_known: bool
) -> Value:
    """The results, of which those are scalars and views that are so in NumPy's answer.

    ``is_known``: NumPy was asked with the very arguments.
    """
    if isinstance(value, SequenceValue):
        parts = zip(value.all(state), answer, strict=True)
        items = [_like_numpys(state, item, part, of_scalar, arguments, is_known) for item, part in parts]
        return ListValue([*items]) if type(answer) is list else SequenceValue([*items], type(answer))
    if not isinstance(value, ArrayValue):
        return value
    tensor = value.tensor
    shares = memory_of(tensor.node) in map(memory_of, arguments)
    if answer.is_view and not shares:
        # Torch has no negative strides. A copy is as good as long as nobody can tell: see ``check_view_copies``.
        note_view_copy(
            state, tensor.node, arguments, "a view with negative strides, which torch has none of,"
        )
    if shares and not answer.is_view:
        copy = state.call_tensor_op("call_method", "clone", [tensor], {})
        assert isinstance(copy, TensorValue)
        tensor = copy
    if isinstance(answer.value, np.generic) or (of_scalar and np.shape(answer.value) == ()):
        number = ConstantValue(answer.value.item()) if is_known else None
        return ArrayValue(tensor, None, value.dtype.type, number)
    return as_array(state, tensor)


def refuse_view_copy(state: CaptureState, array: ArrayValue) -> None:
    """Where the strides of a view matter."""
    if is_view_copy(state, array.tensor.node):
        raise state.unsupported("numpy-view", f"the strides of {array.describe()}")


def operate(state: CaptureState, function: Any, *operands: Value) -> Value | None:
    """An operator of Python with an array or a dtype among its operands; None where there is neither."""
    if any(
        isinstance(operand, ConstantValue) and issubclass(operand.python_type(), np.dtype)
        for operand in operands
    ):
        return state.from_constant(function(*(constant_dtype(operand) for operand in operands)))
    arrays = [operand for operand in operands if isinstance(operand, ArrayValue)]
    beside_tensor = any(isinstance(operand, TensorValue) for operand in operands)
    if not arrays or (beside_tensor and all(array.number is not None for array in arrays)):
        return None
    return call_numpy(state, f"operator.{function.__name__}", list(operands), {})


def numpy_argument(state: CaptureState, value: Value) -> Any:
    """The argument of a node that calls NumPy."""
    if isinstance(value, ArrayValue):
        return value.tensor.node
    if isinstance(value, SequenceValue) and value.cls in (tuple, list, torch.Size):
        items = [numpy_argument(state, item) for item in value.all(state)]
        return items if value.cls is list else tuple(items)
    if isinstance(value, SliceValue):
        return slice(*(numpy_argument(state, part) for part in value.parts))
    real = value.value if isinstance(value, ConstantValue) else value
    if isinstance(real, np.dtype):
        if real not in numpy_calls.DTYPES:
            raise state.unsupported("array-dtype", f"an array of {real}")
        return real.name
    if real is None or real is Ellipsis or isinstance(real, (bool, int, float, complex, str)):
        return real
    if isinstance(value, ReferenceValue) and value.real in _ELEMENT_TYPES:
        return np.dtype(value.real).name
    raise state.unsupported("numpy-argument", f"{value.describe()} as an argument of NumPy")


_ELEMENT_TYPES = {bool, int, float, complex} | {dtype.type for dtype in numpy_calls.DTYPES}


def constant_dtype(value: Value) -> Any:
    """The dtype that a value names; raises NotConstant."""
    if isinstance(value, ReferenceValue):
        return value.real
    if isinstance(value, ArrayValue):
        raise NotConstant(value)
    return value.as_constant()
