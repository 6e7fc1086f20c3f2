# ruff: noqa - the programs are written as people write them
"""Containers of Python and of collections, each against the plain program."""

from __future__ import annotations

import collections
import enum
import operator
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import NamedTuple

import pytest
import torch

from tests.capture.compare_runs import Programs, check_program

program = Programs()
Pair = namedtuple("Pair", ["left", "right"], defaults=[7])


class Color(enum.Enum):
    RED = 1
    GREEN = 2


class Key:
    pass


KEY = Key()


class Named(NamedTuple):
    """Its text is its own."""

    left: object
    right: object = 7

    def __repr__(self):
        return f"Named<{self.left}>"


class Equal(type):
    """Its classes are equal."""

    def __eq__(cls, other):
        return isinstance(other, Equal)

    __hash__ = type.__hash__


class One(metaclass=Equal):
    pass


class Two(metaclass=Equal):
    pass


class Shown:
    def __index__(self):
        return 1

    def __repr__(self):
        return "shown"


class ListOfTheUser(list):
    pass


def what_it_raises(function):
    try:
        return function()
    except (TypeError, ValueError, IndexError) as error:
        return type(error).__name__, str(error)


@program
def pairs_that_are_none(x, n):
    texts = []
    for pairs in ([(1, 2), n], [(1, 2, n)], ["ab", ""], [(n,)]):
        try:
            texts.append(dict(pairs))
        except (TypeError, ValueError) as error:
            texts.append(str(error))
    return x, texts


@program
def what_methods_of_lists_raise(x, n):
    return x, [
        what_it_raises(lambda: [1].insert("a", 2)),
        what_it_raises(lambda: [x].pop(4)),
        what_it_raises(lambda: [x, 2].remove(7) if n > 100 else [1, 2].remove(7)),
        what_it_raises(lambda: [1, 2].index(7)),
        what_it_raises(lambda: (1, 2).index(7)),
        what_it_raises(lambda: [x] + (2,)),
        what_it_raises(lambda: operator.setitem([1, 2, 3], slice(0, 3, 2), [1])),
        what_it_raises(lambda: deque([1], maxlen=1).insert(0, 1)),
        what_it_raises(lambda: deque().popleft()),
        what_it_raises(lambda: -ListOfTheUser([1])),
        what_it_raises(lambda: isinstance(1, 2)),
        what_it_raises(lambda: Pair()),
        what_it_raises(lambda: Pair(1, 2, 3)),
    ]


@program
def deques_by_operators_and_numbers_of_the_program(x, n):
    d = deque([1, x, 3], maxlen=3)
    d.rotate(Shown())
    d.extendleft([n, 7])
    return d, d * 2, deque([x]) + deque([2], maxlen=1), [x] * Shown()


@program
def texts_of_what_has_a_text_of_its_own(x, n):
    inside = [Shown(), n]
    inside.append(inside)
    shown = deque([Shown()], maxlen=4)
    held = {"key": Named(Shown()), (Shown(),): {}, 3: slice(1, Shown())}
    return x, repr(inside), repr(shown), repr(held), str(Named(n)), str(Pair(Shown()))


@program
def classes_that_their_metaclass_compares(x, n):
    return x, One == Two, [One] == [Two], One in [Two], (One,) != (Two,), One is Two


@program
def list_methods(x, n):
    a = [3, 1, 2]
    a.append(n)
    a.extend(range(2))
    a.insert(1, 9)
    b = a.copy()
    a.sort()
    b.sort(key=lambda v: -v)
    c = a + b
    c.reverse()
    a.remove(9)
    popped = a.pop(0), a.pop()
    return (
        x,
        a,
        b,
        c,
        popped,
        c.index(9),
        c.count(1),
        a * 2,
        2 * a,
        a[::-1],
        a[-2:],
        a == b,
        a < b,
        a != b,
        [1, 2] <= [1, 3],
    )


@program
def special_methods_by_name(x, n):
    table, queue, members = {"a": 1}, OrderedDict(k=x), {1, n}
    seen = defaultdict(list)
    table.__setitem__("b", n)
    queue.__setitem__("q", x + 1)
    seen.__getitem__("z").append(table.__len__())
    found = list(map(table.__getitem__, "ba")), list(filter(members.__contains__, range(4)))
    items = [n, 2, 3]
    items.__delitem__(0)
    return table, queue, seen, found, items, list(items.__iter__()), sorted("ba", key=table.__getitem__)


@program
def list_slices(x, n):
    a = list(range(8))
    a[1:3] = [10, 11, 12]
    a[::2] = [0] * len(a[::2])
    del a[5:]
    a[len(a) :] = "xy"
    b = a[slice(1, 3)]
    a[:] = a[::-1]
    return x, a, b, a[n:-1]


