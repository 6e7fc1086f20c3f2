# ruff: noqa - the programs are written as people write them
"""Dataclasses, named tuples and enums, each against the plain program."""

from __future__ import annotations

import copy
import dataclasses
import enum
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import pytest
import torch

from tests.capture.compare_runs import Programs, check_program

program = Programs()


@dataclass
class Point:
    x: float
    y: float = 0.0
    tags: list = field(default_factory=list)
    shared: ClassVar[int] = 3

    def norm(self):
        return (self.x**2 + self.y**2) ** 0.5


@dataclass(frozen=True)
class Frozen:
    a: int
    b: tuple = (1, 2)


@dataclass(order=True)
class Version:
    major: int
    minor: int = 0
    name: str = field(default="v", compare=False, repr=False)


@dataclass(kw_only=True)
class Options:
    rate: float = 0.1
    inner: Point = field(default_factory=lambda: Point(1, 2))


@dataclass(slots=True)
class Slotted:
    a: int
    b: list = field(default_factory=list)


@dataclass
class Post:
    a: int
    b: int = field(init=False)
    scale: dataclasses.InitVar[int] = 2

    def __post_init__(self, scale):
        self.b = self.a * scale


@dataclass
class Child(Point):
    z: float = 1.0

    def norm(self):
        return super().norm() + self.z


@dataclass(eq=True, unsafe_hash=True)
class Hashed:
    a: int


class Row(NamedTuple):
    t: torch.Tensor
    n: int = 5

    @property
    def double(self):
        return self.n * 2

    def scaled(self, k):
        return self.t * k


class Color(enum.Enum):
    RED = 1
    GREEN = "g"
    ALIAS = 1

    @property
    def label(self):
        return self.name.lower()

    def describe(self, suffix=""):
        return f"{self.value}{suffix}"

    @classmethod
    def default(cls):
        return cls.GREEN

    @staticmethod
    def helper(v):
        return v + 1


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 5


class Perm(enum.Flag):
    R = enum.auto()
    W = enum.auto()
    X = enum.auto()
    RW = R | W


class Mask(enum.IntFlag):
    A = 1
    B = 2


class Name(str, enum.Enum):
    ONE = "one"
    TWO = "two"


class Planet(enum.Enum):
    EARTH = (5.9, 6.3)
    MARS = (0.6, 3.3)

    def __init__(self, mass, radius):
        self.mass = mass
        self.radius = radius

    @property
    def density(self):
        return self.mass / self.radius


@program
def creation(x, n):
    p = Point(x, n)
    p.tags.append(1)
    q = Point(1, tags=[2])
    return (
        p,
        q,
        Point(3, 4).norm(),
        p.shared,
        Point.shared,
        dataclasses.is_dataclass(p),
        dataclasses.is_dataclass(3),
    )


@program
def replace_and_dicts(x, n):
    p = Point(n, 2.0, [1])
    q = dataclasses.replace(p, y=5)
    return (
        x,
        q,
        q.tags is p.tags,
        dataclasses.asdict(p),
        dataclasses.astuple(p),
        [f.name for f in dataclasses.fields(p)],
        {f.name: getattr(p, f.name) for f in dataclasses.fields(Point)},
    )


@program
def as_dict_of_tensors(x, n):
    o = Options(rate=n)
    return x, dataclasses.asdict(o), o.inner.norm()


@program
def frozen(x, n):
    f = Frozen(n)
    out = [f.a, f.b, f == Frozen(n), hash(f) == hash(Frozen(n)), {f: 1}[Frozen(n)], f]
    try:
        f.a = 2
    except dataclasses.FrozenInstanceError as error:
        out.append(str(error))
    return x, out


@program
def ordering(x, n):
    a, b = Version(1, n), Version(1, 2, name="other")
    return (
        x,
        a < b,
        a <= b,
        a == b,
        sorted([b, a])[0].minor,
        max(a, b).minor,
        Version(1) == Version(1, name="q"),
        Version(1) == 3,
    )


@program
def representations(x, n):
    return x, repr(Point(1, n)), repr(Version(1)), str(Frozen(n)), f"{Options()}", repr([Point(1)])


@program
def keyword_only(x, n):
    o = Options(rate=n)
    try:
        Options(0.5)
    except TypeError as error:
        return x * o.rate, str(error)


@program
def slots_and_post_init(x, n):
    s = Slotted(n)
    s.b.append(x)
    return s, Post(n).b, Post(n, 5).b, Post(1)


@program
def inheritance(x, n):
    c = Child(n, 2)
    return (
        x,
        c.norm(),
        c,
        isinstance(c, Point),
        [f.name for f in dataclasses.fields(c)],
        Hashed(1) in {Hashed(1): 2},
    )


