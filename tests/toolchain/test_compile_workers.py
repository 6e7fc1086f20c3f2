"""Processes that compile: at the same time, dying, hanging, forked."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.toolchain import compile_workers
from gradsplit.compile_core.toolchain.compile_workers import CompileWorkers

SCRIPT = """
import contextlib, json, os, sys, time
from pathlib import Path
for line in sys.stdin:
    request = json.loads(line)
    if "die_unless" in request and not os.path.exists(request["die_unless"]):
        with contextlib.suppress(OSError):
            Path(request["die_unless"]).touch()
        os.kill(os.getpid(), 9)
    time.sleep(request.get("sleep_s", 0))
    answer = {"process": os.getpid(), "parent": os.getppid(), "text": request.get("text")}
    print(json.dumps(answer), flush=True)
    if request.get("leave"):
        break
"""

FORKS = """
import sys
from gradsplit.compile_core.lowering.triton_kernels.triton_compiler import _fork
if len(sys.argv) > 1:
    _fork(sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def _four_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "usable_processors", lambda: 4)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[CompileWorkers]:
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    workers = CompileWorkers(script)
    yield workers
    workers.close()


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[CompileWorkers]:
    script = tmp_path / "forks.py"
    script.write_text(FORKS + SCRIPT)
    workers = CompileWorkers(script, forks=True)
    yield workers
    workers.close()


def test_one_process_answers_one_request_after_another(workers: CompileWorkers) -> None:
    long = "x" * 300_000  # more than a pipe holds
    answers = [workers.ask({"text": long}), workers.ask({"text": "short"})]
    assert [answer["text"] for answer in answers] == [long, "short"]
    assert answers[0]["process"] == answers[1]["process"]


def test_requests_of_several_threads_have_processes_of_their_own(workers: CompileWorkers) -> None:
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(workers.ask, [{"sleep_s": 0.5}] * 3))
    assert len({answer["process"] for answer in answers}) == 3


def test_requests_wait_where_all_processors_are_taken(
    forks: CompileWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some end with an error; a backward's kernels come while a forward's are compiled."""
    monkeypatch.setattr(compile_workers, "usable_processors", lambda: 2)
    forks.start(2)
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(forks.ask, [{"sleep_s": 0.2}] * 5))
    assert len({answer["process"] for answer in answers}) == 2
    assert {answer["parent"] for answer in answers} == {forks._groups[0].pid}
    for _ in range(3):
        with pytest.raises(CompileError):
            forks.ask({"die_unless": "/proc/no/file/can/be/made/here"})
    assert forks.ask({"text": "yes"})["text"] == "yes"


def test_there_are_no_more_processes_than_wanted(workers: CompileWorkers) -> None:
    """Though there are processors for more."""
    few = CompileWorkers(workers._script, most=2)
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(few.ask, [{"sleep_s": 0.2}] * 5))
    few.close()
    assert len({answer["process"] for answer in answers}) == 2


def test_who_asks_first_is_answered_first(workers: CompileWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a thread that has got its answer is quicker to ask again."""
    monkeypatch.setattr(compile_workers, "usable_processors", lambda: 1)
    answered: list[int] = []

    def ask_often(thread: int) -> None:
        for _ in range(4):
            workers.ask({"sleep_s": 0.05})
            answered.append(thread)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(ask_often, range(3)))
    assert all(sorted(answered[turn : turn + 3]) == [0, 1, 2] for turn in range(0, 12, 3))


def test_processes_that_were_started_ahead_answer(workers: CompileWorkers) -> None:
    workers.start(2)
    started = [worker.process.pid for worker in workers._idle]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(workers.ask, [{"sleep_s": 0.5}] * 3))
    assert len(started) == 2 and {*started} < {answer["process"] for answer in answers}


