"""``python -m tests.torch_facts.without_each_part NAME…``: imports gradsplit and trains a plain model in a torch that
lacks one private part, for each of those that are named; prints what is wrong.

Run as a program of its own, since each of its forked processes imports gradsplit anew.
"""

import os
import pkgutil
import sys
import traceback

import networkx  # noqa: F401 -- loaded once, for all processes
import sympy  # noqa: F401
import torch
import torch.distributed.pipelining
import torch.fx.experimental.proxy_tensor
import torch.fx.experimental.symbolic_shapes
import torch.nn.parallel.distributed
import triton  # noqa: F401


def train_without(name: str) -> None:
    """Trains with the part missing.

    Raises:
        Exception: the import or a call fails, or a gradient differs.
    """
    resolve = pkgutil.resolve_name

    def find(wanted: str) -> object:
        if wanted == name:
            raise AttributeError(wanted)
        return resolve(wanted)

    pkgutil.resolve_name = find
    import gradsplit
    import gradsplit.distributed
    from gradsplit.compile_core.capture.guards.guard_interpreter import guard_interpreter
    from gradsplit.compile_core.torch_facts import layouts
    from gradsplit.compile_core.torch_facts.private_parts import PRIVATE_PARTS, missing_parts

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


def main(names: list[str]) -> None:
    for name in names:
        child = os.fork()
        if child == 0:
            try:
                train_without(name)
            except BaseException:
                print(f"without {name}:\n{traceback.format_exc()}", flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
