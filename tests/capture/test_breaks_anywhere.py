# ruff: noqa: RET504, B904, C417, PIE804 - what is written is what is tested
"""Graph breaks inside of blocks, handlers, loops over any iterator, comprehensions and calls.

PYTEST_DONT_REWRITE: an assert is one of the programs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import traceback
import weakref

import pytest
import torch

from gradsplit.compile_core.capture.code_objects.instructions import decode
from gradsplit.compile_core.capture.code_objects.live_variables import live_at
from gradsplit.compile_core.capture.code_objects.resume import can_resume
from gradsplit.compile_core.capture.frames.binding import only_binds
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from tests.capture.test_language import assert_same

LOG = []


def note(value):
    """No rule covers the write to a C-level list of this module's own making."""
    LOG.append(value)
    sys.stdout.flush()


class Manager:
    def __init__(self, name, swallow=False):
        self.name = name
        self.swallow = swallow

    def __enter__(self):
        LOG.append(("enter", self.name))
        return self

    def __exit__(self, kind, error, trace):
        LOG.append(("exit", self.name, kind, sys.exc_info()[0]))
        return self.swallow


@contextlib.contextmanager
def generated(x):
    LOG.append("begin")
    try:
        yield x + 1
    finally:
        LOG.append("end")


def in_no_grad(x):
    with torch.no_grad():
        y = x * 2
        note(torch.is_grad_enabled())
        y = y + 1
    return y + x, torch.is_grad_enabled()


def in_nested_modes(x):
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = x * 3
            note(torch.is_grad_enabled())
            z = z + 1
        note(torch.is_grad_enabled())
        y = y + 1
    note(torch.is_grad_enabled())
    return y + x, z


def grad_mode_of_another_type(x, items):
    try:
        with torch.set_grad_enabled(items):
            note("not reached")
    except TypeError as error:
        note(str(error))
    return x + 1


def set_grad_enabled_function(x):
    torch.set_grad_enabled(False)
    y = x * 2
    note(torch.is_grad_enabled())
    torch.set_grad_enabled(True)
    return y + x


def in_set_grad_enabled(x):
    with torch.set_grad_enabled(False):
        y = x * 2
        note(torch.is_grad_enabled())
        y = y * 2
    return y + x


def in_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.T
        note((torch.is_autocast_enabled("cpu"), str(y.dtype)))
        z = x @ x.T
    w = x @ x.T
    return y, z, w


def in_inference_mode(x):
    with torch.inference_mode():
        y = x * 2
        note(torch.is_inference_mode_enabled())
        y = y + 1
        inference = y.is_inference()
    return y.clone(), inference, x + 1


def in_class_manager(x):
    with Manager("a") as manager:
        y = x + 1
        note(manager.name)
        y = y * 2
    return y


def in_generator_manager(x):
    with generated(x) as inner:
        y = inner * 2
        note("inside")
        y = y + 1
    return y - 1


def manager_swallows(x):
    with Manager("s", swallow=True):
        y = x + 1
        note("before")
        raise ValueError(y.shape[0])
    return y * 2


def native_error_is_swallowed(x):
    y = x
    with Manager("s", swallow=True):
        y = x + 1
        note(int("not a number"))
        y = y + 1
    return y * 2


def in_try(x):
    try:
        y = x + 1
        note("try")
        y = y * 2
    finally:
        note("finally")
    return y


def error_after_break_in_try(x):
    try:
        y = x + 1
        note("try")
        y = y * 2
        raise KeyError("k")
    except KeyError as error:
        note(error.args)
        y = y + 3
    return y * 2


def native_error_in_try(x):
    y = x + 1
    try:
        note(int("x"))
    except ValueError as error:
        y = y * 2
        note((str(error), sys.exc_info()[0], type(error.__context__)))
    note(sys.exc_info())
    return y + 1


def break_in_handler(x):
    y = x * 2
    try:
        raise ValueError("v")
    except ValueError as error:
        y = y + 1
        note((sys.exc_info()[0], error.args, len(traceback.extract_tb(error.__traceback__))))
        y = y + 2
    note(sys.exc_info())
    return y


def error_in_handler(x):
    try:
        try:
            note("a")
            raise ValueError("v")
        except ValueError:
            y = x + 1
            note("b")
            raise TypeError("t")
    except TypeError as error:
        note(type(error.__context__))
        return y * 2


def finally_with_return(x):
    for i in range(3):
        try:
            note(i)
            x = x + i
            if i == 1:
                return x
        finally:
            note(("final", i))
    return x


