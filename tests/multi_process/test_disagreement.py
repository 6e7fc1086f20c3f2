"""Ranks that disagree or fail end with an error that names the rank, on every rank and soon, instead of hanging or
adding wrong numbers; the cases are in ``disagreement_cases.py``."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tests.forked_ranks import fork_ranks
from tests.start_ranks import start_ranks

# Name -> what every rank is told, as a pattern, and what rank 1 raises itself where that is another error.
FAILURES: dict[str, tuple[str, str]] = {
    "a_hook_on_one_rank": (
        # By the one of them that sees it first.
        "rank . .* (averages 65 values of bucket 0 when rank 1 keeps|keeps stock DDP's reducer: .* when rank 0)",
        "",
    ),
    "compilation_fails": (
        "compilation failed on rank 1: InternalError: a fault on this rank",
        "InternalError",
    ),
    "later_compilation_fails": ("compilation failed on rank 1: InternalError: a fault", "InternalError"),
    "compilation_is_interrupted": ("compilation failed on rank 1: KeyboardInterrupt", "KeyboardInterrupt"),
    "process_ends_in_a_forward": ("rank 1 was ended by KeyboardInterrupt", "KeyboardInterrupt"),
    "failure_is_known_before_the_backward": ("rank 1 gave up", "KeyboardInterrupt"),
    "first_call_raises": ("rank 1 did not come to an agreement: RuntimeError", "RuntimeError"),
}
# The same for cases in which rank 1 says nothing.
SILENCES = {
    "does_not_come": "rank 1 did not come to an agreement within 3 s while rank 0 asks how",
    "process_dies_while_it_compiles": "rank 1 (process ... compiles a graph of 9 nodes",
}
SUCCESSES = (
    "later_models_after_a_failure",
    "slow_rank_is_waited_for",
    "another_size_on_one_rank",
    "interrupts_that_the_program_handles",
)
# The limit for an agreement, and what comes on top: a look each second, and time to hear of it.
SECONDS = 3 + 6

# On GPUs: what each rank says that is blocked or fails; "" for one whose process is gone.
ON_GPUS = {
    "later_compilation_fails": (
        "CompileError: compilation failed on rank 1: InternalError",
        "InternalError: a fault",
    ),
    "another_branch_later": ("went on", "went on"),
    "process_dies_while_it_compiles": ("CompileError: rank 1 (process", ""),
    "slow_compilation": ("went on", "went on"),
    "one_backward_fewer": ("CompileError: the GPU of rank 0 waited for 3 s, the process group's timeout",)
    * 2,
}

Outcomes = list[dict[str, tuple[str, float]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("disagreement")
    run = fork_ranks(["-m", "tests.multi_process.disagreement_cases", str(folder)], timeout_s=200)
    found = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]
    assert run.returncode == 0 and found[0], run.stdout + run.stderr
    return found


@pytest.mark.multi_process
@pytest.mark.timeout(240)
@pytest.mark.xdist_group("disagreement")
@pytest.mark.parametrize("case", FAILURES)
def test_every_rank_is_told(case: str, outcomes: Outcomes) -> None:
    told, own = FAILURES[case]
    for rank, (error, seconds) in enumerate(outcome[case] for outcome in outcomes):
        expected = own if rank == 1 and own else f"CompileError: {told}"
        assert re.match(expected, error), f"rank {rank}: {error}"
        assert seconds < SECONDS


@pytest.mark.multi_process
@pytest.mark.timeout(240)
@pytest.mark.xdist_group("disagreement")
@pytest.mark.parametrize("case", SILENCES)
def test_a_silent_rank_is_named(case: str, outcomes: Outcomes) -> None:
    error, seconds = outcomes[0][case]
    beginning, _, end = SILENCES[case].partition(" ... ")
    assert error.startswith(f"CompileError: {beginning}") and end in error, error
    assert seconds < SECONDS


@pytest.mark.multi_process
@pytest.mark.timeout(240)
@pytest.mark.xdist_group("disagreement")
@pytest.mark.parametrize("case", SUCCESSES)
def test_ranks_that_agree_late_or_differ_in_size_go_on(case: str, outcomes: Outcomes) -> None:
    for rank, outcome in enumerate(outcomes):
        assert not outcome[case][0], f"rank {rank}: {outcome[case][0]}"


@pytest.mark.gpu
@pytest.mark.multi_process
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks")
@pytest.mark.parametrize(
    ("case", "how"),
    [
        *((case, ()) for case in ON_GPUS if case != "one_backward_fewer"),  # NCCL's watchdog ends the process
        ("later_compilation_fails", ("copies",)),
        ("process_dies_while_it_compiles", ("copies",)),
        ("one_backward_fewer", ("copies",)),
    ],
)
def test_a_rank_that_is_blocked_in_nccl_is_freed(case: str, how: tuple[str, ...]) -> None:
    run = start_ranks(["-m", "tests.multi_process.blocked_gpu_cases", case, *how], timeout_s=200)
    for rank, said in enumerate(ON_GPUS[case]):
        lines = [line for line in run.stdout.splitlines() if line.startswith(f"rank {rank} after ")]
        assert (len(lines) == 1 and f" s: {said}" in lines[0]) if said else not lines, run.stdout + run.stderr
        assert not lines or float(lines[0].split()[3]) < 20
