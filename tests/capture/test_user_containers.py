# ruff: noqa: C416, SIM118 - what is written here is what is tested

from __future__ import annotations

import collections
import copy
import dataclasses

import pytest
import torch

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction


def compile_eager(function):
    return CompiledFunction(function, lambda graph, inputs: graph.module, fullgraph=True)


class Record(collections.OrderedDict):
    """As Hugging Face's ModelOutput: entries and attributes are two views of the same."""

    def __getitem__(self, key):
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]

    def __setattr__(self, name, value):
        if name in ("loss", "logits") and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __delitem__(self, key):
        raise RuntimeError("entries stay")


@dataclasses.dataclass
class Output(Record):
    logits: torch.Tensor = None
    loss: torch.Tensor = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Counted(dict):
    reads = 0

    def __getitem__(self, key):
        self.reads += 1
        return super().__getitem__(key)

    def __missing__(self, key):
        return len(key)


class Settings(dict):
    __getattr__ = dict.__getitem__


class Stack(list):
    def __init__(self, *items):
        super().__init__(items)
        self.pushed = 0

    def push(self, item):
        self.pushed += 1
        self.append(item)
        return self

    def __len__(self):
        return 100


class Point(tuple):
    def __new__(cls, x, y):
        return super().__new__(cls, (x, y))

    @property
    def total(self):
        return self[0] + self[1]


class Name(str):
    def shout(self):
        return self.upper() + "!"


class Renamed:
    """As Hugging Face's configurations: attributes under other names."""

    names = {"width": "hidden"}  # noqa: RUF012

    def __init__(self):
        self.hidden = 3

    def __getattribute__(self, name):
        if name != "names" and name in super().__getattribute__("names"):
            name = super().__getattribute__("names")[name]
        return super().__getattribute__(name)

    def __setattr__(self, name, value):
        if name in super().__getattribute__("names"):
            name = super().__getattribute__("names")[name]
        super().__setattr__(name, value)


class Fallback(Renamed):
    def __getattr__(self, name):
        return f"no {name}"


def make_output(x, held):
    made = Output(logits=x + 1)
    made.loss = x.sum()
    return made, made["loss"], made[0], list(made), len(made), "loss" in made


def change_output(x, held):
    held["output"].loss = x * 2
    return held["output"][-1] + 1


def read_counted(x, held):
    counted = held["counted"]
    return x * counted["a"] + counted["abc"], counted.reads, counted.get("b", 5), sorted(counted)


def change_counted(x, held):
    held["counted"].update(held["counted"], c=x + 1)
    held["counted"]["z"] = 1
    del held["counted"]["z"]
    return [key for key in held["counted"].keys()]


def spread(x, held):
    return {**held["counted"], "x": x}, dict(held["counted"]), dict(**held["output"])


def attribute_is_entry(x, held):
    return x * held["settings"].scale


def change_stack(x, held):
    made = Stack(x, 2).push(x + 1)
    held["stack"].push(x).push(3)
    return made, made[-1], len(made), [item for item in made], held["stack"][1:], x.new_ones(2) in [None]


def make_point(x, held):
    point = Point(x, x + 1)
    first, second = point
    return point, point.total, first * second, held["point"].total * x, held["point"] == (1, 2)


def literal_subclass(x, held):
    return held["name"].shout(), held["name"] == "n", x + len(held["name"]), held["name"] + "s"


def renamed(x, held):
    config = held["config"]
    before = config.width
    config.width = before + 1
    return x * before, config.hidden, hasattr(config, "nothing"), getattr(config, "nothing", 7)


def fallback(x, held):
    return x, held["fallback"].width, held["fallback"].unknown


def own_dict(x, held):
    config = held["config"]
    config.__dict__["extra"] = x + 1
    config.temporary = 1
    del config.temporary
    seen = list(vars(config)), "hidden" in config.__dict__, config.__dict__.get("nothing")
    del config.hidden
    config.hidden = 9
    return seen, config.extra


def torch_takes_subclass(x, held):
    return torch.cat(Stack(x, x)), torch.stack(Point(x, x))


def make_held():
    held = {
        "output": Output(logits=torch.ones(1)),
        "counted": Counted(a=2, b=3),
        "settings": Settings(scale=2),
        "stack": Stack(1, 2),
        "point": Point(1, 2),
        "name": Name("n"),
        "config": Renamed(),
        "fallback": Fallback(),
    }
    held["counted"].reads = 0
    return held


CASES = [
    make_output,
    change_output,
    read_counted,
    change_counted,
    spread,
    attribute_is_entry,
    make_point,
    change_stack,
    literal_subclass,
    renamed,
    fallback,
    own_dict,
    torch_takes_subclass,
]


def shown(value):
    """Type, content and attributes, all the way down, without methods of the user's classes."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    own = {key: shown(item) for key, item in getattr(value, "__dict__", {}).items()}
    if isinstance(value, collections.OrderedDict):
        content = [
            (key, shown(dict.__getitem__(value, key))) for key in collections.OrderedDict.__iter__(value)
        ]
    elif isinstance(value, dict):
        content = [(key, shown(item)) for key, item in dict.items(value)]
    elif isinstance(value, (list, tuple)):
        base = list if isinstance(value, list) else tuple
        content = [shown(item) for item in base.__iter__(value)]
    else:
        content = None if own else value
    return type(value).__name__, content, list(own.items())


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_same_as_plain(function):
    compiled = compile_eager(function)
    plain_held, held = make_held(), make_held()
    for step in range(2):
        x = torch.arange(2.0) + step
        want = function(x, plain_held)
        got = compiled(x, held)
        assert shown(got) == shown(want)
        assert shown(held) == shown(plain_held)


def test_a_changed_entry_recompiles():
    held = make_held()
    compiled = compile_eager(attribute_is_entry)
    assert compiled(torch.ones(1), held).item() == 2
    dict.__setitem__(held["settings"], "scale", 4)
    assert compiled(torch.ones(1), held).item() == 4
    held["settings"] = Settings(other=1, scale=4)
    assert compiled(torch.ones(1), held).item() == 4
    assert len(compiled.entries) == 2


def test_guards_run_no_method_of_the_class():
    calls = []

    class Watched(dict):
        def __getitem__(self, key):
            calls.append(key)
            return super().__getitem__(key)

        def __iter__(self):
            calls.append("iter")
            return super().__iter__()

        def __len__(self):
            calls.append("len")
            return super().__len__()

    def function(x, held):
        return x + dict.__getitem__(held, "a") + dict.__len__(held) + len(list(dict.keys(held)))

    compiled = compile_eager(function)
    for _ in range(2):
        assert compiled(torch.zeros(1), Watched(a=1)).item() == 3
    assert len(compiled.entries) == 1 and not calls


def test_made_objects_are_new_at_each_call():
    compiled = compile_eager(make_output)
    one, other = compiled(torch.ones(1), {})[0], compiled(torch.ones(1), {})[0]
    assert one is not other and one == copy.copy(one)
