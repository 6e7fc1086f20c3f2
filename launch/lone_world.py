"""A job on one machine: one supervisor, the launcher itself, which has nobody to talk to.

So nothing of the launcher listens anywhere. An ``mpiexec`` would: Open MPI's listens on every interface of the machine,
whatever its parameters say.
"""

from typing import Any


class LoneWorld:
    """`MpiWorld` of a single supervisor, without MPI."""

    rank = 0
    size = 1
    signal_grace_s = 30.0
    """As torchrun's: a process may write a checkpoint on SIGTERM."""

    def gather_everywhere(self, value: Any) -> list[Any]:
        return [value]

    def announce(self) -> None:
        pass

    def take_announcement(self) -> bool:
        return False

    def beat(self) -> None:
        pass

    def everyone_is_done(self) -> bool:
        return True

    def settle(self, announcements_pending: int) -> None:
        pass

    def leave(self) -> None:
        pass

    def leave_after_signal(self, exit_code: int) -> None:
        pass

    def abort(self, exit_code: int) -> None:
        pass
