# ruff: noqa - the programs are written as people write them
"""Built-in functions, numbers and strings, each against the plain program."""

from __future__ import annotations

import enum
import functools
import heapq
import math
import string

import numpy as np
import pytest
import torch

from tests.capture.compare_runs import Programs, check_program

program = Programs()


@program
def string_methods(x, n):
    s = "Hello, World"
    return (
        x,
        s.upper(),
        s.lower(),
        s.split(", "),
        s.replace("l", "L", n),
        s.find("o"),
        s.rfind("o"),
        s.startswith(("He", "x")),
        s.endswith("d"),
        s.strip("Hd"),
        s.partition(", "),
        s.rpartition("o"),
        s.title(),
        s.swapcase(),
        s.center(20, "*"),
        s.ljust(15) + "|",
        s.zfill(15),
        s.count("l"),
        s.index("W"),
        s.isalpha(),
        "12".isdigit(),
        s[::-1],
        s[n],
        s * 2,
        "W" in s,
        s < "Z",
        len(s),
        "a-b".join("xy"),
        "\n".join(["a"]).splitlines(),
        s.casefold(),
        s.encode(),
        "abc".translate(str.maketrans("a", "b")),
        s.removeprefix("Hello"),
        s.removesuffix("World"),
        "a b c".rsplit(" ", 1),
        "x".expandtabs(),
        ord("a"),
        chr(98),
        "%s and %d and %5.2f and %r" % ("a", n, 2.5, "q"),
        "%(k)s" % {"k": n},
    )


@program
def formatting(x, n):
    v, w = 3.14159, 10
    return (
        x,
        f"{v:.2f}",
        f"{v:{w}.{n}f}",
        f"{n:>5}|{n:<5}|{n:^5}",
        f"{n:05d}",
        f"{1234567:,}",
        f"{n:b} {255:x} {255:#o}",
        f"{v!r}",
        f"{'s':*^9}",
        f"{n=}",
        f"{v:e}",
        f"{0.5:%}",
        "{0} {1} {0}".format(n, "a"),
        "{k:>4}".format(k=n),
        "{0[1]} {1.real}".format([1, 2], n),
        f"{x.shape}",
        f"{tuple(x.shape)} {x.dtype} {x.device}",
        f"{[n, 'a']} { ({'k': n}) }",
        f"{True} {None}",
        format(n, "03d"),
        format(v),
        "{:>{w}}".format("a", w=5),
        f"{x.size(0)}x{x.size(1)}",
    )


@program
def templates(x, n):
    return x, string.ascii_lowercase[:n], string.digits


@program
def integers(x, n):
    big = 2**100 + n
    return (
        x,
        big,
        big // 7,
        big % 10,
        -7 // 2,
        -7 % 3,
        divmod(-7, 2),
        pow(3, 4, 5),
        pow(2, -1),
        7 & 3,
        7 | 8,
        7 ^ 2,
        ~n,
        n << 3,
        256 >> n,
        abs(-n),
        int("ff", 16),
        int("0b11", 0),
        int(3.9),
        int(-3.9),
        (10).bit_length(),
        n.bit_count(),
        hex(255),
        oct(8),
        bin(5),
        round(2567, -2),
        (5).to_bytes(1, "big"),
        n.real,
        n.numerator,
        n.conjugate(),
        int(),
        bool(n),
        True + 1,
        isinstance(True, int),
    )


@program
def floats(x, n):
    inf, nan = float("inf"), float("nan")
    return (
        x,
        0.1 + 0.2,
        7 / 2,
        7.5 // 2,
        -7.5 % 2,
        2**0.5,
        2.0**-1,
        round(2.5),
        round(3.14159, 2),
        float("1e3"),
        inf > n,
        nan == nan,
        nan != nan,
        math.isnan(nan),
        (0.5).as_integer_ratio(),
        (2.0).is_integer(),
        float.fromhex("0x1p-2"),
        (0.1).hex(),
        -0.0,
        str(-0.0),
        1e300 * 1e10,
        abs(-2.5),
        int(1e10),
        max(nan, 1.0) if n > 100 else 0,
        float(n),
        5.0 == 5,
        hash(1.0) == hash(1),
        divmod(7.5, 2),
        math.copysign(1, -0.0),
    )


