"""The launcher's one kind of error for users."""

USAGE_EXIT_CODE = 2
"""Exit code of a launch that was refused: nothing of the user's program has been started."""


class LaunchError(Exception):
    """A launch that cannot start, said in one line: what is wrong, and what is allowed.

    Whoever catches it prints ``launch: <message>`` to standard error and exits with `USAGE_EXIT_CODE`.
    """