@program
def sorting(x, n):
    words = ["bb", "A", "c", "aaa"]
    return (
        x,
        sorted(words),
        sorted(words, key=str.lower),
        sorted(words, key=len, reverse=True),
        sorted([(1, "b"), (1, "a"), (0, "z")]),
        sorted({"b": 1, "a": 2}),
        sorted({3, 1, n}),
        sorted(words, key=lambda w: (len(w), w)),
        min(words, key=len),
        max(3, n, key=lambda v: -v),
        min([], default="none"),
    )


@program
def sort_tensors_by_key(x, n):
    items = [("b", x), ("a", x + 1)]
    items.sort(key=lambda item: item[0])
    best = max(items, key=lambda item: item[0])
    return [t for _, t in items], best[1], sorted([x, x * 2], key=lambda t: t.dim())[0]


@program
def tuples(x, n):
    a = (1, n, x.shape)
    return (
        x,
        a + (3,),
        a * 2,
        a[0],
        a[1:],
        len(a),
        1 in a,
        a.index(n),
        a.count(1),
        (1, 2) < (1, 3),
        hash((1, "a")) == hash((1, "a")),
        tuple([1, 2]),
        tuple("ab"),
        (),
    )


@program
def dict_methods(x, n):
    a = {"a": 1, "b": n}
    a["c"] = x
    b = a.copy()
    b.update({"d": 4}, e=5)
    b |= {"f": 6}
    c = a | {"a": 9}
    popped = b.pop("a"), b.pop("zz", None), b.popitem()
    d = dict.fromkeys("xy", 0)
    return (
        a,
        list(b),
        c["a"],
        popped,
        d,
        dict(zip("ab", [1, 2])),
        dict([("k", 1)], l=2),
        {**a, "b": 0}["b"],
        "a" in a,
        len(a),
        a.get("q"),
        a.setdefault("s", []),
        list(a.keys()),
        list(reversed(a)),
        bool({}),
        {"a": 1} == {"a": 1.0},
    )


@program
def dict_views(x, n):
    a = {"a": 1, "b": n}
    keys, items = a.keys(), a.items()
    a["c"] = 3
    return (
        x,
        list(keys),
        list(items),
        "c" in keys,
        ("a", 1) in items,
        len(items),
        sorted(keys & {"a", "z"}),
        keys == {"a", "b", "c"},
        sorted(keys | {"q"}),
        sorted(keys - {"a"}),
        [k for k, v in a.items() if v > 1],
        sum(a.values()),
        max(a.values()),
    )


@program
def dict_keys_of_all_kinds(x, n):
    a = {
        (1, "a"): 1,
        Color.RED: 2,
        None: 3,
        2.5: 4,
        b"b": 5,
        True: 6,
        int: 7,
        KEY: 8,
        frozenset([1]): 9,
        len: 10,
        torch.float32: 11,
    }
    return (
        x,
        a[(1, "a")],
        a[Color.RED],
        a[None],
        a[2.5],
        a[b"b"],
        a[1],
        a[int],
        a[KEY],
        a[frozenset([1])],
        a[len],
        a[torch.float32],
        (2, "a") in a,
        Color.GREEN in a,
    )


@program
def dict_changes_while_iterated(x, n):
    a = {"a": 1, "b": 2}
    try:
        for key in a:
            a[key + "x"] = 1
    except RuntimeError as error:
        return x, str(error), list(a)


@program
def dict_comprehension_of_tensors(x, n):
    table = {name: x * i for i, name in enumerate(("a", "b", "c")) if i != n}
    return table, {k: v.sum() for k, v in table.items()}, {v: k for k, v in {"a": 1}.items()}


@program
def sets(x, n):
    a, b = {1, 2, n}, {2, 3}
    c = set("ab")
    a.add(5)
    a.discard(7)
    a.update([8], (9,))
    a.remove(8)
    d = a.copy()
    d.clear()
    return (
        x,
        a,
        a | b,
        a & b,
        a - b,
        a ^ b,
        b <= {2, 3, 4},
        b < b,
        {2, 3} == b,
        a.isdisjoint({100}),
        a.issuperset({5}),
        b.issubset(a),
        len(c),
        d,
        a.union([77]),
        a.intersection(b),
        a.difference([1]),
        a.symmetric_difference(b),
        frozenset(b) == b,
        frozenset([1]) | {2},
        bool(set()),
        2 in a,
    )


@program
def set_changes(x, n):
    a, alias = {1, 2, 3}, None
    alias = a
    a |= {4}
    a &= {1, 2, 4, n}
    a -= {1}
    a ^= {9}
    a.intersection_update({2, 9, 4})
    a.difference_update([9])
    a.symmetric_difference_update({n, 50})
    one = {n}
    return x, a, alias is a, one.pop(), one


