"""The launcher's pure parts: command line, placement of ranks, MPI installations."""

import os
import socket
from pathlib import Path

import pytest

from gradsplit.launch import rendezvous
from gradsplit.launch.cli import main, spec_of
from gradsplit.launch.entry import check_entry
from gradsplit.launch.errors import LaunchError
from gradsplit.launch.failure import Failure, collapsed, describe
from gradsplit.launch.launch_spec import EntryKind, LaunchSpec
from gradsplit.launch.mpi_environment import Flavour, MpiInstallation, find_mpi, parse_flavour
from gradsplit.launch.mpi_variables import (
    mpi_rank,
    mpi_size,
    refuse_lonely_worlds,
    started_by_srun,
    without_mpi_variables,
)
from gradsplit.launch.mpiexec_command import mpiexec_command, mpiexec_variables
from gradsplit.launch.options import parse_options
from gradsplit.launch.rank_placement import check_placement, place_ranks
from gradsplit.launch.rendezvous import Rendezvous, choose_rendezvous
from gradsplit.launch.slurm_task import slurm_rank
from gradsplit.launch.terminal import terminal_variables


def parse(*arguments: str) -> LaunchSpec:
    return spec_of(parse_options(list(arguments)))


@pytest.mark.parametrize("spelling", [("--nproc-per-node", "2"), ("--nproc_per_node=2",)])
def test_options_end_at_the_script(spelling):
    spec = parse(
        *spelling, "--master_port=1234", "--master-addr", "a", "t.py", "--nproc-per-node", "9", "--", "-m"
    )
    assert spec == LaunchSpec(
        entry="t.py",
        entry_kind=EntryKind.SCRIPT,
        arguments=("--nproc-per-node", "9", "--", "-m"),
        processes_per_node=2,
        master_address="a",
        master_port=1234,
    )
    assert LaunchSpec.from_json(spec.to_json()) == spec


def test_kinds_of_entry():
    assert parse("-m", "a.b", "x").command()[1:] == ["-u", "-m", "a.b", "x"]
    assert parse("--no_python", "echo", "x").command() == ["echo", "x"]
    assert parse("--nnodes", "1:1", "--", "-odd.py").entry == "-odd.py"
    filters = parse("--duplicate-stdout-filters", "a,b,,c", "--duplicate-stderr-filters=d", "t.py").filters
    assert filters == (("a", "b,c"), ("d",))
    assert parse("--standalone", "t.py").nodes == (1, 1)
    assert parse("--nproc-per-node", "cpu", "t.py").processes_per_node == os.cpu_count()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no script given"),
        (("-m",), "no module given"),
        (("--nproc-per-node",), "--nproc-per-node/--nproc_per_node: expected one argument"),
        (("--nproc-per-node", "0", "t.py"), "'0'"),
        (("--nproc-per-node", "-1", "t.py"), "'-1'"),
        (("--nproc-per-node", "two", "t.py"), "allowed: a whole number from 1, cpu, gpu, auto"),
        (("--nnodes", "2:1", "t.py"), "a whole number from 1, or a range"),
        (("--master-port", "65536", "t.py"), "1 to 65535"),
        (("--master-addr", "", "t.py"), "--master-addr is empty"),
        (
            ("--max-restarts", "-3", "t.py"),
            "--max-restarts '-3': allowed: a whole number from 0",
        ),
        (("--redirects", "0:1,4", "t.py"), "got '0:1,4'; allowed: 0, 1, 2, 3, or"),
        (("--tee=4", "t.py"), "got '4'"),
        (("--ranks-filter", "a", "t.py"), "allowed: ranks with commas"),
        (("--signals-to-handle", "SIGTERM,SIGX", "t.py"), "there is no signal 'SIGX'"),
        (("--nproc", "3", "t.py"), "unrecognized arguments: --nproc"),
        (("--standalone=1", "t.py"), "ignored explicit argument '1'"),
        (("-m", "--no-python", "t"), "exclude each other"),
        (("--standalone", "--nnodes", "2", "t.py"), "--standalone means"),
    ],
)
def test_faults_are_named(arguments, said):
    with pytest.raises(LaunchError) as raised:
        parse(*arguments)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_a_module_in_a_folder_of_a_package(tmp_path, monkeypatch):
    """The folder has no __init__.py; its package is not imported to find that out."""
    folder = tmp_path / "some_package" / "folder"
    folder.mkdir(parents=True)
    (tmp_path / "some_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "program.py").write_text("")
    monkeypatch.chdir(tmp_path)
    check_entry(parse("-m", "some_package.folder.program"))
    with pytest.raises(LaunchError, match="not found"):
        check_entry(parse("-m", "some_package.folder.nothing"))


def test_placement_on_one_host():
    second = place_ranks(["a", "a"])[1]
    assert second.torchrun_variables() == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
    }


