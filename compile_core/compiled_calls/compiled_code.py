"""What was compiled of one code object: its guard table, and the programs of all functions that share it.

Functions that are made anew (lambdas in a loop, methods of equal layers) have one code object, or equal ones, and so
one guard table. What differs between them comes with each call, as arguments of the frame: the object that a method
is bound to, the cells of a closure, the defaults. So guards tell where they differ in what a program depends on.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gradsplit.compile_core.artifact_logs import log_artifact
from gradsplit.compile_core.capture import (
    PlainCall,
    SizeHistory,
    argument_names,
    capture,
    following,
    must_run_plain,
    normal_tensors,
    plain_call,
    resume_function,
    run_only,
)
from gradsplit.compile_core.capture.directives import disabled_frame
from gradsplit.compile_core.compiled_calls.bound_calls import dispatch_function, plain_function
from gradsplit.compile_core.compiled_calls.call_targets import (
    NO_OWNER,
    Compiled,
    Target,
    call_object,
    find_callee_target,
    method_target,
    original_of,
    plain_frame,
    takes_object_among_others,
)
from gradsplit.compile_core.compiled_calls.capture_findings import CallSettings, Findings, forget_reports
from gradsplit.compile_core.compiled_calls.deep_calls import deeper_stack, with_room
from gradsplit.compile_core.compiled_calls.entry_table import Entry, EntryTable
from gradsplit.compile_core.compiled_calls.hooked_modules import HookedCalls, has_hooks
from gradsplit.compile_core.compiled_calls.kept_random_state import kept_random_state
from gradsplit.compile_core.compiled_calls.plain_frames import PlainFrames
from gradsplit.compile_core.compiled_calls.record_captures import recording_failure
from gradsplit.compile_core.errors import CodeLocation, CompileError, InternalError, Unsupported
from gradsplit.compile_core.guard_checks.check import compile_check, explain_failure
from gradsplit.compile_core.ir.captured import CapturedFrame, CapturedGraph, ResumePoint
from gradsplit.compile_core.ir.communication import NOT_AGAIN, may_communicate
from gradsplit.compile_core.ir.data_checks import is_failed_assumption
from gradsplit.compile_core.ir.source_writer import compile_function
from gradsplit.compile_core.observe.progress import progress
from gradsplit.compile_core.observe.stage_times import timed
from gradsplit.compile_core.options import debugged_function
from gradsplit.compile_core.rare_collections import rare_collections
from gradsplit.compile_core.torch_facts.torch_switches import saved_tensor_hooks_are_active

logger = logging.getLogger("gradsplit.compile_core.capture")

# Captures of different functions wait for each other: they set warning filters, which all threads share.
_capture_lock = threading.RLock()

# How many resume functions one function may have: two or so for each place where it breaks.
_MOST_CONTINUATIONS = 512

# What was compiled last, of code that no compiled function may have left: a program may compile in each step anew.
_RECENT = 64
_recent: collections.deque[CompiledCode] = collections.deque(maxlen=_RECENT)

# All that is in use.
_living: weakref.WeakSet[CompiledCode] = weakref.WeakSet()


class ProgramsByCode:
    """What was compiled under the same settings, by code objects. Each lives as long as somebody uses it, and where
    ``kept``, because it belongs to no module, a while longer."""

    def __init__(self, settings: CallSettings, *, kept: bool = False) -> None:
        self.settings = settings
        self.kept = kept
        self._codes: weakref.WeakValueDictionary[Any, CompiledCode] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def of(self, target: Target, name: str) -> CompiledCode:
        """What was compiled of the code that a target runs, whatever its owner and closure.

        Equal code may occur twice, with other globals or in another file.
        """
        function = target.function
        code = function.__code__
        key = (code, code.co_filename, id(function.__globals__), target.is_module_call, target.subject)
        with self._lock:
            found = self._codes.get(key)
            if found is None:
                found = self._codes[key] = CompiledCode(self, target.unbound(), name)
        return found


@dataclass(frozen=True)
class _CalledAtBreaks:
    """What the breaks of a function call, those of its continuations included; held, since they do."""

    continuations: dict[Any, CompiledCode] = field(default_factory=dict)
    callees: dict[CompiledCode, None] = field(default_factory=dict)


class CompiledCode:
    """The guard table of a code object, and how a call that fits no entry makes one.

    Args:
        programs: where callees are found.
        target: what is captured; it has no owner, and takes the cells of a closure as an argument.
        name: for messages.
        parent: for a resume function, the code of the function that it continues.

    Attributes:
        call: takes the frame's arguments, and cells before them where there are any, with defaults left out.
    """

    def __init__(
        self, programs: ProgramsByCode, target: Target, name: str, parent: CompiledCode | None = None
    ) -> None:
        self.programs = programs
        self.settings = programs.settings
        self.target = target
        self.name = name
        self._is_continuation = parent is not None
        # Where functions of another name are debugged; what this one calls may be one of them.
        names = (target.function.__name__, target.function.__qualname__)
        self._is_left_out = parent is None and debugged_function() not in ("", *names)
        self._called = _CalledAtBreaks() if parent is None else parent._called
        self._plain_frames = PlainFrames(self.compiled_form)
        self._hooked: HookedCalls | None = None
        self._recurs = False
        self._lock = threading.RLock()
        self._table = EntryTable()
        self._findings = Findings(name, programs.settings)
        if parent is None:
            called = call_object if target.is_module_call else target.function
            self._call_plain: Callable[..., Any] = plain_function(target, called)
        else:
            self._call_plain = plain_call(target.function, target.cells_argument)
        self.call = dispatch_function(target, self._table, self._miss)
        _living.add(self)

    def reset(self) -> None:
        """Forget every capture."""
        with self._lock:
            self._table.clear()
            self._findings = Findings(self.name, self.settings)
            self._called.continuations.clear()
            self._called.callees.clear()

    @property
    def break_reasons(self) -> list[Unsupported]:
        """Why captures ended early, in the order in which it was found."""
        return self._findings.break_reasons

    @property
    def _argument_names(self) -> tuple[str, ...]:
        return argument_names(self.target.function.__code__, self.target.cells_argument)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The guard table, most recently used first."""
        return self._table.entries

    @property
    def continuations(self) -> tuple[CompiledCode, ...]:
        """The resume functions after graph breaks."""
        return tuple(self._called.continuations.values())

    @property
    def callees(self) -> tuple[CompiledCode, ...]:
        """The code that is called at graph breaks."""
        return tuple(self._called.callees)

    def _miss(self, arguments: tuple[Any, ...]) -> Any:
        return self.call_missed(arguments, self._call_plain)

    def call_missed(
        self,
        arguments: tuple[Any, ...],
        call_plain: Callable[..., Any],
        table: EntryTable | None = None,
        history: SizeHistory | None = None,
    ) -> Any:
        """A call that fits no entry of a caller's own table, which gets one: capture, compile and run.

        Args:
            arguments: of the frame.
            call_plain: what calls that run as plain Python run.
            table, history: the caller's own, if it has them; the latter says which sizes are open.
        """
        if self._is_left_out or (self._findings.expects_wrongly and not must_run_plain()):
            return self._call_frame(arguments, call_plain)
        if must_run_plain() or (self._findings.runs_plain and self._table.find(arguments) is None):
            return call_plain(*arguments)
        expected = ""
        with self._lock, kept_random_state(), deeper_stack():
            try:
                # Another thread may have captured the same while this one waited, or another function of this code.
                entry = self._find(arguments, table) or self._make_entry_if_allowed(
                    arguments, history or self._findings.history
                )
            except PlainCall as plain:
                entry, expected = None, "" if plain.of_this_call else str(plain)
                if plain.of_this_call:
                    self._findings.note_wrongly_expected()
        if expected:
            return self._call_to_raise(expected, arguments, call_plain)
        if entry is None:
            return call_plain(*arguments)
        inputs = entry.check(*arguments)
        if type(inputs) is not list:
            self._findings.report_fresh_guards(entry.explain(arguments))
            return call_plain(*arguments)
        if table is not None:
            table.add(entry)
        return entry.run(entry.compiled, inputs, *arguments)

    def _call_frame(self, arguments: tuple[Any, ...], call_plain: Callable[..., Any]) -> Any:
        """This frame as plain Python, while what it calls is compiled.

        Limit: not of the rest of a frame after a break, of a closure, or of a module with hooks: all of these is plain.
        """
        target = self.target
        is_function = not self._is_continuation and not target.cells_argument
        if not is_function or (target.is_module_call and has_hooks(arguments[0])):
            return call_plain(*arguments)
        return plain_function(target, self._plain_frames.form_of(target.function))(*arguments)

    def _find(self, arguments: tuple[Any, ...], table: EntryTable | None) -> Entry | None:
        """An entry that fits. Of memory that is written to, entries of other functions know nothing; see
        Note [Overlapping inputs] in guards.py."""
        entry = self._table.find(arguments)
        if entry is None or table is None or not entry.captured.writes_inputs:
            return entry
        return None if entry.reads_shared_memory(arguments) else entry

    def _run_again(self, graph: CapturedGraph | None, failures: list[Exception], *arguments: Any) -> Any:
        """The graph raised: plain Python raises the same at the user's line, after the effects that come before.

        Not so where a hook sees what autograd saves: the exception may be the hook's own, by which a checkpoint ends
        the recomputation once it has all that it needs. Nor where other ranks have answered what the graph sent.
        """
        if saved_tensor_hooks_are_active() and not is_failed_assumption(failures[0]):
            raise failures.pop()
        if graph is not None and may_communicate(graph.module):
            failures[0].add_note(NOT_AGAIN)
            raise failures.pop()
        shown = repr(failures.pop())
        result = self._call_plain(*arguments)
        logger.warning("%s: the graph raised %s, which plain Python did not", self.name, shown)
        if graph is not None and graph.end_at_data is not None and not self.settings.fullgraph:
            graph.end_at_data()
        return result

    def _run_frame(self, compiled: None, inputs: list[Any], *arguments: Any) -> Any:
        return self._call_frame(arguments, self._call_plain)

    def _run_recursion(self, compiled: None, inputs: list[Any], *arguments: Any) -> Any:
        """Plain Python, all the way down: each call would be captured as deep as this one, in vain."""
        with run_only(), deeper_stack():
            return self._call_plain(*arguments)

    def _make_entry_if_allowed(self, arguments: tuple[Any, ...], history: SizeHistory) -> Entry | None:
        """A new entry; None where there are as many as a code object may have."""
        if self._findings.runs_plain:
            return None
        reason = self._table.note_miss(arguments)
        if len(self._table.entries) >= self.settings.limit:
            self._findings.report_limit(self._table)
            return None
        if reason is not None:
            last = self._table.entries[0]
            self._findings.report_recompilation(
                reason, self.target.function.__code__, lambda: last.at_failure(arguments)
            )
        if self.programs.kept and self not in _recent:
            _recent.append(self)
        with progress(self.name), rare_collections():
            return self._make_entry(arguments, history)

    def _call_to_raise(
        self, expected: str, arguments: tuple[Any, ...], call_plain: Callable[..., Any]
    ) -> Any:
        """The capture met an exception of the program's: plain Python raises it with its own traceback.

        Where the call ends without, since the program handles it or only fake tensors raise it, that is why there is no
        graph.
        """
        logger.info("%s: this call runs as plain Python: %s", self.name, expected)
        result = call_plain(*arguments)
        code = self.target.function.__code__
        place = CodeLocation(code.co_filename, code.co_firstlineno, self.name)
        reason = Unsupported(
            "exception-in-capture",
            f"the call meets an exception, and ends without: {expected}",
            location=place,
        )
        if self.settings.observer is not None:
            self.settings.observer.frame_captured(
                self.name,
                code,
                CapturedFrame(
                    None,
                    (),
                    self._argument_names,
                    None,
                    reason,
                ),
            )
        self._findings.note_wrongly_expected()
        self._findings.report_break(reason, plain=True)
        return result

    def _make_entry(self, arguments: tuple[Any, ...], history: SizeHistory) -> Entry:
        with timed("capture"):
            captured = self._capture(arguments, history)
        if captured.break_reason is not None:
            with recording_failure(self.target, arguments, history):
                self._findings.report_break(captured.break_reason, plain=captured.runner is None)
        if captured.graph is not None:
            graph = captured.graph
            log_artifact("graph_code", lambda: f"{self.name}:\n{graph}")
            if logger.isEnabledFor(logging.INFO):
                logger.info("%s: captured\n%s", self.name, graph)
        if self.settings.observer is not None:
            self.settings.observer.frame_captured(self.name, self.target.function.__code__, captured)
        with timed("guards"):
            check = compile_check(captured)
        compiled = None
        if captured.runner is None:
            recurs = getattr(captured.break_reason, "reason_id", None) == "recursion"
            run = self._run_recursion if recurs else self._run_frame
        else:
            run_again = functools.partial(self._run_again, captured.graph)
            constants = {**captured.runner.constants, "run_again": run_again}
            if captured.break_reason is not None:
                constants["compiled_form"] = self.compiled_form
                constants |= {point.name: self._continuation(point) for point in captured.resume}
            run = compile_function(captured.runner.text, "run", constants)
            # A resume function leaves its own continuations to the call that the user made.
            if captured.break_reason is not None and not self._is_continuation:
                run = following(run)
            if captured.graph is not None:
                inputs = check(*arguments)
                if type(inputs) is not list:
                    self._findings.report_fresh_guards(explain_failure(captured, arguments))
                    raise PlainCall("its guards do not hold for the call that they were made from")
                try:
                    with normal_tensors():
                        compiled = self.settings.compile_graph(captured.graph, inputs)
                except Exception as error:
                    if captured.graph.end_at_data is None:
                        raise
                    logger.info("%s: captured again, with data outside of the graph: %s", self.name, error)
                    captured.graph.end_at_data()
                    return self._make_entry(arguments, history)
                if isinstance(compiled, torch.fx.GraphModule):
                    compiled = compiled.forward  # hooks on all modules of the program are not for this one
        if captured.late_guards is not None:
            captured = replace(captured, guards=captured.late_guards(), late_guards=None)
            check = compile_check(captured)
        self._findings.report_guards(self.target.function.__code__, captured)
        entry = Entry(captured, compiled, check, run)
        self._table.add(entry)
        return entry

    def _capture(self, arguments: tuple[Any, ...], history: SizeHistory) -> CapturedFrame:
        """Capture one call. A bug of the capture itself makes the function plain, which is always right."""
        try:
            with _capture_lock, recording_failure(self.target, arguments, history):
                return capture(
                    self.target.function,
                    arguments,
                    is_module_call=self.target.is_module_call,
                    cells_argument=self.target.cells_argument,
                    may_break=self.settings.may_break,
                    original_of=original_of,
                    is_compiled_apart=self.settings.modules_apart.claims,
                    history=history,
                    data_ends=self.settings.data_ends,
                    is_whole=self.settings.fullgraph,
                )
        except (CompileError, PlainCall):
            raise
        except Exception as error:
            shown = f"the capture failed: {type(error).__name__}: {error}"
            if self.settings.fullgraph:
                raise InternalError(f"{self.name}: {shown}") from error
            logger.warning("%s: the capture failed, which is a bug of it", self.name, exc_info=error)
            reason = Unsupported("capture-failed", shown)
            return CapturedFrame(
                None,
                (),
                self._argument_names,
                None,
                reason,
            )

    def _continuation(self, point: ResumePoint) -> Callable[..., Any]:
        """The compiled resume function of a point, shared by all captures that stop there in the same way."""
        found = self._called.continuations.get(point.rest)
        if found is None:
            function = resume_function(point, self.target.function)
            if len(self._called.continuations) >= _MOST_CONTINUATIONS:
                logger.warning("%s has more graph breaks than are compiled; the rest is plain", self.name)
                return plain_call(function, point.cells_argument)
            target = Target(function, NO_OWNER, False, point.cells_argument)
            found = self._called.continuations[point.rest] = CompiledCode(
                self.programs, target, function.__qualname__, self
            )
        return found.call

    def compiled_form(self, callee: Any) -> Any:
        """What a graph break or a plain frame calls instead of ``callee``: its compiled form where it can have
        one.

        Forms are kept by code, and get the cells of a closure with each call, so that functions which are made
        for one call are compiled once.
        """
        if type(callee) is functools.partial:
            return functools.partial(self.compiled_form(callee.func), *callee.args, **callee.keywords)
        if takes_object_among_others(callee):
            return functools.partial(self.compiled_form(callee.__func__), callee.__self__)
        frame = disabled_frame(callee) or plain_frame(callee)
        if frame is not None:
            if isinstance(frame, types.MethodType):
                return functools.partial(self._plain_frames.form_of(frame.__func__), frame.__self__)
            return self._plain_frames.form_of(frame)
        apart = self.settings.modules_apart
        if isinstance(callee, torch.nn.Module) and apart.claims(callee):
            return apart.form_of(callee)
        if isinstance(callee, Compiled):
            return with_room(callee, callee.frame_code)
        target = find_callee_target(callee)
        if target is None:
            return callee
        if target.is_module_call and has_hooks(target.owner):
            return functools.partial(self.hooked_calls(target.function.__code__), target.owner)
        return self._form_of_target(target)

    def _form_of_target(self, target: Target) -> Callable[..., Any]:
        found = self.programs.of(target, target.function.__qualname__)
        if found not in self._called.callees:
            self._called.callees[found] = None
            found._recurs = found._recurs or self._is_reached_from(found)
        call: Any = found.call
        if target.function is not found.target.function:
            call = found._with_defaults_of(target.function)
        if found._recurs:
            call = with_room(call, found.call.__code__)
        if target.cells_argument:
            call = functools.partial(call, target.function.__closure__)
        return call if target.owner is NO_OWNER else functools.partial(call, target.owner)

    def _is_reached_from(self, other: CompiledCode) -> bool:
        """Whether breaks of the other lead to calls of this code."""
        seen, waiting = {other}, [other]
        while waiting:
            code = waiting.pop()
            if code._called is self._called:  # a function and its continuations have one
                return True
            waiting += [callee for callee in code._called.callees if callee not in seen]
            seen.update(code._called.callees)
        return False

    def hooked_calls(self, forward: types.CodeType) -> HookedCalls:
        """What calls modules of this forward with their hooks."""
        if self._hooked is None or self._hooked.forward is not forward:
            self._hooked = HookedCalls(forward, lambda method: self._form_of_target(method_target(method)))
        return self._hooked

    def _with_defaults_of(self, function: types.FunctionType) -> Callable[..., Any]:
        """The compiled call with the default arguments of another function that has the same code."""
        made = types.FunctionType(self.call.__code__, self.call.__globals__, function.__name__)
        made.__defaults__ = function.__defaults__
        made.__kwdefaults__ = function.__kwdefaults__
        made.__qualname__ = function.__qualname__
        return made


def forget_all() -> None:
    """Forget everything that was compiled, and what was logged of it."""
    for code in list(_living):
        code.reset()
    _recent.clear()
    forget_reports()
