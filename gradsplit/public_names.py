"""What ``gradsplit`` has to offer, as its own attributes."""

import gradsplit.bucketing as bucketing
import gradsplit.distributed as distributed
from gradsplit.compile_core import config
from gradsplit.compile_core.backends.compile_elsewhere import wait_for_compilations
from gradsplit.compile_core.backends.registry import list_backends, register_backend
from gradsplit.compile_core.capture.directives import (
    allow_in_graph,
    assume_constant_result,
    disallow_in_graph,
    graph_break,
    is_compiling,
)
from gradsplit.compile_core.capture.numpy_arrays.numpy_wrapper import wrap_numpy
from gradsplit.compile_core.capture.open_numbers.size_marks import (
    mark_dynamic,
    mark_static,
    maybe_mark_dynamic,
)
from gradsplit.compile_core.compiled_calls.compiled_function import reset
from gradsplit.compile_core.errors import CompileError, InternalError, Unsupported
from gradsplit.compile_core.export.export_call import export
from gradsplit.compile_core.export.exported import Exported, load_export
from gradsplit.compile_core.export.folder import ExportError
from gradsplit.compile_core.interface import testing
from gradsplit.compile_core.interface.api import compile
from gradsplit.compile_core.interface.disable import disable
from gradsplit.compile_core.interface.explain import explain
from gradsplit.compile_core.interface.replay import replay
from gradsplit.compile_core.interface.run import run
from gradsplit.compile_core.observe.compile_profiler import CompileProfiler
from gradsplit.compile_core.observe.stage_times import compile_times
from gradsplit.compile_core.options import list_mode_options, list_options

__all__ = [
    "CompileError",
    "CompileProfiler",
    "ExportError",
    "Exported",
    "InternalError",
    "Unsupported",
    "allow_in_graph",
    "assume_constant_result",
    "bucketing",
    "compile",
    "compile_times",
    "config",
    "disable",
    "disallow_in_graph",
    "distributed",
    "explain",
    "export",
    "graph_break",
    "is_compiling",
    "list_backends",
    "list_mode_options",
    "list_options",
    "load_export",
    "mark_dynamic",
    "mark_static",
    "maybe_mark_dynamic",
    "register_backend",
    "replay",
    "reset",
    "run",
    "testing",
    "wait_for_compilations",
    "wrap_numpy",
]
