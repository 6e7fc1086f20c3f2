"""One probe under torchrun and under ours: environment, exit code, output and files of each option and failure.

``python -m tests.launch.compare_with_torchrun`` runs all cases with 1, 2 and 4 processes, some minutes, and prints a
table; it ends with 1 when anything differs that is not meant to. Meant are: an exit code that is the failed process's
(torchrun's is 1), the prefix of teed lines, files of all streams in a --log-dir, and the variables of `OWN`. Each case
of options is also run with them as ``PET_…`` variables.
"""

import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed.run

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("torchrun", "ours")
MOST_S = 300
OWN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS"}
"""Each launcher's own: where ranks meet, files, and processors shared out (torchrun: 1)."""
PROBE = """
import glob, json, os, signal, sys, time
rank, world, attempt = (os.environ[n] for n in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
last = rank == str(int(world) - 1)
if "heedless" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, f"probe out {rank} {attempt}\\n".encode())  # In one piece: torchrun lets ranks tear each other's lines.
os.write(2, f"probe error {rank} {attempt}\\n".encode())
with open(f"seen_{rank}_{attempt}.new", "w") as file:
    json.dump([dict(os.environ), sys.argv[1:], __name__], file)
os.rename(file.name, file.name[:-4])
do = sys.argv[-1]
if do == "fail once":
    do = "sys.exit(3)" if attempt == "0" else "nothing"
if do != "nothing":
    while len(glob.glob(f"seen_*_{attempt}")) < int(world):
        time.sleep(0.01)
    exec(do if last and do != "wait" else "time.sleep(60)")
"""
RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    exec(open("probe.py").read(), globals())
main()
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
    told: str = ""
    """What the last line that ours writes must have in it."""

    def by_variables(self) -> "Case":
        """Return the same with its options as variables."""
        pairs = (option.lstrip("-").partition("=") for option in self.options)
        given = {
            f"PET_{name.replace('-', '_').upper()}": value if equals else "1" for name, equals, value in pairs
        }
        return replace(self, options=(), variables=self.variables | given)


LOGS = "--log-dir=logs"
CASES = {
    "no option": Case(),
    "standalone": Case(("--standalone",)),
    "nnodes": Case(("--nnodes=1",)),
    "nnodes range": Case(("--nnodes=1:1",)),
    "as many as processors": Case(("--nproc-per-node=cpu",)),
    "as many as there are": Case(("--nproc-per-node=auto",)),
    "rendezvous": Case(("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=job")),
    "static rendezvous": Case(
        ("--rdzv-backend=static", "--rdzv-endpoint=127.0.0.1:29714", "--rdzv-conf=timeout=30")
    ),
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
    "logs specs": Case((LOGS, "--logs-specs=default")),
    "log folder": Case((LOGS,)),
    "redirects": Case((LOGS, "--redirects=3")),
    "redirects by rank": Case((LOGS, "--redirects=0:1")),
    "redirects in short": Case((LOGS, "-r3", "-t", "0:1")),
    "tee": Case((LOGS, "--tee=3")),
    "tee by rank": Case((LOGS, "--tee=0:2")),
    "redirects and tee": Case((LOGS, "--redirects=1", "--tee=2")),
    "local ranks filter": Case((LOGS, "--local-ranks-filter=0", "--tee=3")),
    "duplicate output": Case((LOGS, "--tee=3", "--duplicate-stdout-filters=out 0,none")),
    "duplicate errors": Case((LOGS, "--tee=3", "--duplicate-stderr-filters=error 0,none")),
    "underscores": Case(("--max_restarts=1", "--monitor_interval=0.1", "--rdzv_id=job")),
    "together": Case(
        ("--standalone", "--max-restarts=2", "--role=trainer", "--signals-to-handle=SIGTERM,SIGUSR2")
    ),
    "module": Case(("--module",), entry=("probe",)),
    "module in short": Case(("-m",), entry=("probe",)),
    "no python": Case(("--no-python",), entry=(sys.executable, "probe.py")),
    "run path": Case(("--run-path",)),
    "option before variable": Case(
        ("--role=trainer",), variables={"PET_ROLE": "other", "PET_STANDALONE": "0"}
    ),
    "python": Case(variables={"PYTHON_EXEC": sys.executable}),
    "recorded": Case(entry=("recorded.py",)),
}
CASES |= {
    f"{name} (PET_…)": case.by_variables()
    for name, case in CASES.items()
    if case.options
    and all(option.startswith("--") for option in case.options)
    and not case.variables.get("PET_ROLE")
}
ERROR = "exited with code 1;"
CASES |= {
    "unknown option": Case(("--bogus",), code=2),
    "bad count": Case(("--nnodes=none",), code=2),
    "no GPU": Case(("--nproc-per-node=gpu",), code=2, variables={"CUDA_VISIBLE_DEVICES": ""}),
    "no GPU to be near": Case(("--numa-binding=node",), code=2),
    "no script": Case(entry=("missing.py",), code=2),
    "no module": Case(("-m",), entry=("missing",), code=2),
    "no program": Case(("--no-python",), entry=("./missing",), code=2),
    "syntax error": Case(entry=("broken.py",), code=1, told=ERROR),
    "raises": Case(do="raise ValueError('probe broken')", code=1, told=ERROR),
    "raises, recorded": Case((LOGS,), "raise ValueError('broken')", 1, ("recorded.py",), told=ERROR),
    "exits with 3": Case(do="sys.exit(3)", code=3, told="exited with code 3;"),
    "exits with words": Case(do="sys.exit('probe ends')", code=1, told=ERROR),
    "exits at once": Case(do="os._exit(5)", code=5, told="exited with code 5;"),
    "no memory": Case(do="bytearray(1 << 60)", code=1, told=ERROR),
    "killed": Case(do="os.kill(os.getpid(), signal.SIGKILL)", code=137, told="when memory runs out"),
    "segmentation fault": Case(do="os.kill(os.getpid(), signal.SIGSEGV)", code=139, told="by signal 11"),
    "aborts": Case(do="os.abort()", code=134, told="by signal 6"),
    "others do not end": Case(
        ("--shutdown-timeout=1",), "sys.exit(3)", 3, ("probe.py", "heedless"), told="exited with code 3;"
    ),
    "fails once": Case(("--max-restarts=1",), do="fail once"),
    "fails twice": Case(("--max-restarts=1",), do="sys.exit(4)", code=4, told="exited with code 4;"),
    "launcher ended": Case(do="wait", code=128 + signal.SIGTERM),
    "launcher interrupted": Case(do="wait", code=128 + signal.SIGINT),
    "launcher hung up": Case(do="wait", code=128 + signal.SIGHUP),
    "launcher told to quit": Case(do="wait", code=128 + signal.SIGQUIT),
    "own signal": Case(("--signals-to-handle=SIGUSR2",), do="wait", code=128 + signal.SIGUSR2),
}


