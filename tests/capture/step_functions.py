# ruff: noqa: B904, B905, RUF021, PIE804, C416 - what is written here is what is stepped through
"""Runs functions one instruction at a time through break code and resume code, as a graph break after each would.

It needs no torch, so that it runs under every supported Python: ``python step_functions.py REPOSITORY`` loads only
the modules of the rewriting.
"""

from __future__ import annotations

import sys
import types


def load_without_torch(repository):
    """Make the package importable without running its own imports."""
    sys.path.insert(0, repository)
    package = sys.modules["gradsplit.compile_core.capture"] = types.ModuleType("capture")
    package.__path__ = [f"{repository}/gradsplit/compile_core/capture"]


if __name__ == "__main__":
    load_without_torch(sys.argv[1])

from gradsplit.compile_core.capture.code_objects import resume  # noqa: E402
from gradsplit.compile_core.capture.code_objects.instructions import decode  # noqa: E402

NULL = object()


class Left(Exception):
    """Carries the state of a frame out of break code."""


class Stepper:
    """The state of a frame: index, stack with its kinds, locals, handled exceptions."""

    def __init__(self, function, arguments):
        self.function = function
        self.code = function.__code__
        self.decoded = decode(self.code)
        names = self.code.co_varnames[: len(arguments)]
        self.locals = dict(zip(names, arguments))
        created = {name: types.CellType() for name in self.code.co_cellvars}
        self.cells = created | dict(zip(self.code.co_freevars, function.__closure__ or ()))
        for name in created:
            if name in self.locals:
                created[name].cell_contents = self.cells[name].cell_contents = self.locals.pop(name)
        self.stack = []
        self.places = []
        self.index = 0
        self.broken = 0

    def run(self, resume_after):
        """The result of the function; after some steps the rest is run by resume code."""
        while True:
            if self.broken == resume_after and self.may_resume():
                return self.call(resume.make_resume_code, [])
            if resume.can_break_at(self.decoded.instructions[self.index]):
                outcome = self.break_here()
                if outcome is not None:
                    return outcome[0]
            else:
                self.move()

    def may_resume(self):
        names = [instruction.name for instruction in self.decoded.instructions]
        return self.index > names.index("RESUME") and names[self.index - 1] not in ("KW_NAMES", "PRECALL")

    def call(self, make, exits):
        names = tuple(self.locals)
        places = tuple(self.places)
        made = make(resume.Rest(self.code, self.index, places, names))
        code = made.code if isinstance(made, resume.BreakCode) else made
        ways = [lambda *values, at=at: (Left, at, values) for at in range(len(getattr(made, "exits", ())))]
        cells = tuple(self.cells[name] for name in (*self.code.co_cellvars, *self.code.co_freevars))
        function = types.FunctionType(code, self.function.__globals__, code.co_name, None, cells)
        passed = [v for p, v in zip(places, self.stack) if p.kind in ("value", "handled")]
        result = function(*ways, *passed, *self.locals.values())
        exits += getattr(made, "exits", ())
        return result

    def break_here(self):
        exits = []
        self.broken += 1
        result = self.call(resume.make_break_code, exits)
        assert sys.exc_info()[1] is None
        if not (type(result) is tuple and len(result) == 3 and result[0] is Left):
            return (result,)
        way_out = exits[result[1]]
        values = list(result[2])
        self.index = way_out.index
        self.places = list(way_out.places)
        self.stack = [values.pop(0) if p.kind in ("value", "handled") else NULL for p in self.places]
        assert len(values) == len(self.locals)
        return None

    def push(self, value, place=resume.VALUE):
        self.stack.append(value)
        self.places.append(place)

    def pop(self):
        self.places.pop()
        return self.stack.pop()

    def move(self):
        """The instructions at which graphs never break."""
        instruction = self.decoded.instructions[self.index]
        name, value = instruction.name, instruction.value
        self.index += 1
        if name == "COPY":
            self.push(self.stack[-instruction.arg], self.places[-instruction.arg])
        elif name == "SWAP":
            for items in (self.stack, self.places):
                items[-1], items[-instruction.arg] = items[-instruction.arg], items[-1]
        elif name == "POP_TOP":
            self.pop()
        elif name == "PUSH_NULL":
            self.push(NULL, resume.NULL_PLACE)
        elif name in ("STORE_FAST", "STORE_FAST_MAYBE_NULL"):
            self.locals[value] = self.pop()
            if self.locals[value] is NULL:
                del self.locals[value]
        elif name == "DELETE_FAST":
            del self.locals[value]
        elif name == "LOAD_FAST_AND_CLEAR":
            unset = value not in self.locals
            self.push(self.locals.pop(value, NULL), resume.NULL_PLACE if unset else resume.VALUE)
        elif name.startswith("JUMP"):
            self.index = instruction.target
        elif name == "RERAISE":
            self.unwind()
        elif name == "PUSH_EXC_INFO":
            error = self.pop()
            self.push(error, resume.HANDLED)
            self.push(error)
        elif name == "POP_EXCEPT":
            assert self.places[-1] == resume.HANDLED
            self.pop()
        elif name not in ("RESUME", "NOP", "MAKE_CELL", "COPY_FREE_VARS", "KW_NAMES", "PRECALL", "END_FOR"):
            raise AssertionError(f"no step for {name}")

    def unwind(self):
        error = self.pop()
        handler = self.decoded.handler_at(self.index - 1)
        if handler is None:
            raise error
        del self.stack[handler.depth :]
        del self.places[handler.depth :]
        if handler.pushes_lasti:
            self.push(NULL, resume.StackPlace(resume.LAST_INSTRUCTION.kind, self.index - 1))
        self.push(error)
        self.index = handler.target


