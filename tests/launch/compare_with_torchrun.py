"""One probe under torchrun and under ours: environment, exit code, output and files of each option and failure.

``python -m tests.launch.compare_with_torchrun`` runs all cases with 1, 2 and 4 processes, some minutes, and prints a
table; it ends with 1 when anything differs that is not meant to. Meant are: an exit code that is the failed process's
(torchrun's is 1), the prefix of teed lines, files of all streams in a --log-dir, and the variables of `OWN`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STARTS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "ours": [sys.executable, "-m", "gradsplit.launch"],
}
OWN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS"}
"""Each launcher's own: where ranks meet, files, and processors shared out (torchrun: 1)."""
PROBE = """
import glob, json, os, signal, sys, time
rank, world, attempt = (os.environ[n] for n in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
last = rank == str(int(world) - 1)
os.write(1, f"probe out {rank} {attempt}\\n".encode())  # In one piece: torchrun lets ranks tear each other's lines.
os.write(2, f"probe error {rank} {attempt}\\n".encode())
with open(f"seen_{rank}_{attempt}.new", "w") as file:
    json.dump([dict(os.environ), sys.argv[1:], __name__], file)
os.rename(file.name, file.name[:-4])
do = sys.argv[1]
if do == "fail once":
    do = "sys.exit(3)" if attempt == "0" else "nothing"
if do != "nothing":
    while len(glob.glob(f"seen_*_{attempt}")) < int(world):
        time.sleep(0.01)
    exec(do if last and do != "wait" else "time.sleep(60)")
"""


@dataclass(frozen=True)
class Case:
    options: tuple[str, ...] = ()
    do: str = "nothing"
    """What the last rank executes while the others sleep."""
    code: int = 0
    """Our exit code; torchrun's is 0 for 0, and otherwise not."""
    entry: tuple[str, ...] = ("probe.py",)
    variables: dict[str, str] = field(default_factory=dict)


LOGS = "--log-dir=logs"
CASES = {
    "no option": Case(),
    "standalone": Case(("--standalone",)),
    "nnodes": Case(("--nnodes=1",)),
    "nnodes range": Case(("--nnodes=1:1",)),
    "rendezvous": Case(("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=job")),
    "static address": Case(("--node-rank=0", "--master-addr=127.0.0.1", "--master-port=29713")),
    "local address": Case(("--local-addr=127.0.0.1",)),
    "monitor interval": Case(("--monitor-interval=0.1",)),
    "role": Case(("--role=trainer",)),
    "restarts": Case(("--max-restarts=2",)),
    "signals to handle": Case(("--signals-to-handle=SIGTERM,SIGUSR1",)),
    "shutdown timeout": Case(("--shutdown-timeout=3",)),
    "virtual local rank": Case(("--virtual-local-rank",), variables={"CUDA_VISIBLE_DEVICES": "3,2,1,0"}),
    "start method": Case(("--start-method=fork",)),
    "event log handler": Case(("--event-log-handler=null",)),
    "log folder": Case((LOGS,)),
    "redirects": Case((LOGS, "-r3")),
    "redirects by rank": Case((LOGS, "--redirects=0:1")),
    "tee": Case((LOGS, "-t", "3")),
    "tee by rank": Case((LOGS, "--tee=0:2")),
    "redirects and tee": Case((LOGS, "-r=1", "-t=2")),
    "local ranks filter": Case((LOGS, "--local-ranks-filter=0", "-t=3")),
    "duplicate filters": Case((LOGS, "-t=3", "--duplicate-stdout-filters=out 0,none")),
    "module": Case(("-m",), entry=("probe",)),
    "no python": Case(("--no-python",), entry=(sys.executable, "probe.py")),
    "run path": Case(("--run-path",)),
    "variables": Case(variables={"PET_ROLE": "trainer", "PET_MAX_RESTARTS": "1"}),
    "unknown option": Case(("--bogus",), code=2),
    "bad count": Case(("--nnodes=none",), code=2),
    "no script": Case(entry=("missing.py",), code=2),
    "no module": Case(("-m",), entry=("missing",), code=2),
    "no program": Case(("--no-python",), entry=("./missing",), code=2),
    "syntax error": Case(entry=("broken.py",), code=1),
    "raises": Case(do="raise ValueError('probe broken')", code=1),
    "exits with 3": Case(do="sys.exit(3)", code=3),
    "exits with words": Case(do="sys.exit('probe ends')", code=1),
    "exits at once": Case(do="os._exit(5)", code=5),
    "killed": Case(do="os.kill(os.getpid(), signal.SIGKILL)", code=137),
    "segmentation fault": Case(do="os.kill(os.getpid(), signal.SIGSEGV)", code=139),
    "aborts": Case(do="os.abort()", code=134),
    "fails once": Case(("--max-restarts=1",), do="fail once"),
    "fails twice": Case(("--max-restarts=1",), do="sys.exit(4)", code=4),
    "launcher ended": Case(do="wait", code=128 + signal.SIGTERM),
    "launcher interrupted": Case(do="wait", code=128 + signal.SIGINT),
}