@dataclass
class Seen:
    code: int
    ranks: dict[str, list]
    """What each attempt's processes saw, by the names of their files."""
    said: list[str]
    """The probes' own lines, of both streams."""
    files: list[str]
    last: str
    """The last line of standard error."""


def start(launcher: str, arguments: list[str], environment: dict[str, str], folder: Path) -> int:
    """Start a launcher in ``folder``, where it writes to ``out`` and ``error``, and return its process.

    torchrun goes on in a copy of this process, which has imported it: that takes seconds.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.chdir(folder)
        for stream, file in (1, "out"), (2, "error"):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if launcher == "ours":
            os.execve(sys.executable, [sys.executable, "-m", "gradsplit.launch", *arguments], environment)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = arguments
        torch.distributed.run.main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def observe(launcher: str, name: str, processes: int) -> Seen:
    """Return what comes of a case under ``launcher``."""
    case = CASES[name]
    unset = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE")
    outer = {name: value for name, value in os.environ.items() if name not in unset}
    environment = {**outer, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "", **case.variables}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "probe.py").write_text(PROBE)
        (folder / "broken.py").write_text("probe = (")
        (folder / "recorded.py").write_text(RECORDED)
        by_variable = "PET_NPROC_PER_NODE" in case.variables
        options = [] if by_variable else [f"--nproc-per-node={processes}", *case.options]
        job = start(launcher, [*options, *case.entry, case.do], environment, folder)
        told = case.do != "wait"
        until = time.monotonic() + MOST_S
        while not (ended := os.waitpid(job, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.kill(job, signal.SIGKILL)
            if not told and len(list(folder.glob("seen_*_0"))) == processes:
                told = True
                os.kill(job, case.code - 128)
            time.sleep(0.01)
        out, error = ((folder / stream).read_text() for stream in ("out", "error"))
        lines = [re.sub(r"^\[[^]]*\]:? ?", "", line) for line in [*out.splitlines(), *error.splitlines()]]
        # Ours repeats what a failed rank wrote last.
        said = sorted({line for line in lines if re.fullmatch(r"probe (out|error) \d \d", line)})
        ranks = {file.name: json.loads(file.read_text()) for file in folder.glob("seen_*[0-9]")}
        logs = sorted(folder.glob("logs/*/attempt_*/**/*.log"))
        files = [f"{Path(*log.parts[-3:])} {log.read_text()}" for log in logs]
        files = [re.sub(r"^[^ ]*/(?=(attempt_|\d/))|\[[^]]*\]:? ?", "", text) for text in files]
        files += sorted(str(Path(*file.parts[-2:])) for file in folder.glob("logs/*/attempt_*/*/error.json"))
        code = os.waitstatus_to_exitcode(ended[1])
        return Seen(code, ranks, said, files, (error.splitlines() or [""])[-1])


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
    if case.told not in ours.last:
        found.append(f"the last line is {ours.last}")
    return found


def main(arguments: Sequence[str]) -> int:
    """Compare the cases that are named, or all. A number among them: with so many processes only."""
    names = [argument for argument in arguments if not argument.isdigit()] or list(CASES)
    numbers = [int(argument) for argument in arguments if argument.isdigit()] or [1, 2, 4]
    wrong = 0
    print(f"{'case':32} processes  torchrun  ours  seconds")
    for name in names:
        for processes in numbers:
            seen, seconds = {}, []
            for launcher in LAUNCHERS:
                start_s = time.monotonic()
                seen[launcher] = observe(launcher, name, processes)
                seconds.append(f"{time.monotonic() - start_s:.1f}")
            found = differences(name, seen["torchrun"], seen["ours"])
            wrong += bool(found)
            codes = f"{seen['torchrun'].code:8}  {seen['ours'].code:4}"
            print(f"{name:32} {processes:9}  {codes}  {' '.join(seconds)}", flush=True)
            for line in found:
                print(f"    {line}")
    print(f"{len(names) * len(numbers)} comparisons, {wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