def test_placement_of_interleaved_and_uneven_hosts():
    placements = place_ranks(["b", "a", "b", "a", "b"])
    assert [p.node_index for p in placements] == [0, 1, 0, 1, 0]
    assert [p.local_rank for p in placements] == [0, 0, 1, 1, 2]
    assert [p.local_world_size for p in placements] == [3, 2, 3, 2, 3]
    assert {p.node_count for p in placements} == {2}


def test_placement_must_match_the_options():
    placements = place_ranks(["a", "a", "b"])
    check_placement(parse("t.py"), placements)
    with pytest.raises(LaunchError, match=r"started 1 rank\(s\) on b"):
        check_placement(parse("--nproc-per-node", "2", "t.py"), placements)
    with pytest.raises(LaunchError, match=r"on 2 node\(s\)"):
        check_placement(parse("--nnodes", "3", "t.py"), placements)


def test_ports_are_not_those_that_the_system_hands_out(monkeypatch):
    handed_out = rendezvous._first_handed_out()
    assert handed_out > 1024
    found = {rendezvous.find_free_port() for _ in range(20)}
    assert len(found) > 10 and (max(found) < handed_out or handed_out <= 20_000)
    monkeypatch.setattr(rendezvous, "_first_handed_out", lambda: 20_001)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.2", 20_000))
        taken.listen()
        assert rendezvous.find_free_port() != 20_000, "taken at another address, as by a connection"


def test_rendezvous():
    one, two = place_ranks(["a", "a"]), place_ranks(["a", "b"])
    assert choose_rendezvous(parse("t.py"), one[0]).master_address == "127.0.0.1"
    assert choose_rendezvous(parse("t.py"), two[0]).master_address == "a"
    spec = parse("--master-addr", "10.0.0.1", "--master-port", "29500", "t.py")
    chosen = choose_rendezvous(spec, two[0])
    assert (chosen.master_address, chosen.master_port) == ("10.0.0.1", 29500)
    assert "TORCHELASTIC_USE_AGENT_STORE" not in Rendezvous("a", 1, "x").torchrun_variables()