@program
def the_least_without_a_key(x, n):
    return (
        x,
        max([n, 2], key=None),
        min([3, n], default=4, key=None),
        max([], default=n, key=None),
        heapq.nlargest(1, [n]),
    )


@program
def quotients_of_numbers_by_torch(x, n):
    return x * (torch.div(x.size(0), 2, rounding_mode="trunc") - 1), torch.div(n, 2), torch.mul(n, 2)


@program
def complex_numbers(x, n):
    c = 3 + 4j
    return (
        x,
        abs(c),
        c.real,
        c.imag,
        c.conjugate(),
        c * c,
        c / 2,
        complex(n, 2),
        complex("1+2j"),
        c == 3 + 4j,
        c**2,
    )


@program
def mathematics(x, n):
    return (
        x,
        math.sqrt(16),
        math.floor(2.7),
        math.ceil(2.1),
        math.prod([1, 2, n]),
        math.gcd(12, 18),
        math.comb(5, 2),
        math.factorial(5),
        math.log(8, 2),
        math.log2(8),
        math.exp(0),
        math.pi,
        math.inf,
        math.isclose(0.1 + 0.2, 0.3),
        math.hypot(3, 4),
        math.fsum([0.1] * 10),
        math.trunc(2.7),
        math.modf(2.5),
        math.sin(0),
        math.atan2(1, 1),
        math.perm(4, 2),
        math.isqrt(17),
        math.lcm(4, 6),
        math.dist([0, 0], [3, 4]),
    )


