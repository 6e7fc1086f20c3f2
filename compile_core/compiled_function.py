"""Stage 0: a callable that looks up its guard table, and captures and compiles what the table lacks."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from compile_core import config
from compile_core.bound_calls import dispatch_function, plain_function
from compile_core.call_targets import (
    NO_OWNER,
    CalledCode,
    CalledForward,
    ModulesApart,
    Target,
    call_object,
    find_callee_target,
    find_target,
    method_target,
)
from compile_core.capture import (
    COMPILED_APART,
    PlainCall,
    SizeHistory,
    argument_names,
    capture,
    compile_check,
    compile_function,
    explain_failure,
    must_run_plain,
    normal_tensors,
    resume_function,
    run_to_end,
    run_with_cells,
)
from compile_core.capture.code_objects.plain_frames import PlainFrames
from compile_core.capture.directives import disabled_frame, leave_alone
from compile_core.entry_table import CompiledGraph, Entry, EntryTable
from compile_core.errors import CodeLocation, CompileError, InternalError, Unsupported
from compile_core.hooked_modules import HookedCalls, has_hooks
from compile_core.ir.apart_from_torch_compile import apart_from_torch_compile
from compile_core.ir.captured import CapturedFrame, CapturedGraph, ResumePoint
from compile_core.ir.kept_random_state import kept_random_state
from compile_core.ir.torch_switches import saved_tensor_hooks_are_active
from compile_core.ir.torchs_stance import stance
from compile_core.observe.observer import Observer
from compile_core.observe.stage_times import timed

logger = logging.getLogger("compile_core.capture")

CompileGraph = Callable[[CapturedGraph, list[torch.Tensor]], CompiledGraph]

# Captures of different functions wait for each other: they set warning filters, which all threads share.
_capture_lock = threading.RLock()

_logged_locations: set[tuple[str, CodeLocation | None]] = set()


class CompiledFunction:
    """A function, method or module whose calls run compiled graphs.

    Args:
        fn: a Python function, a bound method, an ``nn.Module`` (its call is compiled), or an object whose class defines
            ``__call__`` in Python.
        compile_graph: given a captured graph and its real inputs, returns what is called as ``compiled(*tensors)`` and
            returns the flat tuple of the graph's outputs.
        fullgraph: raise Unsupported, with the user's line, where other graphs than of ``modules_apart`` are needed.
        name: for messages; the function's own name by default.
        dynamic: None makes the sizes symbolic that differ between calls, True all of them at once, False none.
        cache_limit: how many different captures are kept before calls run as plain Python; None is
            ``config.cache_size_limit`` at the time.
        target: what to capture, if it is not what ``fn`` itself says.
        callees: the compiled forms of functions called at graph breaks, if they are shared with another function.
        observer: who is told of captures and misses, also of those of continuations and callees.
        modules_apart: modules among what it calls that have a compiled form of their own, and no part in its graphs.
        continuations: for a resume function, all those of the function that it continues.

    Attributes:
        original: ``fn``.
        break_reasons: why captures ended early, in the order in which it was found.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        compile_graph: CompileGraph,
        *,
        fullgraph: bool = False,
        name: str | None = None,
        dynamic: bool | None = None,
        cache_limit: int | None = None,
        target: Target | None = None,
        callees: dict[tuple[types.CodeType, int, bool], CompiledFunction] | None = None,
        continuations: dict[types.CodeType, CompiledFunction] | None = None,
        observer: Observer | None = None,
        modules_apart: ModulesApart | None = None,
    ) -> None:
        if isinstance(fn, CompiledFunction):
            fn = fn.original
        self.original = fn
        self.compile_graph = compile_graph
        self.observer = observer
        self.modules_apart = modules_apart or ModulesApart()
        self.fullgraph = fullgraph
        self.dynamic = dynamic
        self.cache_limit = cache_limit
        self._table = EntryTable()
        self.break_reasons: list[Unsupported] = []
        self._is_continuation = continuations is not None
        self._continuations = {} if continuations is None else continuations
        # A function and all that continues it or is called by it share the compiled forms of callees.
        self._callees = {} if callees is None else callees
        self._plain_frames = PlainFrames(self._compiled_form)
        self._hooked: HookedCalls | None = None
        self._history = SizeHistory(dynamic)
        self._lock = threading.RLock()
        self._runs_plain, self._wrongly_expected = False, 0
        is_module = isinstance(fn, torch.nn.Module) and target is None
        self._called_forward = CalledForward(fn) if is_module else None  # type: ignore[arg-type]
        self._name = name
        self._take(target or find_target(fn))
        _living[next(_numbers)] = self

    def _take(self, target: Target) -> None:
        """Calls run this target from now on."""
        self._whole_target = target
        self._called_code = CalledCode(target.function)
        self._target: Any = target.function
        self._owner = target.owner
        self._is_module_call = target.is_module_call
        self._cells_argument = target.cells_argument
        self.name = self._name or self._target.__qualname__
        self._arguments = argument_names(self._target.__code__, self._cells_argument)
        self._call_plain = plain_function(target, self.original)
        self._dispatch = dispatch_function(target, self._table, self._call_plain, self._miss)
        functools.update_wrapper(self, self._target)

    @apart_from_torch_compile
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if stance() == "force_eager" and not (self._is_continuation or self._cells_argument):
            return self.original(*args, **kwargs)
        if self._called_forward is not None and self._called_forward.has_changed():
            self.reset()
            self._take(find_target(self.original))
        elif self._called_code.has_changed():
            self.reset()
            self._take(self._whole_target)
        if self._is_module_call and self._owner is not NO_OWNER and has_hooks(self._owner):
            return self._hooked_calls(self._target.__code__)(self._owner, *args, **kwargs)
        return self._dispatch(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Compiled functions are descriptors as functions are, so that methods can be compiled in a class body."""
        return self if instance is None else types.MethodType(self, instance)

    def __copy__(self) -> CompiledFunction:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        """A function is its own copy; of a bound method or an object, the compiled form of its copy is made."""
        copied = copy.deepcopy(self.original, memo)
        if copied is self.original:
            return self
        return self._related(copied, fullgraph=self.fullgraph)

    def _related(self, fn: Callable[..., Any], **arguments: Any) -> CompiledFunction:
        """Another compiled function with the same settings."""
        return CompiledFunction(
            fn,
            self.compile_graph,
            dynamic=self.dynamic,
            cache_limit=self.cache_limit,
            observer=self.observer,
            modules_apart=self.modules_apart,
            **arguments,
        )

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickled by name where its module has it under its name, else as what it was made from: kernels do not
        travel."""
        found: Any = sys.modules.get(self._target.__module__)
        for name in self._target.__qualname__.split("."):
            found = getattr(found, name, None)
        return self._target.__qualname__ if found is self else (_original_of, (self.original,))

    def reset(self) -> None:
        """Forget every capture."""
        with self._lock:
            self._table.clear()
            self.break_reasons = []
            self._runs_plain, self._wrongly_expected = False, 0
            self._history = SizeHistory(self.dynamic)
            self._continuations.clear()
            self._callees.clear()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The guard table, most recently used first."""
        return self._table.entries

    @property
    def continuations(self) -> tuple[CompiledFunction, ...]:
        """The resume functions behind this function's graph breaks."""
        return tuple(self._continuations.values())

    @property
    def callees(self) -> tuple[CompiledFunction, ...]:
        """The compiled forms of the functions that are called at graph breaks."""
        return tuple(self._callees.values())

    def _miss(self, arguments: tuple[Any, ...]) -> Any:
        """No entry fits: capture, compile and run."""
        if must_run_plain() or self._runs_plain:
            return self._call_plain(*arguments)
        expected = ""
        with self._lock, kept_random_state():
            try:
                # Another thread may have captured the same while this one waited.
                entry = self._table.find(arguments) or self._make_entry_if_allowed(arguments)
            except PlainCall as plain:
                entry, expected = None, str(plain)
        if expected:
            return self._call_to_raise(expected, arguments)
        if entry is None or entry.run is None:
            return self._call_plain(*arguments)
        inputs = entry.check(*arguments)
        if type(inputs) is not list:
            self._report_fresh_guards(entry.explain(arguments))
            return self._call_plain(*arguments)
        return entry.run(entry.compiled, inputs, *arguments)

    def _run_again(self, failures: list[Exception], *arguments: Any) -> Any:
        """The graph raised: plain Python raises the same at the user's line, after the effects that come before.

        Not so where a hook sees what autograd saves: the exception may be the hook's own, by which a checkpoint ends
        the recomputation once it has all that it needs.
        """
        if saved_tensor_hooks_are_active():
            raise failures.pop()
        shown = repr(failures.pop())
        result = self._call_plain(*arguments)
        logger.warning("%s: the graph raised %s, which plain Python did not", self.name, shown)
        return result

    def _make_entry_if_allowed(self, arguments: tuple[Any, ...]) -> Entry | None:
        """A new entry; None where there are as many as a function may have."""
        reason = self._table.note_miss(arguments)
        limit = self.cache_limit or config.cache_size_limit
        if len(self._table.entries) >= limit:
            if not self._runs_plain:
                self._report_limit(limit)
            return None
        if reason is not None:
            self._report_recompilation(reason)
        return self._make_entry(arguments)

    def _call_to_raise(self, expected: str, arguments: tuple[Any, ...]) -> Any:
        """The capture met an exception of the program's: plain Python raises it with its own traceback.

        Where the call ends without, since the program handles it or only fake tensors raise it, that is why there is no
        graph.
        """
        logger.info("%s: this call runs as plain Python: %s", self.name, expected)
        result = self._call_plain(*arguments)
        code = self._target.__code__
        place = CodeLocation(code.co_filename, code.co_firstlineno, self.name)
        reason = Unsupported(
            "exception-in-capture",
            f"the call meets an exception, and ends without: {expected}",
            location=place,
        )
        if self.observer is not None:
            self.observer.frame_captured(
                self.name, code, CapturedFrame(None, (), self._arguments, None, reason)
            )
        self._wrongly_expected += 1
        # Each such call is captured in vain.
        self._runs_plain |= self._wrongly_expected >= (self.cache_limit or config.cache_size_limit)
        self._report_break(reason, plain=True)
        return result

    def _make_entry(self, arguments: tuple[Any, ...]) -> Entry:
        with timed("capture"):
            captured = self._capture(arguments)
        if captured.break_reason is not None:
            self._report_break(captured.break_reason, plain=captured.runner is None)
        if captured.graph is not None and logger.isEnabledFor(logging.INFO):
            logger.info("%s: captured\n%s", self.name, captured.graph)
        if self.observer is not None:
            self.observer.frame_captured(self.name, self._target.__code__, captured)
        with timed("guards"):
            check = compile_check(captured)
        run = compiled = None
        if captured.runner is not None:
            constants = {**captured.runner.constants, "run_again": self._run_again}
            if captured.break_reason is not None:
                constants["compiled_form"] = self._compiled_form
                # A resume function leaves its own continuations to the call that the user made.
                constants["run_to_end"] = _leave_to_caller if self._is_continuation else run_to_end
                constants |= {point.name: self._continuation(point) for point in captured.resume}
            run = compile_function(captured.runner.text, "run", constants)
            if captured.graph is not None:
                inputs = check(*arguments)
                if type(inputs) is not list:
                    self._report_fresh_guards(explain_failure(captured, arguments))
                    raise PlainCall("its guards do not hold for the call that they were made from")
                with normal_tensors():
                    compiled = self.compile_graph(captured.graph, inputs)
                if isinstance(compiled, torch.fx.GraphModule):
                    compiled = compiled.forward  # hooks on all modules of the program are not for this one
        if captured.late_guards is not None:
            captured = replace(captured, guards=captured.late_guards(), late_guards=None)
            check = compile_check(captured)
        entry = Entry(captured, compiled, check, run)
        self._table.add(entry)
        return entry

    def _report_fresh_guards(self, explanation: str) -> None:
        """Something that the function reads changes whenever it is read or compiled: only plain Python is right."""
        shown = f"guards fail for the very call that they were made from: {explanation}"
        if self.fullgraph:
            raise InternalError(f"{self.name}: {shown}")
        self._runs_plain = True
        logger.warning("%s runs as plain Python from now on: its %s", self.name, shown)

    def _capture(self, arguments: tuple[Any, ...]) -> CapturedFrame:
        """Capture one call. A bug of the capture itself makes the function plain, which is always right."""
        try:
            with _capture_lock:
                return capture(
                    self._target,
                    arguments,
                    is_module_call=self._is_module_call,
                    cells_argument=self._cells_argument,
                    may_break=self._may_break,
                    original_of=_original_of,
                    is_compiled_apart=self.modules_apart.claims,
                    history=self._history,
                )
        except (CompileError, PlainCall):
            raise
        except Exception as error:
            shown = f"the capture failed: {type(error).__name__}: {error}"
            if self.fullgraph:
                raise InternalError(f"{self.name}: {shown}") from error
            logger.warning("%s: the capture failed, which is a bug of it", self.name, exc_info=error)
            reason = Unsupported("capture-failed", shown)
            return CapturedFrame(None, (), self._arguments, None, reason)

    def _continuation(self, point: ResumePoint) -> Callable[..., Any]:
        """The compiled resume function of a point, shared by all captures that stop there in the same way."""
        found = self._continuations.get(point.code)
        if found is None:
            function = resume_function(point, self._target)
            if len(self._continuations) >= _MOST_CONTINUATIONS:
                logger.warning(
                    "%s has more graph breaks than are compiled; the rest is plain Python", self.name
                )
                return run_with_cells(function) if point.cells_argument else function
            found = self._continuations[point.code] = self._related(
                function,
                fullgraph=self.fullgraph,
                target=Target(function, NO_OWNER, False, point.cells_argument),
                callees=self._callees,
                continuations=self._continuations,
            )
        return found

    def _compiled_form(self, callee: Any) -> Any:
        """What a graph break or a plain frame calls instead of ``callee``: its compiled form where it can have
        one.

        Forms are kept by code, and get the cells of a closure with each call, so that functions which are made
        for one call are compiled once.
        """
        if type(callee) is functools.partial:
            return functools.partial(self._compiled_form(callee.func), *callee.args, **callee.keywords)
        frame = disabled_frame(callee)
        if frame is not None:
            if isinstance(frame, types.MethodType):
                return functools.partial(self._plain_frames.form_of(frame.__func__), frame.__self__)
            return self._plain_frames.form_of(frame)
        if isinstance(callee, torch.nn.Module) and self.modules_apart.claims(callee):
            return self.modules_apart.form_of(callee)
        target = None if isinstance(callee, CompiledFunction) else find_callee_target(callee)
        if target is None:
            return callee
        if target.is_module_call and has_hooks(target.owner):
            return functools.partial(self._hooked_calls(target.function.__code__), target.owner)
        return self._form_of_target(target)

    def _form_of_target(self, target: Target) -> Callable[..., Any]:
        # Equal code may occur twice, with other globals.
        key = (target.function.__code__, id(target.function.__globals__), target.is_module_call)
        found = self._callees.get(key)
        if found is None:
            # One compiled form serves all modules (or bound objects) that share the function.
            shared = Target(target.function, NO_OWNER, target.is_module_call, target.cells_argument)
            plain = call_object if target.is_module_call else target.function
            found = self._callees[key] = self._related(
                plain,
                fullgraph=self.fullgraph,
                name=target.function.__qualname__,
                target=shared,
                callees=self._callees,
            )
        call: Any = found
        if target.function is not found._target:
            call = found.with_defaults_of(target.function)
        if target.cells_argument:
            call = functools.partial(call, target.function.__closure__)
        return call if target.owner is NO_OWNER else functools.partial(call, target.owner)

    def _hooked_calls(self, forward: types.CodeType) -> HookedCalls:
        if self._hooked is None or self._hooked.forward is not forward:
            self._hooked = HookedCalls(forward, lambda method: self._form_of_target(method_target(method)))
        return self._hooked

    def with_defaults_of(self, function: types.FunctionType) -> Callable[..., Any]:
        """The compiled call with the default arguments of another function that has the same code."""
        dispatch = self._dispatch
        made = types.FunctionType(dispatch.__code__, dispatch.__globals__, function.__name__)
        made.__defaults__ = function.__defaults__
        made.__kwdefaults__ = function.__kwdefaults__
        made.__qualname__ = function.__qualname__
        return made

    def _may_break(self, reason: Unsupported) -> bool:
        return not self.fullgraph or reason.reason_id == COMPILED_APART

    def _report_break(self, reason: Unsupported, plain: bool) -> None:
        if self.fullgraph and (plain or not self._may_break(reason)):
            raise reason.with_traceback(None)
        self.break_reasons.append(reason)
        key = (reason.reason_id, reason.location)
        if key not in _logged_locations:
            _logged_locations.add(key)
            logger.warning("%s is not captured in full: %s", self.name, reason)

    def _report_recompilation(self, reason: str) -> None:
        if self.observer is not None:
            self.observer.frame_missed(self.name, self._target.__code__, reason)
        if config.error_on_recompile:
            raise CompileError(
                f"{self.name} would be compiled again (config.error_on_recompile) because {reason}"
            )
        logger.info("%s: recompiled because %s", self.name, reason)

    def _report_limit(self, limit: int) -> None:
        self._runs_plain = True
        reason, count = self._table.most_frequent_reason()
        logger.warning(
            "%s was captured %d times (the limit); calls that no capture fits run as plain Python. "
            "The guard that failed most often, %d times: %s",
            self.name,
            limit,
            count,
            reason,
        )


# How many resume functions one function may have: two or so for each place where it breaks.
_MOST_CONTINUATIONS = 512

# Every compiled function that is in use, by its age.
_living: weakref.WeakValueDictionary[int, CompiledFunction] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def living_functions() -> list[CompiledFunction]:
    """All compiled functions, those behind graph breaks included, oldest first."""
    return [function for _, function in sorted(_living.items())]


@leave_alone
def reset() -> None:
    """Forget everything that was compiled: the next call of every compiled function captures anew."""
    for function in living_functions():
        function.reset()
    _logged_locations.clear()


def _original_of(value: Any) -> Any:
    return value.original if type(value) is CompiledFunction else value


def _leave_to_caller(result: Any) -> Any:
    return result
