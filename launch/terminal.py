"""Tell ranks about the terminal that ``mpiexec``'s pipes hide from them.

``mpiexec`` stands between the launcher's terminal and a rank, mostly with a pipe, in Open MPI with a
pseudo-terminal of no size even when the launcher's output goes to a file. Programs would draw colours and
progress bars in the wrong case, so the launcher says what is at the other end, in the variables that rich,
pytest, Python and others read.
"""

import os
from collections.abc import Mapping


def terminal_variables(
    environment: Mapping[str, str], columns_and_lines: os.terminal_size | None
) -> dict[str, str]:
    """Return the variables to add to ``environment`` for the ranks.

    ``columns_and_lines``: size of the launcher's terminal; None when its output does not go to one. What the
    user has set wins.
    """
    if "FORCE_COLOR" in environment or "NO_COLOR" in environment or "TTY_COMPATIBLE" in environment:
        wanted = {}
    elif columns_and_lines is None:
        wanted = {"NO_COLOR": "1", "TTY_COMPATIBLE": "0"}
    else:
        wanted = {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    if columns_and_lines is not None:
        wanted["COLUMNS"] = str(columns_and_lines.columns)
        wanted["LINES"] = str(columns_and_lines.lines)
    return {name: value for name, value in wanted.items() if name not in environment}


def output_terminal_size() -> os.terminal_size | None:
    """Return the size of the terminal to which standard output and error both go; None without one."""
    try:
        if os.isatty(1) and os.isatty(2):
            return os.get_terminal_size(1)
    except OSError:
        pass
    return None
