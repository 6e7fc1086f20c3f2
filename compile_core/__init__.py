"""gradsplit's compiler: ``compile_core.compile(model)`` in place of ``torch.compile(model)``."""

from compile_core.api import compile
from compile_core.backends.registry import list_backends, register_backend
from compile_core.errors import CompileError, InternalError, Unsupported
from compile_core.options import list_mode_options, list_options

__all__ = [
    "CompileError",
    "InternalError",
    "Unsupported",
    "compile",
    "list_backends",
    "list_mode_options",
    "list_options",
    "register_backend",
]
