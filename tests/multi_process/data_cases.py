"""What graphs assume of data, beside collectives: on one rank an assumption does not hold, on the other it does.

``fork_ranks(["-m", "tests.multi_process.data_cases"])``. Each call sums up a tensor over two ranks; a graph that one
rank ran a second time would be answered with the other's next call.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import gradsplit
from gradsplit.compile_core import config

_BACKENDS = ("eager", "aot_eager", "triton")


# The first group of a process.
_GROUP = "0"


def _sum(x: Tensor) -> Tensor:
    started = torch.ops._c10d_functional.all_reduce(x * 1, "sum", _GROUP)
    return torch.ops._c10d_functional.wait_tensor(started)


def summed_before(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x = _sum(x)
    if not torch.isfinite(y).all():
        y = y.clamp(max=1e30)
    return x * 2, y + 1


def summed_behind(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if not torch.isfinite(y).all():
        y = y.clamp(max=1e30)
    return _sum(x) * 2, y + 1


def of_one_length(x: Tensor, y: Tensor) -> Tensor:
    """Adding says that as many are greater as are less."""
    return _sum(x)[: len(y)] * (y[y > 0] + y[y < 0]).sum()


def unasked(rank: int) -> None:
    for program in (summed_before, summed_behind):
        for backend in _BACKENDS:
            made = gradsplit.compile(program, backend=backend)
            for call in range(4):
                x, y = torch.full((3,), call + 1.0), torch.ones(3)
                if call == 1 and rank == 0:
                    y[0] = float("inf")
                found, other = made(x, y)
                assert found.tolist() == [4.0 * (call + 1)] * 3, (program.__name__, backend, call, found)
                assert other[1] == 2 and other[0].isfinite()
            print(f"{program.__name__} {backend}: as plain", flush=True)


def asked_for(rank: int) -> None:
    """The rank whose assumption fails says so, and does not wait for another that has gone on."""
    config.capture_dynamic_output_shape_ops = True
    for backend in _BACKENDS:
        made = gradsplit.compile(of_one_length, backend=backend, fullgraph=True)
        balanced, other = torch.tensor([1.0, -1, 2, -2]), torch.tensor([1.0, 1, 2, -2])
        assert made(torch.ones(4), balanced).tolist() == [0.0] * 4
        try:
            made(torch.ones(4), other if rank == 0 else balanced)
        except RuntimeError as error:
            assert rank == 0 and "assumed of data" in str(error), error
            assert "not run again" in " ".join(error.__notes__)
        else:
            assert rank == 1
        dist.barrier()
        print(f"of_one_length {backend}: told", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    try:
        unasked(dist.get_rank())
        asked_for(dist.get_rank())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