def loop_over_list(x):
    items = [x, x + 1]
    for item in items:
        note(len(items))
        if len(items) < 4:
            items.append(item * 2)
    return items


def loop_over_given_list(x, items):
    for item in items:
        x = x + item
        note(item)
        if len(items) < 4:
            items.append(item + 1)
    return x


def loop_over_dict(x, items):
    table = {"a": x, "b": x + 1, "c": x + 2}
    total = x
    for key, value in table.items():
        total = total + value
        note(key)
    for value in table.values():
        total = total + value
        note("value")
    for key in table:
        note(key)
    return total


def loop_over_zip(x, items):
    for i, (item, other) in enumerate(zip(items, (x, x + 1, x + 2), strict=False), 5):
        x = x + item * other
        note((i, item))
    return x


def loop_over_map(x, items):
    for value in map(lambda item: item + 1, items):
        x = x + value
        note(value)
    for value in filter(lambda item: item > 1, items):
        x = x + value
        note(value)
    return x


def numbers(x, count):
    for i in range(count):
        note(("yield", i))
        yield x + i


def loop_over_generator(x):
    total = x
    for value in numbers(x, 3):
        total = total + value
        note("round")
    return total


def generator_expression(x):
    total = x
    for value in (x + i for i in range(3)):
        total = total + value
        note("round")
    return total


def sorted_by_lambda(x):
    order = sorted([3, 1, 2], key=lambda n: note(n) or -n)
    return x + order[0]


def comprehension(x):
    return [talks(x + i) for i in range(3)]


def dict_comprehension(x):
    scale = 2
    return {i: talks(x * scale) for i in range(2)}


def talks(x):
    y = x + 1
    note("talk")
    return y * 2


def closure_call(x):
    scale = 3

    def inner(v, shift=1):
        v = v * scale
        note(scale)
        return v + shift

    return inner(x) + inner(x, shift=2)


def closure_writes(x):
    count = 0

    def inner(v):
        nonlocal count
        count += 1
        note(count)
        return v + count

    x = inner(x)
    count += 10
    x = inner(x)
    return x, count


def partial_call(x):
    return functools.partial(talks)(x + 1) * 2


class Box:
    def __init__(self, value):
        self.value = value

    def __add__(self, other):
        note("add")
        return Box(self.value + other)

    def __getitem__(self, index):
        note("getitem")
        return self.value[index]

    def __call__(self, x):
        y = self.value + x
        note("call")
        return y * 2

    @property
    def doubled(self):
        note("property")
        return self.value * 2

    def method(self, x):
        self.value = self.value + x
        note("method")
        return self.value


def dunders(x):
    box = Box(x) + 1
    return box(x) + box.method(x) + box.doubled, box[0], box.value


def method_of_tensor(x):
    y = x + 1
    values = y.detach().tolist()
    return x * values[0][0]


def unpacked(x):
    first, *rest = (x + i for i in range(3))
    note(len(rest))
    return first + rest[0]


def yields_a_result(x):
    return zip([x, x + 1], range(2), strict=True), iter([1, 2])


def chained(x):
    y = x + 1
    return (y.sum() > 0 and y.shape[0]) or y.sum() < -1000


def star_arguments(x):
    def collect(*args, **kwargs):
        note((len(args), sorted(kwargs)))
        return args[0] + kwargs["b"]

    return collect(*[x, x + 1], **{"a": x, "b": x * 2})


def assertion(x):
    assert x.sum() < 1000, "too large"
    return x + 1


def imports(x):
    import colorsys

    note(colorsys.ONE_THIRD > 0)
    return x + 1


def deletes(x):
    y = x + 1
    note("delete")
    z = y
    del y
    note("deleted")
    try:
        return y
    except NameError as error:
        note(type(error))
    return z


def inner_function_sees_locals(x):
    def later():
        return y * 2

    y = x + 1
    note("between")
    y = y + 1
    return later()


FUNCTIONS = [
    value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and name not in ("note", "generated", "talks")
    if not isinstance(value, type) and name != "numbers"
]


def arguments(function, seed):
    torch.manual_seed(seed)
    x = torch.randn(2, 2, requires_grad=True)
    rest = [[1, 2, 3]] if "items" in function.__code__.co_varnames[: function.__code__.co_argcount] else []
    return (x.clone(), *rest)


