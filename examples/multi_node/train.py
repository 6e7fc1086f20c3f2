"""Trains on any number of processes and machines, unchanged under torchrun and under mpi-torchrun.

It writes a checkpoint at its end and when it gets SIGUSR1, which Slurm sends before an allocation ends; started again,
it goes on from there::

    torchrun --nproc-per-node 2 examples/multi_node/train.py
    mpi-torchrun --nproc-per-node 2 examples/multi_node/train.py
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsplit


def main() -> None:
    """Train a small network on data of its own; rank 0 tells the loss."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    options = parser.parse_args()
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _frame: asked.append(number))

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10)
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    train = gradsplit.compile(model)

    for step in range(first, options.steps):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        inputs = torch.randn(32, 64, generator=generator).to(device)
        loss = torch.nn.functional.cross_entropy(train(inputs), inputs[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = step + 1 == options.steps
        if dist.get_rank() == 0 and (asked or last):  # All ranks hold the same.
            asked.clear()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            unfinished = options.checkpoint.with_suffix(".unfinished")
            torch.save(state, unfinished)
            unfinished.replace(options.checkpoint)
            print(
                f"step {step + 1}: loss {loss.item():.4f} on rank 0 of {dist.get_world_size()}, saved",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
