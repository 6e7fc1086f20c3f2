"""Capture of one call: run the function's bytecode symbolically, then close the graph and write the runner."""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradsplit.compile_core import config
from gradsplit.compile_core.capture.code_objects.instructions import parameter_names
from gradsplit.compile_core.capture.code_objects.resume import rest_of
from gradsplit.compile_core.capture.frames.frame import BreakRequested, Frame
from gradsplit.compile_core.capture.graph.fake_inputs import has_layout
from gradsplit.compile_core.capture.graph.out_arguments import RESIZED_WITH_HISTORY
from gradsplit.compile_core.capture.graph.output_graph import InputRecord
from gradsplit.compile_core.capture.graph_breaks import BreakWriter, enter
from gradsplit.compile_core.capture.object_model.classes import FINALIZER
from gradsplit.compile_core.capture.object_model.functions import FunctionValue
from gradsplit.compile_core.capture.object_model.modules import ModuleValue
from gradsplit.compile_core.capture.open_numbers.size_history import SizeHistory
from gradsplit.compile_core.capture.reconstruct import RunnerWriter
from gradsplit.compile_core.capture.state import Capture
from gradsplit.compile_core.capture.torch_rules.global_state import (
    attention_kernels,
    autocast_state,
    default_device,
    global_state,
    normal_tensors,
)
from gradsplit.compile_core.capture.torch_rules.gradient_calls import REQUIRED_OPTIONS
from gradsplit.compile_core.capture.torch_rules.modes import restore_modes
from gradsplit.compile_core.capture.values.base import CaptureState, LazyValue, PlainCall, SymbolicRaise
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.tensors import MEMORY_OF_A_VIEW
from gradsplit.compile_core.capture.wrap import wrap_cell
from gradsplit.compile_core.errors import CompileError, Unsupported
from gradsplit.compile_core.guard_checks.check import compile_check
from gradsplit.compile_core.ir.captured import CapturedFrame, verify_captured_graph
from gradsplit.compile_core.ir.data_reads import DataEnds, DataReads
from gradsplit.compile_core.ir.sources import ConvertedSource, ItemSource, LocalSource, Source
from gradsplit.compile_core.torch_facts.fake_tensors import quiet_fakes
from gradsplit.compile_core.torch_facts.thread_state import set_grad_enabled
from gradsplit.compile_core.torch_facts.torch_switches import read_switches, turn_back
from gradsplit.compile_core.torch_facts.wrapper_tensors import inner_tensors, memory_of

# How far back a break is looked for at first, where the instruction without a rule cannot end the graph.
_NEAR_STEPS = 64

logger = logging.getLogger(__name__)

CELLS_ARGUMENT = "_gs_cells"


def argument_names(code: types.CodeType, cells_argument: bool = False) -> tuple[str, ...]:
    """The parameters of a code object in the order of its locals: positional, keyword-only, *args, **kwargs.

    With ``cells_argument`` the tuple of closure cells comes before them.
    """
    return ((CELLS_ARGUMENT,) if cells_argument else ()) + parameter_names(code)


def capture(
    function: types.FunctionType,
    arguments: tuple[Any, ...],
    *,
    is_module_call: bool = False,
    cells_argument: bool = False,
    may_break: Callable[[Unsupported], bool] = lambda reason: True,
    original_of: Callable[[Any], Any] = lambda value: value,
    is_compiled_apart: Callable[[torch.nn.Module], bool] = lambda module: False,
    history: SizeHistory | None = None,
    data_ends: DataEnds | None = None,
    is_whole: bool = False,
) -> CapturedFrame:
    """Capture one call of a function, without running it and without changing anything that the user can see.

    Args:
        function: the Python function.
        arguments: one value per parameter in the order of ``argument_names``.
        is_module_call: the function is the ``forward`` of the module that is its first argument, called through the
            module, which must then have no hooks.
        cells_argument: the first argument is the tuple of the function's closure cells, which differ from call to
            call; the cells of ``function`` itself are not used.
        may_break: whether to end the graph at what has no rule, for this reason, and go on in a resume function.
        original_of: what a compiled function was made from, so that it is inlined instead of called.
        is_compiled_apart: whether calls of a module run a compiled form of its own, and hence are in no graph.
        history: which sizes and integers are symbolic; it learns from this call. By default all are static.
        data_ends: where data that the program reads end graphs, which this call adds to; by default they do everywhere,
            unless the settings say otherwise.
        is_whole: the frame is wanted as one graph, or an error.

    Returns:
        The captured frame. Where the function cannot be captured its ``runner`` is None and ``break_reason`` says why.

    Raises:
        PlainCall: this call must run as plain Python, because the program itself raises.
        CompileError: a size that the user marked as dynamic cannot be.
    """
    history = history or SizeHistory(dynamic=False)
    reads = DataReads(data_ends, may_end=not is_whole)
    call = _Call(
        function, arguments, is_module_call, cells_argument, original_of, is_compiled_apart, history, reads
    )
    if history.dynamic is not False:
        captured = _capture_symbolic(call, may_break)
        if captured is not None:
            return captured
        call = replace(call, history=SizeHistory(dynamic=False))
    return _capture_call(call, may_break)