@program
def set_order(x, n):
    a = {3, 1, 2}
    a.add(n)
    b = {"q", "w", "e"}
    return (
        x,
        list(a),
        [v for v in a],
        "".join(b) == "".join(list(b)),
        tuple(frozenset([5, n])),
        sum(a),
        max(a),
        {v * 2 for v in a},
    )


@program
def sets_of_tensors(x, n):
    y = x + 1
    a = {x, y, x}
    return len(a), x in a, (x + 2) in a, x, y


@program
def sets_of_objects(x, n):
    k = Key()
    a = {k, KEY}
    return (
        x,
        len(a),
        k in a,
        Key() in a,
        {Color.RED, Color.GREEN} == {Color.GREEN, Color.RED},
        {int, str} == {str, int},
    )


@program
def named_tuples(x, n):
    p = Pair(x, n)
    q = p._replace(right=5)
    return (
        p,
        q.right,
        Pair(1),
        Pair._fields,
        p._asdict(),
        Pair._make([1, 2]),
        p[1],
        len(p),
        p == Pair(x, n) if n > 5 else None,
        q[1:],
        Pair(right=2, left=1),
    )


@program
def named_tuple_made_here(x, n):
    return (
        x,
        Pair(1, 2) == (1, 2),
        Pair(1, 2) < Pair(1, 3),
        repr(Pair(1, 2)),
        hash(Pair(1, 2)) == hash((1, 2)),
        [*Pair(1, 2)],
    )


@program
def default_dicts(x, n):
    groups = defaultdict(list)
    for i in range(4):
        groups[i % 2].append(i * n)
    counts = defaultdict(int, a=1)
    counts["a"] += 1
    counts["b"] += 2
    nested = defaultdict(lambda: defaultdict(int))
    nested["k"]["l"] += x.shape[0]
    return (
        x,
        groups,
        counts,
        nested["k"]["l"],
        groups.get(9),
        9 in groups,
        groups.default_factory is list,
        list(groups.items()),
    )


@program
def ordered_dicts(x, n):
    a = OrderedDict([("a", 1), ("b", 2), ("c", x)])
    a.move_to_end("a")
    a.move_to_end("c", last=False)
    first = list(a)
    last = a.popitem()
    head = a.popitem(last=False)
    return (
        first,
        last,
        head[0],
        a,
        OrderedDict(a=1, b=2) == OrderedDict(b=2, a=1),
        OrderedDict(a=1) == {"a": 1},
        list(reversed(OrderedDict(q=1, r=2))),
    )


@program
def deques(x, n):
    d = deque([1, 2, 3], maxlen=4)
    d.append(4)
    d.append(5)
    d.appendleft(0)
    d.extend([7])
    e = deque("ab")
    e.extendleft("xy")
    e.rotate(n)
    out = d.pop(), d.popleft(), d[0], d[-1], len(d), 2 in d, d.maxlen, e.index("x"), e.count("a")
    e.remove("a")
    e.insert(1, "new")
    e[0] = "first"
    e.reverse()
    f = e.copy()
    f.clear()
    return (
        x,
        list(d),
        d,
        e,
        out,
        f,
        [v for v in e],
        bool(f),
        deque([1]) == deque([1]),
        list(reversed(e)),
        deque(maxlen=2),
        d + deque([1]),
    )


@program
def deque_of_tensors(x, n):
    window = deque(maxlen=2)
    for i in range(4):
        window.append(x * i)
    return sum(window), list(window), window


@program
def deque_errors(x, n):
    out = []
    for action in (
        lambda: deque().pop(),
        lambda: deque().popleft(),
        lambda: deque()[0],
        lambda: deque([1]).remove(3),
    ):
        try:
            action()
        except (IndexError, ValueError) as error:
            out.append((type(error), str(error)))
    return x, out


@program
def counters(x, n):
    c = Counter("abracadabra")
    c.update("aa")
    c["z"] += n
    c.subtract({"b": 1})
    d = Counter(a=1, b=2)
    return (
        x,
        c["a"],
        c["missing"],
        c.most_common(2),
        dict(d + Counter(a=1)),
        dict(d - Counter(b=1)),
        dict(d & Counter(a=5)),
        dict(d | Counter(a=5)),
        sum(c.values()),
        sorted(d.elements()),
        d.total(),
        c,
        len(c),
    )


@program
def chain_maps(x, n):
    base, top = {"a": 1, "b": 2}, {"a": n}
    m = ChainMap(top, base)
    m["c"] = 3
    child = m.new_child({"b": 20})
    return (
        x,
        m["a"],
        m["b"],
        top,
        child["b"],
        len(m),
        "c" in m,
        sorted(m),
        child.parents["b"],
        m.get("zz", 0),
        list(m.maps[1]),
    )


