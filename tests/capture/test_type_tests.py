"""``isinstance`` and ``issubclass``, whoever decides: metaclasses, libraries, protocols, ``__class__``."""

import collections.abc
import typing

import pytest
import torch

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction


class ByFlag(type):
    def __instancecheck__(cls, instance):
        return hasattr(instance, "flag")

    def __subclasscheck__(cls, subclass):
        return subclass.__name__.startswith("F")


class Flagged(metaclass=ByFlag):
    pass


class AllAreSubclasses(type):
    def __instancecheck__(cls, instance):
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass):
        return True


class Everything(metaclass=AllAreSubclasses):
    pass


class Matrices(type(torch.Tensor)):
    def __instancecheck__(cls, instance):
        return isinstance(instance, torch.Tensor) and instance.dim() == 2


class Matrix(torch.Tensor, metaclass=Matrices):
    pass


@typing.runtime_checkable
class Runs(typing.Protocol):
    def run(self): ...


class First:
    flag = 1
    run = None


class Proxy:
    run = print

    @property
    def __class__(self):
        return torch.nn.Linear


CLASSES = [
    torch.nn.Buffer,
    torch.nn.Parameter,
    torch.nn.parameter.UninitializedBuffer,
    torch.Tensor,
    torch.autograd.Variable,
    torch.FloatTensor,
    torch.DoubleTensor,
    torch.cuda.FloatTensor,
    torch.nn.Linear,
    Flagged,
    Everything,
    Matrix,
    Runs,
    collections.abc.Hashable,
    collections.abc.Callable,
    typing.SupportsFloat,
    int | torch.nn.Buffer,
    typing.Callable,
    typing.Hashable,
    (typing.Sized, typing.Iterable),
    (str, (torch.autograd.Variable,)),
]


def marked(**attributes):
    tensor = torch.ones(2)
    tensor.__dict__.update(attributes)
    return tensor


@pytest.mark.parametrize("cls", CLASSES, ids=str)
def test_instances_and_subclasses(cls):
    def test(x, value, other):
        return x + 1, isinstance(value, cls), issubclass(other, cls)

    compiled = CompiledFunction(test, lambda graph, inputs: graph.module, fullgraph=True)
    values = [torch.nn.Buffer(torch.ones(2)), torch.nn.Parameter(torch.ones(2)), torch.ones(2, 2).double()]
    values += [marked(_is_param=True), marked(_is_buffer=False), First(), Proxy(), 2, torch.nn.ReLU()]
    x = torch.ones(2)
    for value in values:
        wanted = test(x, value, type(value))
        assert compiled(x, value, type(value))[1:] == wanted[1:], value


def test_attributes_of_a_tensor_are_read_anew():
    def test(x, b):
        scale = 2 if isinstance(b, torch.nn.Buffer) else 3
        return x * scale, getattr(b, "note", None), isinstance(b, torch.nn.Parameter)

    compiled = CompiledFunction(test, lambda graph, inputs: graph.module, fullgraph=True)
    x, b = torch.ones(2), torch.ones(2)
    for attributes in (
        {},
        {"_is_buffer": True, "note": "a"},
        {"note": x},
        {"_is_buffer": False, "_is_param": 1},
    ):
        b.__dict__.update(attributes)
        for wanted, found in zip(test(x, b), compiled(x, b), strict=True):
            assert torch.equal(wanted, found) if isinstance(wanted, torch.Tensor) else wanted == found