def test_mpi_variables():
    open_mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1"}
    hydra = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}
    assert (mpi_rank(open_mpi), mpi_size(open_mpi)) == (1, 4)
    assert (mpi_rank(hydra), mpi_size(hydra)) == (3, 4)
    assert mpi_rank({"PATH": "x"}) is None
    assert without_mpi_variables(open_mpi | hydra | {"PATH": "x"}) == {"PATH": "x"}
    settings = {"OMPI_MCA_btl": "self,tcp", "PATH": "x"}
    assert without_mpi_variables(settings) == settings
    assert without_mpi_variables(open_mpi | settings) == {"PATH": "x"}


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "4",
}
SLURM_STEP = SLURM | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "4"}


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        # What each starter sets, of what is read here or could be mistaken for it.
        ({}, (None, None)),
        (SLURM, (None, None)),  # The batch script itself, where mpirun is still to come.
        (SLURM_STEP, (None, 4)),
        (SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "1"}, (None, 1)),  # An interactive shell in an allocation.
        (SLURM_STEP | {"PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.7.0"}, (2, 4)),
        (SLURM_STEP | {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_JOBID": "7.0", "PMI_FD": "9"}, (2, 4)),
        # Open MPI's mpirun in an allocation: srun starts its daemons, one on each of 4 nodes.
        (
            SLURM_STEP
            | {"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "32", "PMIX_NAMESPACE": "prterun-a"},
            (9, 32),
        ),
        (
            {"PALS_RANKID": "5", "PALS_NODEID": "1", "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1"},
            (5, 8),
        ),
        (
            {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9"},
            (3, 4),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 2)),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"}, (None, None)),
        ({"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4"}, "pmi=off"),
        ({"PALS_RANKID": "5", "PALS_NODEID": "1"}, "--pmi=none"),
    ],
)
def test_environments_of_what_starts_ranks(environment, seen):
    if isinstance(seen, str):
        with pytest.raises(LaunchError, match=seen):
            refuse_lonely_worlds(environment)
        return
    refuse_lonely_worlds(environment)
    assert (mpi_rank(environment), mpi_size(environment)) == seen
    assert started_by_srun(environment) == ("slurm" in environment.get("PMIX_NAMESPACE", ""))
    assert slurm_rank(environment) == (2 if environment is SLURM_STEP else None)
    assert not [
        name for name in without_mpi_variables(environment) if name.startswith(("PMI", "OMPI", "MPI_"))
    ]


def test_flavours():
    assert parse_flavour("mpiexec (Open MPI) 5.0.11\n\nReport bugs") is Flavour.OPEN_MPI
    assert parse_flavour("mpiexec (OpenRTE) 4.0.3") is Flavour.OPEN_MPI
    assert parse_flavour("HYDRA build details:\n    Version: 4.2.0") is Flavour.MPICH
    assert parse_flavour("Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 2023") is Flavour.INTEL
    assert parse_flavour("something else") is Flavour.OTHER


def test_mpiexec_command_lines():
    def installation(flavour: Flavour) -> MpiInstallation:
        return MpiInstallation(Path("/m/bin/mpiexec"), flavour, Path("/m/lib/libmpi.so"))

    command = mpiexec_command(installation(Flavour.OPEN_MPI), 4, ["p", "x"])
    assert command == [
        "/m/bin/mpiexec",
        "-n",
        "4",
        "--bind-to",
        "none",
        "--map-by",
        ":OVERSUBSCRIBE",
        "p",
        "x",
    ]
    assert mpiexec_command(installation(Flavour.MPICH), 2, ["p"])[1:] == ["-n", "2", "-bind-to", "none", "p"]
    assert mpiexec_command(installation(Flavour.INTEL), 2, ["p"])[1:] == ["-n", "2", "p"]

    root = mpiexec_variables(installation(Flavour.OPEN_MPI), as_root=True)
    assert root["MPI4PY_LIBMPI"] == "/m/lib/libmpi.so" and root["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    user = mpiexec_variables(installation(Flavour.OPEN_MPI), as_root=False)
    assert not any("ROOT" in name for name in user)
    assert mpiexec_variables(installation(Flavour.INTEL), as_root=False)["I_MPI_PIN"] == "0"


def make_installation(prefix: Path, version: str, library: str) -> Path:
    mpiexec = prefix / "bin" / "mpiexec"
    mpiexec.parent.mkdir(parents=True)
    mpiexec.write_text(f"#!/bin/sh\necho '{version}'\n")
    mpiexec.chmod(0o755)
    (prefix / "lib").mkdir()
    (prefix / "lib" / library).touch()
    return mpiexec


def test_a_system_mpi_goes_before_the_embedded_one_with_its_own_library(tmp_path, monkeypatch):
    embedded = make_installation(tmp_path / "venv", "mpiexec (Open MPI) 5.0", "libmpi.so.40")
    system = make_installation(tmp_path / "system", "HYDRA build details:", "libmpi.so.12")
    broken = make_installation(tmp_path / "broken", "Open MPI", "libmpi.so.40")
    broken.write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setattr("gradsplit.launch.mpi_environment.own_script_folders", lambda: [embedded.parent])
    path = os.pathsep.join(str(mpiexec.parent) for mpiexec in (embedded, broken, system))
    assert find_mpi({"PATH": path}) == MpiInstallation(
        system, Flavour.MPICH, tmp_path / "system" / "lib" / "libmpi.so.12"
    )
    assert find_mpi({"PATH": str(broken.parent)}).mpiexec == embedded  # Need not be on PATH.
    embedded.unlink()
    with pytest.raises(LaunchError, match="no MPI found"):
        find_mpi({"PATH": str(broken.parent)})


def test_terminal_variables():
    size = os.terminal_size((120, 40))
    shown = {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "COLUMNS": "120", "LINES": "40"}
    assert terminal_variables({}, size) == shown
    assert terminal_variables({"NO_COLOR": "1", "COLUMNS": "9"}, size) == {"LINES": "40"}
    assert terminal_variables({}, None) == {"NO_COLOR": "1", "TTY_COMPATIBLE": "0"}


@pytest.mark.parametrize(
    ("exceptions", "told"),
    [
        ({}, ""),
        ({1: "KeyError: 1"}, ""),
        (
            dict.fromkeys((0, 1, 2, 5), "ValueError: x"),
            "launch: 'ValueError: x' ended the traceback of 4 ranks: 0-2, 5\n",
        ),
        (
            {0: "Closed", 1: "KeyError: 1"},
            "launch: 'Closed' ended the traceback of 1 rank: 0\n",
        ),
    ],
)
def test_equal_exceptions_are_told_once_with_their_ranks(exceptions, told):
    assert collapsed(exceptions, 1) == told


def test_failures():
    placements = place_ranks(["a", "a"])
    assert min(Failure(2.0, 0, 1), Failure(1.0, 1, -9)).exit_code == 137
    assert "rank 1 of 2 (local rank 1 on a) was killed by signal 9" in describe(
        Failure(1.0, 1, -9), placements[1]
    )
    assert "exited with code 200;" in describe(Failure(1.0, 0, 200), placements[0])


@pytest.mark.parametrize(("rank", "told", "waited"), [("0", 1, []), ("1", 0, [5.0])])
def test_other_ranks_let_rank_0_print_an_error(monkeypatch, capsys, rank, told, waited):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    assert main(["--nproc-per-node", "none", "train.py"]) == 2
    assert capsys.readouterr().err.count("launch: ") == told
    assert slept == waited
