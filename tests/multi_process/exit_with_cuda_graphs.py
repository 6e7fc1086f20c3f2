"""A rank that ends while CUDA graphs of a backward live: ``exit_with_cuda_graphs.py destroy|leave``."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsplit
from tests.multi_process.ddp_harness import Net, loss_of

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
compiled = gradsplit.compile(
    DistributedDataParallel(Net().to(device), bucket_cap_mb=0.004), mode="reduce-overhead", fullgraph=True
)
for _ in range(8):
    compiled.zero_grad()
    loss_of(compiled(torch.randn(6, 16, device=device))).backward()
if sys.argv[1] == "destroy":
    dist.destroy_process_group()
