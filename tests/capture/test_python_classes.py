# ruff: noqa - the programs are written as people write them
"""Classes of the program: special methods, descriptors, super, metaclasses, each against the plain program."""

from __future__ import annotations

import abc
import types
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import pytest
import torch

from tests.capture.compare_runs import Programs, check_program

program = Programs()
T = TypeVar("T")


class Vector:
    def __init__(self, *items):
        self.items = list(items)

    def __add__(self, other):
        if not isinstance(other, Vector):
            return NotImplemented
        return Vector(*[a + b for a, b in zip(self.items, other.items)])

    def __radd__(self, other):
        return Vector(*[other + a for a in self.items])

    def __iadd__(self, other):
        self.items = [a + other for a in self.items]
        return self

    def __mul__(self, k):
        return Vector(*[a * k for a in self.items])

    __rmul__ = __mul__

    def __matmul__(self, other):
        return sum(a * b for a, b in zip(self.items, other.items))

    def __rsub__(self, other):
        return ("rsub", other)

    def __neg__(self):
        return Vector(*[-a for a in self.items])

    def __pos__(self):
        return self

    def __invert__(self):
        return "inverted"

    def __abs__(self):
        return sum(abs(a) for a in self.items)

    def __len__(self):
        return len(self.items)

    def __bool__(self):
        return any(self.items)

    def __getitem__(self, key):
        if isinstance(key, slice):
            return Vector(*self.items[key])
        return self.items[key]

    def __setitem__(self, key, value):
        self.items[key] = value

    def __delitem__(self, key):
        del self.items[key]

    def __contains__(self, item):
        return item in self.items

    def __iter__(self):
        return iter(self.items)

    def __reversed__(self):
        return iter(self.items[::-1])

    def __eq__(self, other):
        return isinstance(other, Vector) and self.items == other.items

    def __hash__(self):
        return hash(tuple(self.items))

    def __repr__(self):
        return f"Vector{tuple(self.items)!r}"

    def __format__(self, spec):
        return f"<{spec}|{len(self)}>"

    def __call__(self, *args, **kwargs):
        return len(args), sorted(kwargs)

    def __index__(self):
        return 1

    def __int__(self):
        return 7

    def __float__(self):
        return 2.5

    def __round__(self, digits=None):
        return ("round", digits)

    def __divmod__(self, other):
        return ("divmod", other)

    def __pow__(self, other, modulo=None):
        return ("pow", other, modulo)

    def __lt__(self, other):
        return len(self) < len(other)


class OnlyGetItem:
    def __getitem__(self, i):
        if i >= 3:
            raise IndexError(i)
        return i * 10


class Counting:
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return self

    def __next__(self):
        if self.n == 0:
            raise StopIteration
        self.n -= 1
        return self.n


class Typed:
    """A descriptor."""

    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        return getattr(instance, self.name, "unset")

    def __set__(self, instance, value):
        if not isinstance(value, int):
            raise TypeError(f"{self.name} takes an int")
        setattr(instance, self.name, value)

    def __delete__(self, instance):
        delattr(instance, self.name)


class NonData:
    def __init__(self, factor):
        self.factor = factor

    def __get__(self, instance, owner):
        return lambda v: (v * self.factor, owner.__name__)


class Account:
    size = Typed()
    scale = NonData(3)
    count = 0
    registry = {}

    def __init__(self, n):
        self._value = n
        self.size = n

    @property
    def value(self):
        "The value."
        return self._value

    @value.setter
    def value(self, new):
        self._value = new * 2

    @value.deleter
    def value(self):
        self._value = None

    @classmethod
    def make(cls, n):
        return cls(n)

    @staticmethod
    def plus(a, b=1):
        return a + b

    def __getattr__(self, name):
        if name.startswith("dyn_"):
            return name[4:]
        raise AttributeError(f"no {name}")


class SubAccount(Account):
    def __init__(self, n):
        super().__init__(n)
        super(SubAccount, self).__init__(n + 1)

    @property
    def value(self):
        return super().value + 100

    @classmethod
    def make(cls, n):
        made = super().make(n)
        made.tag = cls.__name__
        return made

    @staticmethod
    def plus(a, b=1):
        return super(SubAccount, SubAccount).plus(a, b) + 1000


class Left:
    def who(self):
        return ["Left"]


class Right:
    def who(self):
        return ["Right"]


