"""Ranks agree on what their collectives depend on: which parameters a module reduces, on which way, by which plan.

What must be the same on all ranks is the order, size and dtype of collectives, nothing else. A module's buckets follow
from its parameters, and each backward reduces all of them in the plan's order whatever ran before, so graphs are no
matter: a rank compiles and runs what it needs, and the others wait for it in their first collective.

A module has two rounds of agreement, in its first synchronised call: before the forward the ranks compare what they
would reduce; after it they take the first rank's plan, and wait for a rank that compiles for as long as that takes.
Rounds are numbered, so that a rank which does something else meets the others in the same round and can be named.
Where ranks differ, each raises the same error at the same point, and the program may go on with other modules.

None of this is a collective. A rank that does not come is named after a time limit instead of hanging everyone, and no
communicator's watchdog runs while a rank compiles. For a rank that has no part in a round that another one opened, the
limit begins when its ``FailureWatch`` sees the round.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.torch_facts.process_groups import store_of, world
from gradsplit.distributed.agreement.bulletin import Bulletin, StoreLost, store_has_ended
from gradsplit.distributed.agreement.failure_watch import LINGER_S, FailureWatch, describe_error
from gradsplit.distributed.agreement.gloo_connections import GlooConnections
from gradsplit.distributed.agreement.operations import Operations
from gradsplit.distributed.agreement.session import (
    ARRIVED,
    HandOut,
    device_of,
    meet,
    wait_until_all_know,
)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
_DIFFERENCES_SHOWN = 3
# How long the others have to come, too, after a failure. Rounds have other numbers then.
_COME_BACK_S = 20.0
# How long a rank that knows of an end waits for those that do not; named within half a minute are also silent ones.
_ALL_KNOW_S = 8.0
_ROUNDS_OF_TERM = 10**9


@dataclass(frozen=True)
class Verdict:
    """What came of a round.

    Attributes:
        reason: the first rank's that has one, and its name; "" where all can.
        offer: what the first rank of the group has offered.
    """

    reason: str
    offer: Any


class Agreement:
    """The rounds of one process group, for all modules that are compiled over it; see ``agreement_of``.

    Args:
        bulletin: of the group.
        rank: this process, by its number in the job.
        ranks: those of the group.
        hand_out: begins the collective by which they meet.
        abort: ends the group's collectives.
        is_over: whether the group was destroyed.
        on_device: its collectives are waited for by a device.
        is_groups: whether an argument ``group`` of torch's functions is the group.

    Attributes:
        watch: posts and reads failures.
    """

    def __init__(
        self,
        bulletin: Bulletin,
        rank: int,
        ranks: Sequence[int],
        hand_out: HandOut,
        abort: Callable[[], None],
        is_over: Callable[[], bool],
        on_device: bool,
        is_groups: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        self._bulletin = bulletin
        self._rank = rank
        self._ranks = tuple(ranks)
        self._hand_out, self._abort = hand_out, abort
        self._next_round = 0
        # The round that was opened without this rank: seen when.
        self._unanswered: tuple[int, float] | None = None
        self._is_compiling = False
        look_further = weakref.WeakMethod(self._look_for_others)
        self.watch = FailureWatch(
            bulletin,
            rank,
            ranks,
            abort,
            lambda: (look_further() or _nothing)(),
            is_over,
            on_device,
            Operations(hand_out.collectives, is_groups),
        )
        if len(self._ranks) == 1:
            self._meet("is alone", 0)
        else:
            with suppress(StoreLost):  # whoever needs it will see
                self.watch.heartbeat.send()

    def settle(
        self,
        what: str,
        timeout_s: float | None,
        facts: Mapping[str, str] | None = None,
        reason: str = "",
        offer: Any = None,
    ) -> Verdict:
        """A round.

        Args:
            what: what this rank does, for the messages of ranks that have no part in it.
            timeout_s: how long ranks wait for each other; ``None``: for as long as nothing is heard of a failure.
            facts: must be the same on all ranks, by what they are about, if no rank has a reason.
            reason: why this rank cannot do what is settled, or "".
            offer: what all ranks take if this one is the first of the group; plain data.

        Raises:
            CompileError: the ranks differ, on every rank; or the job has failed.
        """
        number = self._begin(what, timeout_s)
        bulletin, facts = self._bulletin, dict(facts or {})
        digest = sha256(repr(sorted(facts.items())).encode()).hexdigest()[:32]
        if not bulletin.has(f"facts/{digest}"):
            bulletin.post(f"facts/{digest}", facts)
        decision = {"what": what, "reason": reason, "facts": digest, "offer": offer}
        bulletin.post(f"{number}/decided/{self._rank}", decision)
        if self._rank == self._ranks[0]:
            decided = self._wait([f"{number}/decided/{rank}" for rank in self._ranks], number, timeout_s)
            bulletin.post(f"{number}/verdict", self._judge(dict(zip(self._ranks, decided, strict=True))))
        (verdict,) = self._wait([f"{number}/verdict"], number, timeout_s)
        if verdict["error"]:
            raise CompileError(verdict["error"])
        return Verdict(verdict["reason"], verdict["offer"])

    def give_up(self, what: str, error: str) -> None:
        """A round that this rank has no part in because of an error: it is posted to the others, if they wait in it.

        Unlike a crash in compilation this does not end the job: an error that all ranks raise is theirs to handle.
        """
        number = self._begin(what, None)
        self._bulletin.post(f"{number}/error", f"rank {self._rank} did not come to an agreement: {error}")

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """While this rank compiles, which the others need not do; they wait for it in their collectives.

        Raises:
            CompileError: the job has failed.
            BaseException: what is raised inside; the job has failed.
        """
        self.watch.check_failures()
        self._is_compiling = True
        try:
            with self.watch.doing(what):
                yield
        except BaseException as error:
            self.watch.announce(f"compilation failed on rank {self._rank}: {describe_error(error)}")
            raise
        finally:
            self._is_compiling = False

    def _meet(self, what: str, timeout_s: float) -> None:
        def absent(ranks: Sequence[int], has_ended: bool) -> str:
            waits = f"rank {self._rank} {what}"
            if has_ended:
                names = ", ".join(map(str, ranks))
                return f"rank {names} has ended, or its connection has, and did not come to an agreement while {waits}"
            return _did_not_come(ranks, timeout_s, waits)

        heartbeat, began_s = self.watch.heartbeat, time.monotonic()
        try:
            with self.watch.doing(ARRIVED):
                meet(self._bulletin, self._rank, self._ranks, self._hand_out, self._turns(timeout_s), absent)
        except CompileError as error:
            # There is no secret to tell the others by: each looks for itself, or sees that its connection ends.
            heartbeat.failed = str(error)
            if isinstance(error, StoreLost):  # nobody can be told, and nothing be heard of them
                self._abort()
                raise
            with suppress(StoreLost):
                heartbeat.send()
            self._abort()
            # The job's store may end with this process: those who come here yet are to see whom they wait for.
            is_late = time.monotonic() > began_s + timeout_s
            wait_until_all_know(self._bulletin, self._ranks, LINGER_S if is_late else _ALL_KNOW_S)
            raise
        if len(self._ranks) > 1:
            heartbeat.met()

    def _come_back(self, what: str) -> None:
        """The program goes on after a failure that it knows of. So can the process group, if all ranks come here and
        have begun as many collectives: else one of them would meet another's of before.

        Raises:
            CompileError: the failure again.
        """
        watch, bulletin = self.watch, self._bulletin
        term = watch.operations.term + 1
        mine = {"collectives": self._hand_out.collectives(), "aborted": watch.was_aborted}
        bulletin.post(f"back/{term}/{self._rank}", mine)
        names = [f"back/{term}/{rank}" for rank in self._ranks]
        for _ in _turns(_COME_BACK_S):
            if bulletin.has_all(names):
                break
        states = list(map(bulletin.read_if_there, names))
        if mine["aborted"] or any(state != mine for state in states):
            raise CompileError(
                f"{watch.failure}\n(This was before rank {self._rank} {what}; the process group cannot be used any "
                f"longer: destroy it and make another)"
            )
        watch.begin_anew(term)
        self._next_round, self._unanswered = term * _ROUNDS_OF_TERM, None

    def _begin(self, what: str, timeout_s: float | None) -> int:
        if self.watch.failure and self.watch.was_raised:
            self._come_back(what)
        self.watch.check_failures()
        if not self._bulletin.has_session:
            assert timeout_s is not None
            self._meet(what, timeout_s)
        self.watch.operations.begin("comes to an agreement", report=what)
        number = self._next_round
        self._next_round += 1
        opened = {"rank": self._rank, "what": what, "timeout_s": timeout_s}
        self._bulletin.post_first(f"{number}/opened", opened)
        return number

    def _wait(self, names: Sequence[str], number: int, timeout_s: float | None) -> list[Any]:
        """The values of these entries, once all of them are there."""
        for _ in self._turns(timeout_s):
            if self._bulletin.has_all(names):
                values = list(map(self._bulletin.read, names))
                if all(value is not None for value in values):
                    return values
            self.watch.check_failures()
            error = self._bulletin.read_if_there(f"{number}/error")
            if error is not None:
                raise CompileError(error)
        assert timeout_s is not None
        self.watch.announce(self._who_is_missing(number, timeout_s))
        raise CompileError(self.watch.failure)

    def _judge(self, decisions: Mapping[int, Any]) -> dict[str, Any]:
        """The verdict for all ranks."""
        first = decisions[self._ranks[0]]
        error = reason = ""
        for rank, decision in decisions.items():
            if decision["what"] != first["what"]:
                error = error or (
                    f"rank {rank} {decision['what']} when rank {self._ranks[0]} {first['what']}; the ranks must call "
                    f"the same modules in the same order"
                )
            if decision["reason"] and not reason:
                reason = f"rank {rank}: {decision['reason']}"
        for rank, decision in decisions.items() if not reason and not error else ():
            if decision["facts"] != first["facts"]:
                error = self._difference(rank, first["facts"], decision["facts"])
                break
        return {"error": error, "reason": reason, "offer": first["offer"]}

    def _difference(self, rank: int, ours: str, theirs: str) -> str:
        mine, other = (self._bulletin.read(f"facts/{digest}") for digest in (ours, theirs))
        names = [name for name in {**mine, **other} if mine.get(name) != other.get(name)]
        shown = [
            f"{name} is {other.get(name, 'not there')} on rank {rank} and {mine.get(name, 'not there')} on rank "
            f"{self._ranks[0]}"
            for name in names[:_DIFFERENCES_SHOWN]
        ]
        if len(names) > len(shown):
            shown.append(f"and {len(names) - len(shown)} more")
        return f"gradients of these ranks cannot be averaged: {'; '.join(shown)}"

    def _who_is_missing(self, number: int, timeout_s: float) -> str:
        missing = [rank for rank in self._ranks if not self._bulletin.has(f"{number}/decided/{rank}")]
        opened = self._bulletin.read(f"{number}/opened")
        what = f"rank {opened['rank']} {opened['what']}"
        if missing:
            return _did_not_come(missing, timeout_s, what)
        return (
            f"rank {self._ranks[0]} gave no verdict within {timeout_s:g} s while {what}. It may have failed"
        )

    def _turns(self, seconds: float | None) -> Iterator[None]:
        """Times to look for something, until so long has passed in which all ranks could come."""

        def is_over() -> bool:
            reports = map(self._bulletin.report_of, self._ranks)
            return all(report is None or report["doing"] in ("", ARRIVED) for report in reports)

        return _turns(seconds, is_over)

    def _look_for_others(self) -> None:
        """Whether others wait in vain for this rank; while it compiles they do not.

        Raises:
            CompileError: for too long.
        """
        number, now_s = self._next_round, time.monotonic()
        opened = self._bulletin.read_if_there(f"{number}/opened")
        if opened is None or opened["timeout_s"] is None or self._is_compiling:
            self._unanswered = None
        elif self._unanswered is None or self._unanswered[0] != number:
            self._unanswered = number, now_s
        elif now_s - self._unanswered[1] > opened["timeout_s"] and number == self._next_round:
            raise CompileError(self._who_is_missing(number, opened["timeout_s"]))


def agreement_of(group: dist.ProcessGroup) -> Agreement:
    """The agreement of a process group, the same for all modules over it."""
    found = _agreements.get(group)
    if found is None:
        try:
            reference, bulletin = weakref.ref(group), Bulletin(store_of(group))
            connections = GlooConnections(bulletin, group.rank())
        except RuntimeError as error:  # as torch's own, where another rank has ended by now
            raise store_has_ended() from error

        def hand_out(values: torch.Tensor) -> dist.Work:
            living = reference()
            assert living is not None
            return living.allreduce([values], dist.AllreduceOptions())

        def collectives() -> int:
            living = reference()
            with suppress(RuntimeError):  # some backends do not count
                if living is not None:
                    backends: Any = map(living._get_backend, living._device_types)  # pyright: ignore[reportAttributeAccessIssue]
                    return sum(backend._get_sequence_number_for_group() for backend in backends)
            return 0

        def abort() -> None:
            living = reference()
            if living is not None:
                with suppress(RuntimeError):  # a backend that cannot
                    living.abort()
                connections.cut()

        def is_over() -> bool:
            return reference() not in world.pg_map

        ranks = dist.get_process_group_ranks(group)
        on_device = "nccl" in dist.get_backend_config(group)
        found = _agreements[group] = Agreement(
            bulletin,
            dist.get_rank(),
            ranks,
            HandOut(hand_out, device_of(group), collectives),
            abort,
            is_over,
            on_device,
            lambda argument: argument is reference(),
        )
    return found


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, Agreement] = weakref.WeakKeyDictionary()


def _nothing(*_: Any) -> None:
    pass


def _turns(seconds: float | None, is_over: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Times to look for something, until so long has passed; or twice as long, and so on, if that is not over then."""
    began_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
    while True:
        is_last = seconds is not None and time.monotonic() > began_s + seconds
        if is_last and not is_over():
            is_last, began_s = False, time.monotonic()
        yield
        if is_last:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _did_not_come(ranks: Sequence[int], timeout_s: float, what: str) -> str:
    return (
        f"rank {', '.join(map(str, ranks))} did not come to an agreement within {timeout_s:g} s while {what}. It may "
        f"have failed, or be late (then raise agreement_timeout_s), or not have called the compiled module"
    )
