"""What a sweep found, in words."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.sweeps.measure import OURS, TORCHS

_SHOWN = 25
_WIDTH = 220
_CAUSES = 12


@dataclass(frozen=True)
class Pair:
    """What both compilers made of a model."""

    name: str
    ours: dict[str, Any]
    torchs: dict[str, Any] | None

    @property
    def both_run(self) -> bool:
        return self.torchs is not None and not self.ours["error"] and not self.torchs_error

    @property
    def how_torchs_ended(self) -> str:
        if self.torchs is None:
            return "not run"
        return self.torchs_error[:60] or "runs"

    @property
    def torchs_error(self) -> str:
        return "" if self.torchs is None else self.torchs["error"] or self.torchs["skipped"]

    @property
    def compile_ratio(self) -> float:
        assert self.torchs is not None
        return self.ours["seconds"] / max(self.torchs["seconds"], 0.01)

    @property
    def has_more_graphs(self) -> bool:
        torchs = self.torchs
        return torchs is not None and not self.torchs_error and 0 < torchs["graphs"] < self.ours["graphs"]

    @property
    def as_plain(self) -> bool:
        """Whether values that were compared are within bounds of plain PyTorch's, told that it is compiled or not."""
        while_compiled = self.ours.get("excess_while_compiled")
        return self.ours["excess"] <= 1 or (while_compiled is not None and while_compiled <= 1)

    @property
    def is_same_in_float64(self) -> bool:
        """Whether values that are not within bounds differ by rounding alone."""
        excess = self.ours.get("excess_in_float64")
        return excess is not None and excess <= 1

    @property
    def fallbacks(self) -> list[str]:
        return [reason for reason in self.ours["breaks"] if reason.startswith("log: ")]


def paired(results: Sequence[dict[str, Any]]) -> list[Pair]:
    """Models that ran on our side, in the order in which they ended."""
    torchs = {result["name"]: result for result in results if result["compiler"] == TORCHS}
    return [
        Pair(result["name"], result, torchs.get(result["name"]))
        for result in results
        if result["compiler"] == OURS and not result["skipped"]
    ]


def report(results: Sequence[dict[str, Any]], left: int = 0) -> str:
    """Counts, the models that torch.compile has in fewer graphs, those that differ, raised, fell back or took longer to
    compile, and breaks by cause.

    Args:
        left: models that were not begun.
    """
    pairs = paired(results)
    reasons = [result["skipped"] for result in results if result["skipped"] and result["compiler"] == OURS]
    lines = [f"{len(pairs)} models ran, {len(reasons)} left out, {left} not begun"]
    lines += [f"  left out {count:4} {reason}" for reason, count in _grouped(reasons).most_common(6)]
    lists: list[str] = []
    beside = [pair for pair in pairs if pair.both_run]
    lines.append(f"in one graph: {_whole(pair.ours for pair in pairs)}")
    lines.append(f"  of the {len(beside)} that both sides run: {_whole(pair.ours for pair in beside)}")
    lines.append(f"  torch.compile: {_whole(pair.torchs or {} for pair in beside)}")
    lists += _listed(
        "more graphs than torch.compile",
        [
            f"{pair.name}: {pair.ours['graphs']} against {(pair.torchs or {})['graphs']}; "
            f"{'; '.join(pair.ours['breaks'])[:200]}"
            for pair in pairs
            if pair.has_more_graphs
        ],
    )
    compared = [pair for pair in pairs if pair.ours["excess"] is not None]
    exact = sum(pair.ours["has_float64"] for pair in compared)
    if compared:
        widths = [pair.ours["width"] for pair in compared]
        lines.append(
            f"values within bounds: {sum(pair.as_plain for pair in compared)} of {len(compared)} that were compared, "
            f"{exact} of them with float64"
        )
        lines.append(
            f"  the median bound is {statistics.median(widths):.2g} of a value, "
            f"above 0.25 in {sum(width > 0.25 for width in widths)} models"
        )
    further = [pair for pair in compared if not pair.as_plain]
    for same, title in ((False, ""), (True, ", and the same in float64")):
        lists += _listed(
            f"further from plain PyTorch than the bound{title}",
            [
                f"{pair.name}: {pair.ours['excess']:.3g} bounds, {pair.ours['worst']} "
                f"(in float64: {_short(pair.ours.get('excess_in_float64'))}, torch.compile: {_excess(pair)})"
                for pair in further
                if pair.is_same_in_float64 == same
            ],
        )
    raised = [pair for pair in pairs if pair.ours["error"]]
    lists += _listed(
        "raised",
        [
            f"{pair.name}: {pair.ours['error'][:160]} (torch.compile: {pair.how_torchs_ended})"
            for pair in raised
        ],
    )
    lists += _listed(
        "torch.compile raised, ours runs",
        [
            f"{pair.name}: {pair.torchs_error[:80]}"
            for pair in pairs
            if pair.torchs and pair.torchs_error and not pair.ours["error"]
        ],
        shown=8,
    )
    lists += _listed(
        "with torch's own kernels, or calls made again",
        [
            f"{pair.name}: {pair.fallbacks[0][5:165]} (torch.compile: {_graphs(pair)})"
            for pair in pairs
            if pair.fallbacks
        ],
    )
    if beside:
        ratios = sorted(pair.compile_ratio for pair in beside)
        lines.append(
            f"processor seconds to compile, ours over torch.compile's: median {statistics.median(ratios):.3f}, "
            f"greatest {ratios[-1]:.2f}, {sum(ratio <= 1 / 3 for ratio in ratios)} at most a third, "
            f"{sum(ratio <= 1 for ratio in ratios)} at most 1 of {len(ratios)}"
        )
        slow = sorted(
            (pair for pair in beside if pair.compile_ratio > 1), key=lambda pair: -pair.compile_ratio
        )
        lists += _listed("longer to compile than torch.compile", [_seconds(pair) for pair in slow])
    return "\n".join([*lines, *(item[:_WIDTH] for item in lists), *_causes(pairs)])