def _capture_symbolic(call: _Call, may_break: Callable[[Unsupported], bool]) -> CapturedFrame | None:
    """A capture with symbolic sizes, None where that does not work: then the sizes of this call may."""
    try:
        captured = _capture_call(call, may_break)
        if captured.late_guards is not None:
            whole = type(compile_check(captured)(*call.arguments)) is list
            return captured if whole else None
    except Unsupported:
        return None
    except CompileError:
        raise
    except PlainCall as plain:
        if not plain.has_symbols:
            raise  # without symbols a second capture would meet the same
        return None
    except Exception as error:
        logger.info("%s: no capture with symbolic sizes: %s", call.function.__qualname__, error)
        return None
    return None if captured.break_reason is not None and not may_break(captured.break_reason) else captured


def _capture_call(call: _Call, may_break: Callable[[Unsupported], bool]) -> CapturedFrame:
    captured, step = _whole_or_without_data(call)
    if captured.break_reason is None or not may_break(captured.break_reason) or step is None:
        return captured
    # What was captured of the failing instruction must go, so the capture is made again up to it.
    reason = captured.break_reason
    if reason.reason_id in _OF_THE_WHOLE_FRAME:
        return captured
    shorter, _ = _attempt(call, step, reason)
    if shorter.runner is None:
        # Something that is alive there cannot be rebuilt: the break must come before it was made.
        earlier = _last_breakable_step(call, step)
        if earlier is not None:
            shorter, _ = _attempt(call, earlier, reason)
    if shorter.runner is not None:
        return shorter
    why = "" if shorter.break_reason is None else shorter.break_reason.explanation
    explanation = f"{reason.explanation} (the frame runs as plain Python: {why})"
    both = Unsupported(reason.reason_id, explanation, reason.hint, reason.location, reason.stack)
    return replace(captured, break_reason=both)


def _whole_or_without_data(call: _Call) -> tuple[CapturedFrame, int | None]:
    """A first attempt; one more, where it ends early and data were read without being asked."""
    try:
        captured, step = _attempt(call, None, None)
        if captured.break_reason is None or not call.data_reads:
            return captured, step
    except Exception:
        if not call.data_reads:
            raise
    call.data_reads.end_graphs()
    return _attempt(call, None, None)


# Python would run code of it when it is dropped, which is later where the frame's rest is a call of its own.
_DROPPED_GENERATOR = "dropped-generator"
# The frame runs as plain Python: a callee that recurs would be captured as deep, and so on.
_OF_THE_WHOLE_FRAME = frozenset(
    ["recursion", RESIZED_WITH_HISTORY, MEMORY_OF_A_VIEW, _DROPPED_GENERATOR, FINALIZER]
)


@dataclass(frozen=True)
class _Call:
    function: Any
    arguments: tuple[Any, ...]
    is_module_call: bool
    cells_argument: bool
    original_of: Callable[[Any], Any]
    is_compiled_apart: Callable[[torch.nn.Module], bool]
    history: SizeHistory
    data_reads: DataReads


def _last_breakable_step(call: _Call, end: int) -> int | None:
    """The last step before ``end`` at which everything can be rebuilt; near ones are tried first, for speed."""
    for begin in (max(0, end - _NEAR_STEPS), 0):
        found = _Watch(begin)
        _attempt(call, end, None, found)
        if found.step is not None:
            return found.step
    return None


