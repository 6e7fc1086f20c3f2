"""The scripts of examples/multi_node: a shell reads each, and the launcher accepts what each would start."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples" / "multi_node").glob("*.sh"))
STARTER = """#!/bin/sh
echo "started by: $(basename $0) $*"
while [ "$1" != python ]; do shift; done
exec "$@"
"""


def test_a_shells_checker_finds_nothing():
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    checker = shutil.which("shellcheck", path=beside)
    if checker is None:
        pytest.skip("shellcheck is not installed")
    checked = subprocess.run([checker, *SCRIPTS], check=False, capture_output=True, text=True)
    assert SCRIPTS and checked.returncode == 0, checked.stdout


@pytest.mark.timeout(300)
def test_the_program_runs_unchanged_under_torchrun_and_ours(tmp_path):
    """And goes on under the one from the checkpoint that it has written under the other."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GRADSPLIT_DISABLE": "1", "PYTHONWARNINGS": ""}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # on a machine of one GPU the second rank would have none
    losses = []
    for launcher, steps in ("torch.distributed.run", 5), ("gradsplit.launch", 10):
        program = [str(ROOT / "examples/multi_node/train.py"), f"--steps={steps}"]
        job = subprocess.run(
            [sys.executable, "-m", launcher, "--nproc-per-node=2", *program],
            check=False,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=140,
        )
        assert job.returncode == 0, job.stderr
        loss = re.fullmatch(rf"step {steps}: loss ([\d.]+) on rank 0 of 2, saved\n", job.stdout)
        assert loss is not None, job.stdout
        losses.append(float(loss[1]))
    assert losses[1] < losses[0]


def dry_run(folder: Path, command: list[str]) -> str:
    """Run ``command`` with a stand-in for what starts ranks, which starts one."""
    for starter in "mpirun", "mpiexec", "srun":
        (folder / starter).write_text(STARTER)
        (folder / starter).chmod(0o755)
    (folder / "python").symlink_to(sys.executable)
    (folder / "hosts").write_text("a\n")
    variables = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PROCESSES": "2",
    }
    variables |= {"PBS_NODEFILE": str(folder / "hosts"), "HOSTFILE": str(folder / "hosts")}
    job = subprocess.run(
        command, check=False, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=40
    )
    assert job.returncode == 0, job.stderr
    return job.stdout


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "script", [s for s in SCRIPTS if s.stem != "hostfile"], ids=lambda script: script.stem
)
def test_a_script_starts_what_the_launcher_accepts(tmp_path, script):
    shown = dry_run(tmp_path, ["bash", str(script), "--dry-run"])
    assert shown.startswith("started by: " + ("srun" if "srun" in script.stem else "mpi"))
    assert "  LOCAL_RANK=1\n" in shown and shown.endswith("-u examples/multi_node/train.py\n")


def test_the_hostfile_script_and_the_manifest(tmp_path):
    script = ROOT / "examples/multi_node/hostfile.sh"
    (tmp_path / "python").write_text('#!/bin/sh\necho "$*"\n')
    (tmp_path / "python").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    shown = subprocess.run(
        ["bash", script], check=True, env={"PATH": path}, capture_output=True, text=True
    ).stdout
    assert shown == "-m gradsplit.launch --hostfile hosts --nproc-per-node gpu examples/multi_node/train.py\n"
    (tmp_path / "python").unlink()
    manifest = (ROOT / "examples/multi_node/kubernetes.yaml").read_text()
    command = json.loads(re.search(r"command: (\[.*\])", manifest)[1])
    assert command.pop() == "examples/multi_node/train.py"
    shown = dry_run(
        tmp_path, [str(tmp_path / command[0]), *command[1:], "--dry-run", "examples/multi_node/train.py"]
    )
    assert shown.count("  RANK=") == 8
