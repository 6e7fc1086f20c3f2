# ruff: noqa - the programs are written as people write them
"""Exceptions: raised, caught, chained, with attributes, in groups, each against the plain program.

PYTEST_DONT_REWRITE: the asserts of the programs are part of what is tested.
"""

from __future__ import annotations

import sys
import traceback

import pytest
import torch

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from tests.capture.compare_runs import Programs, check_program

program = Programs()


class Problem(Exception):
    def __init__(self, code, *, detail="none"):
        super().__init__(f"code {code}")
        self.code = code
        self.detail = detail

    @property
    def doubled(self):
        return 2 * self.code


class WithText(ValueError):
    def __str__(self):
        return "text of " + ",".join(map(str, self.args))


class Plain(KeyError):
    pass


class Coded(ValueError):
    def __init__(self, code, *more, **named):
        super().__init__(code, *more, **named)
        self.code = code


@program
def custom_attributes(x, n):
    try:
        raise Problem(n, detail="d")
    except Problem as problem:
        return x + problem.code, problem.detail, problem.args, str(problem), problem.doubled, f"{problem}"


@program
def initializers_of_builtin_exceptions(x, n):
    try:
        raise Coded(n, "more")
    except ValueError as error:
        made = error.code, error.args, repr(error), str(Coded(n))
    try:
        Coded(n, name=3)
    except TypeError as error:
        return x + n, made, str(error)


@program
def overridden_text(x, n):
    try:
        raise WithText(1, n)
    except ValueError as error:
        return x, str(error), repr(error), f"{error!s:>20}"


@program
def texts_of_builtin_exceptions(x, n):
    return (
        x,
        str(KeyError("k")),
        str(ValueError("v")),
        str(ValueError()),
        str(OSError(2, "no file")),
        repr(ValueError("v", n)),
        repr(Plain(n)),
        [str(Problem(n))],
    )


@program
def causes_and_contexts(x, n):
    out = []
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error
    except ValueError as error:
        out += [error.__cause__.args, error.__context__ is error.__cause__, error.__suppress_context__]
    try:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")
    except ValueError as error:
        out += [error.__cause__, type(error.__context__), error.__suppress_context__]
    try:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second") from None
    except ValueError as error:
        out += [error.__cause__, type(error.__context__), error.__suppress_context__]
    return x, out


@program
def the_exception_that_is_handled(x, n):
    seen = [sys.exception()]
    try:
        raise ValueError(n)
    except ValueError as error:
        seen += [sys.exception() is error, sys.exc_info()[1] is error]
    return x, seen, sys.exception()


@program
def context_across_calls(x, n):
    def inner():
        raise ValueError("inner")

    try:
        try:
            {}["missing"]
        except KeyError:
            inner()
    except ValueError as error:
        return x, type(error.__context__), error.__context__.args


@program
def bare_raise_in_a_callee(x, n):
    def again():
        raise

    try:
        try:
            raise Problem(n)
        except Problem:
            again()
    except Problem as problem:
        return x, problem.code


@program
def bare_raise_without_exception(x, n):
    try:
        raise
    except RuntimeError as error:
        return x, str(error)


@program
def nested_handlers(x, n):
    log = []
    try:
        try:
            raise Problem(1)
        except ValueError:
            log.append("wrong")
        except Problem as problem:
            log.append(problem.code)
            try:
                raise KeyError("inner")
            except KeyError as inner:
                log.append(type(inner.__context__))
            raise
        finally:
            log.append("finally")
    except Problem:
        log.append("outer")
    return x, log


@program
def name_is_deleted_after_except(x, n):
    error = 1
    try:
        raise ValueError
    except ValueError:
        pass
    try:
        return error
    except UnboundLocalError as missing:
        return x, str(missing)


