"""Jobs on two machines of their own network (`machines`), of which something is disturbed at a random moment.

``python -m tests.launch.several_machines COUNT [SEED] [KIND]`` ends with 1 when a job hung, left a process behind, or
told another exit code or rank than that of what failed. Without a KIND each job's is drawn.
"""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.launch.machines import Machines, in_own_namespaces
from tests.launch.random_failures import SCRIPT, left_behind

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4
MOST_S = 40
KINDS = ("exit", "killed", "supervisor killed", "keeper killed", "daemon killed", "mpiexec killed")
KINDS += ("machine ended", "machine lost", "launcher told", "launcher killed")
IMPATIENT = """
import gradsplit.launch.mpi_world as world
world.SILENCE_S, world._HEARTBEAT_S = 4.0, 1.0
import gradsplit.launch.job as job
job.KILL_AFTER_S = 3.0
"""
"""A machine counts as lost after a minute, else."""


def disturb(
    kind: str, job: subprocess.Popen[str], machines: Machines, folder: Path, random_: random.Random
) -> tuple[Callable[[int], bool], str]:
    """Do what is wrong with the job; return which exit codes are right then, and what the last line must say."""
    while len(list(folder.glob("rank?"))) < RANKS and job.poll() is None:
        time.sleep(0.01)
    time.sleep(random_.uniform(0, 0.5))
    rank = random_.randrange(RANKS)
    if kind.startswith("launcher"):
        number = signal.SIGTERM if kind == "launcher told" else signal.SIGKILL
        job.send_signal(number)
        return {-number, 128 + number}.__contains__, ""
    if kind == "machine lost":
        machines.lose("node2")
        return bool, "of node2, where rank 3 is, for 4 s: the machine or the network has failed"
    if kind == "machine ended":
        os.kill(machines.first["node2"], signal.SIGKILL)
        return (
            bool,
            "launch: the launcher on node2, rank 2-3, has ended: it was killed, or its machine has failed",
        )
    if kind == "mpiexec killed":
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text()
        os.kill(int(children.split()[0]), signal.SIGKILL)
        return (128 + signal.SIGKILL).__eq__, "was killed by signal 9 (Killed) while the ranks ran"
    if kind in ("supervisor killed", "keeper killed", "daemon killed"):
        names = ("prted", "hydra_pmi_proxy") if kind == "daemon killed" else ("gradsplit.launch.worker",)
        found = [
            pid
            for pid, command in machines.processes("node2")
            if not command.startswith("sh ") and any(name in command for name in names)
        ]
        if kind != "daemon killed":  # A keeper is forked from its supervisor, and has its command line.
            parents = {
                pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in found
            }
            found = [pid for pid in found if (parents[pid] in found) == (kind == "keeper killed")]
        ended = random_.choice(found)
        variables = Path(f"/proc/{ended}/environ").read_text()
        os.kill(ended, signal.SIGKILL)
        rank_of = re.search(r"(?:OMPI_COMM_WORLD_RANK|PMI_RANK)=(\d+)", variables)
        if kind == "daemon killed" or rank_of is None:
            return bool, "launch: "
        return bool, f"launch: the launcher on node2, rank {rank_of[1]}, has ended: it was killed"
    pid = int((folder / f"rank{rank}").read_text())
    inside = ["nsenter", "-t", str(machines.first[f"node{1 + rank // 2}"]), "-p", "-m"]
    name, code = ("USR1", 7) if kind == "exit" else ("KILL", 137)
    subprocess.run([*inside, "sh", "-c", f"kill -{name} {pid}"], check=True)
    return code.__eq__, f"rank {rank} of {RANKS} "


def run_one(machines: Machines, shared: Path, kind: str, random_: random.Random) -> str | None:
    """Return what went wrong in one job; None when nothing did."""
    folder = Path(tempfile.mkdtemp(prefix="job-", dir=shared))
    (folder / "job.py").write_text(SCRIPT)
    (folder / "sitecustomize.py").write_text(IMPATIENT)
    options = ["--hostfile", str(machines.hosts), "--nproc-per-node=2", "--shutdown-timeout=2"]
    command = [sys.executable, "-m", "gradsplit.launch", *options, "job.py", str(folder)]
    variables = os.environ | machines.variables() | {"PYTHONPATH": f"{folder}:{ROOT}"}
    said = folder / "said"
    with said.open("w") as out:
        job = subprocess.Popen(command, cwd=folder, env=variables, stdout=out, stderr=out, text=True)
    right, told = disturb(kind, job, machines, folder, random_)
    start_s = time.monotonic()
    try:
        job.wait(MOST_S)
    except subprocess.TimeoutExpired:
        running = left_behind(str(folder))
        job.kill()
        return f"{kind}: hung, with {running}\n{said.read_text()}"
    seconds = time.monotonic() - start_s
    until = time.monotonic() + 5
    while (left := left_behind(str(folder))) and time.monotonic() < until:
        time.sleep(0.01)
    if left:
        return f"{kind}: left behind {left}"
    lines = said.read_text().rstrip().splitlines()
    print(f"{kind}: exit code {job.returncode} after {seconds:.1f} s; {lines[-1]}", flush=True)
    if not right(job.returncode) or told not in lines[-1]:
        return f"{kind}: exit code {job.returncode}\n{said.read_text()}"
    return None


def run_jobs(count: int, seed: int, kind: str, folder: Path) -> int:
    wrong = 0
    random_ = random.Random(seed)
    kinds = [kind or random_.choice(KINDS) for _ in range(count)]
    machines = Machines(2, folder)
    for number, kind in enumerate(kinds):
        problem = run_one(machines, folder, kind, random_)
        if kind.startswith("machine"):
            machines.restore("node2")
        if problem is not None:
            wrong += 1
            print(f"job {number}: {problem}", flush=True)
    print(f"{len(kinds)} jobs, {wrong} wrong")
    return 1 if wrong else 0


def main(count: str, seed: str = "0", kind: str = "", folder: str = "") -> int:
    """Run the jobs that are asked for. ``folder``: given where this process may make machines that share it."""
    if folder:
        return run_jobs(int(count), int(seed), kind, Path(folder))
    with tempfile.TemporaryDirectory(prefix="machines-") as folder:
        program = [sys.executable, "-m", "tests.launch.several_machines", count, seed, kind, folder]
        return subprocess.call(in_own_namespaces(program))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
