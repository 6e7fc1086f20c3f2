"""The page of a report: plain HTML with its style and script inside, so that it opens without a network.

Every graph node, loop, kernel, region and bucket has an anchor, and links to what it was made from and what was made of
it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
body { font: 14px/1.45 sans-serif; margin: 0 auto; max-width: 1500px; padding: 0 1.5em 6em; color: #1f2430 }
nav { position: sticky; top: 0; background: #fff; border-bottom: 1px solid #ccd; padding: .6em 0; z-index: 1 }
nav a { margin-right: 1.2em } a { color: #1a56a8; text-decoration: none } a:hover { text-decoration: underline }
h2 { margin: 1.6em 0 .4em; scroll-margin-top: 3em } h3 { margin: 1.1em 0 .3em }
table { border-collapse: collapse; width: 100%; margin: .4em 0 } th { text-align: left; background: #eef1f6 }
td, th { border: 1px solid #dde; padding: .2em .5em; vertical-align: top; overflow-wrap: break-word }
td.number { text-align: right; white-space: nowrap } tr { scroll-margin-top: 4em } tr:target { background: #fff3c4 }
code, pre { font: 12px/1.4 monospace } pre { background: #f6f7fa; padding: .6em; overflow-x: auto; max-height: 30em }
.verdict { background: #f2f7f2; border-left: 5px solid #54a24b; padding: .6em 1em } .added { color: #18794e }
.removed { color: #b42318 } summary { cursor: pointer; margin: .3em 0 } input { width: 30em; padding: .2em }
.none { color: #667 }
"""

_SCRIPT = """
function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  target.hidden = false;
  for (let part = target; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
  target.scrollIntoView();
}
addEventListener("hashchange", reveal);
reveal();
for (const field of document.querySelectorAll("input.filter"))
  field.addEventListener("input", () => {
    const wanted = field.value.toLowerCase();
    for (const row of field.nextElementSibling.tBodies[0].rows)
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
"""

_COLOURS = {"compute": "#4c78a8", "all_reduce": "#e45756"}
_SECTIONS = {
    "verdict": "Verdict",
    "ranks": "Ranks",
    "graphs": "Graphs",
    "breaks": "Graph breaks",
    "recompilations": "Recompilations",
    "guards": "Guards",
    "cudagraphs": "CUDA graphs",
    "buckets": "Buckets",
    "differences": "What differs between ranks",
    "notes": "Notes",
}
_FILTER_FROM = 15
_OPEN_SIZES = (
    "mark_dynamic(tensor, dim) or compile(dynamic=True), where a size or number differs between calls"
)
# By the kind of a guard that did not hold.
_NEXT = {
    "tensor": _OPEN_SIZES,
    "equal": _OPEN_SIZES,
    "length": "pass containers of one length, or tensors of an open size",
    "keys": "pass dictionaries with the same keys",
    "type": "pass values of one type",
    "identity": "pass the same object or value, or decide by a tensor (torch.where)",
    "same": "make the object once and keep it",
}


class Html(str):
    """Text that is HTML already."""


Cell = str | float | None


def page(report: Mapping[str, Any]) -> str:
    """The whole page."""
    links = " ".join(f'<a href="#{name}">{title}</a>' for name, title in _SECTIONS.items())
    parts = {
        "verdict": f'<div class="verdict">{"<br>".join(map(escape, report["verdict"]))}</div>',
        "ranks": _ranks(report["ranks"]),
        "graphs": "".join(_graph(graph, report["ddp"]) for graph in report["graphs"]) or _none("no graph"),
        "breaks": _breaks(report["breaks"], report["fallbacks"]),
        "recompilations": _recompilations(report["recompilations"]),
        "guards": _guards(report["guards"]),
        "cudagraphs": _logs(report["logs"], ("cudagraphs",)),
        "buckets": _buckets(report["ddp"], report["graphs"]),
        "differences": _list(report["differences"]) or _none("nothing that was recorded"),
        "notes": _logs(report["logs"], ("perf_hints", "dynamic", "ddp_graphs", "cache")),
    }
    body = "".join(f'<h2 id="{name}">{_SECTIONS[name]}</h2>{part}' for name, part in parts.items())
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>gradsplit report</title>'
        f"<style>{_STYLE}</style></head><body><h1>gradsplit report</h1><nav>{links}</nav>{body}"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _none(what: str) -> Html:
    return Html(f'<p class="none">{escape(what)}</p>')


def _list(lines: Iterable[str]) -> Html:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return Html(f"<ul>{items}</ul>" if items else "")


