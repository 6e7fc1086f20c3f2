"""``python -m gradsplit.report FOLDER``: makes one page of what a run with ``GRADSPLIT_DEBUG=FOLDER`` has left.

All ranks are merged into ``FOLDER/index.html``, which opens without a network, and ``FOLDER/report.json``, which has
the same content. A folder is for one run: of several processes of a rank the one that began last counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from gradsplit.report_page import page

Event = dict[str, Any]

# Steps that are left out of times: programs are compiled, plans are settled, and one is profiled.
_FIRST_STEPS = 7
# Ranks whose steps or memory differ by more than this are said to differ.
_DIFFERS = 1.2


def read_events(folder: Path) -> dict[str, list[Event]]:
    """The events of each rank, in order, by what the rank is called.

    Raises:
        ValueError: nothing was recorded there.
    """
    processes: dict[str, list[Event]] = {}
    for process in sorted(each for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else ():
        events = [json.loads(file.read_text()) for file in sorted(process.glob("[0-9]*.json"))]
        if not any(event["kind"] != "process" for event in events):
            continue
        rank = next((event["rank"] for event in reversed(events) if event["rank"] is not None), None)
        name = f"rank {rank}" if rank is not None else f"process {process.name}"
        before = processes.get(name)
        if before is None or before[0]["time_s"] < events[0]["time_s"]:
            processes[name] = events
    if not processes:
        raise ValueError(f"{folder} has nothing of a run: start the program with GRADSPLIT_DEBUG={folder}")
    return dict(sorted(processes.items(), key=lambda item: (len(item[0]), item[0])))


def merge(processes: Mapping[str, Sequence[Event]]) -> dict[str, Any]:
    """The report: what ``report.json`` has."""
    ranks = {name: _rank(events) for name, events in processes.items()}
    report: dict[str, Any] = {
        "ranks": ranks,
        "graphs": _graphs(processes),
        "breaks": _joined(processes, "break", ("function", "reason", "hint", "stack", "plain")),
        "fallbacks": _joined(processes, "fallback", ("reason",)),
        "recompilations": _joined(
            processes, "recompilation", ("function", "reason", "guard", "found", "place")
        ),
        "guards": _joined(processes, "guards", ("function", "place", "guards")),
        "logs": _joined(processes, "log", ("artifact", "text")),
        "ddp": {
            name: event for name, events in processes.items() for event in events if event["kind"] == "ddp"
        },
    }
    report["differences"] = _differences(report)
    report["verdict"] = _verdict(report)
    return report


def _rank(events: Sequence[Event]) -> dict[str, Any]:
    """What is known of one rank's process."""
    end = next((event for event in events if event["kind"] == "end"), None)
    steps = [
        1e3 * (after - before)
        for event in events
        if event["kind"] == "steps"
        for before, after in list(zip(event["began_s"], event["began_s"][1:], strict=False))[_FIRST_STEPS:]
    ]
    return {
        "command": " ".join(events[0].get("command", [])),
        "torch": events[0].get("torch", ""),
        "pid": events[0].get("pid"),
        "ended": end is not None,
        "step_ms": median(steps) if steps else None,
        "steps": len(steps),
        "peak_bytes": end["peak_bytes"] if end else None,
        "peak_gpu_bytes": end["peak_gpu_bytes"] if end else None,
        "compile_seconds": end["seconds"] if end else {},
    }


def _joined(
    processes: Mapping[str, Sequence[Event]], kind: str, fields: Sequence[str]
) -> list[dict[str, Any]]:
    """Equal events of all ranks as one, with the ranks and how often each had it."""
    found: dict[str, dict[str, Any]] = {}
    for name, events in processes.items():
        for event in events:
            if event["kind"] == kind:
                content = {field: event.get(field) for field in fields}
                entry = found.setdefault(json.dumps(content, sort_keys=True), {**content, "times": {}})
                entry["times"][name] = entry["times"].get(name, 0) + 1
    return list(found.values())


