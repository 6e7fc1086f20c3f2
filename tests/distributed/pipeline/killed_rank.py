"""A rank of a pipeline is killed between two steps.

``RANK=... python -m tests.distributed.pipeline.killed_rank FOLDER fixed|open WHO`` on two ranks, without a launcher,
which would end the other one.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B
from torch.export import Dim

from gradsplit.distributed import export_pipeline, load_stage
from tests.distributed.pipeline.tied_model import Tied, call


def main(folder: str, sizes: str, who: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        count = {0: Dim("count", max=16)}
        dims = {"ids": count, "labels": count} if sizes == "open" else None
        export_pipeline(Tied().eval(), call(), 2, folder=folder, dynamic_shapes=dims)
    dist.barrier()
    stage = load_stage(folder, rank, backend="aot_eager")
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda output, target: output["loss"])
    batch = [torch.cat([one, one]) for one in call()]
    for step in range(3):
        if step == 1 and rank == who:
            os.kill(os.getpid(), signal.SIGKILL)
        schedule.step(*batch, target=torch.zeros(2), return_outputs=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
