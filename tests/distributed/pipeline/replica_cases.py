"""Two pipelines of two stages on four ranks, whose gradients are averaged: beside the unsplit model on the whole batch.

python -m gradsplit.launch --nproc-per-node 4 -m tests.distributed.pipeline.replica_cases FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B

from gradsplit import ExportError
from gradsplit.distributed import export_pipeline, load_stage, merge_checkpoints
from tests.distributed.pipeline.tied_model import Tied, call

MICROBATCHES = 2


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(0)
    model = Tied().eval()
    if rank == 0:
        for name, stages in (("p", 2), ("other", 2), ("four", 4)):
            export_pipeline(model, call(), stages, folder=folder / name)
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
    ids = torch.arange(6 * MICROBATCHES).view(-1).roll(rank // 2) % 16
    labels = (ids + 3) % 16
    schedule.step(ids, labels, target=torch.zeros(MICROBATCHES), return_outputs=False)

    expected = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    for shift in (0, 1):
        every = torch.arange(6 * MICROBATCHES).roll(shift) % 16
        for part in every.chunk(MICROBATCHES):
            model.zero_grad()
            model(part, (part + 3) % 16)["loss"].backward()
            for name, one in model.named_parameters():
                expected[name] += one.grad / (2 * MICROBATCHES)
    for name, one in stage.submod.named_parameters():
        assert torch.allclose(one.grad, expected[name], rtol=1e-5, atol=1e-7), name

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
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank}: equal", flush=True)


if __name__ == "__main__":
    main()
