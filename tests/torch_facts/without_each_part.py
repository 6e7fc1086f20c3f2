"""``python -m tests.torch_facts.without_each_part [NAME…]``: imports gradsplit and trains a plain model in a torch that
lacks one private part, for each of those that are named, or of all; prints what is wrong.

Run as a program of its own, since gradsplit is imported anew for each part. All share the imports before the part is
looked up: a process is forked at the lookup, which misses the part there and goes on without it.
"""

import gc
import os
import pkgutil
import subprocess
import sys
import traceback

import bytecode  # noqa: F401 -- loaded once, for all processes
import networkx  # noqa: F401
import rich.console
import rich.table  # noqa: F401
import safetensors.torch  # noqa: F401
import sympy  # noqa: F401
import torch
import torch.distributed.pipelining
import torch.fx.experimental.proxy_tensor
import torch.fx.experimental.symbolic_shapes
import torch.nn.parallel.distributed
import triton  # noqa: F401


class MissingParts:
    """Stands for ``pkgutil.resolve_name``: forks at the first lookup of each part, and the fork misses it.

    Attributes:
        waiting: the parts that have not been looked up.
        missing: the one that this process misses; "" in the first process, which has all.
        failed: those without which something was wrong.
    """

    def __init__(self, names: list[str]) -> None:
        self.waiting = set(names)
        self.missing = ""
        self.failed: list[str] = []
        self._resolve = pkgutil.resolve_name

    def find(self, wanted: str) -> object:
        if wanted in self.waiting:
            self.fork(wanted)
        if wanted == self.missing:
            raise AttributeError(wanted)
        return self._resolve(wanted)

    def fork(self, name: str) -> None:
        """Begins a process without the part, and returns in both; here when the other has ended."""
        self.waiting.remove(name)
        child = os.fork()
        if child == 0:
            self.missing, self.waiting = name, set()
        elif os.waitpid(child, 0)[1]:
            self.failed.append(name)


def train(parts: MissingParts) -> None:
    """Trains with the part missing; an exception says that the import or a call fails, or that a gradient differs."""
    import gradsplit
    import gradsplit.distributed
    from gradsplit.compile_core.guard_checks.guard_interpreter import guard_interpreter
    from gradsplit.compile_core.torch_facts import layouts
    from gradsplit.compile_core.torch_facts.private_parts import PRIVATE_PARTS, missing_parts

    for name in sorted(parts.waiting):  # those that are not looked up by an import
        if not parts.missing:
            parts.fork(name)
    name = parts.missing
    if name.startswith("offset"):
        layouts.word_at = lambda address, offset: 0
        assert guard_interpreter() is None

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    x = torch.randn(5, 3)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    compiled = gradsplit.compile(model, backend="aot_eager")
    compiled(x).sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert name not in PRIVATE_PARTS or not PRIVATE_PARTS[name].present
    assert (compiled is model) == bool(missing_parts())


def every_part() -> list[str]:
    """The names of all parts, from a process that looks them up before this one does."""
    program = """
from gradsplit.support import private_parts_table
from gradsplit.compile_core.torch_facts.private_parts import PRIVATE_PARTS
import gradsplit.distributed
private_parts_table()
print(*PRIVATE_PARTS, sep="\\n")
"""
    run = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    return run.stdout.splitlines()


def main(names: list[str]) -> int:
    names = names or every_part()
    gc.disable()  # a collection would copy what the processes share
    parts = MissingParts(names)
    pkgutil.resolve_name = parts.find
    first = os.getpid()
    failed = 0
    try:
        train(parts)
    except BaseException:
        print(f"without {parts.missing or 'nothing'}:\n{traceback.format_exc()}", flush=True)
        failed = 1
    if os.getpid() != first:
        os._exit(failed)
    assert not parts.waiting, parts.waiting
    return failed or int(bool(parts.failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