@program
def named_tuples(x, n):
    r = Row(x, n)
    t, k = r
    match r:
        case Row(t=_, n=number):
            out = number
    return r, t, k, r.double, r.scaled(2), r._replace(n=1), Row(x).n, out, r._asdict()


@program
def matching(x, n):
    out = []
    for value in (Point(0, n), Frozen(n), Color.RED, Level.LOW, (1, Point(1, 1))):
        match value:
            case Point(0, y):
                out.append(y)
            case Frozen(a=a):
                out.append(a)
            case Color.RED:
                out.append("red")
            case Level.LOW:
                out.append("low")
            case (1, Point(x=1)):
                out.append("nested")
    return x, out


@program
def enum_members(x, n):
    c = Color.RED
    return (
        x,
        c,
        c.name,
        c.value,
        c is Color.ALIAS,
        Color(1) is c,
        Color["GREEN"],
        Color("g"),
        c == Color.GREEN,
        c.label,
        c.describe("!"),
        Color.default(),
        Color.helper(1),
        list(Color),
        len(Color),
        c in Color,
        isinstance(c, Color),
        repr(c),
        str(c),
        f"{c}",
        [m.name for m in Color],
        Color.__members__["ALIAS"].name,
        {c: 1}[Color.RED],
        hash(c) == hash(Color.RED),
        bool(c),
    )


@program
def enum_errors(x, n):
    out = []
    for action in (lambda: Color(99), lambda: Color["NOPE"], lambda: Color.NOPE):
        try:
            action()
        except (ValueError, KeyError, AttributeError) as error:
            out.append((type(error), str(error)))
    return x, out


@program
def int_enums(x, n):
    return (
        x * Level.HIGH,
        Level.LOW + 1,
        Level.LOW < Level.HIGH,
        Level(5),
        [10, 20][Level.LOW],
        Level.LOW == 1,
        max(Level),
        sorted(Level),
        int(Level.HIGH),
        isinstance(Level.LOW, int),
        f"{Level.LOW}",
        str(Level.HIGH),
        range(Level.LOW),
        Level.HIGH * 2,
        {1: "a"}[Level.LOW],
    )


@program
def flags(x, n):
    p = Perm.R | Perm.W
    return (
        x,
        p == Perm.RW,
        Perm.R in p,
        Perm.X in p,
        p & Perm.W,
        p ^ Perm.R,
        ~Perm.R,
        bool(p & Perm.X),
        p.value,
        Perm(3),
        Mask.A | Mask.B,
        Mask.A + 1,
        Mask(3) & Mask.A,
        repr(Perm.R),
        list(p),
    )


@program
def string_enums(x, n):
    return (
        x,
        Name.ONE == "one",
        Name("two"),
        Name.ONE.upper(),
        Name.ONE.value,
        Name.ONE in ("one",),
        {"one": 1}[Name.ONE],
        isinstance(Name.ONE, str),
        Name.TWO.startswith("t"),
        f"{Name.ONE.value}",
    )


@program
def enums_with_data(x, n):
    return x * Planet.EARTH.mass, Planet.MARS.density, [p.radius for p in Planet], Planet((0.6, 3.3)).name


@program
def copies(x, n):
    p = Point(n, 1, [[n]])
    q = copy.copy(p)
    q.y = 9
    r = copy.deepcopy({"p": p, "same": p.tags, "c": Color.RED, "t": (1, [2])})
    r["p"].x = 50
    r["same"].append(3)
    return (
        p,
        q,
        q.tags is p.tags,
        r["p"].tags is r["same"],
        r["p"].x,
        r["c"] is Color.RED,
        copy.copy([1, 2]),
        copy.copy({"a": 1}),
        copy.deepcopy((1, (2,))),
        copy.deepcopy([p.tags, p.tags]),
    )


@pytest.mark.parametrize("function, settings", program.table, ids=program.names)
def test_same_as_plain(function, settings):
    check_program(function, **settings)


def test_records_that_come_in():
    def run(x, point, frozen, row, color, level, perm, options):
        point.tags.append(color)
        point.y = x
        options.inner.x += 1
        if color is Color.RED and Perm.R in perm:
            x = x + level
        return (
            x * frozen.a,
            row.scaled(2),
            row,
            dataclasses.replace(options, rate=2),
            color,
            point == point,
            frozen,
        )

    check_program(
        run,
        lambda seed: (
            torch.ones(2),
            Point(1, seed),
            Frozen(seed),
            Row(torch.ones(1), seed),
            [Color.RED, Color.GREEN][seed % 2],
            Level.HIGH,
            Perm.RW,
            Options(rate=seed),
        ),
    )
