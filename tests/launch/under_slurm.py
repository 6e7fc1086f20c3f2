"""Jobs under a real Slurm, whose machines are imitated (`machines`): three of them, and the one that it is asked from.

``python -m tests.launch.under_slurm``, as root with Slurm's daemons and munge installed (Debian: slurmctld, slurmd,
slurm-client, munge; for PMIx also libpmix2), prints a line a case and ends with 1 when any is wrong. Each runs without
MPI, and with PMIx where this Slurm has it.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.launch.machines import Machines, in_own_namespaces

ROOT = Path(__file__).resolve().parents[2]
NODES = 3
MOST_S = 60
SLURM = """\
ClusterName=imitated
SlurmctldHost=front
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SelectType=select/linear
NodeName=node[1-3] CPUs=2 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES State=UP
"""
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
rank, do = os.environ["RANK"], sys.argv[1]
def heed(number, frame):
    with open(f"signal{rank}", "a") as file:
        file.write(f"{number} ")
    if number == signal.SIGTERM:
        time.sleep(1)  # For a checkpoint.
        Path(f"saved{rank}").touch()
        sys.exit(0)
signal.signal(signal.SIGUSR1, heed)
signal.signal(signal.SIGTERM, heed)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR")
Path(f"rank{rank}").write_text(" ".join(os.environ[name] for name in names))
while do == "wait" or do == "fail" and rank != "3":
    time.sleep(0.05)
if do == "fail":
    raise ValueError("broken")
"""
EVERYWHERE = [f"{rank} 6 {rank % 2} {rank // 2} node1" for rank in range(6)]
Told = Callable[[subprocess.Popen[str]], None]


def case(
    mpi: str, do: str, disturb: Told | None = None, tasks: int = 6, *options: str
) -> tuple[int, str, Path]:
    """Run the script in a step, ``disturb`` it once all ranks are there; return exit code, output and its folder."""
    folder = Path(tempfile.mkdtemp(dir=os.environ["JOBS"]))
    (folder / "job.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "gradsplit.launch", *options, "job.py", do]
    job = subprocess.Popen(
        ["srun", f"--mpi={mpi}", f"--nodes={NODES}", f"--ntasks={tasks}", *launcher],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        if disturb is not None:
            until = time.monotonic() + MOST_S
            while len(list(folder.glob("rank*"))) < 6 and job.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(0.3)
            disturb(job)
        said, _ = job.communicate(timeout=MOST_S)
    except subprocess.TimeoutExpired:
        job.kill()
        return -1, f"hung\n{job.communicate()[0]}", folder
    return job.returncode, said, folder


def of(folder: Path, name: str) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob(f"{name}*"))]


def number_of_job() -> str:
    return subprocess.run(
        ["squeue", "-h", "-o", "%A"], check=True, capture_output=True, text=True
    ).stdout.split()[0]


def cancel(*options: str) -> None:
    subprocess.run(["scancel", *options, number_of_job()], check=True)


def usr1_then_cancel(_job: subprocess.Popen[str]) -> None:
    cancel("--signal=USR1")
    time.sleep(2)
    cancel()


def run_cases(machines: Machines, mpi: str) -> int:
    def kill_supervisor(_job: subprocess.Popen[str]) -> None:
        ours = [pid for pid, command in machines.processes("node2") if "-m gradsplit.launch" in command]
        os.kill(min(ours), signal.SIGKILL)  # The oldest; the others are keepers.

    wrong = 0

    def judge(name: str, right: bool, said: str) -> None:
        nonlocal wrong
        wrong += not right
        print(f"srun --mpi={mpi}, {name}: {'right' if right else 'WRONG: ' + said}", flush=True)

    code, said, folder = case(mpi, "nothing")
    judge("six tasks", code == 0 and of(folder, "rank") == EVERYWHERE, said)
    code, said, folder = case(mpi, "nothing", None, 3, "--nproc-per-node=2", "--no-preflight")
    judge("a task a node, two ranks each", code == 0 and of(folder, "rank") == EVERYWHERE, said)
    code, said, _ = case(mpi, "fail")
    last = [line for line in said.splitlines() if line.startswith("launch: ")][-1]
    told = last.startswith("launch: rank 3 of 6 (local rank 1 on node2) exited with code 1;")
    judge("a rank raises", code == 1 and told and "ValueError: broken" in said, said)
    code, said, folder = case(mpi, "wait", usr1_then_cancel)
    usr1, term = str(int(signal.SIGUSR1)), str(int(signal.SIGTERM))
    heard = [set(text.split()) for text in of(folder, "signal")]
    judge("scancel --signal=USR1 reaches all", heard == 6 * [{usr1, term}], f"{heard}\n{said}")
    saved = len(of(folder, "saved"))
    judge(
        f"scancel leaves time for a checkpoint ({saved} of 6)",
        code != 0 and saved == 6,
        said,
    )
    code, said, _ = case(mpi, "wait", kill_supervisor)
    judge("a supervisor is killed", code not in (0, -1), said)
    code, said, _ = case(mpi, "nothing", None, 6, "--nnodes=2")
    judge("another number of nodes", code == 2 and said.count("launch: ") == 1, said)
    left = [found for name in machines.first for found in machines.processes(name) if "job.py" in found[1]]
    judge("nothing is left behind", not left, str(left))
    return wrong


def main(folder: str = "") -> int:
    """Start Slurm and run all cases. ``folder``: given where this process may make machines that share it."""
    if not folder:
        with tempfile.TemporaryDirectory(prefix="slurm-") as made:
            return subprocess.call(
                in_own_namespaces([sys.executable, "-m", "tests.launch.under_slurm", made])
            )
    shared = Path(folder)
    machines = Machines(NODES, shared)
    configuration = shared / "slurm.conf"
    configuration.write_text(SLURM.format(folder=folder))
    for name in "state", "jobs", *(f"spool-{node}" for node in machines.first):
        (shared / name).mkdir()
    os.environ |= {"SLURM_CONF": str(configuration), "JOBS": str(shared / "jobs")}
    Path("/run/munge").mkdir(exist_ok=True)
    subprocess.run(["munged", "--force"], check=True, capture_output=True)
    subprocess.Popen(["slurmctld", "-D"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for name, first in machines.first.items():
        inside = ["nsenter", "-t", str(first), "-n", "-u", "-m", "-i", "-p", "--"]
        subprocess.Popen(
            [*inside, "slurmd", "-D", "-N", name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    until = time.monotonic() + MOST_S
    while time.monotonic() < until:
        seen = subprocess.run(["sinfo", "-h", "-o", "%t %D"], check=False, capture_output=True, text=True)
        if seen.stdout.strip() == f"idle {NODES}":
            break
        time.sleep(0.2)
    trial = subprocess.run(["srun", "--mpi=pmix", "true"], check=False, capture_output=True, text=True)
    kinds = ["none", "pmix"] if trial.returncode == 0 else ["none"]
    wrong = sum(run_cases(machines, mpi) for mpi in kinds)
    print(f"{', '.join(kinds)}: {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