def outcome(run, given):
    LOG.clear()
    try:
        result = run(*given)
    except Exception as error:
        result = (type(error), str(error))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    if isinstance(result, tuple) and isinstance(result[0], zip):
        result = [list(item) for item in result]
    return result, list(LOG), given


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_same_as_plain(function):
    compiled = CompiledFunction(function, lambda graph, inputs: graph.module)
    for seed in (0, 1, 2):
        found = outcome(compiled, arguments(function, seed))
        assert sys.exc_info() == (None, None, None)
        assert_same(found, outcome(function, arguments(function, seed)))
    assert not any("runs as plain Python" in str(reason) for reason in compiled.break_reasons)


class Base:
    def speak(self, x):
        note("base")
        return x + 1


class Derived(Base):
    def speak(self, x):
        note("derived")
        x = super().speak(x)
        note("again")
        return super().speak(x) * 2

    def with_cell(self, x):
        note("cell")
        found = [(lambda: self)() for _ in range(2)]
        note(len(found))
        return super().speak(x)


def calls_super(x):
    return Derived().speak(x) + Derived().with_cell(x)


def test_super_behind_breaks():
    compiled = CompiledFunction(calls_super, lambda graph, inputs: graph.module)
    for seed in (0, 1):
        given = arguments(calls_super, seed)
        assert_same(outcome(compiled, given), outcome(calls_super, given))


def test_locals_are_those_of_the_user():
    def reads(x):
        y = x + 1
        note("before")
        return sorted(locals()), y

    compiled = CompiledFunction(reads, lambda graph, inputs: graph.module)
    assert compiled(torch.ones(1))[0] == ["x", "y"]


def test_a_graph_that_raises_runs_again_as_plain_python():
    def fails(x, index, log):
        log.append("before")
        x = x * 2
        x = x[index]
        log.append("after")
        return x

    compiled = CompiledFunction(fails, lambda graph, inputs: graph.module)
    for indexes in ([0, 1], [0, 9], [1, 1]):
        outcomes = []
        for run in (compiled, fails):
            log = []
            try:
                result = run(torch.ones(3), torch.tensor(indexes), log).tolist()
            except IndexError as error:
                result = [str(error), [entry.line for entry in traceback.extract_tb(error.__traceback__)][-1]]
            outcomes.append((result, log))
        assert outcomes[0] == outcomes[1]


def test_loops_with_breaks_compile_each_piece_once():
    graphs = []

    def compile_graph(graph, inputs):
        graphs.append(graph)
        return graph.module

    def steps(x, count):
        for _ in range(count):
            x = x + 1
            note("step")
            x = x * 2
        return x

    compiled = CompiledFunction(steps, compile_graph)
    assert torch.equal(compiled(torch.ones(2), 3), steps(torch.ones(2), 3))
    made, functions = len(graphs), len(compiled.continuations)
    assert made <= 4  # x + 1; x * 2; x + 1 of the second round; of every round, with any number of it
    # Deeper than Python's limit of nested calls, with nothing new to compile.
    count = sys.getrecursionlimit() + 500
    assert torch.equal(compiled(torch.ones(2), count), steps(torch.ones(2), count))
    assert len(compiled.continuations) == functions
    assert len(graphs) <= made + 3  # the count may be another constant, then any


def test_functions_made_for_one_call_are_compiled_once():
    def outer(x, scale):
        def inner(v, shift=scale):
            v = v * scale
            note("inner")
            return v + shift

        return inner(x) + inner(x, shift=1)

    compiled = CompiledFunction(outer, lambda graph, inputs: graph.module)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2), 3), outer(torch.ones(2), 3))
    (inner,) = [callee for callee in compiled.callees if callee.name.endswith("inner")]
    assert len(inner.entries) <= 2  # the default is another number than the argument


def test_the_data_behind_item_does_not_recompile():
    def uses(x, log):
        value = x.detach().sum().item()
        log.append(value)
        y = x * value + 1
        return y * 2, f"{value:.3f}", -value, value > 0

    compiled = CompiledFunction(uses, lambda graph, inputs: graph.module)
    for seed in range(8):
        torch.manual_seed(seed)
        x, one, other = torch.randn(3), [], []
        assert_same(compiled(x, one), uses(x, other))
        assert one == other
    assert all(len(piece.entries) <= 3 for piece in compiled.continuations)


def test_a_list_that_grows_does_not_recompile():
    def loop(x, count, log):
        found = []
        for _ in range(count):
            x = x + 1
            found.append(x)
            log.append(x.detach().sum().item())
            log += [1]
            x = x * 2
        return found, len(log)

    compiled = CompiledFunction(loop, lambda graph, inputs: graph.module)
    for count in (3, 12, 12, 0):
        one, other = [], []
        assert_same(compiled(torch.ones(2), count, one), loop(torch.ones(2), count, other))
        assert one == other
    pieces = [compiled, *compiled.continuations]
    entries = sum(len(piece.entries) for piece in pieces)
    log = []
    assert_same(compiled(torch.ones(2), 40, log), loop(torch.ones(2), 40, []))
    assert (
        sum(len(piece.entries) for piece in pieces) <= entries + 3
    )  # the count and the length of the log are read


