"""Ranks agree on what they compile before their first collective depends on it.

Every graph with a new structure (``GraphFingerprint``) opens a round: each rank of the process group says that it has
begun, compiles, posts what it decided, and waits for the verdict of the first rank, which reads all decisions. Rounds
are numbered, so that a rank that captured another graph meets the others in the same round, and the first line that
differs can be named. A graph that differs only in sizes from one that was agreed on needs no round: any rank may
compile it alone.

None of this is a collective. A rank that does not come, or whose process dies while it compiles, is named after a time
limit instead of hanging everyone, and no communicator's watchdog runs while a rank compiles. The limit begins when a
rank has decided. For a rank that has no part in a round that another one opened, because it goes on with the graphs
that it has, it begins when its ``FailureWatch`` sees the round.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from compile_core.errors import CompileError
from distributed.agreement.bulletin import Bulletin
from distributed.agreement.failure_watch import FailureWatch
from distributed.agreement.graph_fingerprint import digest_of, first_difference
from distributed.agreement.session import meet

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1

Compiled = TypeVar("Compiled")


@dataclass(frozen=True)
class Statement:
    """One thing that must be the same on all ranks.

    Attributes:
        claim: what a rank did that has other lines, such as "captured another graph".
        lines: what is compared.
        places: for each line the user's line behind it, or "".
    """

    claim: str
    lines: tuple[str, ...]
    places: tuple[str, ...] = ()


class Agreement:
    """The rounds of one process group, for all modules that are compiled over it; see ``agreement_of``.

    Args:
        bulletin: of the group.
        rank: this process, by its number in the job.
        ranks: those of the group.
        abort: ends the group's collectives.
        is_over: whether the group was destroyed.
        on_device: its collectives are waited for by a device.

    Attributes:
        watch: tells and hears of failures.
    """

    def __init__(
        self,
        bulletin: Bulletin,
        rank: int,
        ranks: Sequence[int],
        abort: Callable[[], None],
        is_over: Callable[[], bool],
        on_device: bool,
    ) -> None:
        self._bulletin = bulletin
        self._rank = rank
        self._ranks = tuple(ranks)
        self._next_round = 0
        # The round that was opened without this rank, and the compilations of others that have not ended: seen when.
        self._unanswered: tuple[int, float] | None = None
        self._is_compiling = False
        self._alone_seen = 0
        self._alone: dict[int, float] = {}
        if len(self._ranks) == 1:
            self._meet("is alone", 0)
        look_further = weakref.WeakMethod(self._look_for_others)
        self.watch = FailureWatch(
            bulletin,
            len(ranks),
            abort,
            lambda ended: (look_further() or _nothing)(ended),
            is_over,
            on_device,
        )

    def settle(
        self, what: str, timeout_s: float, statements: Sequence[Statement] = (), reason: str = ""
    ) -> str:
        """A round about something that needs no compilation.

        Args:
            what: what this rank does, for the messages of ranks that have no part in it.
            timeout_s: how long ranks wait for each other.
            statements: must be the same on all ranks, if no rank has a reason.
            reason: why this rank cannot do what is settled, or "".

        Returns:
            The first rank's reason that has one, and its name; "" where all can.

        Raises:
            CompileError: the job has failed; on every rank.
        """
        number = self._begin(what, timeout_s)
        return self._conclude(number, what, timeout_s, statements, reason)

    def give_up(self, what: str, timeout_s: float, error: str) -> None:
        """A round that this rank has no part in because of an error: the others are told, if they wait in it.

        Unlike a crash in compilation this does not end the job: an error that all ranks raise is theirs to handle.
        """
        number = self._begin(what, timeout_s)
        self._bulletin.post(f"{number}/error", f"rank {self._rank} did not come to an agreement: {error}")

    def compile_together(
        self, what: str, timeout_s: float, compile: Callable[[], tuple[Compiled, Sequence[Statement]]]
    ) -> Compiled:
        """A round about a graph that is new in structure.

        Args:
            compile: makes the result, and what must be the same on all ranks.

        Raises:
            CompileError: the job has failed; on every rank.
            BaseException: from ``compile``; the job has failed.
        """
        number = self._begin(what, timeout_s)
        with self._compiling():
            compiled, statements = compile()
        self._conclude(number, what, timeout_s, statements, "")
        return compiled

    def compile_alone(self, what: str, timeout_s: float, compile: Callable[[], Compiled]) -> Compiled:
        """Compiles what the other ranks need not have; they wait for this one in their collectives.

        Raises:
            BaseException: from ``compile``; the job has failed.
        """
        self.watch.at_point()
        if not self._bulletin.has_session:  # before any round, as to evaluate
            return compile()
        number = self._bulletin.count("alone", 1)
        self._bulletin.post(f"alone/{number}", {"rank": self._rank, "what": what, "timeout_s": timeout_s})
        try:
            with self._compiling():
                return compile()
        finally:
            self._bulletin.post(f"alone/{number}/done", True)

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        self._is_compiling = True
        try:
            yield
        except BaseException as error:
            self.watch.announce(f"compilation failed on rank {self._rank}: {describe_error(error)}")
            raise
        finally:
            self._is_compiling = False

    def _meet(self, what: str, timeout_s: float) -> None:
        def absent(ranks: Sequence[int]) -> str:
            return _did_not_come(ranks, timeout_s, f"rank {self._rank} {what}")

        meet(self._bulletin, self._rank, self._ranks, _turns(timeout_s), absent)

    def _begin(self, what: str, timeout_s: float) -> int:
        self.watch.at_point()
        if not self._bulletin.has_session:
            self._meet(what, timeout_s)
        number = self._next_round
        self._next_round += 1
        opened = {"rank": self._rank, "what": what, "timeout_s": timeout_s}
        self._bulletin.post_first(f"{number}/opened", opened)
        self._bulletin.post(f"{number}/begun/{self._rank}", True)
        return number

    def _conclude(
        self, number: int, what: str, timeout_s: float, statements: Sequence[Statement], reason: str
    ) -> str:
        bulletin = self._bulletin
        digests = []
        for statement in statements:
            digest = digest_of(statement.lines)
            digests.append((statement.claim, digest))
            if not bulletin.has(f"text/{digest}"):
                bulletin.post(f"text/{digest}", (statement.lines, statement.places))
        decision = {"what": what, "reason": reason, "digests": digests}
        bulletin.post(f"{number}/decided/{self._rank}", decision)
        if bulletin.count(f"{number}/count", 1) == len(self._ranks):
            bulletin.post(f"{number}/complete", True)
        deadline = time.monotonic() + timeout_s
        if self._rank == self._ranks[0]:
            self._wait(f"{number}/complete", number, deadline, timeout_s)
            bulletin.post(f"{number}/verdict", self._judge(number))
        self._wait(f"{number}/verdict", number, deadline, timeout_s)
        return bulletin.read(f"{number}/verdict")

    def _wait(self, name: str, number: int, deadline: float, timeout_s: float) -> None:
        for _ in _turns(deadline - time.monotonic()):
            if self._bulletin.has(name):
                return
            self.watch.look()
            error = self._bulletin.read_if_there(f"{number}/error")
            if error is not None:
                self._end(error)
        self._end(self._who_is_missing(number, timeout_s))

    def _judge(self, number: int) -> str:
        """The reason that counts; ends the job where ranks decided differently."""
        decisions = {rank: self._bulletin.read(f"{number}/decided/{rank}") for rank in self._ranks}
        first = decisions[self._ranks[0]]
        for rank, decision in decisions.items():
            if [claim for claim, _ in decision["digests"]] != [claim for claim, _ in first["digests"]]:
                self._end(
                    f"rank {rank} {decision['what']} when rank {self._ranks[0]} {first['what']}; the ranks must "
                    f"run the same program"
                )
        for rank, decision in decisions.items():
            if decision["reason"]:
                return f"rank {rank}: {decision['reason']}"
        for rank, decision in decisions.items():
            for (_, ours), (claim, theirs) in zip(first["digests"], decision["digests"], strict=True):
                if ours != theirs:
                    self._end(
                        f"rank {rank} {claim} than rank {self._ranks[0]}: {self._difference(ours, theirs)}"
                    )
        return ""

    def _difference(self, ours: str, theirs: str) -> str:
        (our_lines, our_places), (their_lines, their_places) = (
            self._bulletin.read(f"text/{digest}") for digest in (ours, theirs)
        )
        position = first_difference(our_lines, their_lines)
        assert position is not None
        other, mine = _at(their_lines, position), _at(our_lines, position)
        shown = f"{other or '(nothing)'!r} where that one has {mine or '(nothing)'!r}"
        places = [place for place in (_at(their_places, position), _at(our_places, position)) if place]
        return "\n  ".join([f"{shown}; the ranks must run the same model", *dict.fromkeys(places)])

    def _end(self, message: str) -> None:
        self.watch.announce(message)
        raise CompileError(self.watch.failure)

    def _who_is_missing(self, number: int, timeout_s: float) -> str:
        missing = [rank for rank in self._ranks if not self._bulletin.has(f"{number}/decided/{rank}")]
        begun = [rank for rank in missing if self._bulletin.has(f"{number}/begun/{rank}")]
        opened = self._bulletin.read(f"{number}/opened")
        what = f"rank {opened['rank']} {opened['what']}"
        absent = [rank for rank in missing if rank not in begun]
        if absent:
            return _did_not_come(absent, timeout_s, what)
        if begun:
            return (
                f"rank {_listed(begun)} did not end a compilation within {timeout_s:g} s while {what}. Its process "
                f"may have been killed, or be slow to compile (then raise agreement_timeout_s)"
            )
        return (
            f"rank {self._ranks[0]} gave no verdict within {timeout_s:g} s while {what}. It may have failed"
        )

    def _look_for_others(self, connection_ended: bool) -> None:
        """Whether others wait in vain for this rank, or this rank for them. While it compiles it waits for nobody, and
        what they compile may take as long.

        Raises:
            CompileError: for too long, or until a connection ended.
        """
        if self._is_compiling:
            self._unanswered = None
            self._alone = dict.fromkeys(self._alone, time.monotonic())
            return
        self._look_for_round(connection_ended)
        self._look_for_lone_compilations(connection_ended)

    def _look_for_round(self, connection_ended: bool) -> None:
        number, now_s = self._next_round, time.monotonic()
        opened = self._bulletin.read_if_there(f"{number}/opened")
        if opened is None:
            self._unanswered = None
        elif connection_ended:
            raise CompileError(_says_end(opened))
        elif self._unanswered is None or self._unanswered[0] != number:
            self._unanswered = number, now_s
        elif now_s - self._unanswered[1] > opened["timeout_s"] and number == self._next_round:
            raise CompileError(self._who_is_missing(number, opened["timeout_s"]))

    def _look_for_lone_compilations(self, connection_ended: bool) -> None:
        now_s = time.monotonic()
        while self._bulletin.has(f"alone/{self._alone_seen + 1}"):
            self._alone_seen += 1
            self._alone[self._alone_seen] = now_s
        for alone, seen_s in list(self._alone.items()):
            compiling = self._bulletin.read(f"alone/{alone}")
            if compiling["rank"] == self._rank or self._bulletin.has(f"alone/{alone}/done"):
                del self._alone[alone]
            elif connection_ended:
                raise CompileError(_says_end(compiling))
            elif now_s - seen_s > compiling["timeout_s"]:
                raise CompileError(
                    f"rank {compiling['rank']} {compiling['what']} and did not end within "
                    f"{compiling['timeout_s']:g} s. Its process may have been killed, or be slow to compile (then "
                    f"raise agreement_timeout_s)"
                )


def agreement_of(group: dist.ProcessGroup) -> Agreement:
    """The agreement of a process group, the same for all modules over it."""
    found = _agreements.get(group)
    if found is None:
        reference = weakref.ref(group)

        def abort() -> None:
            living = reference()
            if living is not None:
                with suppress(RuntimeError):  # a backend that cannot
                    living.abort()

        def is_over() -> bool:
            return reference() not in _world.pg_map

        ranks = dist.get_process_group_ranks(group)
        on_device = "nccl" in dist.get_backend_config(group)
        found = _agreements[group] = Agreement(
            Bulletin.of_group(group), dist.get_rank(), ranks, abort, is_over, on_device
        )
    return found


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, Agreement] = weakref.WeakKeyDictionary()


def describe_error(error: BaseException) -> str:
    """Its type, and what it says."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _nothing(*_: Any) -> None:
    pass


def _turns(seconds: float) -> Iterator[None]:
    """Times to look for something, until so long has passed."""
    deadline, pause_s = time.monotonic() + seconds, _FIRST_PAUSE_S
    while True:
        is_last = time.monotonic() > deadline
        yield
        if is_last:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _did_not_come(ranks: Sequence[int], timeout_s: float, what: str) -> str:
    return (
        f"rank {_listed(ranks)} did not come to an agreement within {timeout_s:g} s while {what}. It may have "
        f"failed, or be late (then raise agreement_timeout_s), or not have called the compiled module, or have nothing "
        f"to compile because it runs another graph"
    )


def _says_end(announced: Mapping[str, Any]) -> str:
    what = f"rank {announced['rank']} {announced['what']}"
    return f"a connection ended while {what}: its process may have been killed"


def _at(lines: Sequence[str], position: int) -> str:
    return lines[position] if position < len(lines) else ""


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
