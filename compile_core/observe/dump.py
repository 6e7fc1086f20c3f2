"""Writes what each stage made, for people who look for a fault or are curious."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gradsplit.compile_core.artifact_logs import log_artifact
from gradsplit.compile_core.observe.describe import describe
from gradsplit.compile_core.run_record import record

T = TypeVar("T")

_numbers = itertools.count()


class StageDump:
    """``dump(stage, print, graph)`` writes ``print(graph)`` to ``graph_<n>.<stage>.txt``, given a folder.

    Args:
        folder: for texts.
        diagram_folder: for pictures.

    Attributes:
        number: of the graph in this process.
    """

    def __init__(self, folder: Path | None, diagram_folder: Path | None = None) -> None:
        self._folder = folder
        self._diagram_folder = diagram_folder
        self.number = next(_numbers)

    def __call__(
        self,
        stage: str,
        print_graph: Callable[[T], str],
        graph: T,
        artifact: str = "",
        seconds: float | None = None,
    ) -> None:
        """
        Args:
            artifact: the log that the text belongs to, too.
            seconds: how long the pass took that made the graph, if one did.
        """
        log_artifact(artifact, lambda: f"graph {self.number}, {stage}:\n{print_graph(graph)}")
        record(
            "stage",
            lambda: {
                "graph": self.number,
                "stage": stage,
                "seconds": seconds,
                "text": print_graph(graph),
                **describe(graph),
            },
        )
        if self._folder is not None:
            self._write(self._folder, f"{stage}.txt", print_graph(graph))

    def diagram(self, stage: str, draw: Callable[[], str]) -> None:
        """Writes ``graph_<n>.<stage>.svg``, drawn only if it is wanted."""
        if self._diagram_folder is not None:
            self._write(self._diagram_folder, f"{stage}.svg", draw())

    def _write(self, folder: Path, name: str, text: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"graph_{self.number}.{name}").write_text(text, encoding="utf-8")
