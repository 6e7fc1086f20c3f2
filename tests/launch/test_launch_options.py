"""Every option as a user gives it: torchrun's own meaning where it has one, and what ours do beyond."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import json, os, sys
with open("seen" + os.environ["RANK"], "w") as file:
    json.dump([dict(os.environ), sys.argv, sys.path[0], __name__], file)
"""
OURS = [sys.executable, "-m", "gradsplit.launch"]

pytestmark = pytest.mark.timeout(60)


def environment(**more: str) -> dict[str, str]:
    unset = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE")
    outer = {name: value for name, value in os.environ.items() if name not in unset}
    return {**outer, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "", **more}


def run(folder: Path, script: str, *options: str, **more: str):
    (folder / "job.py").write_text(script)
    return subprocess.run(
        [*OURS, *options, "job.py"],
        check=False,
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=50,
    )


def seen_by_ranks(folder: Path) -> list[list]:
    """What the probes of the last job have written, by rank."""
    files = sorted(folder.glob("seen*"))
    seen = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return seen


def test_what_a_process_sees_that_is_not_torchruns(tmp_path):
    """The rest is compared with torchrun in test_compare_with_torchrun."""
    options = ["--nproc-per-node=2", "--standalone", "--monitor-interval", "0.1"]
    job = run(tmp_path, PROBE, *options)
    assert job.returncode == 0
    assert (
        job.stderr == "launch: without effect here: --monitor-interval (processes are watched every 10 ms)\n"
    )
    for rank, (variables, *_) in enumerate(seen_by_ranks(tmp_path)):
        assert variables["MASTER_ADDR"] == "127.0.0.1"
        assert variables["TORCHELASTIC_ERROR_FILE"].endswith(f"/attempt_0/{rank}/error.json")
        assert int(variables["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_options_from_variables(tmp_path):
    run(tmp_path, PROBE, PET_NPROC_PER_NODE="2", PET_ROLE="a", PET_STANDALONE="1", PET_RDZV_ID="mine")
    seen = [probe[0] for probe in seen_by_ranks(tmp_path)]
    assert [(v["ROLE_NAME"], v["WORLD_SIZE"], v["TORCHELASTIC_RUN_ID"]) for v in seen] == 2 * [
        ("a", "2", "mine")
    ]
    job = run(tmp_path, PROBE, "--role=b", "--nnodes", "1:4", PET_ROLE="a")
    assert seen_by_ranks(tmp_path)[0][0]["ROLE_NAME"] == "b"
    assert job.stderr == "launch: --nnodes 1:4: 1 for the whole job\n"


FAILS_ONCE = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "2":
        sys.exit(3)
    import time
    time.sleep(60)
"""


def test_each_process_sees_one_gpu(tmp_path):
    run(tmp_path, PROBE, "--virtual-local-rank", "--nproc-per-node=2", CUDA_VISIBLE_DEVICES="3, 5")
    seen = [(probe[0]["LOCAL_RANK"], probe[0]["CUDA_VISIBLE_DEVICES"]) for probe in seen_by_ranks(tmp_path)]
    assert seen == [("0", "3"), ("0", "5")]
    job = run(tmp_path, PROBE, "--virtual-local-rank", "--nproc-per-node=2", CUDA_VISIBLE_DEVICES="3")
    assert (
        job.returncode == 2
        and seen_by_ranks(tmp_path) == []
        and "has no device in CUDA_VISIBLE_DEVICES=3" in job.stderr
    )


def test_tasks_of_srun_without_mpi_find_each_other(tmp_path):
    """Three on two machines, whose environment is replayed, with a munge that believes everything; one fails once."""
    (tmp_path / "sitecustomize.py").write_text(
        'import os, socket\nsocket.gethostname = lambda: os.environ["SLURMD_NODENAME"]\n'
    )
    for name, does in {"munge": "cat", "unmunge": 'printf "UID: x (%s)\\n\\n" $(id -u); cat'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.py").write_text(PROBE + FAILS_ONCE)
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2"}
    step |= {"SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3", "SLURM_STEP_NODELIST": "127.0.0.[1-2]"}
    step["CUDA_VISIBLE_DEVICES"] = ""  # else who shares a GPU of this machine, or has none, is told
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    tasks = []
    for rank, node in (2, 1), (1, 0), (0, 0):
        task = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURMD_NODENAME": f"node{node}"}
        tasks.append(
            subprocess.Popen(
                [*OURS, "--max-restarts=1", "job.py"],
                cwd=tmp_path,
                env=environment(**step, **task, **paths),
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    told = [task.communicate(timeout=50)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0, 0], told
    table, failed = told[2].splitlines()[:4], told[2].splitlines()[4:]
    assert [line.split()[1:3] for line in table[1:]] == [["0", "node0"], ["1", "node0"], ["2", "node1"]]
    assert told[:2] == ["", ""] and len(failed) == 1
    assert failed[0].startswith("launch: rank 2 of 3 (local rank 0 on node1) exited with code 3; ")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    assert [" ".join(seen[0][name] for name in names) for seen in seen_by_ranks(tmp_path)] == [
        "0 3 0 2 0 node0",
        "1 3 1 2 0 node0",
        "2 3 0 1 1 node0",
    ]


def test_the_nodes_of_an_allocation_that_are_not_used_are_told(tmp_path):
    (tmp_path / "nodes").write_text("a\na\nb\n")
    for allocation in {"SLURM_JOB_NUM_NODES": "2"}, {"PBS_NODEFILE": str(tmp_path / "nodes")}:
        job = run(tmp_path, PROBE, **allocation)
        assert (job.returncode, len(seen_by_ranks(tmp_path))) == (0, 1)
        assert job.stderr == "launch: of the 2 nodes of this allocation one is used; --nnodes 2 uses all\n"


def test_a_dry_run_starts_nothing(tmp_path):
    job = run(tmp_path, 'open("ran", "w")', "--nproc-per-node=2", "--dry-run", "--master-port", "1234")
    assert job.returncode == 0 and not (tmp_path / "ran").exists()
    assert job.stdout.count("  MASTER_PORT=1234\n") == 2 and "  LOCAL_RANK=1\n" in job.stdout
    assert job.stdout.endswith("-u job.py\n")


SPEAKS = (
    "import os, sys\nprint('out', os.environ['RANK'])\nprint('error', os.environ['RANK'], file=sys.stderr)\n"
)


@pytest.mark.parametrize(
    ("options", "shown", "told", "files"),
    [
        ((), "out 0|out 1", "error 0|error 1", 0),
        (("--log-dir", "logs"), "out 0|out 1", "error 0|error 1", 4),
        (("--log-dir", "logs", "-r", "3"), "", "", 4),
        (("--log-dir", "logs", "-t", "0:3,1:1"), "[0:0] out 0|[0:1] out 1", "[0:0] error 0|error 1", 4),
        (("--log-dir", "logs", "-r", "0:1", "--ranks-filter=0"), "", "error 0", 4),
        (("--local-ranks-filter", "1"), "out 1", "error 1", 0),
    ],
)
def test_output_goes_to_files_and_to_the_screen(tmp_path, options, shown, told, files):
    job = run(tmp_path, SPEAKS, "--nproc-per-node=2", *options)
    assert job.returncode == 0
    assert sorted(job.stdout.splitlines()) == shown.split("|") * bool(shown)
    assert sorted(job.stderr.splitlines()) == told.split("|") * bool(told)
    logs = sorted((tmp_path / "logs").glob("*/attempt_0/[01]/*.log"))
    assert [f"{log.parent.name} {log.name} {log.read_text()}" for log in logs] == [
        f"{rank} std{'out' if word == 'out' else 'err'}.log {word} {rank}\n"
        for rank in range(2)
        for word in ("error", "out")
    ][:files]


def test_of_progress_bars_the_first_is_drawn(tmp_path):
    """And every one's end is shown."""
    (tmp_path / "job.py").write_text("""
import os
rank = os.environ["RANK"]
for text in f"\\r{rank}: 1%", f"\\r{rank}: 50%", f"\\r{rank}: 100%", f"\\nend {rank}\\r", "\\n":
    os.write(2, text.encode())
""")
    job = subprocess.run(
        [*OURS, "--nproc-per-node=2", "--log-dir=logs", "job.py"],
        check=True,
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        timeout=50,
    )
    shown = {text: text.encode() in job.stderr for text in ("0: 1%\r", "0: 50%\r", "1: 1%", "1: 50%")}
    assert shown == {"0: 1%\r": True, "0: 50%\r": True, "1: 1%": False, "1: 50%": False}
    for rank in range(2):
        assert f"{rank}: 100%\n".encode() in job.stderr and f"end {rank}\r\n".encode() in job.stderr
        log = next((tmp_path / "logs").glob(f"*/attempt_0/{rank}/stderr.log"))
        assert log.read_bytes() == f"\r{rank}: 1%\r{rank}: 50%\r{rank}: 100%\nend {rank}\r\n".encode()


def test_lines_with_some_words_go_to_a_file_of_all_ranks(tmp_path):
    job = run(
        tmp_path,
        SPEAKS,
        "--nproc-per-node=2",
        "--log-dir=logs",
        "-t=0:3,1:1",
        "--duplicate-stdout-filters=x,ut 1",
    )
    assert job.returncode == 0 and "[0:0] out 0\n" in job.stdout
    (file,) = (tmp_path / "logs").glob("*/attempt_0/filtered_*.log")
    assert (file.name, file.read_text()) == ("filtered_stdout.log", "[0:1] out 1\n")


def test_the_exceptions_of_many_ranks_are_told_once(tmp_path):
    """As torch writes them once there is a process group, too."""
    script = """
import os, signal, sys, time
def follow(*_):
    print("[rank%s]: Traceback (most recent call last):" % os.environ["RANK"], file=sys.stderr)
    sys.exit("[rank%s]: RuntimeError: connection closed" % os.environ["RANK"])
signal.signal(signal.SIGTERM, follow)
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    raise ValueError("broken")
time.sleep(60)
"""
    job = run(tmp_path, script, "--nproc-per-node=4")
    told = [line for line in job.stderr.splitlines() if line.startswith("launch: ")]
    assert told[0] == "launch: 'RuntimeError: connection closed' ended the traceback of 3 ranks: 0, 2-3"
    assert told[1] == f"launch: rank 1 on {os.uname().nodename} wrote last:" and len(told) == 3
    assert job.stderr.count("ValueError: broken") == 2


def test_the_first_failure_comes_last(tmp_path):
    script = """
import os, signal, sys, time
def complain(*_):
    sys.exit("I was ended")
signal.signal(signal.SIGTERM, complain)
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    try:
        {}["gone"]
    except KeyError:
        raise ValueError("broken")
while True:
    time.sleep(60)
"""
    job = run(tmp_path, script, "--nproc-per-node=2", "--log-dir", "logs")
    assert job.returncode == 1
    first, last = job.stderr.rsplit("wrote last:\n", 1)
    assert "I was ended\n" in first
    assert last.startswith("Traceback") and last.count("Traceback") == 2 and "KeyError: 'gone'" in last
    *_, error, line = last.splitlines()
    assert error == "ValueError: broken"
    file = next((tmp_path / "logs").glob("*/attempt_0/1/stderr.log"))
    assert re.fullmatch(
        r"launch: rank 1 of 2 \(local rank 1 on .*\) exited with code 1; .*: " + f"{file}\\)", line
    )
    assert "ValueError: broken" in file.read_text()


def test_a_process_that_does_not_heed_sigterm_is_killed(tmp_path):
    script = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGSEGV)
while True:
    time.sleep(60)
"""
    started = time.monotonic()
    job = run(tmp_path, script, "--nproc-per-node=3", "--shutdown-timeout", "1")
    assert time.monotonic() - started < 10
    assert (job.returncode, job.stdout) == (128 + signal.SIGSEGV, 2 * "heard\n")
    assert "rank 1 of 3" in job.stderr and job.stderr.count("\n") == 1


FAILS_TWICE = """
import os, sys
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
# In one write: the other rank may be ended in the middle of a line.
sys.stdout.write(f"{attempt} {os.environ['MASTER_PORT']} {os.environ['TORCHELASTIC_RUN_ID']}\\n")
if os.environ["RANK"] == "1" and int(attempt) < 2:
    sys.exit(3)
"""


@pytest.mark.parametrize(("restarts", "code", "told"), [(0, 3, 1), (1, 3, 2), (5, 0, 2)])
def test_the_group_is_started_again(tmp_path, restarts, code, told):
    job = run(tmp_path, FAILS_TWICE, "--nproc-per-node=2", f"--max-restarts={restarts}")
    assert (
        job.returncode == code and job.stderr.count("launch: rank 1 of 2") == job.stderr.count("\n") == told
    )
    assert job.stderr.count("; restart") == min(restarts, 2)
    attempts = [line.split() for line in job.stdout.splitlines()]
    assert {words[0] for words in attempts} == set("012"[: min(restarts, 2) + 1])
    assert len({words[2] for words in attempts}) == 1


@pytest.mark.parametrize(
    ("options", "sent", "said", "code"),
    [
        ((), [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM], ["SIGUSR1", "SIGUSR2", "SIGTERM"], 143),
        (("--signals-to-handle", "SIGTERM,SIGUSR1"), [signal.SIGUSR1], ["SIGUSR1"], 128 + signal.SIGUSR1),
    ],
)
def test_signals_reach_the_processes(tmp_path, options, sent, said, code):
    """And one that ends the job leaves time to write a checkpoint, also where the launcher's other process, the keeper,
    gets it: Slurm sends it to every process of a job."""
    (tmp_path / "job.py").write_text("""
import signal, time
def heed(number, frame):
    name = signal.Signals(number).name
    if number == signal.SIGTERM or END:
        time.sleep(0.5)
    print(name, flush=True)
    if number == signal.SIGTERM or END:
        raise SystemExit(0)
import os
END = "USR1" in os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"]
for number in signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM:
    signal.signal(number, heed)
print("ready", flush=True)
while True:
    time.sleep(60)
""")
    command = [*OURS, "--nproc-per-node=2", *options, "job.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None and job.stderr is not None
        assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        keeper = int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text())
        for number, name in zip(sent, said, strict=True):
            os.kill(keeper, number)
            job.send_signal(number)
            assert [job.stdout.readline() for _ in range(2)] == [f"{name}\n"] * 2
        assert job.wait(10) == code
        assert job.stderr.read() == ""


def test_an_interrupt_that_an_import_swallows_ends_the_launcher(tmp_path):
    """As those in callbacks are; Python's import system has some."""
    (tmp_path / "sitecustomize.py").write_text("""
import os, signal, sys, weakref
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "gradsplit.launch.options":
            thing = type("Thing", (), {})()
            reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))
            del thing
sys.meta_path.insert(0, Finder)
signal.signal(signal.SIGINT, signal.default_int_handler)
""")
    job = run(tmp_path, PROBE, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (job.returncode, job.stderr) == (-signal.SIGINT, "")
    assert seen_by_ranks(tmp_path) == []
