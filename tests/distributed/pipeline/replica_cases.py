"""Two pipelines of two stages on four ranks, whose gradients are averaged: beside the unsplit model on the whole batch.
They have microbatches of different sizes, and what is wrong with these is an error on each rank of a pipeline.

python -m gradsplit.launch --nproc-per-node 4 -m tests.distributed.pipeline.replica_cases FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import Schedule1F1B
from torch.export import Dim

from gradsplit import ExportError
from gradsplit.distributed import export_pipeline, load_stage, merge_checkpoints
from gradsplit.distributed.pipeline import agree_on_sizes
from tests.distributed.pipeline.tied_model import Tied, call

MICROBATCHES = 2
OPEN = {"ids": {0: Dim("count", max=16)}, "labels": {0: Dim("count", max=16)}}


def batch(size: int, shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Microbatches of this size."""
    ids = torch.arange(size * MICROBATCHES).roll(shift) % 16
    return ids, (ids + 3) % 16


def refused_sizes(schedule: Schedule1F1B, rank: int) -> None:
    """Both ranks of a pipeline raise what does not fit on one of them, and nobody waits."""
    ids, labels = batch(6)
    for args, named, message in (
        (batch(6 - rank % 2), {}, r"args\[0\] has the shape \[6\] on rank 0 and \[5\] on rank 1"),
        (
            batch(17),
            {},
            r"sizes with args\[0\].shape\[0\] <= 16; a microbatch of this step has args\[0\] \[17\]",
        ),
        ((), {"labels": labels}, r"no rank was given args\[0\], whose sizes differ between steps"),
        ((ids.float() if rank % 2 else ids, labels), {}, r"rank 1: args\[0\] has dtype torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            schedule.step(*args, **named, target=torch.zeros(MICROBATCHES))


def refused_alone(folder: Path, group: dist.ProcessGroup | None) -> None:
    """What a rank with all of the model does not take."""
    for name, size, message in (
        ("whole", 5, r"args\[0\] has size 5 in dim 0; .* To leave it open, export with dynamic_shapes"),
        (
            "whole_open",
            6.5,
            r"has the shape \[6\] in microbatch 1, and \[7\] in the first one; .* that 2 divides",
        ),
    ):
        stage = load_stage(folder / name, 0, backend="aot_eager", group=group)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=lambda output, target: output["loss"])
        ids = torch.arange(int(size * MICROBATCHES))
        with pytest.raises(ValueError, match=message):
            schedule.step(ids, ids, target=torch.zeros(MICROBATCHES))


def step_in_shares(parameters: list[torch.Tensor], replicas: dist.ProcessGroup) -> None:
    """Replicas share the optimizer's state (ZeRO-1), and have the weights that each would have alone."""
    alone = [torch.nn.Parameter(one.detach().clone()) for one in parameters]
    for one, given in zip(alone, parameters, strict=True):
        one.grad = given.grad
    torch.optim.Adam(alone, lr=0.1).step()
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, process_group=replicas, lr=0.1)
    optimizer.step()
    assert all(torch.equal(one, given) for one, given in zip(alone, parameters, strict=True))
    assert len(optimizer.optim.state) < len(parameters)


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    alone = [dist.new_group([one]) for one in range(4)]
    torch.manual_seed(0)
    model = Tied().eval()
    if rank == 0:
        for name, stages, dims in (
            ("p", 2, OPEN),
            ("other", 2, None),
            ("four", 4, None),
            ("whole", 1, None),
            ("whole_open", 1, OPEN),
        ):
            export_pipeline(model, call(), stages, folder=folder / name, dynamic_shapes=dims)
    dist.barrier()

    # Ranks with different exports, and one whose stage is not there: an error on both, and no rank waits.
    group = pipelines[rank // 2]
    for name, number in (("p" if rank % 2 else "other", rank % 2), ("p", 7 * (rank % 2))):
        try:
            load_stage(folder / name, number, group=group)
        except ExportError as error:
            assert "different exports" in str(error) or "rank 1 cannot load its stage" in str(error), error
        else:
            raise AssertionError(f"loaded {name}")

    stage = load_stage(folder / "p", rank % 2, backend="aot_eager", group=group, replicas=replicas[rank % 2])
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=lambda output, target: output["loss"])
    refused_sizes(schedule, rank)
    # Each rank gives what its stage reads.
    ids, labels = batch(6 - rank // 2, rank // 2)
    given = {"labels": labels} if rank % 2 else {"ids": ids}
    schedule.step(**given, target=torch.zeros(MICROBATCHES), return_outputs=False)

    expected = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    for shift in (0, 1):
        for part in batch(6 - shift, shift)[0].chunk(MICROBATCHES):
            model.zero_grad()
            model(part, (part + 3) % 16)["loss"].backward()
            for name, one in model.named_parameters():
                expected[name] += one.grad / (2 * MICROBATCHES)
    for name, one in stage.submod.named_parameters():
        assert torch.allclose(one.grad, expected[name], rtol=1e-5, atol=1e-7), name

    refused_alone(folder, alone[rank])

    # Without gradients, and with another size again.
    losses: list[torch.Tensor] = []
    ids, labels = batch(3)
    schedule.eval(ids, labels, target=torch.zeros(MICROBATCHES), losses=losses, return_outputs=False)
    if rank % 2:
        for loss, part in zip(losses, ids.chunk(MICROBATCHES), strict=True):
            assert torch.equal(loss, model(part, (part + 3) % 16)["loss"])

    states = [None, None]
    dist.all_gather_object(states, stage.state_dict(), group=group)
    whole = merge_checkpoints(folder / "p", states)
    assert list(whole) == list(model.state_dict())
    assert all(torch.equal(whole[name], tensor) for name, tensor in model.state_dict().items())
    changed = {name: tensor + 1 for name, tensor in whole.items()}
    stage.load_state_dict(changed)
    halves = [load_stage(folder / "four", number, group=group) for number in (rank % 2, 2 + rank % 2)]
    for half in halves:
        half.load_state_dict(changed)
    for one in (stage, *halves):
        assert all(torch.equal(tensor, changed[name]) for name, tensor in one.state_dict().items())
    step_in_shares([*stage.submod.parameters()], replicas[rank % 2])
    # A rank that does not come is named.
    if rank % 2 == 0:
        agree_on_sizes._PATIENCE_S = 1.0
        with pytest.raises(RuntimeError, match="rank 1 has not begun its step 7 of Tied"):
            schedule.eval(ids, labels, target=torch.zeros(MICROBATCHES))
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank}: equal", flush=True)


if __name__ == "__main__":
    main()