class Diamond(Left, Right):
    def who(self):
        return ["Diamond", *super().who(), *super(Left, self).who(), *Right.who(self)]


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a):
        self.a = a


class SlottedChild(Slotted):
    __slots__ = ("c",)


class Guarded:
    def __init__(self):
        object.__setattr__(self, "log", [])
        self.x = 1

    def __setattr__(self, name, value):
        self.log.append(("set", name))
        object.__setattr__(self, name, value)

    def __delattr__(self, name):
        self.log.append(("del", name))
        super().__delattr__(name)


class Singleton:
    made = None

    def __new__(cls, *args):
        instance = super().__new__(cls)
        instance.args = args
        return instance


class Meta(type):
    def __call__(cls, *args):
        made = super().__call__(*args)
        made.by_meta = True
        return made

    def __instancecheck__(cls, instance):
        return instance == "magic" or type.__instancecheck__(cls, instance)

    def __len__(cls):
        return 42

    def __iter__(cls):
        return iter(["one", "two"])

    def __getitem__(cls, key):
        return (cls.__name__, key)

    def __contains__(cls, key):
        return key == "in"

    @property
    def label(cls):
        return "label of " + cls.__name__

    def describe(cls):
        return cls.__name__.lower()


class Managed(metaclass=Meta):
    def __init__(self, v):
        self.v = v


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...

    @property
    @abc.abstractmethod
    def name(self): ...

    def double(self):
        return 2 * self.area()


class Square(Shape):
    name = "square"

    def __init__(self, n):
        self.n = n

    def area(self):
        return self.n**2


@runtime_checkable
class HasArea(Protocol):
    def area(self): ...


class Box(Generic[T]):
    def __init__(self, item: T):
        self.item = item

    def get(self) -> T:
        return self.item

    def __class_getitem__(cls, key):
        return super().__class_getitem__(key)


class Config:
    rate = 0.5
    layers = [1, 2]


class Node:
    def __init__(self, value, parent=None):
        self.value = value
        self.parent = parent
        self.children = []
        if parent is not None:
            parent.children.append(self)


@program
def arithmetic(x, n):
    a, b = Vector(1, n), Vector(2, 3)
    c = a + b
    d = 1 + a
    e = a * 2
    f = 3 * a
    keep = a
    a += 10
    out = [c.items, d.items, e.items, f.items, b @ b, keep is a, a.items, 5 - b]
    try:
        b + 1
    except TypeError as error:
        out.append(str(error))
    return x, out, (-b).items, (+b) is b, ~b, abs(Vector(-1, 2))


@program
def with_tensors(x, n):
    a = Vector(x, x + 1)
    b = a * n
    return (a + b).items, a @ b, (2 * a)[0]


@program
def tensor_and_object(x, n):
    a = Vector(1.0, 2.0)
    r = x + a
    return r.items


@program
def containers(x, n):
    a = Vector(1, 2, 3)
    a[0] = n
    del a[1]
    b = a[0:1]
    first, second = a
    return (
        x,
        a.items,
        b.items,
        len(a),
        bool(a),
        bool(Vector()),
        3 in a,
        9 in a,
        list(a),
        list(reversed(a)),
        first,
        second,
    )


@program
def old_iteration(x, n):
    o = OnlyGetItem()
    return x, list(o), 20 in o, 5 in o, [v for v in o], sum(o), list(zip(o, "ab")), list(reversed([*o]))


@program
def own_iterator(x, n):
    c = Counting(n + 2)
    first = next(c)
    return (
        x,
        first,
        list(c),
        next(c, "end"),
        sum(Counting(4)),
        max(Counting(n + 1)),
        dict(enumerate(Counting(2))),
    )


@program
def comparisons_and_hash(x, n):
    a, b = Vector(1, 2), Vector(1, 2)
    table = {a: "a"}
    table[b] = "b"
    members = {a, b, Vector(3)}
    return (
        x,
        a == b,
        a != b,
        a is b,
        hash(a) == hash(b),
        len(table),
        table[Vector(1, 2)],
        len(members),
        b in members,
        a < Vector(1, 2, 3),
        min(Vector(1), a).items,
        sorted([a, Vector(1)])[0].items,
    )


@program
def texts(x, n):
    a = Vector(1, n)
    return (
        x,
        repr(a),
        str(a),
        f"{a}",
        f"{a:spec}",
        f"{a!r:>15}",
        "{}".format(a),
        "%s" % a,
        "%r" % (a,),
        [a].__repr__(),
        str([a, {"k": a}]),
    )


