"""Watching over this node's processes, and with the other supervisors over the whole job.

Supervisors spend the job asleep, looking up every few milliseconds. When a process fails, its supervisor
announces that to the others; each ends its own processes (SIGTERM, then SIGKILL after a grace period), and all
meet at a barrier that no process of the user can keep them from. There they exchange their failures: the one that
came first is the job's. An abort of the MPI job would be shorter, but kills without a grace period, cannot
tell the first failure from those that it caused in other ranks, and has ``mpiexec`` print a banner of its
own.
"""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace

from gradsplit.launch.errors import RankLostError
from gradsplit.launch.failure import Failure, collapsed
from gradsplit.launch.launch_spec import LaunchSpec
from gradsplit.launch.process_keeper import ProcessKeeper, RankProcess
from gradsplit.launch.rank_output import RankOutput
from gradsplit.launch.received_signals import PASSED_ON, ReceivedSignals
from gradsplit.launch.world import World

POLL_INTERVAL_S = 0.01


class EndedBySignalError(Exception):
    """Somebody sent this supervisor a signal that ends the job, and its processes have ended."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


class Supervision:
    """Watches this supervisor's processes, one group of them after the other."""

    def __init__(
        self, spec: LaunchSpec, world: World, keeper: ProcessKeeper, signals: ReceivedSignals
    ) -> None:
        self._spec = spec
        self._world = world
        self._running: dict[int, RankProcess] = {}
        self._keeper = keeper
        self._signals = signals
        self._failures: list[Failure] = []
        # Set once the processes are being ended, for whatever reason.
        self._kill_time_s: float | None = None
        self._ends_with: Exception | None = None

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        errors: int,
        processors: Sequence[int] = (),
    ) -> None:
        """Start a rank's process, which writes to the files ``output`` and ``errors``, and watch over it."""
        self._signals.started = True
        self._running[rank] = self._keeper.start(command, environment, output, errors, processors)

    def run(self, output: RankOutput, note: Callable[[Failure], None]) -> Failure | None:
        """Wait until the processes of all ranks have ended, and ``note`` a failure here at once and when all is known.

        Return the first failure of any rank, the same on every rank; None when all exited with 0. Once there is a
        failure, all other processes are ended. Raises `EndedBySignalError`, with MPI as it is: somebody ends the whole
        job, and its orderly end is not ours to wait for. Raises `RankLostError` likewise: there will be none.
        """
        self._failures, self._kill_time_s = [], None
        announcements = 0
        while True:
            self._collect_ends(output, note)
            self._handle_signals()
            if self._ends_with is None:
                try:
                    self._world.beat()
                except RankLostError as lost:
                    self._ends_with = lost
                    self._end_all(self._spec.failure_grace_s)
            if self._world.take_announcement():
                announcements += 1
                self._end_all(self._spec.failure_grace_s)
            if not self._running:
                output.finish()
                if self._ends_with is not None:
                    raise self._ends_with
                if self._world.everyone_is_done():
                    break
            elif self._kill_time_s is not None and time.monotonic() > self._kill_time_s:
                for process in self._running.values():
                    process.send(signal.SIGKILL)
            time.sleep(POLL_INTERVAL_S)
        failures_here = self._all_of_failures(output)
        if failures_here:
            note(min(failures_here))
        gathered = self._world.gather_everywhere(
            [
                [astuple(failure) for failure in failures_here],
                output.exceptions() if self._kill_time_s is not None else [],
            ]
        )
        announced = sum(bool(failures) for failures, _ in gathered) - bool(failures_here)
        self._world.settle(announcements_pending=announced - announcements)
        first = min((Failure(*failure) for failures, _ in gathered for failure in failures), default=None)
        if first is None:
            return None
        exceptions = {rank: line for _, lines in gathered for rank, line in lines}
        return replace(first, elsewhere=collapsed(exceptions, first.rank))

    def _all_of_failures(self, output: RankOutput) -> list[Failure]:
        alone = self._world.size == 1
        return [
            replace(
                failure,
                last_words=output.last_words(failure.rank, alone=alone),
                log=output.log_of(failure.rank),
            )
            for failure in self._failures
        ]

    def _collect_ends(self, output: RankOutput, note: Callable[[Failure], None]) -> None:
        self._keeper.look()
        ending = self._kill_time_s is not None
        for rank, process in list(self._running.items()):
            status = process.status
            if status is None:
                continue
            del self._running[rank]
            if status or ending:
                process.send(signal.SIGKILL)  # To what it had started: nobody else ends that now.
            if status and not ending:
                self._failures.append(Failure(process.ended_s, rank, status))
        if self._failures and not ending:
            note(min(self._all_of_failures(output)))
            self._world.announce()
            self._end_all(self._spec.failure_grace_s)

    def _handle_signals(self) -> None:
        number = self._signals.take()
        if number is None:
            return
        if number not in self._signals.ending:
            for process in self._running.values():
                process.send_alone(number)
        elif self._ends_with is None:
            self._ends_with = EndedBySignalError(number)
            wait_s = self._spec.shutdown_timeout_s
            # Python prints where it was on SIGINT, and the others are as good as SIGTERM.
            end = number if number in PASSED_ON else signal.SIGTERM
            self._end_all(self._world.signal_grace_s if wait_s is None else wait_s, end)
        else:
            self._kill_time_s = 0.0  # The second signal.

    def _end_all(self, grace_s: float, end: signal.Signals = signal.SIGTERM) -> None:
        if self._kill_time_s is None:
            self._kill_time_s = time.monotonic() + grace_s
            for process in self._running.values():
                process.send(end) if end == signal.SIGTERM else process.send_alone(end)
