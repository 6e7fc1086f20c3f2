"""Rounds of agreement, with threads for ranks: what they agree on, and what each is told when they do not."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from gradsplit.compile_core.errors import CompileError
from gradsplit.distributed.agreement import agreement as agreements
from gradsplit.distributed.agreement import failure_watch
from gradsplit.distributed.agreement.agreement import Agreement
from gradsplit.distributed.agreement.bulletin import Bulletin
from tests.distributed.agreement.handed_out import HandedOut

FACTS = {"the parameter w": "float32[8]", "the parameter b": "float32[2]", "static_graph": "False"}
OTHER = {"the parameter w": "float64[8]", "the parameter c": "float32[2]", "static_graph": "False"}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("POLL_INTERVAL_S", 0.1),
        ("_ABORT_AFTER_S", 0.2),
        ("LINGER_S", 0.2),
        ("_SPEAK_S", 0.01),
        ("_EXPLAIN_S", 0.3),
        ("_LEFT_AFTER_S", 0.2),
    ):
        monkeypatch.setattr(failure_watch, name, seconds)


class Ranks:
    """Some ranks over one store; ``run`` has each do its part in a thread, and gives what came of it."""

    def __init__(
        self,
        size: int = 2,
        store: Store | None = None,
        first_late_s: float = 0,
        meets: bool = True,
    ) -> None:
        store, handed_out = store or HashStore(), HandedOut(size)
        self.handed_out = handed_out
        self.aborted: list[int] = []
        self.all = [
            Agreement(
                Bulletin(store),
                rank,
                range(size),
                handed_out.by(rank),
                partial(self.aborted.append, rank),
                lambda: False,
                True,
            )
            for rank in range(size)
        ]

        def begin(agreement: Agreement) -> None:
            time.sleep(first_late_s if agreement is self.all[0] else 0)
            agreement.settle("begins", 5)

        if meets:
            self.run(*[begin] * size)

    def run(self, *parts: Callable[[Agreement], Any]) -> list[Any]:
        outcomes: list[Any] = [None] * len(parts)

        def play(rank: int) -> None:
            try:
                outcomes[rank] = parts[rank](self.all[rank])
            except BaseException as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=play, args=(rank,)) for rank in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        return outcomes


def settling(
    facts: dict[str, str] = FACTS, timeout_s: float | None = 5, **given: Any
) -> Callable[[Agreement], Any]:
    return lambda agreement: agreement.settle("asks for the way", timeout_s, facts, **given).reason


def compiling(seconds: float = 0, error: BaseException | None = None) -> Callable[[Agreement], Any]:
    def compile(agreement: Agreement) -> str:
        with agreement.compiling("compiles a graph of 2 nodes"):
            time.sleep(seconds)
            if error is not None:
                raise error
        return "compiled"

    return compile


def training(seconds: float) -> Callable[[Agreement], None]:
    """Steps of a rank that compiles nothing: it waits in collectives, with an eye on failures."""

    def steps(agreement: Agreement) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            agreement.watch.check_failures()
            time.sleep(0.02)

    return steps


def check_all_told(outcomes: list[Any], *expected: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, CompileError), f"rank {rank}: {outcome!r}"
        for text in expected:
            assert text in str(outcome), f"rank {rank}: {outcome}"


def test_equal_facts_are_agreed_on_round_by_round() -> None:
    ranks = Ranks(3)
    for _ in range(2):
        assert ranks.run(*[settling()] * 3) == [""] * 3


def test_a_rank_that_compiles_is_waited_for() -> None:
    def late(agreement: Agreement) -> str:
        compiling(seconds=0.5)(agreement)
        return settling(timeout_s=None)(agreement)

    assert Ranks().run(settling(timeout_s=None), late) == ["", ""]
    assert Ranks().run(late, settling(timeout_s=None)) == ["", ""]
    assert Ranks().run(training(0.7), compiling(seconds=0.5)) == [None, "compiled"]


def test_what_differs_is_an_error_on_every_rank_and_later_rounds_go_on() -> None:
    ranks = Ranks(3)
    check_all_told(
        ranks.run(settling(), settling(), settling(OTHER)),
        "cannot be averaged: the parameter w is float64[8] on rank 2 and float32[8] on rank 0; "
        "the parameter b is not there on rank 2 and float32[2] on rank 0; "
        "the parameter c is float32[2] on rank 2 and not there on rank 0",
    )
    assert ranks.run(*[settling()] * 3) == [""] * 3


def test_a_round_of_another_kind_is_an_error_that_says_what_each_rank_does() -> None:
    """As where one rank calls the modules in another order."""
    outcomes = Ranks().run(settling(), lambda agreement: agreement.settle("plans buckets", 5))
    check_all_told(outcomes, "rank 1 plans buckets when rank 0 asks for the way; the ranks must call")


def test_a_reason_of_one_rank_counts_for_all_and_so_does_what_the_first_offers() -> None:
    assert Ranks().run(settling(), settling(OTHER, reason="a hook")) == ["rank 1: a hook"] * 2

    def offer(agreement: Agreement) -> Any:
        return agreement.settle("plans buckets", None, offer=[agreement._rank]).offer

    assert Ranks(3).run(*[offer] * 3) == [[0]] * 3


def test_a_rank_that_gives_up_is_an_error_to_those_who_wait_for_it_and_later_rounds_go_on() -> None:
    def give_up(agreement: Agreement) -> None:
        agreement.give_up("the first call", "ValueError: no data")

    ranks = Ranks()
    # An error on all ranks is theirs to handle.
    assert ranks.run(give_up, give_up) == [None, None]
    assert ranks.run(settling(), settling()) == ["", ""]
    outcomes = ranks.run(settling(timeout_s=None), give_up)
    check_all_told(outcomes[:1], "rank 1 did not come to an agreement: ValueError: no data")
    assert ranks.run(settling(), settling()) == ["", ""]


@pytest.mark.parametrize("error", [RuntimeError("a fault"), KeyboardInterrupt(), SystemExit(3)])
def test_a_crash_in_compilation_ends_the_others_at_once(error: BaseException) -> None:
    start_s = time.monotonic()
    outcomes = Ranks(3).run(settling(), compiling(error=error), training(10))
    assert outcomes[1] is error
    shown = f"compilation failed on rank 1: {type(error).__name__}"
    check_all_told([outcomes[0], outcomes[2]], shown)
    assert time.monotonic() - start_s < 2


def test_a_rank_that_does_not_come_is_named() -> None:
    outcomes = Ranks(3).run(settling(timeout_s=0.3), settling(timeout_s=0.3), lambda _: None)
    check_all_told(
        outcomes[:2], "rank 2 did not come to an agreement within 0.3 s while rank", "asks for the way"
    )


def test_a_rank_that_goes_on_training_ends_too() -> None:
    outcomes = Ranks().run(training(10), settling(timeout_s=0.3))
    check_all_told(outcomes, "rank 0 did not come to an agreement", "rank 1 asks for the way")


def test_entries_of_a_process_group_before_are_no_news() -> None:
    """As under torchrun, whose store outlives the groups of its processes."""
    store = HashStore()
    for first_late_s in (0, 0.2):  # then the others find the invitation of the time before
        ranks = Ranks(store=store, first_late_s=first_late_s)
        assert ranks.run(settling(), settling()) == ["", ""]
        check_all_told(ranks.run(settling(), settling(OTHER)), "the parameter w is float64[8] on rank 1")


@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_that_compiles_before_it_comes_is_waited_for(is_first: bool) -> None:
    """As one that evaluates before it trains does."""
    ranks = Ranks(meets=not is_first)

    def compile_and_settle(agreement: Agreement) -> str:
        compiling(1.5)(agreement)
        return settling(timeout_s=0.5)(agreement)

    assert ranks.run(settling(timeout_s=0.5), compile_and_settle) == ["", ""]


def test_ranks_that_do_not_come_to_the_first_round_are_named() -> None:
    for comes, message in ((0, "rank 1 did not come"), (1, "rank 0 did not come")):
        store = HashStore()
        Ranks(store=store)
        agreement = Agreement(
            Bulletin(store), comes, range(2), HandedOut().by(comes), lambda: None, lambda: False, True
        )
        with pytest.raises(CompileError, match=message):
            agreement.settle("begins", 0.2)


def test_after_a_failure_that_all_ranks_know_of_the_process_group_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks()
    for _ in range(2):
        outcomes = ranks.run(settling(), compiling(error=RuntimeError("a fault")))
        check_all_told(outcomes[:1], "compilation failed on rank 1: RuntimeError: a fault")
        assert ranks.run(settling(), settling()) == ["", ""]
    # Not where one of them is in a collective that another has not begun, or has not come.
    ranks.run(settling(), compiling(error=RuntimeError("another fault")))
    ranks.handed_out.collectives[0] += 1
    check_all_told(ranks.run(settling(), settling()), "another fault", "the process group cannot be used")
    monkeypatch.setattr(agreements, "_COME_BACK_S", 0.2)
    ranks = Ranks()
    ranks.run(settling(), compiling(error=RuntimeError("a fault")))
    check_all_told(ranks.run(settling(), lambda _: None)[:1], "a fault", "the process group cannot be used")


def test_a_blocked_rank_is_freed_by_aborting_its_group(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks()

    def blocked(agreement: Agreement) -> None:
        until = time.monotonic() + 15
        while not ranks.aborted and time.monotonic() < until:
            time.sleep(0.02)
        agreement.watch.check_failures()

    outcomes = ranks.run(blocked, compiling(error=RuntimeError("a fault")))
    assert ranks.aborted == [0]
    check_all_told(outcomes[:1], "compilation failed on rank 1: RuntimeError: a fault")
    assert "compilation failed on rank 1" in caplog.text


class Late:
    """What waits for other ranks beside the group's collectives, for too long already."""

    def __init__(self) -> None:
        self.was_released = False

    def late(self) -> str:
        return "the GPU of rank 0 waited for 600 s"

    def release_waits(self) -> None:
        self.was_released = True