def _graphs(processes: Mapping[str, Sequence[Event]]) -> list[dict[str, Any]]:
    """Each graph once, with the ranks that compiled the same; times are those of the first of them."""
    found: dict[str, dict[str, Any]] = {}
    for name, events in processes.items():
        stages: dict[int, list[Event]] = {}
        functions: dict[int, Event] = {}
        for event in events:
            if event["kind"] == "stage":
                stages.setdefault(event["graph"], []).append(event)
            elif event["kind"] == "guards" and stages:  # they are known once the graph is compiled
                functions.setdefault(max(stages), event)
        profile = next((event["events"] for event in events if event["kind"] == "profile"), [])
        for number, of_graph in stages.items():
            graph = _graph(of_graph, functions.get(number), {one["name"]: one for one in profile})
            content = [graph["function"], [(step["region"], step["name"]) for step in graph["loops"]]]
            key = json.dumps([content, graph["captured"], [kernel["text"] for kernel in graph["kernels"]]])
            found.setdefault(key, {**graph, "ranks": []})["ranks"].append(name)
    return [{"id": f"g{position}", **graph} for position, graph in enumerate(found.values())]


def _graph(stages: Sequence[Event], function: Event | None, profile: Mapping[str, Event]) -> dict[str, Any]:
    last: dict[str, Event] = {}
    for stage in stages:
        last[stage["stage"].split(".")[0] if "nodes" in stage else stage["stage"]] = stage
    regions = [
        {**region, "program": stage["stage"]}
        for stage in last.values()
        for region in stage.get("regions", ())
    ]
    loops, kernels = [], []
    for region in (region["name"] for region in regions):
        for step in last.get(f"{region}.loops", {}).get("steps", ()):
            name = f"{region}.{step['name']}"
            if step["kind"] == "call":
                name = step["name"].replace(".", "::", 1).partition(".")[0]
            loops.append({**step, "region": region, **_mean_times(profile.get(name))})
        for kernel in last.get(f"{region}.kernels", {}).get("kernels", ()):
            kernels.append({**kernel, "region": region})
    return {
        "function": function["function"] if function else "",
        "place": function["place"] if function else None,
        "captured": last.get("captured", {}).get("nodes", []),
        "joint": last.get("joint", {}).get("nodes", []),
        "regions": regions,
        "loops": loops,
        "kernels": kernels,
        "passes": _passes(stages),
    }


def _mean_times(event: Event | None) -> dict[str, float | None]:
    """Of a kernel; of one of torch's operators, the mean of its calls."""
    if event is None:
        return {"us": None, "gpu_us": None}
    return {"us": event["cpu_us"] / event["count"], "gpu_us": event["gpu_us"] / event["count"]}


def _passes(stages: Sequence[Event]) -> list[dict[str, Any]]:
    """Each pass with its time and the lines of the graph's print that it added and removed."""
    passes = []
    before: dict[str, Event] = {}
    for stage in stages:
        prefix, _, name = stage["stage"].partition(".")
        is_graph = "nodes" in stage or "steps" in stage
        if stage["seconds"] is not None:
            old = before.get(prefix, {}).get("text", "").splitlines()
            new = stage["text"].splitlines()
            known_before, known_now = set(old), set(new)
            passes.append(
                {
                    "pass": name,
                    "of": prefix,
                    "seconds": stage["seconds"],
                    "added": [line for line in new if line not in known_before] if old else [],
                    "removed": [line for line in old if line not in known_now],
                    "lines": len(new),
                }
            )
        if is_graph:
            before[prefix] = stage
    return passes


