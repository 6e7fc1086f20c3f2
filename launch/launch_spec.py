"""What is to be launched: the parsed command line as a value that travels from the launcher to its ranks."""

import json
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum


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
    nodes: int | None = None
    master_address: str | None = None
    master_port: int | None = None
    hostfile: str | None = None
    """Names the machines on which the launcher starts ``mpiexec``."""

    def command(self) -> list[str]:
        """Return the command line of one rank's process.

        Python is unbuffered (``-u``, as under torchrun), so that a progress bar passes through ``mpiexec``'s
        pipes.
        """
        match self.entry_kind:
            case EntryKind.SCRIPT:
                start = [sys.executable, "-u", self.entry]
            case EntryKind.MODULE:
                start = [sys.executable, "-u", "-m", self.entry]
            case EntryKind.PROGRAM:
                start = [self.entry]
        return [*start, *self.arguments]

    def to_json(self) -> str:
        """Return the spec as one line of ASCII, for an environment variable.

        An environment variable and not arguments, because ``mpiexec`` reads some arguments itself (a lone
        ``:`` starts another program, for example) wherever they stand.
        """
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "LaunchSpec":
        """Return the spec that `to_json` wrote."""
        fields = json.loads(text)
        fields["entry_kind"] = EntryKind(fields["entry_kind"])
        fields["arguments"] = tuple(fields["arguments"])
        return cls(**fields)
