"""What the kernel of means is tried with; run as a program, in Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from gradsplit.distributed.collectives.mean_kernel import kernel_source

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Less than a block, a block, several, and more than the programs have at once.
SIZES = (1, 4096, 10_001, 8192 * 4096 + 17)

Mean = Callable[[torch.Tensor, torch.Tensor, int], object]


def check(mean: Mean, dtype: torch.dtype, numel: int, divisor: int, device: str = "cpu") -> None:
    generator = torch.Generator().manual_seed(numel)
    first, second = (torch.randn(numel, generator=generator).to(device, dtype) for _ in range(2))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    factor = torch.tensor(1 / divisor, dtype=wide, device=device)
    expected = ((first.to(wide) + second.to(wide)) * factor).to(dtype)
    # What lies behind stays as it is.
    held = torch.cat([first, first.new_full((64,), 7.0)])
    mean(held[:numel], second, divisor)
    assert torch.equal(held[:numel], expected)
    assert bool((held[numel:] == 7).all())


def main(folder: Path) -> None:
    # Whose module chooses the interpreter when it is imported.
    from tests.lowering.interpreted_kernels import interpreted

    for dtype in DTYPES:
        # The interpreter runs one program after the other.
        kernel = interpreted(kernel_source(dtype, torch.device("cuda", 0), programs=2), folder)

        def mean(
            part: torch.Tensor, other: torch.Tensor, divisor: int, kernel: Callable[..., None] = kernel
        ) -> None:
            kernel(part, other, torch.tensor([part.numel(), divisor]))

        for divisor in (1, 2, 3):
            check(mean, dtype, 10_001, divisor)
        for numel in (1, 4096, 5 * 4096):
            check(mean, dtype, numel, 2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