@program
def calls_and_numbers(x, n):
    a = Vector(1)
    return (
        x,
        a(),
        a(1, k=2),
        int(a),
        float(a),
        [10, 20][a],
        round(a),
        round(a, 2),
        divmod(a, 3),
        pow(a, 2),
        pow(a, 2, 5),
        a**2,
        range(a),
        "ab" * a,
        hex(a),
    )


@program
def properties(x, n):
    a = Account(n)
    a.value = 5
    out = [a.value]
    del a.value
    out.append(a.value)
    a.value = n
    return x + a.value, out, Account.value.__doc__, a._value


@program
def descriptors(x, n):
    a = Account(n)
    a.size += 1
    out = [a.size, a.scale(2)]
    try:
        a.size = "s"
    except TypeError as error:
        out.append(str(error))
    del a.size
    out += [a.size, a.dyn_thing, hasattr(a, "nothing"), hasattr(a, "dyn_x"), getattr(a, "nothing", 3)]
    a.scale = 1
    out.append(a.scale)
    return x, out, type(Account.size).__name__, Account.scale(4)


@program
def supers(x, n):
    a = SubAccount(n)
    b = SubAccount.make(n)
    return (
        x,
        a.value,
        a.size,
        b.value,
        b.tag,
        SubAccount.plus(1),
        a.plus(1, 2),
        Diamond().who(),
        Diamond.__mro__[1].__name__,
    )


@program
def class_attributes(x, n):
    a = Account(n)
    a.count += 1
    return (
        x,
        a.count,
        Account.count,
        Config.rate,
        Config.layers[1],
        vars(a) == {"_value": n, "_size": n, "count": 1},
        "count" in vars(Account),
        a.__class__.__name__,
        type(a) is Account,
    )


@program
def class_stores(x, n):
    before = Config.rate
    Config.rate = n
    Config.extra = x + 1
    out = Config.rate, Config.extra, Config().rate
    Config.rate = before
    del Config.extra
    return out, hasattr(Config, "extra"), Config.rate


@program
def slots(x, n):
    s = SlottedChild(n)
    s.c = x
    s.b = 1
    del s.b
    out = [s.a, hasattr(s, "b"), hasattr(s, "zz")]
    try:
        s.zz = 1
    except AttributeError as error:
        out.append(str(error))
    try:
        del s.zz
    except AttributeError as error:
        out.append(str(error))
    return out, s.c + 1, s


@program
def stores_are_intercepted(x, n):
    g = Guarded()
    g.y = n
    del g.x
    setattr(g, "z", 1)
    delattr(g, "z")
    return x, g.log, vars(g)


@program
def own_new(x, n):
    s = Singleton(1, n)
    return x, s.args, type(s).__name__, isinstance(s, Singleton)


@program
def metaclasses(x, n):
    m = Managed(n)
    return (
        x,
        m.v,
        m.by_meta,
        isinstance("magic", Managed),
        isinstance(m, Managed),
        isinstance(3, Managed),
        len(Managed),
        list(Managed),
        Managed["k"],
        "in" in Managed,
        Managed.label,
        Managed.describe(),
        type(Managed).__name__,
    )


@program
def abstract_classes(x, n):
    s = Square(n)
    out = [
        s.double(),
        s.name,
        isinstance(s, Shape),
        issubclass(Square, Shape),
        isinstance(s, HasArea),
        isinstance(3, HasArea),
    ]
    try:
        Shape()
    except TypeError as error:
        out.append(str(error))
    return x, out


@program
def generic_classes(x, n):
    b = Box[int](n)
    return x, b.get(), Box(x).get() * 2, isinstance(b, Box), Box[int].__origin__ is Box


@program
def linked_objects(x, n):
    root = Node(x)
    child = Node(n, root)
    Node(3, child)
    seen, todo = [], [root]
    while todo:
        node = todo.pop()
        seen.append(node.value)
        todo.extend(node.children)
    return seen, root, child.parent is root


@program
def attribute_functions(x, n):
    a = Config()
    setattr(a, "rate", n)
    a.__dict__["more"] = 2
    a.__dict__.update(other=3)
    out = [getattr(a, "rate"), getattr(a, "zz", None), hasattr(a, "more"), vars(a), a.__dict__ is vars(a)]
    delattr(a, "rate")
    return x, out, a.rate, "rate" in a.__dict__, sorted(a.__dict__), callable(a), callable(Config)


