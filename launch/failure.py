"""How a process failed, and the report of it, which comes last on the screen."""

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradsplit.launch.rank_placement import RankPlacement


@dataclass(frozen=True, order=True)
class Failure:
    """A process that did not exit with 0; ordered by when it ended (its node's clock)."""

    time_s: float
    rank: int
    status: int
    """An exit code, or -N for signal N."""
    last_words: str = ""
    """What it wrote to standard error last; empty where that stands last on the screen anyway."""
    log: str = ""
    """The file of its standard error, if there is one."""
    elsewhere: str = ""
    """How other ranks' tracebacks ended, if there are any; a line each."""

    @property
    def exit_code(self) -> int:
        """Its exit code in the shells' convention: 128+N for signal N."""
        return self.status if self.status >= 0 else 128 - self.status


def report(failure: Failure, placement: RankPlacement) -> str:
    """Return what stands last on the screen after the failure that ended the group of processes."""
    text = f"launch: {describe(failure, placement)}"
    if failure.last_words:
        text = (
            f"launch: rank {failure.rank} on {placement.hostname} wrote last:\n{failure.last_words}\n{text}"
        )
    return f"{failure.elsewhere}{text}"


def collapsed(exceptions: Mapping[int, str], first: int) -> str:
    """Return, a line each, what ended the tracebacks of which ranks, but for that of rank ``first`` alone."""
    ranks: dict[str, list[int]] = {}
    for rank, line in sorted(exceptions.items()):
        ranks.setdefault(line, []).append(rank)
    return "".join(
        f"launch: {line!r} ended the traceback of {len(raised)} rank{'s' * (len(raised) > 1)}: {ranges(raised)}\n"
        for line, raised in ranks.items()
        if raised != [first]
    )


def ranges(ranks: Sequence[int]) -> str:
    """Return sorted ranks as people write them: 0-3, 5."""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ", ".join(f"{s}-{e}" if s != e else str(s) for s, e in zip(starts, ends, strict=True))


def how_it_ended(status: int) -> str:
    """Return a process's exit code, or -N for signal N, in words."""
    if status >= 0:
        return f"exited with code {status}"
    return f"was killed by signal {-status} ({signal.strsignal(-status) or 'unknown'})"


def describe(failure: Failure, placement: RankPlacement) -> str:
    """Return one line on a failed rank: which, where, how and when it ended, and where to read on."""
    who = f"rank {placement.rank} of {placement.world_size}"
    who += f" (local rank {placement.local_rank} on {placement.hostname})"
    how = how_it_ended(failure.status)
    if failure.status == -signal.SIGKILL:
        how = how[:-1] + "; often the system's doing when memory runs out)"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.time_s))
    log = f"; its standard error: {failure.log}" if failure.log else ""
    return f"{who} {how}; the other ranks were ended ({when}{log})"
