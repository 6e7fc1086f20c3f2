"""The front end: from a Python function and its arguments to a graph, without running the function."""

from gradsplit.compile_core.capture.capture_frame import argument_names, capture
from gradsplit.compile_core.capture.graph_breaks import following, plain_call, resume_function
from gradsplit.compile_core.capture.object_model.modules import COMPILED_APART
from gradsplit.compile_core.capture.open_numbers.size_history import SizeHistory
from gradsplit.compile_core.capture.run_only import run_only
from gradsplit.compile_core.capture.torch_rules.global_state import must_run_plain, normal_tensors
from gradsplit.compile_core.capture.values.base import PlainCall

__all__ = [
    "COMPILED_APART",
    "PlainCall",
    "SizeHistory",
    "argument_names",
    "capture",
    "following",
    "must_run_plain",
    "normal_tensors",
    "plain_call",
    "resume_function",
    "run_only",
]