@dataclass
class Seen:
    code: int
    ranks: dict[str, list]
    """What each attempt's processes saw, by the names of their files."""
    said: list[str]
    """The probes' own lines, of both streams."""
    files: list[str]


def observe(launcher: str, name: str, processes: int) -> Seen:
    """Return what comes of a case under ``launcher``."""
    case = CASES[name]
    unset = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE")
    outer = {name: value for name, value in os.environ.items() if name not in unset}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "probe.py").write_text(PROBE)
        (folder / "broken.py").write_text("probe = (")
        options = [f"--nproc-per-node={processes}", *case.options]
        with subprocess.Popen(
            [*STARTS[launcher], *options, *case.entry, case.do],
            cwd=folder,
            env={**outer, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "", **case.variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as job:
            if case.do == "wait":
                while len(list(folder.glob("seen_*_0"))) < processes and job.poll() is None:
                    time.sleep(0.01)
                job.send_signal(case.code - 128)
            out, error = job.communicate(timeout=60)
        lines = [re.sub(r"^\[[^]]*\]:? ?", "", line) for line in [*out.splitlines(), *error.splitlines()]]
        # Ours repeats what a failed rank wrote last.
        said = sorted({line for line in lines if re.fullmatch(r"probe (out|error) \d \d", line)})
        ranks = {file.name: json.loads(file.read_text()) for file in folder.glob("seen_*[0-9]")}
        logs = sorted(folder.glob("logs/*/attempt_*/**/*.log"))
        files = [f"{Path(*log.parts[-3:])} {log.read_text()}" for log in logs]
        files = [re.sub(r"^[^ ]*/(?=(attempt_|\d/))|\[[^]]*\]:? ?", "", text) for text in files]
        return Seen(job.returncode, ranks, said, files)


def differences(name: str, theirs: Seen, ours: Seen) -> list[str]:
    """Return what differs and is not meant to."""
    case, found = CASES[name], []
    if ours.code != case.code or bool(theirs.code) != bool(case.code):
        found.append(f"exit codes {theirs.code} and {ours.code}, meant is {case.code}")
    if theirs.ranks.keys() != ours.ranks.keys():
        found.append(f"started {sorted(theirs.ranks)} and {sorted(ours.ranks)}")
    for rank in sorted(theirs.ranks.keys() & ours.ranks.keys()):
        (their, *more), (our, *same) = theirs.ranks[rank], ours.ranks[rank]
        store = {"TORCHELASTIC_USE_AGENT_STORE"}  # Ours has none, and claims none.
        differ = {v for v in their.keys() | our.keys() if their.get(v) != our.get(v)} - OWN - store
        if differ or more != same or our.keys() & store:
            found.append(f"{rank}: {[(v, their.get(v), our.get(v)) for v in sorted(differ)]} {more} {same}")
    if theirs.said != ours.said:
        found.append(f"said {theirs.said} and {ours.said}")
    if not set(theirs.files) <= set(ours.files):
        found.append(f"files {theirs.files} and {ours.files}")
    return found


def main() -> int:
    wrong = 0
    print(f"{'case':22} processes  torchrun  ours  seconds")
    for name in sys.argv[1:] or CASES:
        for processes in (1, 2, 4):
            seen, seconds = {}, []
            for launcher in STARTS:
                start = time.monotonic()
                seen[launcher] = observe(launcher, name, processes)
                seconds.append(f"{time.monotonic() - start:.1f}")
            found = differences(name, seen["torchrun"], seen["ours"])
            wrong += bool(found)
            codes = f"{seen['torchrun'].code:8}  {seen['ours'].code:4}"
            print(f"{name:22} {processes:9}  {codes}  {' '.join(seconds)}", flush=True)
            for line in found:
                print(f"    {line}")
    print(f"{wrong} cases differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
