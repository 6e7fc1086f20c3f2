"""The launcher's one kind of error for users, and who tells it."""

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
        self, rank: int, told: str, *, found_here: bool = False, exit_code: int = LOST_EXIT_CODE
    ) -> None:
        super().__init__(rank)
        self.rank = rank
        self.told = told
        """What is to be told of it, with {} for who has gone; empty where nothing is."""
        self.found_here = found_here
        """Whether this supervisor found out, and has told all others: it is the one that tells on the screen."""
        self.exit_code = exit_code


def silent_for(seconds: float) -> str:
    """Return what is to be told of a supervisor of which nothing has been heard for so long."""
    return f"nothing has been heard of {{}} for {seconds:.0f} s: the machine or the network has failed"


LAUNCHER_GONE = "the launcher on {} has ended: it was killed, or its machine has failed"
"""What is to be told of a supervisor that ended without a word."""


def let_rank_0_tell(rank: int | None) -> None:
    """Called on every rank before it ends with an error, which rank 0 alone tells: ``mpiexec`` ends all others when the
    first has ended, perhaps before they have said anything."""
    if rank:
        time.sleep(_HEAD_START_S)