@program
def rounding_shapes(x, n):
    b, c = x.shape
    return x.new_zeros(math.ceil(c / 2), b // 1), int(c * 0.5), round(b / 3, 1), max(1, int(math.sqrt(c)))


@program
def conversions(x, n):
    return (
        x,
        list("abc"),
        tuple({"a": 1}),
        set([1, 1]),
        dict(a=1),
        str(n),
        repr("a'b"),
        bytes("a", "utf8"),
        int(True),
        bool("False"),
        float("nan") != float("nan"),
        list({"k": 1}.items()),
        str([1, "a", None]),
        str({"k": (1,)}),
        repr({1}),
        ascii("é"),
        list(map(int, "123")),
        str(b"a"),
        complex(1),
        type(n)(5),
        str(torch.float32),
        str(torch.device("cpu")),
        type(x.shape).__name__,
    )


@program
def identities(x, n):
    a, b = [1], [1]
    c = a
    s, t = "abc", "abc"
    return (
        x,
        a is b,
        a is c,
        a is not b,
        n is n,
        s is t,
        x is x,
        type(n) is int,
        Ellipsis is ...,
        NotImplemented is NotImplemented,
        a == b,
    )


@program
def object_identity_of_ids(x, n):
    a, b = [], []
    return x, id(a) == id(a), id(a) == id(b), id(x) == id(x), {id(a): 1}[id(a)]


@program
def types_as_values(x, n):
    table = {int: "int", str: "str", type(None): "none"}
    kinds = [type(v) for v in (n, "a", None)]
    return (
        x,
        [table[k] for k in kinds],
        type(x) == torch.Tensor,
        type(n).__name__,
        int is int,
        isinstance(int, type),
        list[int] == list[int],
        type([]) in (list, tuple),
        int.__name__,
        str.__module__,
        (int or str) is int,
    )


@program
def hashes(x, n):
    return (
        x,
        hash(n) == n,
        hash("a") == hash("a"),
        hash((1, 2)) == hash((1, 2)),
        hash(None) == hash(None),
        hash(frozenset([1])) == hash(frozenset([1])),
    )


@program
def evaluation_order(x, n):
    log = []

    def note(v):
        log.append(v)
        return v

    d = {note("k"): note("v")}
    l = [0, 0]
    l[note(0)] = note(5)
    note(1) + note(2) * note(3)
    (note("a") or note("b")) and note("c")
    f = (lambda *a, **k: None)(note(7), *[note(8)], k=note(9))
    return x, log


@program
def globals_and_locals(x, n):
    return x, CONSTANT, __name__


CONSTANT = 4


@program
def regular_expressions(x, n):
    import re

    m = re.match(r"(\w+)-(\d+)", "abc-12")
    return (
        x,
        m.group(1),
        m.groups(),
        re.sub("a", "b", "banana"),
        re.findall(r"\d", "a1b2"),
        re.split(",", "a,b"),
        bool(re.search("z", "abc")),
        re.compile("b+").fullmatch("bbb") is not None,
        PATTERN.match("layers.3.weight").group(1),
    )


import re

PATTERN = re.compile(r"layers\.(\d+)")


class Named(enum.Enum):
    ONE = 1


class Measured:
    def __float__(self):
        return 1.5

    def __index__(self):
        return 3

    def method(self):
        return self


@program
def classes_of_values(x, n):
    array, measured, module = np.arange(3.0), Measured(), torch.nn.ReLU()
    values = [
        x,
        array,
        array + 1,
        x.shape,
        n,
        n / 2,
        Named.ONE,
        measured,
        measured.method,
        module.forward,
        len,
    ]
    values += ["a", [x], {"a": x}, range(3), (i for i in [1]), Measured, torch.float32, lambda: 1]
    return [(v.__class__ is type(v), v.__class__.__name__, isinstance(v, v.__class__)) for v in values]


@program
def what_classes_have_and_tensors_have_not(x, n):
    names = ["__call__", "mro", "__name__", "__bases__", "__len__", "grad", "__next__", "__none_has_this__"]
    return x + 1, [hasattr(x, name) for name in names]


@program
def what_enumeration_classes_have_and_members_have_not(x, n):
    texts = []
    for function in (len, list, iter, lambda v: v[0]):
        try:
            function(Named.ONE)
        except TypeError as error:
            texts.append(str(error))
    return x + 1, texts


@program
def multiples_of_sizes(x, n):
    sizes = [x.shape * 2, 2 * x.shape, x.shape + (1,), (1,) + x.shape, x.shape[1:] * n]
    return x + 1, sizes, [type(size) for size in sizes]


class Hashed:
    def __init__(self, hashed):
        self.hashed = hashed

    def __hash__(self):
        return self.hashed


@program
def hashes_of_objects(x, n):
    made = [Hashed(value) for value in (5, -1, 2**62 + 3, -(2**62), 2**200)]
    return x + 1, [hash(one) for one in made], {made[2]: n}[made[2]]


@program
def names_of_modules(x, n):
    return x + 1, "sqrt" in dir(math), "relu" in dir(torch), "append" in dir([n]), "hashed" in dir(Hashed)


class Index:
    def __index__(self):
        return 2

    def __mul__(self, other):
        return NotImplemented


@program
def multiples_by_objects(x, n):
    return x + 1, "a" * Index(), Index() * "a", Index() * [n], (n,) * Index(), Index() * x.shape


@program
def numbers_of_objects(x, n):
    return x + 1, complex(Measured()), float(Measured()), int(n * 1.0)


@program(graphs=None)
def indices_that_depend_on_data(x, n):
    row = x.argmax()  # a slice by one of these ends the graph at its line, no more
    return x * 2, [1, 2, 3, 4, 5, 6, 7][:row], x.sum()


class Dispatched:
    @functools.singledispatchmethod
    def on(self, value):
        return "any"

    @on.register
    def _(self, value: torch.Tensor):
        return value * 2


@program
def methods_dispatched_by_the_class_of_a_tensor(x, n):
    return Dispatched().on(x), Dispatched().on(n)


@pytest.mark.parametrize("function, settings", program.table, ids=program.names)
def test_same_as_plain(function, settings):
    check_program(function, **settings)