@pytest.mark.parametrize("function", [in_class_manager, closure_writes, loop_over_dict])
def test_more_breaks_than_are_compiled(function, monkeypatch, caplog):
    monkeypatch.setattr("gradsplit.compile_core.compiled_calls.compiled_code._MOST_CONTINUATIONS", 1)
    compiled = CompiledFunction(function, lambda graph, inputs: graph.module)
    for seed in (0, 1):
        found = outcome(compiled, arguments(function, seed))
        assert_same(found, outcome(function, arguments(function, seed)))
    assert len(compiled.continuations) == 1
    assert "more graph breaks than are compiled" in caplog.text


def closure_without_arguments(x):
    def inner():
        note("inner")
        return x * 2

    return inner() + inner()


def test_a_closure_without_arguments():
    compiled = CompiledFunction(closure_without_arguments, lambda graph, inputs: graph.module)
    given = arguments(closure_without_arguments, 0)
    assert_same(outcome(compiled, given), outcome(closure_without_arguments, given))


def test_traceback_has_the_users_lines():
    def fails(x):
        with torch.no_grad():
            y = x + 1
            note("before")
            y = int("word") + y
        return y

    compiled = CompiledFunction(fails, lambda graph, inputs: graph.module)
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            compiled(torch.ones(1))
        places = [
            entry for entry in traceback.extract_tb(caught.value.__traceback__) if entry.filename == __file__
        ]
        assert [entry.line for entry in places][1:] == ['y = int("word") + y']
        assert [entry.name for entry in places][1:] == ["fails"]
        assert torch.is_grad_enabled()


def raises_in_block(x):
    with Manager("one"):
        y = x + 1
        note(y.shape)
        refuse(y)
    return y


def raises_in_handler(x):
    try:
        y = x + 1
        refuse(y)
    except KeyError as error:
        note("handled")
        raise ValueError(error.args) from error
    return y


@torch.compiler.disable
def refuse(x):
    raise KeyError(x.shape)


@pytest.mark.parametrize("function", [raises_in_block, raises_in_handler])
def test_what_is_raised_at_a_break(function):
    """Its traceback has each line of the user's once, and it keeps nothing alive."""
    found = []
    for called in (function, CompiledFunction(function, lambda graph, inputs: graph.module)):
        gc.collect()
        gc.disable()
        try:
            x = torch.ones(2)
            with pytest.raises((KeyError, ValueError)) as caught:
                called(x)
            errors = [caught.value, caught.value.__context__]
            entries = [traceback.extract_tb(error and error.__traceback__) for error in errors]
            found.append([[e.line for e in lines if e.filename == __file__] for lines in entries])
            gone = weakref.ref(x)
            del caught, errors, x
            assert gone() is None
        finally:
            gc.enable()
    assert found[0] == found[1]


def test_the_rest_is_not_assembled_but_to_run_as_plain_python(monkeypatch):
    def fails(rest):
        raise AssertionError(rest)

    monkeypatch.setattr("gradsplit.compile_core.capture.graph_breaks.make_resume_code", fails)
    for function in (in_class_manager, loop_over_dict):
        compiled = CompiledFunction(function, lambda graph, inputs: graph.module)
        expected = outcome(function, arguments(function, 0))
        assert_same(outcome(compiled, arguments(function, 0)), expected)
        assert compiled.continuations


def test_code_with_breaks_is_freed():
    names = {"note": note}
    exec("def function(x):\n    y = x + 1\n    note(y.shape)\n    return y * 2", names)
    gone = weakref.ref(names["function"].__code__)
    CompiledFunction(names.pop("function"), lambda graph, inputs: graph.module)(torch.ones(2))
    for cached in (decode, can_resume, live_at, only_binds):
        cached.cache_clear()
    gc.collect()
    assert gone() is None


def test_fullgraph_raises_at_the_first_break():
    from gradsplit.compile_core.errors import Unsupported

    compiled = CompiledFunction(in_no_grad, lambda graph, inputs: graph.module, fullgraph=True)
    with pytest.raises(Unsupported) as caught:
        compiled(torch.ones(2, 2))
    assert caught.value.location is not None and "flush" in caught.value.location.text
    assert torch.is_grad_enabled()