def _folded(summary: str, content: str) -> Html:
    return Html(f"<details><summary>{escape(summary)}</summary>{content}</details>") if content else Html("")


def _table(heads: Sequence[str], rows: Sequence[Sequence[Cell]], anchors: Sequence[str] = ()) -> Html:
    """Rows of text, HTML or numbers, each with an anchor if there are any; long tables have a field to filter them."""
    if not rows:
        return _none("none")
    lines = []
    for row, anchor in itertools.zip_longest(rows, anchors, fillvalue=""):
        cells = "".join(_cell(cell) for cell in row)
        lines.append(f'<tr id="{escape(anchor)}">{cells}</tr>' if anchor else f"<tr>{cells}</tr>")
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    field = '<input class="filter" placeholder="filter rows">' if len(rows) >= _FILTER_FROM else ""
    return Html(f"{field}<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>")


def _cell(cell: Cell) -> str:
    if isinstance(cell, (int, float)):
        return (
            f'<td class="number">{cell:,.3g}</td>' if cell < 100 else f'<td class="number">{cell:,.0f}</td>'
        )
    return f"<td>{cell if isinstance(cell, Html) else escape('' if cell is None else cell)}</td>"


def _links(targets: Iterable[tuple[str, str]]) -> Html:
    return Html(" ".join(f'<a href="#{escape(anchor)}">{escape(text)}</a>' for anchor, text in targets))


def _place(place: Mapping[str, Any] | None) -> str:
    if place is None:
        return ""
    return f"{place['file']}:{place['line']}" + (f"  {place['text']}" if place.get("text") else "")


def _times(times: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in times.items())


def _ranks(ranks: Mapping[str, Mapping[str, Any]]) -> Html:
    rows = [
        [
            name,
            rank["command"],
            rank["step_ms"],
            float(rank["steps"]),
            rank["peak_bytes"] and rank["peak_bytes"] / 2**20,
            rank["peak_gpu_bytes"] and rank["peak_gpu_bytes"] / 2**20,
            "" if rank["ended"] else "killed",
        ]
        for name, rank in ranks.items()
    ]
    heads = ("", "command", "step ms", "steps", "peak MiB", "peak GPU MiB", "")
    seconds = {name: rank["compile_seconds"] for name, rank in ranks.items()}
    stages = dict.fromkeys(stage for each in seconds.values() for stage in each)
    by_stage = [[stage, *(each.get(stage) for each in seconds.values())] for stage in stages]
    times = _table(("stage", *(f"{name}, s" for name in seconds)), by_stage)
    return Html(_table(heads, rows) + _folded("Seconds of compiling, by stage", times))


def _breaks(breaks: Sequence[Mapping[str, Any]], fallbacks: Sequence[Mapping[str, Any]]) -> Html:
    rows = [
        [
            each["function"],
            each["reason"],
            "\n".join(_place(place) for place in each["stack"]),
            each["hint"] or "compile(..., fullgraph=True) raises here; move this line out of the function",
            _times(each["times"]),
        ]
        for each in breaks
    ]
    rows += [
        ["", "a graph runs with torch's own kernels", each["reason"], "", _times(each["times"])]
        for each in fallbacks
    ]
    return _table(("function", "why", "the program's lines", "what to do", "where"), rows)


def _recompilations(recompilations: Sequence[Mapping[str, Any]]) -> Html:
    rows = [
        [
            each["function"],
            _place(each["place"]),
            each["reason"],
            each["found"],
            _NEXT.get(each["guard"], "keep it the same between calls, or see config.cache_size_limit"),
            _times(each["times"]),
        ]
        for each in recompilations
    ]
    return _table(("function", "line", "guard, with the old value", "new value", "what to do", "where"), rows)


def _guards(guards: Sequence[Mapping[str, Any]]) -> Html:
    parts = []
    for each in guards:
        rows = [
            [guard["kind"], guard["of"], guard["text"], _place(guard["place"])] for guard in each["guards"]
        ]
        summary = f"{each['function']}, {_place(each['place'])}: {len(rows)} guards; {_times(each['times'])}"
        parts.append(_folded(summary, _table(("kind", "of", "condition", "line"), rows)))
    return Html("".join(parts) or _none("none"))


def _logs(logs: Sequence[Mapping[str, Any]], artifacts: Sequence[str]) -> Html:
    parts = []
    for artifact in artifacts:
        found = [log for log in logs if log["artifact"] == artifact]
        rows = [[Html(f"<pre>{escape(log['text'])}</pre>"), _times(log["times"])] for log in found]
        parts.append(_folded(f"{artifact}: {len(rows)}", _table(("", "where"), rows) if rows else ""))
    return Html("".join(parts) or _none("none"))


