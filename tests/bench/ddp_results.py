"""The figures of ``ddp_training``: lines of JSON in a file that several calls fill, a table of them, and what they say
about the aims."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from tests.bench.ddp_sides import OURS, PEERS


@dataclass(frozen=True)
class Figures:
    """One side of one model in one round; the slowest rank's times, the largest rank's memory.

    Attributes:
        link: what the gradients travel over.
        step_ms: the median step.
        first_s: the first step, with compilation.
        cold: the first step found empty caches.
        peak_gib: of allocated memory during the measured steps, without what earlier sides left; 0 on the CPU.
        gradient_gib: all gradients of the model.
        loss: of the first step; ``nan`` where there is none.
        buckets: how many we reduce; 0 where that is not known.
        exposed_ms: how long an all-reduce ran while nothing was computed, measured; ``None`` where not.
        predicted_ms: the same, as the planner predicts it.
        note: more about the side, or why it failed.
        failed: nothing was measured.
    """

    link: str
    model: str
    side: str
    round: int
    step_ms: float = 0.0
    first_s: float = 0.0
    cold: bool = False
    peak_gib: float = 0.0
    gradient_gib: float = 0.0
    loss: float = float("nan")
    buckets: int = 0
    exposed_ms: float | None = None
    predicted_ms: float | None = None
    note: str = ""
    failed: bool = False

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.link, self.model, self.side, self.round

    def __str__(self) -> str:
        where = f"{self.link} {self.model} {self.side} round {self.round}"
        if self.failed:
            return f"{where}: failed: {self.note}"
        text = f"{where}: {self.step_ms:.2f} ms, first {self.first_s:.1f} s, peak {self.peak_gib:.2f} GiB"
        return text + (f", {self.note}" if self.note else "")


def read_figures(path: Path) -> list[Figures]:
    """What earlier calls measured; nothing where there is no file yet."""
    if not path.exists():
        return []
    return [Figures(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def append_figures(path: Path, figures: Figures) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(figures)) + "\n")


@dataclass(frozen=True)
class _Side:
    """All rounds of one side that went well."""

    rounds: Sequence[Figures]

    @property
    def step_ms(self) -> float:
        return statistics.median(figures.step_ms for figures in self.rounds)

    @property
    def peak_gib(self) -> float:
        return max(figures.peak_gib for figures in self.rounds)


def table(measured: Iterable[Figures]) -> Table:
    """A row for each link, model and side; medians of all rounds in one cell."""
    headers = ("step ms", "cold s", "peak GiB", "buckets", "exposed ms", "predicted", "loss", "")
    drawn = Table("link", "model", "side", *headers)
    rows: dict[tuple[str, str, str], list[Figures]] = {}
    for figures in measured:
        rows.setdefault(figures.key[:3], []).append(figures)
    groups = list(dict.fromkeys(key[:2] for key in rows))
    for (link, model, side), rounds in sorted(rows.items(), key=lambda row: groups.index(row[0][:2])):
        good = [figures for figures in rounds if not figures.failed]
        if not good:
            drawn.add_row(link, model, side, *["–"] * 7, rounds[-1].note.splitlines()[0][:60])
            continue
        cold = [figures.first_s for figures in good if figures.cold]
        exposed = [figures.exposed_ms for figures in good if figures.exposed_ms is not None]
        predicted = [figures.predicted_ms for figures in good if figures.predicted_ms is not None]
        drawn.add_row(
            link,
            model,
            side,
            " / ".join(f"{figures.step_ms:.2f}" for figures in good),
            f"{cold[0]:.1f}" if cold else "–",
            f"{max(figures.peak_gib for figures in good):.2f}",
            str(good[-1].buckets or "–"),
            " / ".join(f"{ms:.2f}" for ms in exposed) or "–",
            " / ".join(f"{ms:.2f}" for ms in predicted) or "–",
            f"{good[0].loss:.4f}",
            good[-1].note,
        )
    return drawn


def summary(measured: Iterable[Figures]) -> list[str]:
    """For each link and model what the figures say about the aims, as far as they are there."""
    groups: dict[tuple[str, str], dict[str, list[Figures]]] = {}
    for figures in measured:
        if not figures.failed:
            groups.setdefault((figures.link, figures.model), {}).setdefault(figures.side, []).append(figures)
    lines = []
    for (link, model), sides in groups.items():
        by_side = {name: _Side(rounds) for name, rounds in sides.items()}
        lines += [f"{link} {model}: {line}" for line in _aims(by_side)]
    return lines


def _aims(sides: dict[str, _Side]) -> list[str]:
    lines = []
    peers = {name: sides[name].step_ms for name in PEERS if name in sides}
    best = min(peers, key=lambda name: peers[name], default=None)
    for name, alone in OURS.items():
        if name not in sides:
            continue
        parts = []
        step_ms = sides[name].step_ms
        if alone in sides:
            parts.append(f"{step_ms / sides[alone].step_ms:.3f} of {alone}")
        if best is not None:
            parts.append(f"{100 * (1 - step_ms / peers[best]):+.1f}% faster than {best}")
        if "ours-forward" in sides and "all-reduce" in sides and alone in sides:
            wire_ms = sides["ours-forward"].step_ms + sides["all-reduce"].step_ms
            floor_ms = max(sides[alone].step_ms, wire_ms)
            parts.append(
                f"{step_ms / floor_ms:.3f} of max(compute, forward + all-reduce) = {floor_ms:.2f} ms"
            )
        if "inductor" in sides and sides["inductor"].peak_gib:
            limit_gib = sides["inductor"].peak_gib + sides[name].rounds[0].gradient_gib
            parts.append(
                f"{sides[name].peak_gib - limit_gib:+.2f} GiB over inductor's peak and the gradients"
            )
        lines.append(f"{name}: {'; '.join(parts)}")
    return lines