@dataclass
class _Watch:
    """Notes the last step from ``begin`` on at which the capture could end."""

    begin: int
    step: int | None = None


def _attempt(
    call: _Call, stop_at_step: int | None, reason: Unsupported | None, watch: _Watch | None = None
) -> tuple[CapturedFrame, int | None]:
    """Capture until the end or until a step of the outermost frame; also the step at which it failed, if it did."""
    state = Capture(call.original_of, call.is_compiled_apart, call.history, call.data_reads)
    state.is_continuation = rest_of(call.function.__code__) is not None
    state.guards.gives(global_state, global_state(), "the modes of torch are the same")
    state.default_device, state.autocast_at_start = default_device(), autocast_state()
    state.attention_at_start = attention_kernels()
    try:
        with normal_tensors(), quiet_fakes():
            return _interpret(state, call, stop_at_step, reason, watch)
    except PlainCall as plain:
        plain.has_symbols = bool(state.sizes.symbols)
        raise
    finally:
        state.sizes.end_of_capture()


def _interpret(
    state: Capture, call: _Call, stop_at_step: int | None, reason: Unsupported | None, watch: _Watch | None
) -> tuple[CapturedFrame, int | None]:
    grad_mode = torch.is_grad_enabled()
    state.switches_at_start = read_switches()
    names = argument_names(call.function.__code__, call.cells_argument)
    frame = None
    try:
        frame = _start(state, call, dict(zip(names, call.arguments, strict=True)))
        frame.stop_at_step = stop_at_step
        if watch is not None:
            frame.before_step = functools.partial(_note_step, watch, state, frame, call)
        if call.is_module_call:
            module = state.realize(frame.variable(names[call.cells_argument]))
            assert isinstance(module, ModuleValue)
            if module.has_hooks(state):
                raise state.unsupported("module-hooks", f"{module.describe()} has hooks")
        with suppress(BreakRequested):
            frame.run()
        return _finish(state, frame, names, grad_mode, reason, call.cells_argument), None
    except Unsupported as error:
        step = None if frame is None or frame.steps == 0 else frame.steps - 1
        if config.verbose:
            error.add_note("".join(traceback.format_exception(error)))
        return CapturedFrame(None, state.all_guards(), names, None, error.without_frames()), step
    except SymbolicRaise as raised:
        raise PlainCall(f"the function raises {raised.value.describe()}") from None
    finally:
        for mode in reversed(state.open_modes):
            mode.__exit__(None, None, None)
        turn_back(state.switches_at_start)
        set_grad_enabled(grad_mode)


def _note_step(watch: _Watch, state: Capture, frame: Frame, call: _Call) -> None:
    if frame.steps < watch.begin:
        return
    try:
        writer = RunnerWriter(state)
        ending = BreakWriter(state, frame, writer, call.cells_argument)
        ending.check()
        _check_generators(state)
        ending.emit()
        writer.replay(state.effects)
        _check_inputs(state)
    except Unsupported:
        return
    watch.step = frame.steps


def _start(state: Capture, call: _Call, arguments: dict[str, Any]) -> Frame:
    function = call.function
    if call.cells_argument:
        passed = arguments.pop(CELLS_ARGUMENT)
        place = LocalSource(CELLS_ARGUMENT)
        cells = tuple(
            wrap_cell(state, cell, ItemSource(place, index, name))
            for index, (name, cell) in enumerate(zip(function.__code__.co_freevars, passed, strict=True))
        )
    else:
        cells = tuple(
            wrap_cell(state, cell, state.reference_source(name, cell))
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        )
    value = FunctionValue(function.__code__, function.__globals__, cells, [], {}, function, None)
    lazy: dict[str, Any] = {name: LazyValue(real, LocalSource(name)) for name, real in arguments.items()}
    if function.__code__.co_flags & (
        inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    ):
        raise Unsupported("generator", f"{function.__qualname__} is a generator or coroutine")
    frame, rest = Frame(state, value, lazy), rest_of(function.__code__)
    if rest is not None:
        enter(frame, rest)
    return frame


