"""What is to be launched: the parsed command line as a value that travels from the launcher to its ranks."""

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
FAILURE_GRACE_S = 4.5
"""All have ended within 5 s of a failure."""


class EntryKind(StrEnum):
    """How the program of a rank is named."""

    SCRIPT = "script"
    """A path that the Python interpreter runs."""
    MODULE = "module"
    """A module name, as in ``python -m``."""
    PROGRAM = "program"
    """An executable of its own; no Python interpreter in front."""


@dataclass(frozen=True)
class LaunchSpec:
    """One launch, the same on every rank.

    ``None`` means that the user left the choice to the launcher.
    """

    entry: str
    entry_kind: EntryKind
    arguments: tuple[str, ...] = ()
    processes_per_node: int | None = None
    nodes: tuple[int, int] | None = None
    """The fewest and the most."""
    master_address: str | None = None
    master_port: int | None = None
    hostfile: str | None = None
    """Names the machines on which the launcher starts ``mpiexec``."""
    mpi_arguments: tuple[str, ...] | None = None
    """Further arguments of that ``mpiexec``."""
    bind_to: str = "none"
    run_id: str | None = None
    max_restarts: int = 0
    role: str = "default"
    log_folder: str | None = None
    redirected: str = "0"
    """Streams that go to files alone, in torchrun's spelling: 1 output, 2 error, 3 both, or 0:1,1:2 by local rank."""
    teed: str = "0"
    """Streams that go to files, and to the screen with a prefix."""
    shown_local_ranks: tuple[int, ...] | None = None
    shown_ranks: tuple[int, ...] | None = None
    ending_signals: tuple[int, ...] = tuple(int(signal.Signals[name]) for name in DEFAULT_SIGNALS.split(","))
    shutdown_timeout_s: int | None = None
    virtual_local_rank: bool = False
    dry_run: bool = False
    preflight: bool = True
    """Whether the machines of a job on several are compared first."""
    numa_binding: str | None = None
    filters: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Of standard output and error: teed lines with one of these are also written to a file of all ranks."""

    def command(self) -> list[str]:
        """Return the command line of one rank's process.

        Python is unbuffered (``-u``, as under torchrun), so that a progress bar passes through ``mpiexec``'s
        pipes.
        """
        python = os.environ.get("PYTHON_EXEC", sys.executable)  # As torchrun.
        match self.entry_kind:
            case EntryKind.SCRIPT:
                start = [python, "-u", self.entry]
            case EntryKind.MODULE:
                start = [python, "-u", "-m", self.entry]
            case EntryKind.PROGRAM:
                start = [self.entry]
        return [*start, *self.arguments]

    @property
    def failure_grace_s(self) -> float:
        """How long what is to end has after SIGTERM, once something has failed; then it gets SIGKILL."""
        return FAILURE_GRACE_S if self.shutdown_timeout_s is None else self.shutdown_timeout_s

    def to_json(self) -> str:
        """Return the spec as one line of ASCII, for an environment variable.

        An environment variable and not arguments, because ``mpiexec`` reads some arguments itself (a lone
        ``:`` starts another program, for example) wherever they stand.
        """
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "LaunchSpec":
        """Return the spec that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        fields["entry_kind"] = EntryKind(fields["entry_kind"])
        for name, value in fields.items():
            if isinstance(value, list):
                fields[name] = tuple(tuple(v) if isinstance(v, list) else v for v in value)
        return cls(**fields)
