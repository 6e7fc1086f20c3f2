"""What a sweep found, in words."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

# More than rounding in another order gives, of outputs and gradients over their largest value.
_TOLERATED = 0.02


def print_report(results: Sequence[dict[str, Any]]) -> None:
    """Counts, the models that torch.compile has in fewer graphs, those that differ, and breaks by cause."""
    run = [result for result in results if not result["skipped"]]
    print(f"{len(run)} models, {len(results) - len(run)} left out")
    for reason, count in _grouped(result["skipped"] for result in results if result["skipped"]).most_common(
        12
    ):
        print(f"  left out {count:4} {reason}")
    one = sum(result["ours"]["graphs"] == 1 and not result["ours"]["breaks"] for result in run)
    print(f"in one graph: {one} of {len(run)}")
    beside = [result for result in run if result["torchs"] is not None]
    if beside:
        whole = sum(result["torchs"]["graphs"] == 1 and not result["torchs"]["breaks"] for result in beside)
        print(f"  torch.compile: {whole} of {len(beside)}")
        for side in ("ours", "torchs"):
            seconds = [result[side]["seconds"] for result in beside if not result[side]["error"]]
            if seconds:
                print(f"  processor seconds to compile, {side}: median {statistics.median(seconds):.2f}")
        print("torch.compile has fewer graphs of:")
        for result in beside:
            ours, torchs = result["ours"], result["torchs"]
            if not torchs["error"] and 0 < torchs["graphs"] < ours["graphs"]:
                print(f"  {result['name']}: {ours['graphs']} against {torchs['graphs']}")
    print("different from plain Python, or raised:")
    for result in run:
        ours, torchs = result["ours"], result["torchs"] or {}
        if ours["error"] or not ours["difference"] <= _TOLERATED:
            shown = ours["error"] or f"{ours['difference']:.3g}"
            print(
                f"  {result['name']}: {shown} (torch.compile: {torchs.get('error') or torchs.get('difference')})"
            )
    causes: dict[str, list[str]] = {}
    for result in run:
        for reason in result["ours"]["breaks"]:
            causes.setdefault(_cause(reason), []).append(result["name"].partition("/")[2])
    print("breaks by cause:")
    for cause, names in sorted(causes.items(), key=lambda item: -len(set(item[1]))):
        print(f"  {len(set(names)):4} models  {cause}\n       {', '.join(sorted(set(names))[:6])}")


def _grouped(reasons: Any) -> Counter[str]:
    return Counter(re.sub(r"\d+", "N", reason)[:90] for reason in reasons)


def _cause(reason: str) -> str:
    """A reason without what belongs to one model only: numbers, and names of variables."""
    text, _, line = reason.partition(" | ")
    text = re.sub(r"the (tensor|number|array) \w+", r"the \1 …", re.sub(r"\d+", "N", text))
    return f"{text} | {line}" if line else text
