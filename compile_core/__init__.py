"""gradsplit's compiler: ``compile_core.compile(model)`` in place of ``torch.compile(model)``."""

from compile_core import config, testing
from compile_core.api import compile
from compile_core.backends.registry import list_backends, register_backend
from compile_core.capture.directives import (
    allow_in_graph,
    assume_constant_result,
    disallow_in_graph,
    graph_break,
    is_compiling,
)
from compile_core.capture.numpy_arrays.numpy_wrapper import wrap_numpy
from compile_core.capture.open_numbers.size_marks import mark_dynamic, mark_static, maybe_mark_dynamic
from compile_core.compiled_function import reset
from compile_core.disable import disable
from compile_core.errors import CompileError, InternalError, Unsupported
from compile_core.explain import explain
from compile_core.observe.compile_profiler import CompileProfiler
from compile_core.observe.stage_times import compile_times
from compile_core.options import list_mode_options, list_options
from compile_core.run import run

__all__ = [
    "CompileError",
    "CompileProfiler",
    "InternalError",
    "Unsupported",
    "allow_in_graph",
    "assume_constant_result",
    "compile",
    "compile_times",
    "config",
    "disable",
    "disallow_in_graph",
    "explain",
    "graph_break",
    "is_compiling",
    "list_backends",
    "list_mode_options",
    "list_options",
    "mark_dynamic",
    "mark_static",
    "maybe_mark_dynamic",
    "register_backend",
    "reset",
    "run",
    "testing",
    "wrap_numpy",
]
