"""What the kernel of landed means is tried with; run as a program, in Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from distributed.collectives.landed_mean import BLOCK, NARROW_TYPES, kernel_source

DTYPES = sorted(NARROW_TYPES, key=str)
# Less than a block, a block, several, and more than the programs have at once.
SIZES = (1, BLOCK, 3 * BLOCK + 17, 4096 * BLOCK + 5)

# Takes the buffer in which values have landed, the own values, the word that was told, and the narrow dtype.
Mean = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], object]


def check(mean: Mean, dtype: torch.dtype, numel: int, device: str = "cpu") -> None:
    generator = torch.Generator().manual_seed(numel)
    exact = [torch.randn(numel, generator=generator).to(dtype).to(device) for _ in range(2)]
    for narrow_own in (False, True):
        for narrow_other in (False, True):
            own, other = (
                values if narrow else values.float() + 2.0**-20
                for values, narrow in zip(exact, (narrow_own, narrow_other), strict=True)
            )
            expected = (own.float() + other.float()) * 0.5
            # What lies behind stays as it is.
            buffer = torch.full((numel + 64,), 7.0, device=device)
            if narrow_other:
                values = buffer[:numel].view(dtype)
                for begin in range(0, numel, BLOCK):
                    block = other[begin : begin + BLOCK]
                    values[2 * begin : 2 * begin + block.numel()] = block
            else:
                buffer[:numel] = other
            told = torch.tensor([2 if narrow_other else 4], dtype=torch.int32, device=device)
            mean(buffer[:numel], own, told, dtype)
            assert torch.equal(buffer[:numel], expected), (numel, narrow_own, narrow_other)
            assert bool((buffer[numel:] == 7).all())


def main(folder: Path) -> None:
    # Whose module chooses the interpreter when it is imported.
    from tests.lowering.interpreted_kernels import interpreted

    for dtype in DTYPES:
        # The interpreter runs one program after the other.
        kernel = interpreted(kernel_source(dtype, torch.device("cuda", 0), programs=2), folder)

        def mean(
            means: torch.Tensor,
            own: torch.Tensor,
            told: torch.Tensor,
            dtype: torch.dtype,
            kernel: Callable[..., None] = kernel,
        ) -> None:
            landed = means.view(dtype)
            narrow, wide = (own, means) if own.dtype == dtype else (landed, own)
            kernel(means, landed, narrow, wide, told, torch.tensor([own.numel(), own.itemsize]))

        for numel in (1, BLOCK, 5 * BLOCK + 17):
            check(mean, dtype, numel)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