def outcome(run):
    """What a run gives or raises, with the lines of its own function in the traceback."""
    try:
        return ("returned", run())
    except Exception as error:
        return ("raised", type(error), str(error), type(error.__context__), last_line(error.__traceback__))


def last_line(traceback):
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_lineno


# The functions that are stepped through.

LOG = []


class Manager:
    def __init__(self, swallow=False):
        self.swallow = swallow

    def __enter__(self):
        LOG.append("enter")
        return self

    def __exit__(self, kind, error, traceback):
        LOG.append(("exit", kind, sys.exc_info()[0]))
        return self.swallow

    def method(self, value, *, scale=1):
        return value * scale

    @property
    def doubled(self):
        return 2


def arithmetic(a, b):
    total = a + b * 2
    total -= a
    return [total, -a, a < b, a is b, not a, (a, b)[0], {"a": a}["a"], f"{a:>3}|{b!r}"]


def loops(a, b):
    found = []
    for i in range(a):
        for j, k in enumerate([b, i]):
            if j:
                continue
            found.append(i * k)
        else:
            found.append("else")
        if i > 2:
            break
    while b > 0:
        b -= 1
        found += [b]
    return found


def calls(a, b):
    manager = Manager()
    first = manager.method(a, scale=b)
    second = Manager.method(*(manager, a), **{"scale": 3})
    return first + second + manager.doubled + max(a, b) + sum([i for i in range(b)])


def withs(a, b):
    with Manager() as one, Manager(swallow=True) as two:
        LOG.append((one is two, a))
        if a > b:
            raise ValueError(a)
        LOG.append("inside")
    return one, len(LOG)


def handlers(a, b):
    try:
        try:
            if a > b:
                raise KeyError(a)
            c = a + b
        except KeyError as error:
            LOG.append((error.args, sys.exc_info()[0]))
            c = str(error)
            raise ValueError(c)
        else:
            c += 1
        finally:
            LOG.append(sys.exc_info()[0])
    except (TypeError, ValueError) as other:
        LOG.append(type(other.__context__))
        c = "other"
    LOG.append(sys.exc_info())
    return c


def reraises(a, b):
    try:
        raise IndexError(a)
    except IndexError:
        LOG.append(b)
        raise


def finals(a, b):
    for i in range(a):
        try:
            LOG.append(i)
            if i == b:
                return i
        finally:
            LOG.append("final")
    return None


def natively_raised(a, b):
    for i in range(3):
        try:
            LOG.append(a[i] if i else b)
        except TypeError as error:
            LOG.append(str(error))
    return i


def many_variables(a, b):
    """Instructions of two variables have room for the first sixteen; resume code puts others before them."""
    c, d, e, f, g, h, i, j, k = a + 2, a + 3, a + 4, a + 5, a + 6, a + 7, a + 8, a + 9, a + 10
    LOG.append(max(k, len([m := b, n := d, o := e, p := f])))
    n, o = o, n
    c, k = k, c
    LOG.append((m, n, o, p))
    return [a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, [p for p in (k, o)]]


class Refusing:
    def __init__(self, value):
        raise ValueError(value)


def raised_by_a_frame_of_python(a, b):
    """The interpreter enters ``__init__`` without a call in C, once it has seen the class often enough."""
    try:
        Refusing(a)
    except ValueError as error:
        LOG.append(error.args)
    return b


def closures(a, b):
    count = 0

    def add(value):
        nonlocal count
        count += value + a
        return count

    add(b)
    return [add(b), count, (lambda: a + count)(), [add(i) for i in range(2)]]


def unpacks(a, b):
    first, *rest = [a, b, a]
    (x, y), z = (a, b), first
    *start, last = "abc"
    value = a and b or x
    match (x, y):
        case (1, other):
            return other, rest
        case _:
            return x if a else y, z, start, last, value


def tries(a, b):
    with Manager():
        try:
            return a / b
        except ZeroDivisionError:
            return "zero"


FUNCTIONS = [
    arithmetic,
    loops,
    calls,
    withs,
    handlers,
    reraises,
    finals,
    natively_raised,
    many_variables,
    raised_by_a_frame_of_python,
    closures,
    unpacks,
    tries,
]


def plain(function, arguments):
    LOG.clear()
    return outcome(lambda: function(*arguments)), list(LOG)


def stepped(function, arguments, resume_after):
    LOG.clear()
    return outcome(lambda: Stepper(function, arguments).run(resume_after)), list(LOG)


def check(function):
    for arguments in ((1, 2), (3, 1), (4, 0), (0, 0)):
        expected = plain(function, arguments)
        for resume_after in (*range(40), -1):
            found = stepped(function, arguments, resume_after)
            assert normal(found) == normal(expected), (function, arguments, resume_after, found, expected)


def normal(result):
    return repr(result).split(" object at ")[0]


if __name__ == "__main__":
    for each in FUNCTIONS:
        check(each)
    print("stepped", len(FUNCTIONS))