def _graph(graph: Mapping[str, Any], ddp: Mapping[str, Any]) -> str:
    """One graph, from the user's lines to kernels and buckets."""
    at = graph["id"]
    joint_of: dict[str, list[str]] = defaultdict(list)
    for node in graph["joint"]:
        joint_of[node["captured"]].append(node["name"])
    loops_of: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for number, loop in enumerate(graph["loops"]):
        for name in loop["nodes"]:
            loops_of[name].append((f"{at}-loop-{number}", f"{loop['region']}.{loop['name']}"))
    loop_at = {(loop["region"], loop["name"]): number for number, loop in enumerate(graph["loops"])}
    kernel_at = {(one["region"], one["name"]): number for number, one in enumerate(graph["kernels"])}
    joint_names = {node["name"] for node in graph["joint"]}
    captured_names = {node["name"] for node in graph["captured"]}
    bucket_of = _bucket_of(ddp)
    lines: dict[str, list[str]] = defaultdict(list)
    for node in graph["captured"]:
        if node["place"]:
            lines[_place(node["place"])].append(node["name"])
    line_at = {line: number for number, line in enumerate(lines)}

    line_rows = [
        [line, _links((f"{at}-captured-{name}", name) for name in names)] for line, names in lines.items()
    ]
    captured_rows = [
        [
            node["name"],
            node["target"],
            node["shape"],
            _links(
                [(f"{at}-line-{line_at[_place(node['place'])]}", _place(node["place"]))]
                if node["place"]
                else []
            ),
            _links((f"{at}-joint-{name}", name) for name in joint_of[node["name"]]),
        ]
        for node in graph["captured"]
    ]
    joint_rows = [
        [
            node["name"],
            node["target"],
            node["shape"],
            _links((f"{at}-captured-{name}", name) for name in [node["captured"]] if name in captured_names),
            _links((f"{at}-joint-{name}", name) for name in node["reads"] if name in joint_names),
            _links(loops_of[node["name"]]),
        ]
        for node in graph["joint"]
    ]
    loop_rows = [
        [
            loop["name"],
            _links([(f"{at}-region-{loop['region']}", loop["region"])]),
            _links((f"{at}-joint-{name}", name) for name in loop["nodes"] if name in joint_names),
            loop["read_bytes"] / 2**10,
            loop["written_bytes"] / 2**10,
            loop["us"],
            loop["gpu_us"] or None,
            _links(
                (f"{at}-kernel-{kernel_at[key]}", "source")
                for key in [(loop["region"], loop["name"])]
                if key in kernel_at
            ),
        ]
        for loop in graph["loops"]
    ]
    kernel_rows = [
        [
            _links(
                (f"{at}-loop-{loop_at[key]}", kernel["name"])
                for key in [(kernel["region"], kernel["name"])]
                if key in loop_at
            ),
            _links([(f"{at}-region-{kernel['region']}", kernel["region"])]),
            _folded(
                f"{len(kernel['text'].splitlines())} lines of {kernel['language']}", _pre(kernel["text"])
            ),
        ]
        for kernel in graph["kernels"]
    ]
    region_rows = [
        [
            region["name"],
            region["program"],
            float(len(region["nodes"])),
            _links(
                (f"{at}-loop-{number}", loop["name"])
                for number, loop in enumerate(graph["loops"])
                if loop["region"] == region["name"]
            ),
            _shown(region["stores"]),
            _links(
                dict.fromkeys(
                    (f"bucket-{bucket_of[name]}", f"bucket {bucket_of[name]}")
                    for name in region["stores"]
                    if name in bucket_of
                )
            ),
        ]
        for region in graph["regions"]
    ]
    parts = [
        _part(at, "line", "The program's lines", ("line", "captured nodes"), line_rows, range(len(line_rows))),
        _part(
            at, "captured", "Captured graph", ("node", "calls", "shape", "line", "joint nodes"),
            captured_rows, [node["name"] for node in graph["captured"]],
        ),
        _part(
            at, "joint", "Joint graph of forward and backward",
            ("node", "operator", "shape", "captured node", "reads", "loops"),
            joint_rows, [node["name"] for node in graph["joint"]],
        ),
        _part(
            at, "region", "Regions", ("region", "program", "nodes", "loops", "gradients that it completes", "buckets"),
            region_rows, [region["name"] for region in graph["regions"]],
        ),
        _part(
            at, "loop", "Loops and calls, with times of the profiled step (of calls the mean)",
            ("loop", "region", "joint nodes", "KiB read", "KiB written", "µs", "GPU µs", "kernel"),
            loop_rows, range(len(loop_rows)),
        ),
        _part(at, "kernel", "Kernels", ("loop", "region", "source"), kernel_rows, range(len(kernel_rows))),
        _folded(f"Passes ({len(graph['passes'])})", _passes(graph["passes"])),
    ]  # fmt: skip
    title = f"{graph['function'] or 'a function'} {_place(graph['place'])}: {', '.join(graph['ranks'])}"
    return f'<h3 id="{at}">{escape(title)}</h3>{"".join(parts)}'


