"""Real jobs: `python -m gradsplit.launch` as a user runs it, with a hostfile, and under a user's own mpiexec."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("mpi4py")

from gradsplit.launch.cli import main
from gradsplit.launch.errors import LaunchError
from gradsplit.launch.mpi_environment import find_mpi
from gradsplit.launch.mpiexec_command import mpiexec_command, mpiexec_variables
from tests.launch.random_failures import run_one

ROOT = Path(__file__).resolve().parents[2]
PROMPTLY_S = 15
"""Far less than the 60 s for which a test's healthy rank sleeps, with room for a busy machine."""

try:
    INSTALLATION = find_mpi(os.environ)
except LaunchError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.timeout(60)

SHOW_ENVIRONMENT = """
import json, os, sys
assert "mpi4py" not in sys.modules and sys.stdin.read() == ""
print(json.dumps([dict(os.environ), sys.argv[1:]]))
"""


def environment(**more: str) -> dict[str, str]:
    outer = {n: v for n, v in os.environ.items() if n not in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE")}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**outer, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "error", **more}


def launch(*arguments: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gradsplit.launch", *map(str, arguments)],
        check=False,
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=110,
    )


def under_mpiexec(ranks: int, script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        mpiexec_command(INSTALLATION, ranks, [sys.executable, str(script)]),
        check=False,
        cwd=script.parent,
        env=environment(**mpiexec_variables(INSTALLATION, as_root=os.geteuid() == 0)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )


def write(folder: Path, text: str) -> Path:
    script = folder / "script.py"
    script.write_text(text)
    return script


def ranks_shown(output: str) -> list[tuple[dict[str, str], list[str]]]:
    shown = [json.loads(line) for line in output.splitlines() if line.startswith("[{")]
    return sorted(shown, key=lambda pair: int(pair[0]["RANK"]))


def test_each_rank_sees_torchruns_variables(tmp_path):
    script = write(tmp_path, SHOW_ENVIRONMENT)
    job = launch(
        "--nproc-per-node", "2", script, "a b", ":", "--x", cwd=tmp_path, TORCHELASTIC_USE_AGENT_STORE="True"
    )
    assert (job.returncode, job.stderr) == (0, "")
    ranks = ranks_shown(job.stdout)
    assert len(ranks) == 2
    for rank, (seen, arguments) in enumerate(ranks):
        assert arguments == ["a b", ":", "--x"]
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "ROLE_RANK": rank,
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
        }
        expected |= {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "ROLE_WORLD_SIZE": 2}
        assert {name: seen[name] for name in expected} == {
            name: str(value) for name, value in expected.items()
        }
        assert seen["MASTER_ADDR"] == "127.0.0.1" and 0 < int(seen["MASTER_PORT"]) < 65536
        assert "TORCHELASTIC_USE_AGENT_STORE" not in seen
        added = seen.keys() - os.environ.keys()
        assert not any(name.startswith(("OMPI_", "PMI", "GRADSPLIT_LAUNCH_")) for name in added)
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        assert ranks[0][0][name] == ranks[1][0][name]


def test_under_a_users_own_mpiexec(tmp_path):
    script = write(tmp_path, SHOW_ENVIRONMENT)
    variables = mpiexec_variables(INSTALLATION, as_root=os.geteuid() == 0)
    del variables["MPI4PY_LIBMPI"]  # The rank has to find it.
    port = ["--master-port", "23456"]
    # The last as torchrun is used: one on each node, which starts several.
    for ranks, options, code in (
        (2, port, 0),
        (2, ["--nproc-per-node", "3"], 2),
        (1, ["--nproc-per-node=2", *port], 0),
    ):
        program = [sys.executable, "-m", "gradsplit.launch", *options, str(script)]
        job = subprocess.run(
            mpiexec_command(INSTALLATION, ranks, program),
            check=False,
            cwd=tmp_path,
            env=environment(**variables, OMP_NUM_THREADS="5"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert job.returncode == code, job.stderr
        shown = ranks_shown(job.stdout)
        assert [seen["LOCAL_RANK"] for seen, _ in shown] == (["0", "1"] if code == 0 else [])
        assert all(seen["MASTER_PORT"] == "23456" and seen["OMP_NUM_THREADS"] == "5" for seen, _ in shown)
        assert job.stderr.count("launch: ") == (0 if code == 0 else 1)


def listening(processes: list[int]) -> list[str]:
    """Addresses at which one of the processes listens, in the kernel's own spelling."""
    opened = set()
    for process in processes:
        opened |= {os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()}
    found = []
    for table in "tcp", "tcp6":
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in opened:
                found.append(address)
    return found


def with_descendants(top: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # It has just ended.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [top]
    for process in found:
        found += children.get(process, [])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks for sockets in /proc")
@pytest.mark.parametrize("start", ["alone", "mpiexec"])
def test_a_job_on_one_machine_listens_on_no_network(tmp_path, start):
    script = write(tmp_path, 'import time\nprint("started", flush=True)\ntime.sleep(60)\n')
    command = [sys.executable, "-m", "gradsplit.launch", str(script)]
    if start == "alone":
        command[3:3] = ["--nproc-per-node", "2"]
    else:  # A user's own: what it does itself is not ours to say, but its ranks use shared memory.
        command = mpiexec_command(INSTALLATION, 2, command)
    variables = mpiexec_variables(INSTALLATION, as_root=os.geteuid() == 0)
    with subprocess.Popen(command, env=environment(**variables), stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for _ in range(2):
            assert job.stdout.readline() == "started\n"
        processes = with_descendants(job.pid)
        assert len(processes) >= 4
        of_mpiexec = [] if start == "alone" else listening(processes[:1])
        assert set(listening(processes)) == set(of_mpiexec)
        job.terminate()
    wait_until_gone(str(tmp_path))


def test_lines_of_ranks_do_not_tear_each_other(tmp_path):
    """Nor where a busy machine runs something else in the middle of a line."""
    script = "for i in range(300): print('a', 'b', 'c', 'd', i)\n"
    script += "import time; print('e', end=' '); time.sleep(0.3); print('f')"
    job = launch("--nproc-per-node", "4", write(tmp_path, script), cwd=tmp_path)
    assert sorted(job.stdout.splitlines()) == sorted(4 * [*(f"a b c d {i}" for i in range(300)), "e f"])


def imitated_machines(tmp_path: Path) -> dict[str, str]:
    """Two machines, in the file ``hosts``: the way to them runs its command here, with another host name for Python."""
    version = subprocess.run([INSTALLATION.mpiexec, "--version"], check=False, capture_output=True, text=True)
    if re.search(r"\((Open MPI|OpenRTE)\) [1-4]\.", version.stdout):
        pytest.skip("Open MPI before 5 takes both addresses for one machine")
    # Else ranks of both have the same files of shared memory: Open MPI names them by the kernel's host name.
    own = f"export OMPI_MCA_btl_sm_backing_directory={tmp_path}/$MACHINE; mkdir $OMPI_MCA_btl_sm_backing_directory\n"
    agent = tmp_path / "agent"
    agent.write_text(
        '#!/bin/sh\n[ "$1" = -x ] && shift; export MACHINE="$1"; shift\n' + own + 'exec sh -c "$*"\n'
    )
    agent.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(
        'import os, socket\nsocket.gethostname = lambda: os.environ.get("MACHINE", "front")\n'
    )
    hosts = tmp_path / "hosts"
    hosts.write_text("# The machines.\n127.0.0.2\n127.0.0.3\n")
    variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PRTE_MCA_plm_ssh_agent": str(agent)}
    return variables | {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(agent)}


def test_the_doctor_examines_two_machines(tmp_path):
    variables = imitated_machines(tmp_path) | {"PYTHONWARNINGS": ""}
    options = ["--hostfile", "hosts", "--nproc-per-node=2", "--no-preflight", "--master-addr=127.0.0.1"]
    job = launch("doctor", *options, cwd=tmp_path, **variables)
    assert job.returncode == 0, job.stderr
    assert job.stdout.startswith(f"MPI: {INSTALLATION.flavour}, {INSTALLATION.mpiexec}")
    assert "one rank a machine: LinkModel(startup_s=" in job.stdout
    assert "cannot connect" not in job.stdout and "clock of" not in job.stdout


def test_a_hostfile_starts_mpiexec_on_its_machines(tmp_path):
    variables = imitated_machines(tmp_path) | {"CUDA_VISIBLE_DEVICES": ""}  # none in the table
    script = """
import pathlib, time
sys.stdout.flush()
shown = pathlib.Path(sys.argv[0]).parent / ("shown" + os.environ["TORCHELASTIC_RESTART_COUNT"])
shown.mkdir(exist_ok=True)
(shown / os.environ["RANK"]).touch()
if os.environ["RANK"] == "2":
    while len(os.listdir(shown)) < 4:  # a failure ends the others, who are to be seen
        time.sleep(0.05)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("broken")
    sys.exit(7)
"""
    options = ["--hostfile", "hosts", "--nproc-per-node", "2", "--max-restarts", "1"]
    job = launch(*options, write(tmp_path, SHOW_ENVIRONMENT + script), cwd=tmp_path, **variables)
    assert job.returncode == 7
    seen = [variables for variables, _ in ranks_shown(job.stdout)]
    assert [variables["LOCAL_RANK"] for variables in seen] == list("00110011")
    assert [variables["GROUP_RANK"] for variables in seen] == list("00001111")
    assert {variables["MASTER_ADDR"] for variables in seen} == {"127.0.0.2"}
    said = job.stderr.splitlines()  # a machine's mpiexec may warn before the table
    table = said[next(number for number, line in enumerate(said) if line.split()[1:3] == ["rank", "host"]) :][
        :5
    ]
    assert table[0].split()[1:4] == ["rank", "host", "GPU"] and table[0].endswith("gradsplit   script")
    assert [row.split()[1:4] for row in table[1:]] == [
        [str(rank), f"127.0.0.{2 + rank // 2}", "-"] for rank in range(4)
    ]
    assert len({tuple(row.split()[4:]) for row in table[1:]}) == 1 and "differ" not in job.stderr
    first, _, rest = job.stderr.partition("launch: rank 2 on 127.0.0.3 wrote last:\nTraceback")
    assert first.count("ValueError: broken") == 1
    *_, told, last = rest.splitlines()
    assert told.startswith("launch: rank 2 of 4 (local rank 0 on 127.0.0.3) exited with code 1;")
    assert told.endswith("; restart 1 of 1") and "exited with code 7;" in last


def imitated_installation(prefix: Path, then: str) -> tuple[Path, dict[str, str]]:
    """An MPI whose ``mpiexec`` is a script that starts the real one, and does ``then``."""
    real = INSTALLATION.mpiexec.absolute()
    for part in real.parent.parent.iterdir():
        if part.name != "bin":
            (prefix / part.name).symlink_to(part)
    (prefix / "bin").mkdir()
    mpiexec = prefix / "bin" / "mpiexec"
    mpiexec.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {real} --version\n{real} "$@" &\n{then}')
    mpiexec.chmod(0o755)
    return mpiexec, {"PATH": f"{mpiexec.parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("fails", [True, False])
def test_what_the_ranks_say_counts_where_mpiexec_crashes(tmp_path, fails):
    """An installation is imitated whose mpiexec crashes in the middle of ending the job, or of its run."""
    then = "while [ ! -e now ]; do sleep 0.02; done\nkill -9 $!\nkill -SEGV $$\n"
    mpiexec, path = imitated_installation(tmp_path, then)
    script = write(
        tmp_path,
        """
import os, signal, sys, time
def crash(*_):
    open("now", "w")
    time.sleep(60)
signal.signal(signal.SIGTERM, crash)
print("started")
if os.environ["RANK"] == "1" and "fail" in sys.argv:
    raise ValueError("broken")
if os.environ["RANK"] == "0" and "fail" not in sys.argv:
    crash()
time.sleep(60)
""",
    )
    options = ["--nproc-per-node", "2", "--mpi-args", "", script, tmp_path]
    job = launch(*options, "fail" if fails else "run", cwd=tmp_path, **path)
    last = job.stderr.splitlines()[-1]
    if fails:
        assert (
            job.returncode == 1 and last.startswith("launch: rank 1 of 2") and "exited with code 1;" in last
        )
        assert job.stderr.splitlines()[-2] == "ValueError: broken"
    else:
        assert job.returncode == 128 + signal.SIGSEGV
        said = " while the ranks ran; none of them had failed, and all were ended"
        assert last.startswith(f"launch: {mpiexec} was killed by signal 11 (") and last.endswith(said)
    wait_until_gone(str(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_an_mpiexec_that_stays_after_its_ranks_is_ended(tmp_path):
    """Open MPI's has come to a standstill after a supervisor was killed and it had ended the others."""
    then = f"trap '' TERM\nwait\nwhile :; do sleep 60; : {tmp_path}; done\n"
    _, path = imitated_installation(tmp_path, then)
    (tmp_path / "sitecustomize.py").write_text("import gradsplit.launch.job as job\njob.KILL_AFTER_S = 1\n")
    script = """
import os, signal, time
from pathlib import Path
if os.environ["RANK"] == "1":
    keeper = Path(f"/proc/{os.getppid()}/stat").read_text()
    os.kill(int(keeper.rpartition(")")[2].split()[1]), signal.SIGKILL)
time.sleep(60)
"""
    options = ["--nproc-per-node=2", "--shutdown-timeout=1", "--mpi-args", "", write(tmp_path, script)]
    job = launch(*options, tmp_path, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}", **path)
    last = job.stderr.splitlines()[-1]
    assert job.returncode == 1
    assert last.startswith("launch: the launcher on ") and ", rank 1, has ended: it was killed" in last
    wait_until_gone(str(tmp_path))


def test_a_rank_that_does_not_come_is_not_waited_for(tmp_path):
    script = """
import os, time
import gradsplit.launch.mpi_world as mpi_world
mpi_world.JOIN_S = 1.0
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    time.sleep(50)
mpi_world.join_world()
"""
    job = under_mpiexec(2, write(tmp_path, script))
    assert job.returncode and "in join_world" in job.stderr


def test_what_ranks_tell_each_other_is_plain_data(tmp_path):
    script = """
from gradsplit.launch.mpi_world import join_world
def refuse(*arguments):
    raise AssertionError("a message was a pickle")
world = join_world()
from mpi4py import MPI
MPI.pickle.__init__(refuse, refuse)
values = [{"rank": 0, "text": "\u00e9" * 5000}, None, ["a", 1.5]]
assert world.gather_everywhere(values[world.rank]) == values
if world.rank == 1:
    world.announce()
else:
    while not world.take_announcement():
        pass
assert not world.take_announcement()
while not world.everyone_is_done():
    pass
world.settle(announcements_pending=0)
world.leave()
"""
    job = under_mpiexec(3, write(tmp_path, script))
    assert job.returncode == 0, job.stderr


def test_exit_code_of_one_rank_ends_the_other_promptly(tmp_path):
    script = 'import os, sys, time\nif os.environ["RANK"] == "1": sys.exit(3)\ntime.sleep(60)\n'
    started = time.monotonic()
    job = launch("--nproc-per-node", "2", write(tmp_path, script), cwd=tmp_path)
    assert time.monotonic() - started < PROMPTLY_S
    assert job.returncode == 3
    assert job.stderr.count("\n") == 1 and "rank 1 of 2" in job.stderr and "code 3" in job.stderr


def test_an_exception_is_printed_once_with_its_rank(tmp_path):
    script = 'import os, time\nif os.environ["RANK"] == "0": raise ValueError("broken")\ntime.sleep(60)\n'
    started = time.monotonic()
    job = launch("--nproc-per-node", "2", write(tmp_path, script), cwd=tmp_path)
    assert time.monotonic() - started < PROMPTLY_S
    assert job.returncode == 1
    assert job.stderr.count("ValueError: broken") == 1 and job.stderr.count("Traceback") == 1
    assert job.stderr.splitlines()[-1].startswith("launch: rank 0 of 2")


def processes_with(marker: str) -> list[str]:
    found = []
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker in command_line.read_text():
                found.append(command_line.parent.name)
        except (OSError, UnicodeDecodeError):
            pass  # It has just ended.
    return found


def wait_until_gone(marker: str) -> None:
    deadline = time.monotonic() + 5
    while processes_with(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(marker) == []


STARTS_A_CHILD = """
import os, signal, sys, time
child = [sys.executable, "-c", "import time; time.sleep(60)", sys.argv[1]]
os.spawnv(os.P_NOWAIT, sys.executable, child)
print("started", flush=True)
if os.environ["RANK"] == "1" and "die" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_killed_rank_leaves_no_process_behind(tmp_path):
    started = time.monotonic()
    job = launch("--nproc-per-node", "2", write(tmp_path, STARTS_A_CHILD), tmp_path, "die", cwd=tmp_path)
    assert time.monotonic() - started < PROMPTLY_S
    assert job.returncode == 128 + signal.SIGKILL
    assert job.stderr.count("\n") == 1 and "rank 1 of 2" in job.stderr and "signal 9" in job.stderr
    wait_until_gone(str(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_ending_the_launcher_ends_everything(tmp_path, ending):
    script = write(tmp_path, STARTS_A_CHILD)
    command = [sys.executable, "-m", "gradsplit.launch", "--nproc-per-node", "2", str(script), str(tmp_path)]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None and job.stderr is not None
        for _ in range(2):
            assert job.stdout.readline() == "started\n"  # Live, while the ranks still run.
        job.send_signal(ending)
        assert job.wait(PROMPTLY_S) == (130 if ending == signal.SIGINT else -signal.SIGKILL)
        assert job.stderr.read() == ""
    wait_until_gone(str(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("kind", ["keeper killed", "launcher killed"])
def test_what_loses_its_launcher_ends(kind):
    assert run_one(0, kind) is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["no_such_script.py"],
        ["--nproc-per-node", "0", "script.py"],
        ["--nproc-per-node", "many", "script.py"],
        ["--bogus", "script.py"],
        ["--nproc-per-node", "2"],
        ["--nnodes", "2", "script.py"],
        ["-m", "no_such_module.part"],
        ["--no-python", "no-such-program"],
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(tmp_path, monkeypatch, capfd, arguments):
    write(tmp_path, 'print("ran")')
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    told = capfd.readouterr()
    assert told.out == "" and told.err.startswith("launch: ") and told.err.count("\n") == 1
