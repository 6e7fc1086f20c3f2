"""The launcher's one kind of error for users, and who tells it."""

import time

USAGE_EXIT_CODE = 2
"""Exit code of a launch that was refused: nothing of the user's program has been started."""

# What a loaded machine needs; as a rule the others are ended before.
_HEAD_START_S = 5.0


class LaunchError(Exception):
    """A launch that cannot start, said in one line: what is wrong, and what is allowed.

    Whoever catches it prints ``launch: <message>`` to standard error and exits with `USAGE_EXIT_CODE`.
    """


def let_rank_0_tell(rank: int | None) -> None:
    """Called on every rank before it ends with an error, which rank 0 alone tells: ``mpiexec`` ends all others when the
    first has ended, perhaps before they have said anything."""
    if rank:
        time.sleep(_HEAD_START_S)
