"""Pipelines of small models beside the same models unsplit, on the ranks that this program is started on.

    python -m gradsplit.launch --nproc-per-node 2 -m tests.distributed.pipeline.pipeline_cases \\
        [--cuda] [--lanes] [--late] [--recorded] [--open] [--own-kernels] FOLDER MODEL... -- SCHEDULE...

With ``--cuda`` ranks have a GPU each. With ``--lanes`` messages go as over NCCL, which has no tags, and with ``--late``
what torch's schedules send is read as late as it may be there. With ``--recorded`` stages replay recordings, as CUDA
graphs are. With ``--open`` each step has other sizes. Losses, gradients, buffers and the state of the generator must be
equal bit for bit with torch's kernels, and within rounding with generated ones.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.export import Dim

import gradsplit
from gradsplit.compile_core import pipeline as stages_of_compilation
from gradsplit.compile_core.runtime.cuda_graphs import graph_programs
from gradsplit.distributed.pipeline import load_stage as load_stage_file
from gradsplit.distributed.pipeline import stage_programs
from gradsplit.distributed.pipeline.draws import state_of
from gradsplit.distributed.pipeline.export_pipeline import export_pipeline
from gradsplit.distributed.pipeline.load_stage import load_stage
from tests.distributed.pipeline.late_messages import LateMessages
from tests.distributed.pipeline.tied_model import chain, tied
from tests.runtime.recorder_on_cpu import LendingRecorder

CPU = torch.device("cpu")
# What is added to the sizes of a microbatch in each step, where they are open: to the first dim, and to the last.
GROWTH = ((0, 0), (0, -3), (1, 4), (0, 0))
SINGLE = ("GPipe", "1F1B")
# Of float32, in parts of a tensor's greatest value.
# Stages of earlier cases, which one rank still has: elsewhere they were garbage, and are collected.
KEPT: list[Any] = []
_ROUNDING = 1e-5
IN_A_V = ("ZBVZeroBubble", "DualPipeV")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")


def grown(kwargs: dict[str, Tensor], more: tuple[int, int]) -> dict[str, Tensor]:
    """A microbatch of another size, with values of this one."""
    found = {}
    for key, value in kwargs.items():
        for dim, add in list(zip((0, -1), more, strict=True))[-value.dim() :]:
            value = torch.cat([value, value.roll(1, dim)], dim).narrow(dim, 0, value.shape[dim] + add)
        found[key] = value
    return found


def chunks(kwargs: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """A batch of ``count`` microbatches that differ."""
    return {
        key: torch.cat([value.roll(k, -1) if key != "attention_mask" else value for k in range(count)])
        for key, value in kwargs.items()
    }


def unsplit(model: Any, batch: dict[str, Tensor], count: int, is_reversed: bool) -> list[Tensor]:
    """Accumulates the gradients of all microbatches; returns their losses."""
    parts = {key: value.chunk(count) for key, value in batch.items()}
    losses = [model(**{key: part[k] for key, part in parts.items()})["loss"] for k in range(count)]
    for loss in reversed(losses) if is_reversed else losses:
        loss.backward()
    return [loss.detach() for loss in losses]


def stages_of_rank(schedule: str, num_stages: int) -> list[int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    if schedule in IN_A_V:
        return [rank, num_stages - 1 - rank]
    return list(range(rank, num_stages, world))


def differences(
    model: nn.Module, stages: list[Any], losses: list[Tensor], expected: list[Tensor], tolerance: float
) -> Iterator[str]:
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    # Some gradients are zero but for rounding, such as those of a bias of keys.
    greatest = max(float(one.grad.abs().max()) for one in parameters.values() if one.grad is not None)

    def differs(found: Tensor, wanted: Tensor) -> bool:
        if tolerance == 0:
            return not torch.equal(found, wanted)
        scale = max(float(wanted.abs().max()), 0.1 * greatest)
        return not torch.allclose(found, wanted, rtol=tolerance, atol=tolerance * scale)

    for stage in stages:
        if stage.is_last:
            for k, (found, wanted) in enumerate(zip(losses, expected, strict=True)):
                if differs(found, wanted):
                    yield f"loss {k}: {found.item()} against {wanted.item()}"
        for name, parameter in stage.submod.named_parameters():
            wanted = parameters[name].grad
            if (parameter.grad is None) != (wanted is None):
                yield f"{name}: a gradient on one side only"
            elif wanted is not None and differs(parameter.grad, wanted):
                yield f"{name}: {(parameter.grad - wanted).abs().max().item():.3g} of {wanted.abs().max():.3g}"
        for name, buffer in stage.submod.named_buffers():
            if name in buffers and differs(buffer, buffers[name]):
                yield f"buffer {name}"


def run_case(
    folder: Path,
    make: Callable[[], tuple[nn.Module, dict[str, Tensor]]],
    schedule: str,
    stages_per_rank: int,
    microbatches: int,
    has_own_kernels: bool,
    mode: str | None,
    device: torch.device,
    steps: int,
    is_open: bool,
) -> list[str]:
    """What differs from the unsplit model on this rank."""
    torch.manual_seed(0)
    model, kwargs = make()
    model.train().to(device)
    kwargs = {key: value.to(device) for key, value in kwargs.items()}
    num_stages = stages_per_rank * dist.get_world_size()
    place = folder / f"stages_{num_stages}"
    # A call by position where an argument has the name of one of step()'s.
    by_position = "target" in kwargs
    dims = {key: {0: Dim.DYNAMIC, value.dim() - 1: Dim.DYNAMIC} for key, value in kwargs.items()}
    writes = dist.get_rank() == 0 and not place.exists()
    # Llama asks whether it is compiled, and takes another attention then.
    asks = type(model).__name__ == "LlamaForCausalLM"
    whole: nn.Module = model
    if writes or asks:
        exported = gradsplit.export(
            model,
            tuple(kwargs.values()) if by_position else (),
            None if by_position else kwargs,
            dynamic_shapes=dims if is_open else None,
            strict=False,
        )
        whole = exported.module() if asks else model
        if writes:
            export_pipeline(exported, (), num_stages, folder=place)
    dist.barrier()
    if not KEPT:
        gc.collect()
    stages = [
        load_stage(place, k, device, backend=None if has_own_kernels else "aot_eager", mode=mode)
        for k in stages_of_rank(schedule, num_stages)
    ]
    if dist.get_rank():
        KEPT.extend(stages)
    tolerance = _ROUNDING if has_own_kernels else 0.0
    stages.sort(key=lambda stage: stage.stage_index)
    made = torch_schedules.get_schedule_class(schedule)(
        stages[0] if schedule in SINGLE else stages,
        microbatches,
        loss_fn=lambda output, target: output["loss"],
        scale_grads=False,
    )
    found = []
    compiled = COMPILED.count
    for step in range(steps):
        more = GROWTH[step % len(GROWTH)] if is_open else (0, 0)
        batch = chunks(grown(kwargs, more), microbatches)
        torch.manual_seed(step)
        expected = unsplit(whole, batch, microbatches, schedule == "LoopedBFS")
        after = state_of(device)
        torch.manual_seed(step)
        losses: list[Tensor] = []
        target = torch.zeros(microbatches, device=device)
        args, named = (tuple(batch.values()), {}) if by_position else ((), batch)
        made.step(*args, target=target, losses=losses, return_outputs=False, **named)
        if not torch.equal(after, state_of(device)):
            found.append("the generator")
        found += differences(model, stages, losses, expected, tolerance)
        # Both sides take a step, so the next one tells whether weights reach those who borrow them.
        with torch.no_grad():
            for parameter in (
                *model.parameters(),
                *(p for stage in stages for p in stage.submod.parameters()),
            ):
                if parameter.grad is not None and tolerance == 0:
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None
    if COMPILED.count != compiled + len(stages):
        found.append(f"{len(stages)} stages were compiled {COMPILED.count - compiled} times")
    return found


class _Counting:
    """Counts what stages compile."""

    def __init__(self) -> None:
        self.count = 0
        self._compile = stage_programs.compile_module
        stage_programs.compile_module = self  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._compile(*args, **kwargs)


COMPILED = _Counting()


def models_of(names: list[str]) -> dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]]:
    small = {"tied": tied, "chain": chain}
    if small.keys() >= {*names}:
        return small
    # Not without need: transformers takes a while to import.
    from tests.export.exported_models import MODELS

    def t5_of_two_lengths() -> tuple[nn.Module, dict[str, Tensor]]:
        model, kwargs = MODELS["t5"]()
        return model, {**kwargs, "labels": kwargs["labels"][:, :6].contiguous()}

    return {**small, **MODELS, "t5_of_two_lengths": t5_of_two_lengths}


def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--cuda", "--lanes", "--late", "--recorded", "--open", "--own-kernels"):
        parser.add_argument(option, action="store_true")
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="+")
    split = sys.argv.index("--")
    options, schedules = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    device, recorder = CPU, LendingRecorder()
    if options.cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if options.lanes:
        load_stage_file.backend_of = lambda group, device: "nccl"
    if options.late:
        LateMessages().take_place(pytest.MonkeyPatch())
    if options.recorded and device == CPU:
        stages_of_compilation.with_cuda_graphs = functools.partial(graph_programs, recorder=recorder)
    makers = models_of(options.models)
    dist.init_process_group("gloo" if device == CPU else "cpu:gloo,cuda:nccl")
    failures = 0
    for model, schedule in itertools.product(options.models, schedules):
        per_rank = (1,) if schedule in SINGLE else (2,) if schedule in IN_A_V else (1, 2)
        for count in per_rank:
            microbatches = 2 * count * dist.get_world_size()
            found = run_case(
                options.folder / model,
                makers[model],
                schedule,
                count,
                microbatches,
                has_own_kernels=options.own_kernels,
                mode="reduce-overhead" if options.recorded else None,
                device=device,
                steps=(4 if options.recorded or options.open else 2)
                * (3 if options.recorded and options.open else 1),
                is_open=options.open,
            )
            if options.recorded and device == CPU:
                counts = recorder.recorded, recorder.replayed
                recorder.recorded = recorder.replayed = 0
                # Of eight calls of each program a few lead to a recording.
                if counts[1] < 2 * counts[0]:
                    found.append(f"{counts[0]} recordings were replayed {counts[1]} times")
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, found)
            if dist.get_rank() == 0:
                bad = [line for lines in every for line in lines]
                failures += bool(bad)
                print(f"{model} {schedule} {count}: {'; '.join(bad[:4]) or 'equal'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
