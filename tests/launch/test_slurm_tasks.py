"""Tasks that srun started without MPI: what they are told, how they meet, and whom they believe."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from gradsplit.launch.errors import LaunchError, RankLostError
from gradsplit.launch.same_user import is_proof_of, proof_of
from gradsplit.launch.slurm_task import SlurmTask, first_of, slurm_task
from gradsplit.launch.slurm_world import SlurmWorld, join_slurm_world

pytestmark = pytest.mark.timeout(60)

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "2",
}


def test_what_a_task_of_slurm_is_told():
    step = STEP | {"SLURM_STEP_NODELIST": "rack[0-1]-a[03-5,9],b"}
    task = slurm_task(step)
    assert task == SlurmTask("7.0", rank=2, size=4, node_count=4, first_host="rack0-a03")
    ports = task.ports()
    assert (
        ports == slurm_task(step | {"SLURM_PROCID": "1"}).ports()
        and ports != replace(task, step="7.1").ports()
    )
    assert len(set(ports)) > 1 and all(61000 <= port < 65536 for port in ports)
    assert [first_of(nodes) for nodes in ("a", "a,b", "n[7]", "n[12,14-15]x,m")] == ["a", "a", "n7", "n12x"]
    for wrong, told in (
        ({"SLURM_NTASKS": "1"}, "SLURM_STEP_NUM_TASKS=4, SLURM_NTASKS=1"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4 of 4"),
        ({"SLURM_PROCID": "0", "SLURM_NODEID": "1"}, "not on the first node"),
        ({"SLURM_HET_SIZE": "2"}, "needs MPI"),
    ):
        with pytest.raises(LaunchError, match=told):
            slurm_task(step | wrong)


def tasks_of(size: int, **more: str) -> list[dict[str, str]]:
    """The environments of tasks on one machine."""
    step = {"SLURM_JOB_ID": f"{os.getpid()}x", "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_NUM_NODES": "1"}
    return [step | {"SLURM_STEP_NODELIST": "a", "SLURM_PROCID": str(rank)} | more for rank in range(size)]


@pytest.fixture
def without_munge(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)


def test_tasks_of_slurm_meet_among_strangers(without_munge, capsys):
    first, second = tasks_of(2)

    def arrive() -> SlurmWorld:
        for said in b"", b"\0\0\0\2{}", b"\xff" * 20:
            while True:
                try:
                    stranger = socket.create_connection(("127.0.0.1", slurm_task(second).ports()[0]))
                    break
                except ConnectionRefusedError:
                    pass
            stranger.sendall(said)
            stranger.close()
        return join_slurm_world(second)

    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(arrive)
        world = join_slurm_world(first)
        there = other.result()
        assert "no munge here: who reached a:" in capsys.readouterr().err
        gathered = thread.submit(there.gather_everywhere, ["b"])
        assert world.gather_everywhere({"a": 1}) == gathered.result() == [{"a": 1}, ["b"]]
        there.announce()
        while not world.take_announcement():
            pass
        assert not world.take_announcement() and not there.take_announcement()
        there.abort(1)
        with pytest.raises(RankLostError) as lost:
            while True:
                world.beat()
        assert (lost.value.rank, lost.value.found_here) == (1, True)
        assert lost.value.message.startswith("the launcher on {} has ended")


def test_tasks_of_slurm_that_disagree_or_do_not_come(without_munge, monkeypatch):
    (first, _), (_, second, _) = tasks_of(2), tasks_of(3)
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(join_slurm_world, second)
        for join in lambda: join_slurm_world(first), other.result:
            with pytest.raises(LaunchError, match="task 1 was told of 3 tasks, task 0 of 2"):
                join()
    monkeypatch.setattr("gradsplit.launch.slurm_world.JOIN_S", 0.2)
    with pytest.raises(LaunchError, match="task 1-2 of 3 did not come to a within"):
        join_slurm_world(tasks_of(3)[0])
    with pytest.raises(LaunchError, match="task 1 did not find task 0 of 3 within") as alone:
        join_slurm_world(second)
    assert alone.value.known_here_alone


UNMUNGE = """read user text
[ -n "$text" ] || exit 1
printf 'STATUS:  Success (0)\\nUID:  somebody (%s)\\nLENGTH:  3\\n\\n%s' "$user" "$text\""""


def test_proofs_are_of_this_user_and_this_text(tmp_path, monkeypatch):
    for name, does in {"munge": 'echo "$USER_ID $(cat)"', "unmunge": UNMUNGE}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("USER_ID", str(os.geteuid()))
    proof = proof_of("a b")
    assert proof and is_proof_of("a b", proof)
    assert not is_proof_of("a c", proof) and not is_proof_of("a b", "") and not is_proof_of("a b", "nonsense")
    monkeypatch.setenv("USER_ID", str(os.geteuid() + 1))
    assert not is_proof_of("a b", proof_of("a b"))