def table(results: Sequence[dict[str, Any]]) -> str:
    """A line a model."""
    lines = ["model | graphs, torch's | breaks | seconds, torch's | bounds, torch's | error, torch's"]
    for pair in sorted(paired(results), key=lambda pair: pair.name):
        ours, torchs = pair.ours, pair.torchs or {}
        cells = [
            f"{ours['graphs']} {torchs.get('graphs', '-')}",
            f"{sum(ours['breaks'].values())}{' own kernels' if pair.fallbacks else ''}",
            f"{ours['seconds']:.1f} {torchs.get('seconds', 0):.1f}",
            f"{_short(ours['excess'])} {_short(torchs.get('excess'))}{'' if ours['has_float64'] else ' no float64'}",
            f"{ours['error'][:80]} {pair.torchs_error[:80]}".strip(),
        ]
        lines.append(" | ".join([pair.name, *cells]))
    return "\n".join(lines)


def _whole(sides: Iterable[dict[str, Any]]) -> str:
    sides = [*sides]
    whole = [side for side in sides if _in_a_call(side) == 1 and not _ends(side) and not side["error"]]
    anew = sum(side["graphs"] > 1 for side in whole)
    shown = f"{len(whole)} of {len(sides)} ({100 * len(whole) / max(len(sides), 1):.1f} %)"
    return f"{shown}, {anew} of them in another one from the second call on" if anew else shown


def _in_a_call(side: dict[str, Any]) -> int:
    return side.get("in_a_call") or side["graphs"]


def _ends(side: dict[str, Any]) -> list[str]:
    """Breaks but for graphs, or calls in them, that are in one graph and run with torch's own kernels."""
    return [reason for reason in side["breaks"] if "torch's own kernels" not in reason]


def _graphs(pair: Pair) -> str:
    return pair.torchs_error[:40] or f"{(pair.torchs or {}).get('graphs', '-')} graphs"


def _excess(pair: Pair) -> str:
    return _short((pair.torchs or {}).get("excess"))


def _short(excess: float | None) -> str:
    return "-" if excess is None else f"{excess:.2g}"


def _seconds(pair: Pair) -> str:
    return f"{pair.name}: {pair.ours['seconds']:.1f} against {(pair.torchs or {})['seconds']:.1f}"


def _listed(title: str, items: Sequence[str], shown: int = _SHOWN) -> list[str]:
    more = [f"  … and {len(items) - shown} more"] if len(items) > shown else []
    return [f"{title}: {len(items)}", *(f"  {item}" for item in items[:shown]), *more]


def _causes(pairs: Sequence[Pair]) -> list[str]:
    causes: dict[str, list[str]] = {}
    for pair in pairs:
        for reason in pair.ours["breaks"]:
            causes.setdefault(_cause(reason), []).append(pair.name.partition("/")[2])
    lines = [f"breaks by cause: {len(causes)}"]
    for cause, names in sorted(causes.items(), key=lambda item: -len(set(item[1])))[:_CAUSES]:
        lines.append(f"  {len(set(names)):4} models  {cause[:200]} ({', '.join(sorted(set(names))[:3])})")
    return lines


def _grouped(reasons: Iterable[str]) -> Counter[str]:
    return Counter(re.sub(r"\d+", "N", reason)[:90] for reason in reasons)


def _cause(reason: str) -> str:
    """A reason without what belongs to one model only: numbers, and names of variables."""
    text, _, line = reason.partition(" | ")
    text = re.sub(r"the (tensor|number|array) \w+", r"the \1 …", re.sub(r"\d+", "N", text))
    return f"{text} | {line}" if line else text