@pytest.mark.parametrize("by_launcher", [False, True])
def test_who_holds_the_store_ends_after_all_have_heard(
    by_launcher: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store ends with rank 0, and who has not heard by then takes that for the failure."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(by_launcher))
    monkeypatch.setattr(failure_watch, "LINGER_S", 5.0)
    ranks = Ranks(3)
    first, second, third = (agreement.watch for agreement in ranks.all)
    second.close()  # its thread is late
    third.close()
    threading.Timer(1.0, second.poll).start()
    third._post("rank 2 has failed")
    while not first.failure:
        time.sleep(0.01)
    began_s = time.monotonic()
    with pytest.raises(CompileError, match="rank 2 has failed"):
        first.check_failures()
    waited_s = time.monotonic() - began_s
    assert second.failure if not by_launcher else waited_s < 0.5


def test_what_waits_beside_the_group_for_too_long_is_let_go() -> None:
    ranks, late = Ranks(), Late()
    ranks.all[0].watch.watch_over(late)

    def blocked(agreement: Agreement) -> None:
        until = time.monotonic() + 15
        while not late.was_released and time.monotonic() < until:
            time.sleep(0.02)
        agreement.watch.check_failures()

    check_all_told(ranks.run(blocked, training(15)), "the GPU of rank 0 waited for 600 s")
    assert late.was_released


def test_what_a_late_rank_undoes_is_let_go_again() -> None:
    ranks, late = Ranks(), Late()
    watch = ranks.all[0].watch
    watch.watch_over(late)
    ranks.run(lambda _: None, compiling(error=RuntimeError("a fault")))
    with pytest.raises(CompileError, match="a fault"):
        watch.check_failures()
    late.was_released = False
    until = time.monotonic() + 5
    while not late.was_released and time.monotonic() < until:
        time.sleep(0.02)
    assert late.was_released


def test_what_a_device_is_beyond_does_not_hide_the_failure() -> None:
    class Broken(Late):
        def late(self) -> str:
            return ""

        def release_waits(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    ranks, broken = Ranks(), Broken()
    ranks.all[0].watch.watch_over(broken)
    outcomes = ranks.run(training(15), compiling(error=RuntimeError("a fault")))
    check_all_told(outcomes[:1], "compilation failed on rank 1: RuntimeError: a fault")


_FREED_AND_ENDS = """
import threading
from torch._C._distributed_c10d import HashStore
from gradsplit.distributed.agreement import failure_watch
from gradsplit.distributed.agreement.agreement import Agreement
from gradsplit.distributed.agreement.bulletin import Bulletin
from tests.distributed.agreement.handed_out import HandedOut
failure_watch.POLL_INTERVAL_S, failure_watch._ABORT_AFTER_S = 0.05, 0.1
store, aborted, handed = HashStore(), threading.Event(), HandedOut()
ranks = [
    Agreement(Bulletin(store), rank, range(2), handed.by(rank), aborted.set, lambda: False, True) for rank in range(2)
]
others = threading.Thread(target=ranks[1].settle, args=("begins", 5))
others.start()
ranks[0].settle("begins", 5)
others.join()
{failure}
print("waited", aborted.wait(5), flush=True)
"""


@pytest.mark.parametrize(
    ("failure", "said", "code"),
    [("ranks[1].watch._post('a fault')", "waited True", 1), ("aborted.set()", "waited True", 0)],
)
def test_a_program_whose_waiting_came_to_nothing_does_not_end_well(
    failure: str, said: str, code: int
) -> None:
    program = _FREED_AND_ENDS.format(failure=failure)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == said and run.returncode == code, run.stdout + run.stderr


class SlowWork:
    """A collective that is done after some waits, or fails."""

    def __init__(self, waits: int, error: str = "") -> None:
        self.left, self.error = waits, error

    def wait(self, timeout: Any) -> None:
        self.left -= 1
        time.sleep(0.01)
        if self.left > 0:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return self.left <= 0


def test_waiting_for_a_bucket_looks_for_failures() -> None:
    ranks = Ranks()
    mine, other = ranks.all
    mine.watch.wait(SlowWork(3))
    with pytest.raises(RuntimeError, match="connection closed"):
        mine.watch.wait(SlowWork(3, "connection closed"))
    ranks.run(lambda _: None, compiling(error=RuntimeError("a fault")))
    with pytest.raises(CompileError, match="compilation failed on rank 1"):
        mine.watch.wait(SlowWork(3, "connection closed"))
    with pytest.raises(CompileError, match="compilation failed on rank 1"):
        other.watch.check_failures()


def test_a_connection_that_ends_is_explained_by_a_rank_that_has_left() -> None:
    mine, other = Ranks().all
    mine.watch.wait(SlowWork(3))
    other.watch.close()
    with pytest.raises(
        CompileError,
        match=r"rank 1 \(process .* has ended, or destroyed the process group, while rank 0 waits",
    ):
        mine.watch.wait(SlowWork(3, "connection closed"))


def test_the_thread_ends_with_its_agreement() -> None:
    ranks = Ranks()
    threads = [agreement.watch._thread for agreement in ranks.all]
    del ranks
    gc.collect()
    for thread in threads:
        thread.join(3)
        assert not thread.is_alive()


def test_nobody_asks_a_store_that_has_ended(capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 holds the store and may end first, which is no failure."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    agreement = Agreement(
        Bulletin(client), 1, range(2), HandedOut().by(1), lambda: None, lambda: False, False
    )
    agreement._bulletin.enter(b"secret")
    agreement.watch.check_failures()
    del server
    agreement.watch._thread.join(5)
    assert not agreement.watch._thread.is_alive()
    assert not agreement.watch.failure
    assert "TCPStore" not in capfd.readouterr().err