def test_those_that_are_started_together_are_forked(forks: CompileWorkers) -> None:
    forks.start(3)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(forks.ask, [{"sleep_s": 0.5}] * 4))
    assert len({answer["process"] for answer in answers}) == 4
    (group,) = forks._groups
    assert sorted(answer["parent"] for answer in answers) == sorted([group.pid] * 3 + [os.getpid()])
    forks.close()
    assert group.returncode == 0 or group.returncode == -signal.SIGTERM
    _wait_for_the_end(*(answer["process"] for answer in answers))


def test_one_of_a_group_that_died_is_replaced(forks: CompileWorkers, tmp_path: Path) -> None:
    forks.start(2)
    answers = [forks.ask({"die_unless": str(tmp_path / "once")}), forks.ask({})]
    assert [answer["parent"] == forks._groups[0].pid for answer in answers] == [False, True]
    with pytest.raises(CompileError, match="the process that compiles died"):
        forks.ask({"die_unless": "/proc/no/file/can/be/made/here"})


def test_a_group_of_which_one_hangs_is_ended(forks: CompileWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    forks.start(2)
    members = [forks.ask({})["process"], forks.ask({})["process"]]
    monkeypatch.setattr(compile_workers, "_ANSWER_TIMEOUT_S", 0.2)
    with pytest.raises(CompileError, match=r"no answer in 0 s"):
        forks.ask({"sleep_s": 60})
    _wait_for_the_end(*members)
    monkeypatch.setattr(compile_workers, "_ANSWER_TIMEOUT_S", 60.0)
    assert forks.ask({"text": "yes"})["text"] == "yes"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_group_ends_with_the_process_that_started_it(forks: CompileWorkers) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        forks.start(2)
        os.write(writer, f"{forks.ask({})['process']} {forks.ask({})['process']}".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    processes = [int(process) for process in os.read(reader, 100).split()]
    os.close(reader)
    os.close(writer)
    assert len({*processes}) == 2
    _wait_for_the_end(*processes)


def test_those_that_left_do_not_count_as_started(workers: CompileWorkers) -> None:
    left = workers.ask({"leave": True})["process"]
    for worker in workers._idle:
        worker.process.wait(10)
    workers.start(1)
    assert [worker.process.pid == left for worker in workers._idle] == [False]


def test_a_process_that_died_is_replaced(workers: CompileWorkers, tmp_path: Path) -> None:
    assert workers.ask({"die_unless": str(tmp_path / "once"), "text": "alive"})["text"] == "alive"


def test_a_process_that_left_is_replaced(workers: CompileWorkers) -> None:
    workers.ask({"leave": True})
    time.sleep(0.1)
    assert workers.ask({"text": "another"})["text"] == "another"


def test_a_request_that_kills_is_an_error_and_the_next_is_answered(workers: CompileWorkers) -> None:
    with pytest.raises(CompileError, match="the process that compiles died: exit status -9"):
        workers.ask({"die_unless": "/proc/no/file/can/be/made/here"})
    assert workers.ask({"text": "yes"})["text"] == "yes"


def test_no_answer_is_an_error(workers: CompileWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "_ANSWER_TIMEOUT_S", 0.2)
    with pytest.raises(CompileError, match=r"no answer in 0 s"):
        workers.ask({"sleep_s": 60})


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_processes_of_its_own(workers: CompileWorkers, tmp_path: Path) -> None:
    mine = workers.ask({})["process"]
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        theirs = workers.ask({})["process"]
        workers.close()
        os._exit(1 if theirs == mine else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert workers.ask({})["process"] == mine


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_end_with_the_one_that_started_them(workers: CompileWorkers, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, str(workers.ask({})["process"]).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    process = int(os.read(reader, 100))
    os.close(reader)
    os.close(writer)
    _wait_for_the_end(process)


def _wait_for_the_end(*processes: int) -> None:
    for _ in range(200):
        if not any(map(_is_running, processes)):
            return
        time.sleep(0.05)
    pytest.fail("a worker outlives the process that started it")


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
