"""A picture of a timeline: compute above, all-reduces below, one time axis.

The part of an all-reduce during which nothing was computed has its own colour: it is the time that a better
plan could still hide. matplotlib is imported here only, and only when a picture is drawn.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradsplit.bucketing.bucket import format_bytes
from gradsplit.bucketing.simulate_pipeline import PipelineTimeline
from gradsplit.bucketing.timeline import Interval, Span, Timeline, intersect

COMPUTE_COLOUR = "#4c78a8"
HIDDEN_COLOUR = "#54a24b"
EXPOSED_COLOUR = "#e45756"
LINE_COLOUR = "#6b7280"
PIPELINE_COLOURS = {
    "F": ("#9ecae9", "forward"),
    "B": ("#88d27a", "backward"),
    "I": ("#ffbf79", "input gradients"),
    "W": ("#d6a5c9", "weight gradients"),
}

# Heights are in rows; a row is ROW_INCHES high.
ROW_INCHES = 0.62
BAR_HEIGHT = 0.8
FLAG_HEIGHT = 0.34
LABEL_POINTS = 8.5
LABEL_GAP_PIXELS = 10


def plot_timeline(timeline: Timeline, path: str | Path) -> None:
    """Write ``timeline`` as a PNG to ``path``, whose folder must exist.

    Times are in ms since the first start. Each compute segment carries its label, each all-reduce its label
    and size: inside the bar where that fits, else on a flag above (compute) or below (all-reduce). Raises
    ModuleNotFoundError without matplotlib, which the `demo` extra installs.
    """
    from matplotlib.patches import Patch

    figure, axes = _figure_of(4, timeline.end_s - timeline.start_s)

    compute = sorted_intervals(timeline, "compute")
    all_reduces = sorted_intervals(timeline, "all_reduce")
    rows = [1 + row for row in stack_rows([(item.start_s, item.end_s) for item in all_reduces])]
    last_row = max(rows, default=1)
    busy = timeline.busy("compute")
    for item in compute:
        draw_bar(axes, timeline.start_s, 0, [(item.start_s, item.end_s)], COMPUTE_COLOUR)
    for item, row in zip(all_reduces, rows, strict=True):
        whole = (item.start_s, item.end_s)
        draw_bar(axes, timeline.start_s, row, [whole], EXPOSED_COLOUR)
        draw_bar(axes, timeline.start_s, row, intersect([whole], busy), HIDDEN_COLOUR)

    axes.set_yticks([0, (1 + last_row) / 2], ["compute", "all-reduce"], fontsize=11, fontweight="bold")
    axes.tick_params(axis="y", length=0)
    axes.legend(
        handles=[
            Patch(color=COMPUTE_COLOUR, label=f"compute {timeline.compute_ms:.1f} ms"),
            Patch(color=HIDDEN_COLOUR, label=f"all-reduce behind compute {timeline.overlap_ms:.1f} ms"),
            Patch(color=EXPOSED_COLOUR, label=f"all-reduce exposed {timeline.exposed_ms:.1f} ms"),
        ],
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=3,
        frameon=False,
    )

    # What fits into a bar depends on the width that the layout leaves to the axes, so lay out before
    # labelling.
    figure.draw_without_rendering()
    compute_levels = draw_labels(
        axes,
        timeline.start_s,
        bars=[(item, 0) for item in compute],
        texts=[(item.label, "\n".join(item.label.rsplit(" ", 1)), item.label) for item in compute],
        base_row=0,
        towards=-1,
    )
    all_reduce_levels = draw_labels(
        axes,
        timeline.start_s,
        bars=list(zip(all_reduces, rows, strict=True)),
        texts=[
            (f"{item.label}\n{size}", f"{item.label} · {size}")
            for item in all_reduces
            for size in [format_bytes(item.bytes)]
        ],
        base_row=last_row,
        towards=1,
    )
    top = -0.6 - compute_levels * FLAG_HEIGHT
    bottom = last_row + 0.6 + all_reduce_levels * FLAG_HEIGHT
    axes.set_ylim(bottom, top)
    figure.set_size_inches(12, (bottom - top) * ROW_INCHES + 0.9)
    # A flag may reach past the axes; `tight` keeps it in the picture.
    figure.savefig(path, bbox_inches="tight", format="png")


def sorted_intervals(timeline: Timeline, kind: str) -> list[Interval]:
    return sorted(
        (interval for interval in timeline.intervals if interval.kind == kind),
        key=lambda interval: (interval.start_s, interval.end_s),
    )


def stack_rows(spans: Sequence[Span]) -> list[int]:
    """A row for each of the spans, given by ascending start, so that no two in one row overlap."""
    row_ends: list[float] = []
    rows = []
    for start, end in spans:
        row = next((row for row, row_end in enumerate(row_ends) if row_end <= start), len(row_ends))
        row_ends[row : row + 1] = [end]
        rows.append(row)
    return rows


def stack_flags(anchors: Sequence[float], widths: Sequence[float]) -> list[int]:
    """A level (1 is nearest to the bars) for each flag, given by ascending anchor, so that all can be read.

    A flag's pole stands at its anchor and its text extends to the right of it. A flag therefore flies
    higher than every later one whose pole its text would cross.
    """
    levels = [0] * len(anchors)
    for i in reversed(range(len(anchors))):
        crossed = [levels[j] for j in range(i + 1, len(anchors)) if anchors[j] < anchors[i] + widths[i]]
        levels[i] = 1 + max(crossed, default=0)
    return levels


def draw_bar(axes: Any, origin_s: float, row: int, spans: Sequence[Span], colour: str) -> None:
    ranges_ms = [(1e3 * (start - origin_s), 1e3 * (end - start)) for start, end in spans]
    axes.broken_barh(ranges_ms, (row - BAR_HEIGHT / 2, BAR_HEIGHT), color=colour, linewidth=0)


def draw_labels(
    axes: Any,
    origin_s: float,
    bars: Sequence[tuple[Interval, int]],
    texts: Sequence[tuple[str, ...]],
    base_row: int,
    towards: int,
) -> int:
    """Label bars, given by ascending start with their rows.

    ``texts`` has for each bar what to try inside it, best first, and last what its flag says. Flags fly
    beyond ``base_row`` in the direction ``towards`` (-1 is up). Returns how many levels of flags were
    needed.
    """
    pixels_per_ms = axes.get_window_extent().width / axes.get_xlim()[1]
    flags, anchors_ms, widths_ms = [], [], []
    for (item, row), (*inside_texts, flag_text) in zip(bars, texts, strict=True):
        middle_ms = 1e3 * ((item.start_s + item.end_s) / 2 - origin_s)
        bar_pixels = 1e3 * (item.end_s - item.start_s) * pixels_per_ms
        text = axes.text(middle_ms, row, "", ha="center", va="center", color="white", fontsize=LABEL_POINTS)
        for inside_text in inside_texts:
            text.set_text(inside_text)
            if text.get_window_extent().width + LABEL_GAP_PIXELS <= bar_pixels:
                break
        else:
            text.set(text=flag_text, color="black", ha="left")
            flags.append((text, row))
            anchors_ms.append(middle_ms)
            widths_ms.append((text.get_window_extent().width + 2 * LABEL_GAP_PIXELS) / pixels_per_ms)
    levels = stack_flags(anchors_ms, widths_ms)
    for (text, row), anchor_ms, level in zip(flags, anchors_ms, levels, strict=True):
        flag_row = base_row + towards * (BAR_HEIGHT / 2 + FLAG_HEIGHT * level)
        text.set(x=anchor_ms + LABEL_GAP_PIXELS / 2 / pixels_per_ms, y=flag_row)
        # Behind the bars, so that a pole from an upper row does not strike out the label of a lower one.
        pole_rows = [row + towards * BAR_HEIGHT / 2, flag_row]
        axes.plot([anchor_ms, anchor_ms], pole_rows, color=LINE_COLOUR, linewidth=0.8, zorder=0.9)
    return max(levels, default=0)


def _figure_of(rows: int, duration_s: float) -> tuple[Any, Any]:
    """A figure with axes of time in ms."""
    from matplotlib.figure import Figure

    # Without pyplot no global state and no window system are involved; a bare Figure draws with Agg.
    figure = Figure(figsize=(12, max(2.0, float(rows))), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(0, 1e3 * duration_s or 1.0)
    axes.set_xlabel("time since the start (ms)")
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.grid(axis="x", color="#e5e7eb")
    axes.set_axisbelow(True)
    return figure, axes


def plot_pipeline(timeline: PipelineTimeline, path: str | Path) -> None:
    """Write a pipeline's step as a PNG to ``path``, whose folder must exist: a row for each rank, a bar for each
    computation with its stage and microbatch, and gaps where the rank waits.

    Times are in ms since the first start. Raises ModuleNotFoundError without matplotlib.
    """
    figure, axes = _figure_of(len(timeline.rows), timeline.duration_s)
    start_s = min((span.start_s for row in timeline.rows for span in row), default=0.0)
    used = {}
    for rank, row in enumerate(timeline.rows):
        for span in row:
            colour, name = PIPELINE_COLOURS[span.action.kind]
            used[name] = colour
            left, width = 1e3 * (span.start_s - start_s), 1e3 * (span.end_s - span.start_s)
            axes.barh(rank, width, BAR_HEIGHT, left, color=colour, edgecolor="white", linewidth=0.5)
            if width > 1e3 * timeline.duration_s / 80:
                text = str(span.action.microbatch)
                axes.text(left + width / 2, rank, text, ha="center", va="center", fontsize=LABEL_POINTS)
    axes.set_yticks(range(len(timeline.rows)), [f"rank {rank}" for rank in range(len(timeline.rows))])
    axes.invert_yaxis()
    axes.set_title(
        f"{1e3 * timeline.duration_s:.1f} ms, bubble {100 * timeline.bubble:.1f} %", fontsize=11, loc="right"
    )
    bars = [axes.barh(0, 0, color=colour, label=name) for name, colour in used.items()]
    axes.legend(handles=bars, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, frameon=False)
    figure.savefig(path)