def _finish(
    state: Capture,
    frame: Frame,
    names: tuple[str, ...],
    grad_mode: bool,
    reason: Unsupported | None,
    cells_argument: bool,
) -> CapturedFrame:
    """Close the graph and write the runner; the frame has returned, or stands before the instruction to break at."""
    ending = None
    writer = RunnerWriter(state)
    if frame.result is None:
        ending = BreakWriter(state, frame, writer, cells_argument)
        ending.check()
    _check_generators(state)
    mode_lines = restore_modes(state, writer, grad_mode)
    if ending is None:
        assert frame.result is not None
        last_lines, points = [f"return {writer.emit(frame.result)}"], []
    else:
        ending.build()
        last_lines, points = ending.lines, ending.points
    writer.replay(state.effects)
    _guard_distinct(state)
    writes_inputs = _check_inputs(state)
    has_graph = state.graph.has_operations()
    graph = None
    if has_graph:
        if reason is not None:
            state.graph.required_options.update(REQUIRED_OPTIONS.get(reason.reason_id, {}))
        graph = state.graph.finish([*writer.outputs])
        if state.data_reads:
            state.guards.add([], *state.data_reads.guard())
            graph = replace(graph, end_at_data=state.data_reads.end_graphs)
        verify_captured_graph(graph)
    runner = writer.finish(names, has_graph, writes_inputs, [*mode_lines, *last_lines])
    late_guards = state.all_guards if state.sizes.symbols else None
    return CapturedFrame(
        graph, state.all_guards(), names, runner, reason, tuple(points), late_guards, writes_inputs
    )


def _check_generators(state: Capture) -> None:
    if any(generator.has_unfinished_blocks for generator in state.generators):
        raise state.unsupported(_DROPPED_GENERATOR, "a generator is dropped inside a try or with block")


def _guard_distinct(state: CaptureState) -> None:
    """Where an object was changed, other objects of its type must not turn out to be the same one."""
    changed = [
        getattr(container, "owner", None) or container for container in state.effects.containers.values()
    ]
    changed += state.effects.cells.values()
    changed += state.effects.attributes.values()
    others = [value for _, value in state.known.values() if value.source is not None]
    kinds: dict[type, tuple[list[Source], list[Source]]] = {}
    for value in {id(value): value for value in changed}.values():
        if value.source is not None and not isinstance(value, ConstantValue):
            kinds.setdefault(value.python_type(), ([], []))[0].append(value.source)
    for other in others:
        kind = kinds.get(other.python_type())
        if kind is not None and other.source is not None and other.source not in kind[0]:
            kind[1].append(other.source)
    for touched, untouched in kinds.values():
        if len(touched) + len(untouched) > 1:
            state.guards.all_distinct(touched, untouched)


def _check_inputs(state: Capture) -> bool:
    """Inputs that the graph writes to keep their metadata, and no other input may overlap them. Returns whether there
    are any.

    One may come to require gradients, as a buffer of zeros does to which results are added: the new value is stored
    under the eyes of autograd.
    """
    graph = state.graph
    tensors = [record for record in graph.records if isinstance(record.real, torch.Tensor)]
    owners: dict[int, list[InputRecord]] = {}
    for record in tensors:
        fake, real = record.entry.example, record.real
        assert isinstance(real, torch.Tensor)
        if fake.requires_grad < real.requires_grad or not has_layout(fake, record.layout):
            raise state.unsupported(
                "input-metadata", f"the function changes the metadata of {record.entry.source}"
            )
        for memory in {memory_of(inner) for inner in inner_tensors(real) if inner.numel()}:
            owners.setdefault(memory, []).append(record)
    changed = {index for index, record in enumerate(tensors) if graph.is_changed(record)}
    for shared in owners.values():
        written = next((record for record in shared if graph.is_changed(record)), None)
        if written is not None and len(shared) > 1:
            other = next(record for record in shared if record is not written)
            raise state.unsupported(
                "overlapping-inputs",
                f"{written.entry.source}, which is changed, shares memory with {other.entry.source}",
            )
    arrays = [record for record in tensors if isinstance(record.entry.source, ConvertedSource)]
    for index in sorted(changed):
        # Tensors of arrays begin where the array does, so that nothing tells whether two share memory.
        if tensors[index] in arrays and len(arrays) > 1:
            source = tensors[index].entry.source
            raise state.unsupported("overlapping-inputs", f"{source} is changed, beside other arrays")
        state.guards.no_overlap([record.entry for record in tensors], index)
    return bool(changed)
