"""The figures of ``ddp_training``: lines of JSON in a file that several calls fill, a table of them, and what they say
about the aims."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from tests.bench.ddp_sides import COMPARED_WITH, OURS_UNDER_DDP, PEERS


@dataclass(frozen=True)
class Figures:
    """One side of one model; the slowest rank's times, the largest rank's memory.

    Attributes:
        link: what the gradients travel over.
        step_ms: the median step.
        ratio: the median over rows of its step to that of what it is compared with, in the row beside it; ``None``
            where they were not measured together.
        ratio_spread: half the distance between that ratio's quartiles: what a median of so many rows can be off by.
        sm_mhz: the clock in the middle of a median row; 0 on the CPU.
        watts: the power, likewise.
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
    step_ms: float = 0.0
    ratio: float | None = None
    ratio_spread: float | None = None
    sm_mhz: float = 0.0
    watts: float = 0.0
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
    def key(self) -> tuple[str, str, str]:
        return self.link, self.model, self.side

    def __str__(self) -> str:
        where = " ".join(self.key)
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


def table(measured: Iterable[Figures]) -> Table:
    """A row for each link, model and side, which holds what was measured last."""
    headers = (
        "step ms",
        "× alone",
        "±",
        "MHz",
        "W",
        "cold s",
        "GiB",
        "buckets",
        "exposed ms",
        "predicted",
        "loss",
    )
    drawn = Table("link", "model", "side", *headers, "")
    for (link, model), sides in _by_model(measured).items():
        for side, figures in sides.items():
            if figures.failed:
                drawn.add_row(link, model, side, *["–"] * len(headers), figures.note.splitlines()[0][:60])
                continue
            drawn.add_row(
                link,
                model,
                side,
                f"{figures.step_ms:.2f}",
                _or_dash(figures.ratio, ".3f"),
                _or_dash(figures.ratio_spread, ".3f"),
                _or_dash(figures.sm_mhz or None, ".0f"),
                _or_dash(figures.watts or None, ".0f"),
                _or_dash(figures.first_s if figures.cold else None, ".1f"),
                _or_dash(figures.peak_gib or None, ".2f"),
                _or_dash(figures.buckets or None, "d"),
                _or_dash(figures.exposed_ms, ".2f"),
                _or_dash(figures.predicted_ms, ".2f"),
                f"{figures.loss:.4f}",
                figures.note,
            )
    return drawn


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _by_model(measured: Iterable[Figures]) -> dict[tuple[str, str], dict[str, Figures]]:
    """By link and model, of each side the last."""
    groups: dict[tuple[str, str], dict[str, Figures]] = {}
    for figures in measured:
        groups.setdefault((figures.link, figures.model), {})[figures.side] = figures
    return groups


def summary(measured: Iterable[Figures]) -> list[str]:
    """For each link and model what the figures say about the aims, as far as they are there."""
    lines = []
    for (link, model), sides in _by_model(measured).items():
        good = {name: figures for name, figures in sides.items() if not figures.failed}
        lines += [f"{link} {model}: {line}" for line in _aims(good)]
    return lines


def _aims(sides: dict[str, Figures]) -> list[str]:
    lines = []
    peers = {name: sides[name].step_ms for name in PEERS if name in sides}
    best = min(peers, key=lambda name: peers[name], default=None)
    floors = [
        f"{sides[name].ratio:.3f} {text}"
        for name, text in (
            ("ours-joined", "joined at the end"),
            ("ours-beside", "with all-reduces beside it"),
        )
        if name in sides and sides[name].ratio is not None
    ]
    for name in OURS_UNDER_DDP:
        if name not in sides:
            continue
        alone, step_ms = COMPARED_WITH[name], sides[name].step_ms
        parts = []
        if sides[name].ratio is not None:
            more = f" ({', '.join(floors)})" if floors and alone == "ours" else ""
            parts.append(f"{sides[name].ratio:.3f} of {alone}{more}")
        if best is not None:
            parts.append(f"{100 * (1 - step_ms / peers[best]):+.1f}% faster than {best}")
        if "ours-forward" in sides and "all-reduce" in sides and alone in sides:
            wire_ms = sides["ours-forward"].step_ms + sides["all-reduce"].step_ms
            floor_ms = max(sides[alone].step_ms, wire_ms)
            parts.append(
                f"{step_ms / floor_ms:.3f} of max(compute, forward + all-reduce) = {floor_ms:.2f} ms"
            )
        exposed_ms = sides[name].predicted_ms
        if alone in sides and exposed_ms is not None:
            predicted_ms = sides[alone].step_ms + exposed_ms
            parts.append(f"predicted {predicted_ms:.2f} ms, off by {abs(predicted_ms / step_ms - 1):.1%}")
        if alone in sides and sides[alone].peak_gib:
            limit_gib = sides[alone].peak_gib + sides[name].gradient_gib
            parts.append(f"{sides[name].peak_gib - limit_gib:+.2f} GiB over the peak alone and the gradients")
        lines.append(f"{name}: {'; '.join(parts)}")
    return lines
