"""Chooses for each matrix product on a GPU between torch's kernel and generated ones, by timing them.

What is timed are the steps as the program would run them: torch's kernel and the nest that follows it, against one
kernel that does both, in several tiles. The times are kept in the build cache, for products of the same sizes, layouts,
dtypes and epilogues on the same kind of GPU with the same versions.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from gradsplit.compile_core.ir.loops import LoopProgram, ProductNest, ProductTile, Step
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.build import generate, start_build
from gradsplit.compile_core.lowering.products.fuse_products import (
    ReplaceableSteps,
    find_products,
    with_products,
)
from gradsplit.compile_core.lowering.tiling.tiling_triton import power_of_two
from gradsplit.compile_core.lowering.triton_kernels.build_triton import triton_version
from gradsplit.compile_core.toolchain.disk_cache import DiskCache, content_key

logger = logging.getLogger(__name__)

# A link of steps to a function of their buffers; given by the backend, since linking lies above the lowering.
RunSteps = Callable[[LoopProgram], Callable[[list[torch.Tensor]], object]]

_TILES = (
    ProductTile(128, 256, 64, 3, 8),
    ProductTile(256, 128, 64, 3, 8),
    ProductTile(128, 128, 64, 4, 8),
    ProductTile(128, 128, 32, 4, 4),
    ProductTile(128, 64, 64, 4, 4),
    ProductTile(64, 128, 64, 4, 4),
    ProductTile(64, 64, 64, 4, 4),
    ProductTile(64, 32, 64, 4, 4),
    ProductTile(32, 64, 64, 4, 4),
)
_FILE = "seconds.json"
_TORCHS_KERNEL = "torch"
_ROUNDS, _RUNS_A_ROUND = 5, 10
_NOISE = 0.02  # a kernel must be faster than torch's by more than this

# Key of a product -> its tile, or None for torch's kernel.
_known: dict[str, ProductTile | None] = {}


def choose_products(
    program: LoopProgram, cache_folder: Path, with_epilogues: bool, run_steps: RunSteps
) -> LoopProgram:
    """The program with generated kernels in the place of torch's products where they are faster.

    Args:
        program: fused and ready for code generation.
        cache_folder: where times are kept.
        with_epilogues: let nests that read a product join it.
        run_steps: makes a program callable, for timing.
    """
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    chosen = []
    for candidate in find_products(program, precision, with_epilogues):
        tile = _tile_for(candidate, program, cache_folder, run_steps)
        if tile is not None:
            chosen.append(replace(candidate, product=replace(candidate.product, tile=tile)))
    return with_products(program, chosen)


def tiles_for(product: ProductNest, dtype: torch.dtype) -> list[ProductTile]:
    """The tiles worth trying: none much larger than the matrices, and blocks of one size in bytes for all dtypes."""
    rows, inner = product.left.shape[-2:]
    columns = product.right.shape[-1]
    tiles = [
        tile if dtype.itemsize == 2 else replace(tile, inner=tile.inner // 2)
        for tile in _TILES
        if (tile.rows < 2 * rows or tile.rows <= 32) and (tile.columns < 2 * columns or tile.columns <= 32)
    ]
    fitting = (replace(tile, inner=max(16, min(tile.inner, power_of_two(inner)))) for tile in tiles)
    return list(dict.fromkeys(fitting))


def _tile_for(
    candidate: ReplaceableSteps, program: LoopProgram, cache_folder: Path, run_steps: RunSteps
) -> ProductTile | None:
    product = candidate.product
    source = generate(product, program.buffers)
    replaced = [program.steps[position] for position in candidate.positions]
    gpu = torch.cuda.get_device_name(source.device)
    versions = (torch.__version__, triton_version())
    key = content_key("product", source.text, repr(source.pointers), str(len(replaced)), gpu, *versions)
    if key in _known:
        return _known[key]

    def fill(folder: Path) -> None:
        tiles = tiles_for(product, program.buffers[product.left.buffer].dtype)
        for tile in tiles:  # all compile while the first are timed
            start_build([generate(replace(product, tile=tile), program.buffers)], cache_folder)
        seconds_of: dict[str, float] = {_TORCHS_KERNEL: _seconds(replaced, program, run_steps)}
        for tile in tiles:
            try:
                step = replace(product, tile=tile)
                seconds_of[_name(tile)] = _seconds([step], program, run_steps)
            except Exception as error:
                # A tile may need more registers or shared memory than the GPU has.
                logger.info("%s cannot have the tile %s: %s", product.name, _name(tile), error)
        (folder / _FILE).write_text(json.dumps(seconds_of))

    try:
        with DiskCache(cache_folder).entry(key, fill) as folder:
            seconds_of: dict[str, float] = json.loads((folder / _FILE).read_text())
    except RuntimeError as error:
        logger.warning(
            "%s was not timed: %s", product.name, error
        )  # no memory for a second set of tensors, say
        return None
    seconds_of[_TORCHS_KERNEL] *= 1 - _NOISE
    best = min(seconds_of, key=lambda name: seconds_of[name])
    logger.info("%s: %s of %s", product.name, best, seconds_of)
    _known[key] = None if best == _TORCHS_KERNEL else ProductTile(*map(int, best.split("-")))
    return _known[key]


def _name(tile: ProductTile) -> str:
    return "-".join(map(str, (tile.rows, tile.columns, tile.inner, tile.stages, tile.warps)))


def _seconds(steps: Sequence[Step], program: LoopProgram, run_steps: RunSteps) -> float:
    """The time of some steps of a program on the GPU, on made-up data."""
    written = frozenset().union(*(writes(step) for step in steps))
    read = sorted(frozenset().union(*(reads(step) for step in steps)) - written)
    part = replace(
        program,
        inputs=tuple(read),
        destinations=tuple(sorted(written)),
        constants={},
        steps=tuple(steps),
        outputs=(),
    )
    run = run_steps(part)
    tensors = [_made_up(program.buffers[name]) for name in (*part.inputs, *part.destinations)]
    device = tensors[0].device
    with torch.cuda.device(device), torch.no_grad():
        for _ in range(3):
            run([*tensors])
        times_ms = []
        for _ in range(_ROUNDS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(_RUNS_A_ROUND):
                run([*tensors])
            end.record()
            end.synchronize()
            times_ms.append(start.elapsed_time(end))
    return statistics.median(times_ms) / _RUNS_A_ROUND / 1000


def _made_up(spec: TensorSpec) -> torch.Tensor:
    tensor = spec.empty()
    if spec.dtype.is_floating_point:
        with torch.random.fork_rng([spec.device]):
            return tensor.normal_()
    return tensor.zero_()
