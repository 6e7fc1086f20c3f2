"""The launcher's one kind of error for users, and who reports it."""

import time

USAGE_EXIT_CODE = 2
"""Exit code of a launch that was refused: nothing of the user's program has been started."""

LOST_EXIT_CODE = 1
"""Of a job one of whose machines is lost."""

# What a loaded machine needs; as a rule the others are ended before.
_HEAD_START_S = 5.0


class LaunchError(Exception):
    """A launch that cannot start, said in one line: what is wrong, and what is allowed.

    Whoever catches it prints ``launch: <message>`` to standard error and exits with `USAGE_EXIT_CODE`; of several ranks
    rank 0 does, unless the fault is ``known_here_alone``.
    """

    def __init__(self, message: str, *, known_here_alone: bool = False) -> None:
        super().__init__(message)
        self.known_here_alone = known_here_alone


class RankLostError(Exception):
    """A supervisor has gone: its machine, or the network between, has failed, or somebody has ended it. Nothing that
    waits for it would return."""

    def __init__(
        self, rank: int, message: str, *, found_here: bool = False, exit_code: int = LOST_EXIT_CODE
    ) -> None:
        super().__init__(rank)
        self.rank = rank
        self.message = message
        """What to print of it, with {} for who has gone; empty where nothing is to be printed."""
        self.found_here = found_here
        """Whether this supervisor found out, and has sent it to all others: it is the one that prints it."""
        self.exit_code = exit_code


def silent_for(seconds: float) -> str:
    """Return the message about a supervisor from which no heartbeat has come for so long."""
    return f"nothing has been heard of {{}} for {seconds:.0f} s: the machine or the network has failed"


LAUNCHER_GONE = "the launcher on {} has ended: it was killed, or its machine has failed"
"""The message about a supervisor that ended without sending anything."""


def let_rank_0_print(rank: int | None) -> None:
    """Called on every rank before it ends with an error, which rank 0 alone prints: ``mpiexec`` ends all others when
    the first has ended, perhaps before they have printed anything."""
    if rank:
        time.sleep(_HEAD_START_S)