@program
def errors_of_operations(x, n):
    out = []

    def attempt(action):
        try:
            action()
        except Exception as error:
            out.append((type(error), str(error)))

    attempt(lambda: 1 // (n - n))
    attempt(lambda: 1.0 / 0)
    attempt(lambda: [1][5])
    attempt(lambda: (1,)[5])
    attempt(lambda: {"a": 1}["b"])
    attempt(lambda: int("q"))
    attempt(lambda: "a" + 1)
    attempt(lambda: 1 + "a")
    attempt(lambda: [] + ())
    attempt(lambda: None.nothing)
    attempt(lambda: Problem.nothing)
    attempt(lambda: Problem(1).nothing)
    attempt(lambda: (lambda a: a)())
    attempt(lambda: (lambda a: a)(1, 2))
    attempt(lambda: (lambda *, a: a)())
    attempt(lambda: (lambda a, /: a)(a=1))
    attempt(lambda: (lambda a: a)(1, a=2))
    attempt(lambda: (lambda a: a)(b=2))
    attempt(lambda: (lambda a, b, c=1: a)())
    attempt(lambda: (lambda a, b=1: a)(1, 2, 3))
    attempt(lambda: n())
    attempt(lambda: [1, 2].index(7))
    attempt(lambda: [].pop())
    attempt(lambda: {}.pop("k"))
    attempt(lambda: [1].remove(4))
    attempt(lambda: len(5))
    attempt(lambda: iter(5))
    attempt(lambda: next(iter([])))
    attempt(lambda: [] < 3)
    attempt(lambda: {[]: 1})
    attempt(lambda: max([]))
    attempt(lambda: "%d" % "a")
    attempt(lambda: "{} {}".format(1))
    attempt(lambda: "abc".index("z"))
    attempt(lambda: 3 in 5)
    attempt(lambda: n[0])
    attempt(lambda: (1).missing)
    attempt(lambda: "abc".missing)
    attempt(lambda: [].missing)
    attempt(lambda: isinstance(1, 2))
    attempt(lambda: object().missing)
    attempt(lambda: object(3))
    attempt(lambda: -"a")
    return x, out


@program
def asserts(x, n):
    out = []
    try:
        assert n < 0, f"n is {n}"
    except AssertionError as error:
        out.append(str(error))
    try:
        assert not n
    except AssertionError as error:
        out.append(error.args)
    assert n
    return x, out


@program
def except_groups(x, n):
    out = []
    try:
        raise ExceptionGroup(
            "group", [ValueError(1), KeyError("k"), ExceptionGroup("inner", [ValueError(2)])]
        )
    except* ValueError as group:
        out.append([type(e) for e in group.exceptions])
    except* KeyError as group:
        out.append(group.exceptions[0].args)
    return x, out


@program
def except_star_of_a_plain_exception(x, n):
    out = []
    try:
        raise ValueError(n)
    except* ValueError as group:
        out.append((type(group), group.message, group.exceptions[0].args))
    return x, out


@program
def exception_as_value(x, n):
    error = Problem(n)
    return x, error, ValueError("v", 1), isinstance(error, Exception), KeyError


@program
def exception_notes(x, n):
    try:
        error = ValueError("v")
        error.add_note("note")
        raise error
    except ValueError as caught:
        return x, caught.__notes__, caught is error


@program
def class_is_raised(x, n):
    try:
        raise Plain
    except LookupError as error:
        return x, error.args, type(error), isinstance(error, KeyError)


@program
def tuple_of_classes(x, n):
    kinds = (ValueError, (KeyError, IndexError))
    try:
        raise IndexError(n)
    except kinds[0]:
        return x
    except kinds[1] as error:
        return x, error.args


@program
def raising_something_else(x, n):
    try:
        raise 5
    except TypeError as error:
        return x, str(error)


@program
def stop_iteration_by_next(x, n):
    iterator = iter([1])
    next(iterator)
    try:
        next(iterator)
    except StopIteration as stop:
        return x, stop.value, stop.args


@program
def tensor_in_an_exception(x, n):
    try:
        raise ValueError(x + n, "t")
    except ValueError as error:
        return error.args[0] * 2, len(error.args)


@program
def loop_with_exceptions(x, n):
    good = []
    for value in ("1", "x", "3", None):
        try:
            good.append(int(value))
        except (ValueError, TypeError) as error:
            good.append(type(error).__name__)
            continue
        finally:
            good.append("done")
    return x, good


@program(graphs=None)
def what_a_kernel_refuses_to_write(x, n):
    repeated = x.new_zeros(1).expand(3)
    try:
        repeated.add_(n)
    except RuntimeError as error:
        return x + n, str(error)
    return x


@program
def nothing_may_be_written_to_what_is_repeated_for_no_elements(x, n):
    return x.new_zeros(1).expand(0).add_(n), x + n


@pytest.mark.parametrize("function, settings", program.table, ids=program.names)
def test_same_as_plain(function, settings):
    check_program(function, **settings)


def test_what_the_program_raises_comes_out_whole():
    def fails(x, n):
        try:
            raise KeyError("first")
        except KeyError as error:
            raise Problem(n, detail=x.shape) from error

    check_program(fails)


def test_an_exception_that_was_raised_keeps_its_traceback():
    def fails(x):
        try:
            raise ValueError("v")
        except ValueError as error:
            kept = error
        return x + 1, kept

    compiled = CompiledFunction(fails, lambda graph, inputs: graph.module)
    for _ in range(2):
        _, error = compiled(torch.ones(2))
        (place,) = [entry for entry in traceback.extract_tb(error.__traceback__) if entry.name == "fails"]
        assert place.filename == __file__ and place.line == 'raise ValueError("v")'