def _differences(report: Mapping[str, Any]) -> list[str]:
    """What is not the same on all ranks, a sentence each."""
    ranks = list(report["ranks"])
    found = []
    for what, entries in (
        ("the graph of", report["graphs"]),
        ("the graph break", report["breaks"]),
        ("the recompilation of", report["recompilations"]),
        ("torch's own kernels:", report["fallbacks"]),
    ):
        for entry in entries:
            owners = entry.get("ranks") or list(entry["times"])
            if len(owners) < len(ranks):
                shown = f"{entry.get('function', '')} {entry.get('reason', '')}".strip() or "a function"
                found.append(f"{what} {shown}: only on {', '.join(owners)}")
    plans = {
        name: [bucket["parameters"] for bucket in event["buckets"]] for name, event in report["ddp"].items()
    }
    if len({json.dumps(plan) for plan in plans.values()}) > 1:
        found.append("the buckets differ between ranks, which must not be: see the bucket plan")
    for what, field in (("a step takes", "step_ms"), ("peak memory is", "peak_bytes"), ("torch is", "torch")):
        values = {name: rank[field] for name, rank in report["ranks"].items() if rank[field] is not None}
        if len(values) < 2 or len(set(values.values())) == 1:
            continue
        if isinstance(next(iter(values.values())), str):
            found.append(f"{what} {', '.join(f'{value} on {name}' for name, value in values.items())}")
            continue
        low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
        if values[high] > _DIFFERS * values[low]:
            found.append(f"{what} {values[high] / values[low]:.2f} times as much on {high} as on {low}")
    return found


def _verdict(report: Mapping[str, Any]) -> list[str]:
    """The outcome in a few sentences, what costs most first."""
    ranks = report["ranks"].values()
    steps = [rank["step_ms"] for rank in ranks if rank["step_ms"] is not None]
    lines = [
        f"A step takes {max(steps):.1f} ms (median, slowest of {len(steps)} processes)."
        if steps
        else f"No step was measured: a graph must be called more than {_FIRST_STEPS + 1} times."
    ]
    exposed = [event["measured"] for event in report["ddp"].values() if event["measured"]]
    if exposed:
        worst = max(exposed, key=lambda each: each["exposed_ms"])
        lines.append(
            f"All-reduces take {worst['all_reduce_ms']:.1f} ms, of which {worst['exposed_ms']:.1f} ms are exposed, "
            f"in a backward of {worst['backward_ms']:.1f} ms."
        )
    peaks = [rank["peak_gpu_bytes"] or rank["peak_bytes"] for rank in ranks if rank["peak_bytes"]]
    if peaks:
        lines.append(f"Peak memory is {max(peaks) / 2**20:.0f} MiB.")
    lines.append(
        f"{len(report['graphs'])} graphs, {len(report['breaks'])} graph breaks, "
        f"{len(report['recompilations'])} recompilations, {len(report['fallbacks'])} graphs with torch's own kernels."
    )
    compile_s = max((sum(rank["compile_seconds"].values()) for rank in ranks), default=0.0)
    lines.append(f"Compiling took {compile_s:.1f} s.")
    unfinished = [name for name, rank in report["ranks"].items() if not rank["ended"]]
    if unfinished:
        lines.append(f"Killed before they ended: {', '.join(unfinished)}.")
    lines += [f"Ranks differ: {difference}." for difference in report["differences"][:3]]
    lines.append(
        "Plain PyTorch was not measured: python -m gradsplit.doctor FILE:FACTORY runs a program beside it."
    )
    return lines


def write_report(folder: Path) -> Path:
    """Writes ``report.json`` and ``index.html`` into a run's folder, and returns the latter.

    Raises:
        ValueError: nothing was recorded there.
    """
    report = merge(read_events(folder))
    for name, text in (("report.json", json.dumps(report, indent=1)), ("index.html", page(report))):
        unfinished = folder / f".{name}"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(folder / name)
    return folder / "index.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = argparse.ArgumentParser("python -m gradsplit.report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="what GRADSPLIT_DEBUG named when the program ran")
    folder = parser.parse_args(arguments).folder
    try:
        written = write_report(folder)
    except ValueError as error:
        sys.stderr.write(f"gradsplit.report: {error}\n")
        return 2
    verdict = json.loads((folder / "report.json").read_text())["verdict"]
    sys.stdout.write("".join(f"{line}\n" for line in (*verdict, f"The whole report: {written}")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