@program
def user_dicts(x, n):
    class_made = Table({"a": 1})
    class_made["b"] = n
    return (
        x,
        class_made["b"],
        class_made.data,
        len(class_made),
        "a" in class_made,
        list(class_made),
        class_made.pop("a"),
    )


class Table(UserDict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value * 2)


@program
def nested_structures(x, n):
    tree = {"layers": [{"w": x, "b": [1, (2, {"deep": n})]}], "n": n}
    tree["layers"][0]["b"][1][1]["deep"] += 1
    tree["layers"].append({"w": tree["layers"][0]["w"] * 2})
    a, b = tree["layers"]
    return tree, a["b"][1][1]["deep"], b["w"] is tree["layers"][1]["w"]


@program
def multiplied_lists_alias(x, n):
    rows = [[0]] * 3
    rows[0].append(n)
    return x, rows, rows[0] is rows[2]


@program
def bytes_and_arrays(x, n):
    b = b"abc" + bytes([n])
    return (
        x,
        b,
        b[0],
        b[1:],
        b.hex(),
        b"a" in b,
        list(b"xy"),
        b.decode("latin1"),
        "é".encode(),
        int.from_bytes(b"\x01\x00", "big"),
        (258).to_bytes(2, "little"),
        len(b),
        bytes(2),
        b.upper(),
    )


@program
def attributes_of_ordered_dictionaries(x, n):
    made = OrderedDict(a=x)
    made.extra, made.itself, made.n = x * 2, made, n
    made.n += 1
    try:
        made.missing
    except AttributeError as error:
        text = str(error)
    try:
        deque().missing
    except AttributeError as error:
        text += str(error)
    return made, made.extra, made.copy(), hasattr(made.copy(), "n"), made == OrderedDict(a=x), text


@pytest.mark.parametrize("function, settings", program.table, ids=program.names)
def test_same_as_plain(function, settings):
    check_program(function, **settings)


def incoming(x, items, table, members, queue, counts, ordered, more):
    items.append(x)
    items[0] = len(table)
    table["new"] = items
    table.pop("old")
    members.add(len(items))
    queue.append(items)
    queue.popleft()
    counts["k"] += 1
    ordered.move_to_end("a")
    more["list"] = more["inner"]["list"]
    more["list"].append(more)
    del table["gone"]
    return items, queue[-1] is items, ordered, x + counts["k"]


def make_incoming(seed):
    items = [1, 2]
    inner = {"list": [seed]}
    return (
        torch.ones(2) * seed,
        items,
        {"old": items, "gone": 1},
        {100},
        deque([1, items], maxlen=3),
        Counter(k=2),
        OrderedDict(a=1, b=2),
        {"inner": inner, "same": inner["list"]},
    )


def test_containers_that_come_in_are_changed():
    check_program(incoming, make_incoming)


def test_keys_of_all_kinds_that_come_in():
    def run(x, table):
        table[Color.RED] += 1
        table[(1, "a")] = x
        return table[int], Color.GREEN in table, table.get((2, Color.RED)), list(table.values())[0]

    check_program(
        run, lambda seed: (torch.ones(1), {Color.RED: seed, (1, "a"): 2, int: 3, (2, Color.RED): 4, 1.5: 5})
    )


def test_sets_that_come_in():
    def run(x, members, frozen):
        members.discard(2)
        return x, sorted(members), 3 in members, len(frozen), members & frozen, Color.RED in frozen

    check_program(run, lambda seed: (torch.ones(1), {1, 2, seed}, frozenset([1, Color.RED])))


def test_attributes_of_ordered_dictionaries_that_come_in():
    def make(seed):
        given = OrderedDict(a=1)
        given.tag = torch.ones(2) * seed
        return torch.ones(2), given

    def run(x, given):
        given.other = given.tag + x
        return hasattr(given, "absent"), given.tag * x, given

    check_program(run, make)


def test_what_a_module_holds_is_read_and_loaded():
    """With the versions of its modules, which lie in an attribute of the dictionary."""

    def make(seed):
        torch.manual_seed(seed)
        models = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)) for _ in range(3)]
        return torch.ones(2), *models[:2], models[2].state_dict()

    def run(x, one, other, held):
        with torch.no_grad():
            for name, tensor in other.state_dict().items():
                if tensor.is_floating_point():
                    tensor.mul_(0.9).add_(held[name], alpha=0.1)
        one.load_state_dict(other.state_dict())
        return x, one.state_dict()._metadata, held._metadata[""]["version"], dict(one.state_dict())

    check_program(run, make)
