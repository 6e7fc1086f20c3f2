"""``python -m tests.runtime.without_memory``: each allocation of Python's that the interpreters make fails in turn.

Prints how many calls ended in a MemoryError. A program of its own, since what is wrong here is a crash.
"""

import _testcapi
from array import array
from collections import OrderedDict

import torch

from gradsplit.compile_core.guard_checks.guard_interpreter import GuardOpcode as Guard
from gradsplit.compile_core.guard_checks.guard_interpreter import guard_interpreter
from gradsplit.compile_core.runtime.encode_program import EncodedProgram, Opcode
from gradsplit.compile_core.runtime.region_interpreter import region_interpreter
from gradsplit.compile_core.toolchain.torch_library import device_codes, dtype_code

ALLOCATIONS = 60


class Point:
    def __init__(self):
        self.keys = OrderedDict(x=1, y=2)

    @property
    def length(self):
        return [self.keys]


def guard_check():
    """A check that reads, calls and compares, and its argument."""
    constants = ("length", lambda value: [value], "keys", ("x", "y"))
    words = (
        *(4, Guard.ATTRIBUTE, 0, ~0, Guard.INSTANCE_DICT, 0, Guard.CALL, 0, ~1, 1, 0),
        *(Guard.ATTRIBUTE, 0, ~2, Guard.EXPRESSION, 0, ~1, 1, 1, Guard.KEYS, 1, 4, ~3, Guard.RETURN, 2, 1, 3),
    )
    check = guard_interpreter().bind(array("q", words).tobytes(), constants)
    point = Point()

    def call():
        found = check(point)
        assert type(found) is list, found

    return call


def region_run():
    """A region that allocates, makes views, calls and packs."""
    codes = (dtype_code(torch.float32), *device_codes(torch.device("cpu")))
    constants = (lambda: torch.empty(4), lambda *tensors: [tensors], lambda *tensors: tensors)
    words = (
        *(8, 1, Opcode.ALLOCATE, 1, *codes, 0, 1, 4, 1, Opcode.VIEW, 2, 1, 0, 2, 2, 2, 2, 1),
        *(Opcode.CALL, 1, -1, 3, 2, 1, 1, 2, 3, Opcode.PACK, 4, 1, 2, 1, 2, Opcode.PACK, 5, 0, 1, 3),
        *(Opcode.CALL, 2, -1, 4, 2, 3, 0, 1, 6, 7, -1, Opcode.RETURN, 3, 4, 5, 7),
    )
    run = region_interpreter().bind(EncodedProgram(array("q", words).tobytes(), constants, None), "größe")
    x = torch.ones(4)

    def call():
        (several, (one,), last) = run([x])
        assert len(several) == 2 and len(one) == 1 and last is several[0]

    return call


def addresses():
    """The addresses of many tensors."""
    tensors = [torch.ones(1) for _ in range(8)]
    expected = [tensor.data_ptr() for tensor in tensors]
    read = region_interpreter().addresses

    def call():
        assert read(tensors) == expected

    return call


def main():
    for make in (guard_check, region_run, addresses):
        call = make()
        call()
        failures = 0
        for allocation in range(ALLOCATIONS):
            try:
                _testcapi.set_nomemory(allocation, allocation + 1)
                try:
                    call()
                finally:
                    _testcapi.remove_mem_hooks()
            except MemoryError:
                failures += 1
        call()
        print(make.__name__, failures, flush=True)


if __name__ == "__main__":
    main()