@program
def dir_of_things(x, n):
    return x, "layers" in dir(Config), [d for d in dir(Config) if not d.startswith("_")], "append" in dir([])


@program
def simple_namespace(x, n):
    s = types.SimpleNamespace(a=n, b=[1])
    s.c = x
    s.b.append(2)
    return s, s.a, s == types.SimpleNamespace(a=n, b=[1, 2], c=x), hasattr(s, "zz"), sorted(vars(s))


@program
def mapping_proxies(x, n):
    p = types.MappingProxyType({"a": n, "b": 2})
    return x, p["a"], "b" in p, len(p), list(p), dict(p), p.get("zz", 1), list(p.items()), {**p}


@program
def bound_methods_as_values(x, n):
    a = Account(n)
    table = {"plus": a.plus, "make": Account.make, "vec": Vector(1).__len__}
    return (
        x,
        table["plus"](1),
        table["make"](n).size,
        table["vec"](),
        list(map(str.upper, "ab")),
        list(map(Vector.__len__, [Vector(1)])),
    )


@program
def instance_checks(x, n):
    import numbers
    from collections.abc import Callable, Iterable, Mapping, Sequence, Sized

    return (
        x,
        isinstance(n, numbers.Number),
        isinstance([], Iterable),
        isinstance({}, Mapping),
        isinstance((), Sequence),
        isinstance(Vector(), Sized),
        isinstance(Vector, Callable),
        isinstance(n, int | str),
        isinstance(n, (str, (float, int))),
        isinstance(x, torch.Tensor | None),
        issubclass(bool, int),
        isinstance(None, type(None)),
        isinstance(lambda: 1, types.FunctionType),
    )


@program
def stateful_argument(x, n):
    return x


@pytest.mark.parametrize("function, settings", program.table, ids=program.names)
def test_same_as_plain(function, settings):
    check_program(function, **settings)


@pytest.mark.parametrize("name", ["Account", "SubAccount", "Slotted", "Guarded", "Vector", "Square"])
def test_objects_that_come_in(name):
    cls = globals()[name]

    def run(x, item, items):
        out = [getattr(item, "value", None), item is items[0]]
        if name == "Vector":
            item += 1
            item[0] = x
            out.append(len(item))
        elif name == "Slotted":
            item.b = item.a + 1
            item.a = x
        else:
            item.value = 3
            item.more = [item]
        return out, item

    if name == "Square":
        run = _square

    def make(seed):
        item = cls(seed + 1) if name != "Guarded" else cls()
        return torch.ones(2) * seed, item, [item]

    check_program(run, make)


def _square(x, item, items):
    return x * item.area(), item.name


def test_class_stores_are_kept():
    def run(x, n):
        Config.rate = n
        Config.layers.append(n)
        return x * Config.rate

    before = Config.rate, list(Config.layers)
    try:
        check = check_program
        from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction

        compiled = CompiledFunction(run, lambda graph, inputs: graph.module, fullgraph=True)
        compiled(torch.ones(1), 7)
        assert Config.rate == 7 and Config.layers == [*before[1], 7]
    finally:
        Config.rate, Config.layers[:] = before


def test_a_class_made_in_the_function():
    def run(x, n):
        class Local:
            factor = n

            def scale(self, v):
                return v * self.factor

        return Local().scale(x), Local.__name__

    check_program(run, graphs=None)


class DoubledProperty(property):
    def __get__(self, instance, owner=None):
        return self if instance is None else super().__get__(instance, owner) * 2

    def __set__(self, instance, value):
        super().__set__(instance, value * 3)


class NegatedMethod(staticmethod):
    def __get__(self, instance, owner=None):
        function = super().__get__(instance, owner)
        return lambda x: -function(x)


class WithOwnDescriptors:
    def __init__(self, rate):
        self._rate = rate

    @DoubledProperty
    def rate(self):
        return self._rate

    @rate.setter
    def rate(self, value):
        self._rate = value

    @NegatedMethod
    def shifted(x):
        return x + 1


def test_descriptors_whose_classes_are_of_built_in_ones():
    """What such a class does itself, and not what the one does that it is made of."""

    def run(x):
        owner = WithOwnDescriptors(2.0)
        first = x * owner.rate
        owner.rate = 5.0
        return first, x * owner.rate, owner._rate, WithOwnDescriptors(1.0).shifted(x)

    check_program(run, graphs=None)
