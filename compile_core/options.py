"""What a user may ask of a compilation, and the one place that reads the environment.

``CompileOptions`` is the table: a line an option, with its default, what it takes and what it means. Where
torch.compile has an option of the same purpose, its name is torch's, a dot included.
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any


def default_cache_folder() -> Path:
    """Where built kernels are kept: ``GRADSPLIT_CACHE``, else a folder of the user's cache. Begins with ``~`` where the
    user has no home."""
    chosen = os.environ.get("GRADSPLIT_CACHE")
    if not chosen:
        chosen = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/gradsplit"
    return Path(os.path.expanduser(chosen))


def compilation_is_off() -> bool:
    """Whether ``compile`` leaves all as it is in this process: ``GRADSPLIT_DISABLE``, or torch's own switch."""
    return any(os.environ.get(name, "0") == "1" for name in ("GRADSPLIT_DISABLE", "TORCH_COMPILE_DISABLE"))


# What can be logged apart from the rest, by torch's names, with what each prints.
LOG_ARTIFACTS: Mapping[str, str] = {
    "graph_breaks": "each end of a graph before its function's, with the user's line",
    "guards": "the conditions under which each graph holds",
    "recompiles": "which condition did not hold where something is compiled again",
    "dynamic": "sizes and numbers that differ between calls, and are symbols from then on",
    "graph_code": "each captured graph",
    "aot_graphs": "each joint graph of forward and backward",
    "schedule": "the regions of each program, and where collectives start",
    "fusion": "the loops of each region",
    "output_code": "the source of each kernel",
    "perf_hints": "operators without a lowering, and kernels that share memory traffic and stay apart",
    "cudagraphs": "recordings of CUDA graphs, and why there is none",
    "ddp_graphs": "backwards that are cut, and the buckets of their gradients",
    "cache": "kernels that were found on disk, and those that were built",
}
# Those of our own; torch has none of this name.
_NOT_TORCHS = frozenset(["cache"])


def chosen_logs() -> set[str]:
    """``GRADSPLIT_LOGS``: names of ``LOG_ARTIFACTS`` or ``all``, separated by commas, a ``-`` before what is left out;
    and of ``TORCH_LOGS`` the names that mean the same.

    Raises:
        ValueError: ``GRADSPLIT_LOGS`` has an unknown name; the message lists the known.
    """
    chosen: set[str] = set()
    for word in os.environ.get("TORCH_LOGS", "").split(","):
        name = word.strip().lstrip("+")
        chosen |= {name} & (set(LOG_ARTIFACTS) - _NOT_TORCHS)
    for word in filter(None, (word.strip() for word in os.environ.get("GRADSPLIT_LOGS", "").split(","))):
        name = word.lstrip("+-")
        if name not in LOG_ARTIFACTS and name != "all":
            raise ValueError(unknown_name(name, [*LOG_ARTIFACTS, "all"], "name in GRADSPLIT_LOGS:"))
        names = set(LOG_ARTIFACTS) if name == "all" else {name}
        chosen = chosen - names if word.startswith("-") else chosen | names
    return chosen


@dataclass(frozen=True)
class ReproRequest:
    """What is to become of graphs that fail.

    Attributes:
        after: "capture" or "aot": the stage whose graph is written.
        level: 1 writes a graph that fails to compile or to run its forward, 2 makes it smaller first, 3 tries every
            graph in another process before it is compiled, its backward, too, so that crashes and hangs are found,
            4 also compares results and gradients with plain PyTorch's.
        folder: where programs are written.
    """

    after: str
    level: int
    folder: Path


def requested_repro() -> ReproRequest | None:
    """``GRADSPLIT_REPRO_AFTER``, ``GRADSPLIT_REPRO_LEVEL`` (2) and ``GRADSPLIT_REPRO_DIR`` (``gradsplit_repro`` here).

    Raises:
        ValueError: one of them has a value that it cannot have.
    """
    after = os.environ.get("GRADSPLIT_REPRO_AFTER", "")
    if not after:
        return None
    stages = {
        "capture": "capture",
        "dynamo": "capture",
        "aot": "aot",
    }  # the second is torch's word for the first
    if after not in stages:
        raise ValueError(f"GRADSPLIT_REPRO_AFTER takes capture or aot, not {after!r}")
    level = os.environ.get("GRADSPLIT_REPRO_LEVEL", "2")
    if level not in ("1", "2", "3", "4"):
        raise ValueError(f"GRADSPLIT_REPRO_LEVEL takes 1 to 4, not {level!r}")
    return ReproRequest(stages[after], int(level), repro_folder())


def repro_folder() -> Path:
    """``GRADSPLIT_REPRO_DIR``: where what fails is written."""
    return Path(os.environ.get("GRADSPLIT_REPRO_DIR") or "gradsplit_repro")


