"""Runs cases of ``ddp_cases/`` on this rank: ``-m tests.multi_process.run_ddp_cases FOLDER [CASE ...]``.

What became of each case is written to FOLDER as JSON, a file for each rank. Starting ranks takes longer than a case, so
all cases share one start. After a case that failed on some rank the ranks are at different collectives; all of them
then leave their process group, which ends what they wait for, and join a new one.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.multi_process.ddp_harness import CASES, DEVICE, start_process_group

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
TIMEOUT = timedelta(seconds=30)


def load_cases(device: str) -> list[str]:
    """The names of all cases that run on this kind of device, in the same order everywhere."""
    for path in sorted((Path(__file__).parent / "ddp_cases").glob("*.py")):
        importlib.import_module(f"tests.multi_process.ddp_cases.{path.stem}")
    return [name for name, case in CASES.items() if device in case.devices]


def join_group(store: dist.Store, generation: int) -> None:
    prefixed = dist.PrefixStore(f"group {generation}", store)
    start_process_group(store=prefixed, rank=RANK, world_size=WORLD_SIZE, timeout=TIMEOUT)


def failed_somewhere(store: dist.Store, name: str, failed: bool) -> bool:
    """Whether the case failed on any rank; waits for all of them."""
    keys = [f"{name} on {rank}" for rank in range(WORLD_SIZE)]
    store.set(keys[RANK], "failed" if failed else "passed")
    store.wait(keys, 2 * TIMEOUT)
    return any(store.get(key) == b"failed" for key in keys)


def run_case(name: str) -> str:
    """What became of the case: "" if all went well."""
    try:
        CASES[name].run()
    except (Exception, pytest.fail.Exception):  # the latter of pytest.raises
        return traceback.format_exc()
    return ""


def main(folder: Path, names: list[str]) -> None:
    logging.disable(logging.WARNING)
    names = names or load_cases(DEVICE)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, WORLD_SIZE, is_master=RANK == 0, timeout=2 * TIMEOUT)
    join_group(store, 0)
    outcomes, seconds = {}, {}
    for generation, name in enumerate(names, start=1):
        start_s = time.perf_counter()
        outcomes[name] = run_case(name)
        if outcomes[name]:
            dist.destroy_process_group()
        if failed_somewhere(store, name, failed=bool(outcomes[name])):
            if dist.is_initialized():
                dist.destroy_process_group()
            join_group(store, generation)
        seconds[name] = round(time.perf_counter() - start_s, 2)
    (folder / f"rank_{RANK}.json").write_text(json.dumps(outcomes))
    if RANK == 0:
        slowest = sorted(seconds, key=seconds.__getitem__)[-5:]
        print("seconds:", {name: seconds[name] for name in slowest}, f"of {sum(seconds.values()):.1f}")
    # gloo's threads may be the last to hold the tensors of the last collectives. They need Python to let go of them,
    # and torch aborts a process that is ending by then.
    time.sleep(1)
    dist.destroy_process_group()
    store.set(f"rank {RANK} has ended", "")
    if RANK == 0:  # which has the store, so it leaves last
        store.wait([f"rank {rank} has ended" for rank in range(WORLD_SIZE)], TIMEOUT)


if __name__ == "__main__":
    load_cases(DEVICE)
    main(Path(sys.argv[1]), sys.argv[2:])
