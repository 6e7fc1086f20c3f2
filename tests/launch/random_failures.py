"""Jobs that somebody disturbs at a random moment of their start or run, as a program: it takes half a second a job.

``python -m tests.launch.random_failures COUNT [SEED]`` ends with 1 when a job hung, left a process behind or blamed the
wrong rank. A rank is killed or exits at any moment of its start or run, in some jobs while another is stopped, or hangs
and does not heed SIGTERM; or the launcher is told to end, or is killed. `several_machines` does so on more than one.
``LAUNCH_JOBS_DEVICE=cuda`` has the ranks reduce over NCCL until then, one to a GPU: some ten seconds a job.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ON_GPUS = os.environ.get("LAUNCH_JOBS_DEVICE") == "cuda"
RANKS = min(3, torch.cuda.device_count()) if ON_GPUS else 3
MOST_S = 20
KINDS = [
    "exit",
    "killed",
    "stopped",
    "hung",
    "killed early",
    "launcher told",
    "launcher interrupted",
    "launcher killed",
    "keeper killed",
]
SCRIPT = """
import os, signal, socket, subprocess, sys, time
from pathlib import Path
ON_GPUS = os.environ.get("LAUNCH_JOBS_DEVICE") == "cuda"
mark = Path(sys.argv[1], "rank" + os.environ["RANK"])
if os.environ["RANK"] == "0":
    if not ON_GPUS:
        listening = socket.create_server(("", int(os.environ["MASTER_PORT"])))
    mark.with_name("port").write_text(os.environ["MASTER_PORT"])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", sys.argv[1]])
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
if sys.argv[2:] == ["hung"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if ON_GPUS:
    import torch
    import torch.distributed as dist
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    value = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
mark.with_suffix(".new").write_text(str(os.getpid()))
mark.with_suffix(".new").rename(mark)
until = time.monotonic() + 60
while time.monotonic() < until:
    if ON_GPUS:
        dist.all_reduce(value)
        torch.cuda.synchronize()
    else:
        time.sleep(1)
"""


def left_behind(marker: str) -> list[str]:
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker in command.read_text() and command.parent.name != str(os.getpid()):
                found.append(command.read_text().replace("\0", " "))
        except (OSError, UnicodeDecodeError):
            pass  # It has just ended.
    return found


def _why_taken(port: int) -> str:
    """Why nobody can listen at a port; empty where somebody can."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return str(error)
    return ""


def disturb(
    kind: str, job: subprocess.Popen[str], folder: Path, random_: random.Random
) -> tuple[set[int], str]:
    """Do what is wrong with the job; return the exit codes that are right then, and what the last line must say."""
    if kind.startswith("launcher"):
        time.sleep(random_.uniform(0, 0.6))
        number = {"told": signal.SIGTERM, "interrupted": signal.SIGINT, "killed": signal.SIGKILL}[
            kind.split()[1]
        ]
        job.send_signal(number)
        # Before it has said what it does with a signal, Python or the kernel ends it.
        return {-number, 128 + number, 1} if number != signal.SIGKILL else {-number}, ""
    if kind == "keeper killed":
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
        while not (folder / "rank0").exists():
            time.sleep(0.001)
        os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
        return {1}, "ChildProcessError: the launcher's own process"
    ranks = random_.sample(range(RANKS), 2)
    if kind == "killed early":
        os.kill(started(job.pid, ranks[0], random_.uniform(0, 0.2)), signal.SIGKILL)
        return {128 + signal.SIGKILL}, f"rank {ranks[0]} of {RANKS} "
    for rank in ranks[: 1 + (kind == "stopped")]:
        while not (folder / f"rank{rank}").exists():
            time.sleep(0.001)
    time.sleep(random_.uniform(0, 0.2))
    first, second = (
        int((folder / f"rank{rank}").read_text()) if kind == "stopped" or rank == ranks[0] else 0
        for rank in ranks
    )
    if kind == "exit":
        os.kill(first, signal.SIGUSR1)
        return {7}, f"rank {ranks[0]} of {RANKS} "
    if kind == "stopped":
        os.kill(second, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    return {128 + signal.SIGKILL}, f"rank {ranks[0]} of {RANKS} "


def started(launcher: int, rank: int, after_s: float) -> int:
    """Return a rank's process, some time after it was there, whatever it has become by then."""

    def children(process: int) -> list[int]:
        try:
            return [
                int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()
            ]
        except OSError:
            return []

    while True:
        ranks = [rank for keeper in children(launcher) for rank in children(keeper)]
        if len(ranks) > rank:
            time.sleep(after_s)
            return ranks[rank]
        time.sleep(0.001)


def run_one(seed: int, kind: str | None = None) -> str | None:
    """Return what went wrong in one job; None when nothing did."""
    random_ = random.Random(seed)
    kind = kind or random_.choice(KINDS)
    with tempfile.TemporaryDirectory(prefix="random-failures-") as name:
        script = Path(name, "job.py")
        script.write_text(SCRIPT)
        options = [f"--nproc-per-node={RANKS}", "--shutdown-timeout=2"]
        command = [sys.executable, "-m", "gradsplit.launch", *options, str(script), name, kind]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
            codes, said = disturb(kind, job, Path(name), random_)
            try:
                _, errors = job.communicate(timeout=MOST_S)
            except subprocess.TimeoutExpired:
                job.kill()
                return f"{kind}: hung"
        until = time.monotonic() + 3
        while (left := left_behind(name)) and time.monotonic() < until:
            time.sleep(0.01)
        if left:
            return f"{kind}: left behind {left}"
        if (port := Path(name, "port")).exists() and port.read_text():
            # A process that ends has no command line any more before its files are closed.
            while (fault := _why_taken(int(port.read_text()))) and time.monotonic() < until:
                time.sleep(0.01)
            if fault:
                return f"{kind}: the port of rank 0 is open: {fault}"
        if job.returncode not in codes:
            return f"{kind}: exit code {job.returncode}\n{errors}"
        if said and said not in errors.splitlines()[-1]:
            return f"{kind}: {errors}"
    return None


def main() -> int:
    count, first = (*map(int, sys.argv[1:]), 0)[:2]
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # A shell's background job and its children ignore it.
    wrong = 0
    for seed in range(first, first + count):
        problem = run_one(seed)
        if problem is not None:
            wrong += 1
            print(f"seed {seed}: {problem}", flush=True)
    print(f"{count} jobs, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