# What a process that this one starts to try something must not have of its environment.
RUN_VARIABLES = ("GRADSPLIT_REPRO_AFTER", "GRADSPLIT_DEBUG", "GRADSPLIT_DEBUG_FUNCTION")


def debug_folder() -> Path | None:
    """``GRADSPLIT_DEBUG``: where a run is recorded, if it is."""
    chosen = os.environ.get("GRADSPLIT_DEBUG")
    return Path(chosen).absolute() if chosen else None


def debugged_function() -> str:
    """``GRADSPLIT_DEBUG_FUNCTION``: the name of the functions that alone are compiled; "" for all."""
    return os.environ.get("GRADSPLIT_DEBUG_FUNCTION", "")


def rank_given() -> int | None:
    """The rank that a launcher gave this process, if one did."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else None


def chosen_cpp_compiler() -> list[str]:
    """The command in ``CXX``, in words, arguments among them; empty where none is chosen."""
    return shlex.split(os.environ.get("CXX", ""))


@dataclass(frozen=True)
class Option:
    """How an option is given: its name, the values it takes (a test, and the test in words), its meaning."""

    name: str
    accepts: Callable[[Any], bool]
    allowed: str
    meaning: str
    convert: Callable[[Any], Any]


def _option(
    accepts: Callable[[Any], bool],
    allowed: str,
    meaning: str,
    *,
    name: str = "",
    convert: Callable[[Any], Any] = lambda value: value,
) -> dict[str, Option]:
    """What a field of ``CompileOptions`` carries; the option's ``name`` is the field's by default."""
    return {"option": Option(name, accepts, allowed, meaning, convert)}


def _flag(meaning: str, *, name: str = "") -> dict[str, Option]:
    return _option(lambda value: isinstance(value, bool), "True or False", meaning, name=name)


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, Path))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


@dataclass(frozen=True)
class CompileOptions:
    """One compilation's settings, passed from ``compile`` to every stage that reads one."""

    cache_folder: Path = field(
        default_factory=default_cache_folder,
        metadata=_option(_is_path, "a path", "where built kernels are kept between runs", convert=Path),
    )
    cache_size_limit: int | None = field(
        default=None,
        metadata=_option(
            _is_count,
            "a positive number",
            "compiled entries a function may have before it runs as plain Python; by default config.cache_size_limit",
        ),
    )
    activation_memory_budget: float = field(
        default=1.0,
        metadata=_option(
            _is_share,
            "a number from 0.0 to 1.0",
            "what may be kept between forward and backward, as a share of what is cheapest in time: 1.0 keeps that, "
            "smaller numbers compute more again in the backward, 0.0 all but what torch's generator gave",
            convert=float,
        ),
    )
    double_backward: bool = field(
        default=False,
        metadata=_flag(
            "gradients can be differentiated again, as a gradient penalty does; keeps the inputs for that"
        ),
    )
    fallback_random: bool = field(
        default=False,
        metadata=_flag(
            "draw random numbers with torch's kernels, the very numbers that eager draws, instead of inside the "
            "generated kernels from seeds that torch's generator gives"
        ),
    )
    freezing: bool = field(
        default=False,
        metadata=_flag(
            "where gradients are off, compute what depends on parameters and buffers alone once and keep it, with "
            "batch norms folded into the weights before them; compute it again where they are seen to have changed"
        ),
    )
    linked_results: bool = field(
        default=False,
        metadata=_flag(
            "gradients flow between results of which one is computed from the other, and hooks see them, as in plain "
            "PyTorch; cuts the graph there"
        ),
    )
    verify: bool = field(
        default_factory=lambda: os.environ.get("GRADSPLIT_VERIFY", "0") != "0",
        metadata=_flag("check what every stage hands on; costs compile time"),
    )
    skipped_passes: frozenset[str] = field(
        default=frozenset(),
        metadata=_option(
            lambda value: (
                isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(n, str) for n in value)
            ),
            "names of passes",
            "passes between the stages that are left out, to find the one that is at fault; some cannot be",
            name="skip_passes",
            convert=frozenset,
        ),
    )
    cuda_graphs: bool = field(
        default=False,
        metadata=_flag(
            "launch the kernels of forward and backward as CUDA graphs, from the second call on; they are replayed at "
            "fixed addresses, so each keeps its memory",
            name="triton.cudagraphs",
        ),
    )
    max_autotune: bool = field(
        default=False,
        metadata=_flag(
            "on GPUs, time generated kernels for matrix products against torch's and take the faster ones; costs "
            "compile time, once for a machine"
        ),
    )
    epilogue_fusion: bool = field(
        default=True,
        metadata=_flag(
            "under max_autotune, let generated matrix products do what follows them element by element"
        ),
    )
    shape_padding: bool = field(
        default=True,
        metadata=_flag(
            "on GPUs, pad odd sides of the matrices that products read and write with zeros, as of a vocabulary of "
            "50257, so that their rows are aligned"
        ),
    )
    # Smaller ones save memory and cost time: of the head's weight gradient so many sums are added up.
    chunk_bytes: int = field(
        default=512 << 20,
        metadata=_option(
            _is_size,
            "a number of bytes",
            "a loss over a vocabulary is computed for so many bytes of its logits at a time, forward and backward; 0 "
            "keeps logits and their gradient whole. A loss of less than twice as many bytes stays whole",
        ),
    )
    compile_elsewhere: bool = field(
        default=True,
        metadata=_flag(
            "compile for further sizes of a graph in another process, and run torch's kernels until that is done; "
            "else the step waits, as it does under torch.use_deterministic_algorithms"
        ),
    )
    trace_folder: Path | None = field(
        default=None,
        metadata=_option(
            lambda value: value is None or _is_path(value),
            "a path",
            "write what every stage made there, one file a graph and stage",
            convert=lambda value: None if value is None else Path(value),
        ),
    )
    trace_enabled: bool = field(
        default=False,
        metadata=_flag(
            "write what every stage made to trace_folder, by default gradsplit_trace/pid_<process> here",
            name="trace.enabled",
        ),
    )
    trace_graph_diagram: bool = field(
        default=False,
        metadata=_flag(
            "write a picture of every region after fusion, as SVG, to the same folder",
            name="trace.graph_diagram",
        ),
    )

    @property
    def text_folder(self) -> Path | None:
        """Where stages write what they made, if they do."""
        return self.trace_folder or (_default_trace_folder() if self.trace_enabled else None)

    @property
    def diagram_folder(self) -> Path | None:
        """Where pictures of the regions are written, if they are."""
        return (self.trace_folder or _default_trace_folder()) if self.trace_graph_diagram else None

    @property
    def changed(self) -> frozenset[str]:
        """Names of the options that differ from their defaults."""
        defaults = CompileOptions()
        return frozenset(
            name
            for name, attribute in _ATTRIBUTES.items()
            if getattr(self, attribute) != getattr(defaults, attribute)
        )


