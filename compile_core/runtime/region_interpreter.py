"""Loads the interpreter of regions.

What a region does between its kernels (allocating, freeing, calling, launching) costs more than many kernels take when
Python does it: some 20 microseconds a kernel on a GPU, a fifth of that in C. So where ``region_interpreter.cpp`` can be
built, one call from Python runs a region; see ``encode_program`` for its instructions. Elsewhere the function runs that
``write_program`` writes.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gradsplit.compile_core.runtime.encode_program import EncodedProgram, Opcode
from gradsplit.compile_core.runtime.native_operators import SIGNATURES, Kind
from gradsplit.compile_core.toolchain.cpp_compiler import builtin_function
from gradsplit.compile_core.toolchain.torch_library import LoadErrors, address_of, cpp_enum, load_library
from gradsplit.compile_core.torch_facts.cuda import current_device, current_raw_stream

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
_TORCH_SYMBOLS = {
    "gs_empty_strided": "aoti_torch_empty_strided",
    "gs_view": "aoti_torch__reinterpret_tensor",
    "gs_delete": "aoti_torch_delete_tensor_object",
    "gs_get_data_ptr": "aoti_torch_get_data_ptr",
    "gs_wrap": "_Z16THPVariable_WrapRKN2at10TensorBaseE",
}
_PROFILER_SYMBOLS = {
    "gs_record_start": "aoti_record_function_start",
    "gs_record_end": "aoti_record_function_end",
    "gs_has_listeners": "_ZN2at12hasCallbacksEv",
}
_DRIVER = "libcuda.so.1"
_DRIVER_SYMBOLS = {"gs_launch_kernel": "cuLaunchKernel", "gs_current_context": "cuCtxGetCurrent"}

_CALLABLE = ", ".join(
    f"Signature<{', '.join(kind.name for kind in signature)}>::call" for signature in SIGNATURES
)
OPCODES = f"{cpp_enum(Opcode)}{cpp_enum(Kind)}#define GS_SIGNATURES {_CALLABLE}\n"

# What a linked region is: it takes inputs and destinations in a list, which it empties.
Run = Callable[[list[torch.Tensor]], Sequence[Any]]


class RegionInterpreter:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        # Where the tensors of a list begin, -1 for ``None``.
        self.addresses: Callable[[list[Any]], list[int | None]] = builtin_function(library, "gs_addresses")

    def bind(self, program: EncodedProgram, filename: str) -> Run:
        """The function that runs a program, whose tracebacks name a file."""
        run = builtin_function(self._library, "gs_run", (program.words, program.constants, filename))
        return run if program.device is None else _on_device(run, program.device)


def _on_device(run: Callable[..., Any], device: torch.device) -> Run:
    """Launches on the current stream of the device, whichever device is current."""
    index = device.index

    def run_on_device(arguments: list[torch.Tensor]) -> Sequence[Any]:
        if current_device() == index:
            return run(arguments, current_raw_stream(index))
        with torch.cuda.device(index):
            return run(arguments, current_raw_stream(index))

    return run_on_device


@cache
def region_interpreter() -> RegionInterpreter | None:
    """The interpreter, built if need be; None where it cannot be had."""
    try:
        library = load_library(_SOURCE, _TORCH_SYMBOLS, OPCODES)
    except LoadErrors as error:
        logger.info("regions are run by generated Python: %s", error)
        return None
    ctypes.c_void_p.in_dll(library, "gs_tensor_type").value = id(torch.Tensor)
    listening = {name: address_of(symbol) for name, symbol in _PROFILER_SYMBOLS.items()}
    if None not in listening.values():  # else profilers see the operators that Python calls, and no kernels
        for name, address in listening.items():
            ctypes.c_void_p.in_dll(library, name).value = address
    if torch.cuda.is_available():
        try:
            _find_driver(library)
        except (OSError, AttributeError) as error:
            logger.info("kernels are launched from Python: %s", error)
    return RegionInterpreter(library)


def _find_driver(library: ctypes.CDLL) -> None:
    driver = ctypes.CDLL(_DRIVER)
    for name, symbol in _DRIVER_SYMBOLS.items():
        address = ctypes.cast(getattr(driver, symbol), ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(library, name).value = address