def _part(
    graph: str,
    kind: str,
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    names: Iterable[object],
) -> Html:
    anchors = [f"{graph}-{kind}-{name}" for name in names]
    return _folded(f"{title} ({len(rows)})", _table(heads, rows, anchors))


def _passes(passes: Sequence[Mapping[str, Any]]) -> Html:
    rows = []
    for each in passes:
        changed = [("added", "+ ", line) for line in each["added"]] + [
            ("removed", "- ", line) for line in each["removed"]
        ]
        text = "\n".join(f'<span class="{kind}">{sign}{escape(line)}</span>' for kind, sign, line in changed)
        summary = f"{len(each['added'])} lines added, {len(each['removed'])} removed"
        shown = _folded(summary, f"<pre>{text}</pre>") if changed else "nothing"
        rows.append([each["of"], each["pass"], 1e3 * each["seconds"], shown])
    return _table(("of", "pass", "ms", "what it changed"), rows)


def _pre(text: str) -> Html:
    return Html(f"<pre>{escape(text)}</pre>")


def _shown(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _bucket_of(ddp: Mapping[str, Any]) -> dict[str, int]:
    """By parameter; of the first rank, as all have the same buckets."""
    buckets = next(iter(ddp.values()))["buckets"] if ddp else []
    return {name: index for index, bucket in enumerate(buckets) for name in bucket["parameters"]}


def _buckets(ddp: Mapping[str, Any], graphs: Sequence[Mapping[str, Any]]) -> Html:
    if not ddp:
        return _none("no DistributedDataParallel module was compiled")
    first = next(iter(ddp.values()))
    if first["reason_for_reducer"]:
        return _none(f"the module keeps stock DDP's reducer: {first['reason_for_reducer']}")
    stores = [
        (f"{graph['id']}-region-{region['name']}", region["name"], set(region["stores"]))
        for graph in graphs
        for region in graph["regions"]
    ]
    rows = [
        [
            str(index),
            bucket["bytes"] / 2**20,
            Html(escape(_shown(bucket["parameters"]))),
            _links((anchor, name) for anchor, name, stored in stores if stored & {*bucket["parameters"]}),
            bucket["reason"],
        ]
        for index, bucket in enumerate(first["buckets"])
    ]
    anchors = [f"bucket-{index}" for index in range(len(rows))]
    table = _table(("", "MiB", "parameters", "regions", "why it ends there"), rows, anchors)
    pictures = []
    for name, event in ddp.items():
        both = [(what, event[what]) for what in ("predicted", "measured") if event[what]]
        scale = max((timeline["backward_ms"] for _, timeline in both), default=1.0) or 1.0
        for what, timeline in both:
            shown = (
                f"{name}, {what}: backward {timeline['backward_ms']:.1f} ms, all-reduces "
                f"{timeline['all_reduce_ms']:.1f} ms, exposed {timeline['exposed_ms']:.1f} ms"
            )
            pictures.append(f"<p>{escape(shown)}</p>{_timeline(timeline, scale)}")
    return Html(f"{table}{''.join(pictures) or _none('no backward was recorded: the run was too short')}")


def _timeline(timeline: Mapping[str, Any], scale_ms: float) -> Html:
    """Compute above, all-reduces below; widths in percent of the longest backward of the rank."""
    bars = []
    for each in timeline["intervals"]:
        x, width = 100 * each["start_ms"] / scale_ms, 100 * (each["end_ms"] - each["start_ms"]) / scale_ms
        label = f"{each['label']}: {each['start_ms']:.2f} to {each['end_ms']:.2f} ms"
        y = 2 if each["kind"] == "compute" else 24
        bars.append(
            f'<rect x="{x:.3f}%" y="{y}" width="{max(width, 0.05):.3f}%" height="18" stroke="#fff" '
            f'fill="{_COLOURS[each["kind"]]}"><title>{escape(label)}</title></rect>'
        )
    return Html(f'<svg width="100%" height="46" style="background:#f6f7fa">{"".join(bars)}</svg>')