def _default_trace_folder() -> Path:
    return Path("gradsplit_trace") / f"pid_{os.getpid()}"


# Name of an option -> the attribute that holds it, and how the option is given.
_ATTRIBUTES: Mapping[str, str] = {
    row.metadata["option"].name or row.name: row.name for row in fields(CompileOptions)
}
OPTIONS: Mapping[str, Option] = {
    name: replace(row.metadata["option"], name=name)
    for name, row in zip(_ATTRIBUTES, fields(CompileOptions), strict=True)
}

# What each mode sets.
MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune": {"max_autotune": True, "triton.cudagraphs": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True},
}


def list_mode_options(mode: str | None = None) -> dict[str, Any]:
    """The options that each mode sets, or those of one mode.

    Raises:
        ValueError: there is no such mode.
    """
    if mode is None:
        return {name: dict(settings) for name, settings in MODES.items()}
    return dict(MODES[_known(mode, MODES, "mode")])


def list_options() -> list[str]:
    """The names that ``compile(options=...)`` takes; ``gradsplit.compile_core.options.OPTIONS`` has what they mean."""
    return sorted(OPTIONS)


def parse_options(mode: str | None, options: Mapping[str, Any] | None) -> CompileOptions:
    """The settings of a mode, or the user's options.

    Raises:
        ValueError: an unknown mode or option; the message lists the nearest names and what is allowed.
        TypeError: an option's value has the wrong type.
        RuntimeError: both a mode and options.
    """
    refuse_both(mode, options)
    chosen: dict[str, Any] = list_mode_options(mode or "default")
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must be a dictionary, not {options!r}")
    for name, value in (options or {}).items():
        option = OPTIONS[_known(name, OPTIONS, "option")]
        if not option.accepts(value):
            raise TypeError(f"option {name!r} takes {option.allowed}, not {value!r}")
        chosen[name] = option.convert(value)
    return CompileOptions(**{_ATTRIBUTES[name]: value for name, value in chosen.items()})


def refuse_both(mode: str | None, options: Mapping[str, Any] | None) -> None:
    """As ``torch.compile``, which takes one of the two.

    Raises:
        RuntimeError: both are given.
    """
    if mode is not None and options is not None:
        raise RuntimeError(
            "compile takes a mode or options, not both; list_mode_options() has what a mode sets"
        )


def _known(name: str, allowed: Iterable[str], kind: str) -> str:
    names = sorted(allowed)
    if name in names:
        return name
    raise ValueError(unknown_name(name, names, kind))


def unknown_name(name: object, allowed: Iterable[str], kind: str) -> str:
    """One line that names the fault, the nearest allowed names, and all of them."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(name), names, n=3)
    guess = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"unknown {kind} {name!r}{guess} (allowed: {', '.join(names)})"
