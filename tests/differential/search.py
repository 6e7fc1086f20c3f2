"""Worker processes that check programs, findings that are made smaller, and the table of a search."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.differential.reduce_program import reduce_program

# Loaded kernels are never unloaded, so a process is replaced after as many programs.
_PROGRAMS_OF_WORKER = 400
_REDUCE_SECONDS = 90.0
# Making all samples of the operator database takes a slow machine a minute.
_COUNT_SECONDS = 600.0


class Worker:
    """One process at a time; what it dies of is an answer."""

    def __init__(self, folder: Path, number: int, timeout_s: float, verify: bool) -> None:
        self._current = folder / f"current_{number}.py"
        self._errors = folder / f"errors_{number}.txt"
        self._timeout_s = timeout_s
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "GRADSPLIT_CACHE": os.environ.get("GRADSPLIT_CACHE", str(folder / "cache")),
            "GRADSPLIT_VERIFY": "1" if verify else "0",
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = 0

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._asked >= _PROGRAMS_OF_WORKER:
            self.stop()
        if self._process is None:
            with self._errors.open("wb") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.differential.worker", str(self._current)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=self._environment,
                    bufsize=0,
                )
            self._asked = 0
        self._asked += 1
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        # Who dies before there is a program dies of plain PyTorch, which writes it.
        self._current.unlink(missing_ok=True)
        received, end = b"", time.monotonic() + self._timeout_s
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode() + b"\n")
        while not received.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return self._died("hang", f"no answer in {self._timeout_s:.0f} s: {self._where()}")
            part = process.stdout.read(1 << 20)
            if not part:
                status = process.wait()
                self.stop()
                words = self._errors.read_text(errors="replace")
                # Of a signal, the beginning says where; of an exception, the end.
                words = words[words.find("Fatal Python error") :][:2500] if status < 0 else words[-600:]
                return self._died(f"crash {status}", f"the process ended with {status}: {words}")
            received += part
        return json.loads(received)

    def _where(self) -> str:
        """Where the threads of a process are that hangs, which is stopped then, and the processes it waits for."""
        assert self._process is not None
        children = _descendants(self._process.pid)
        self._process.send_signal(signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self.stop()
        return f"{self._errors.read_text(errors='replace')[-12000:]}\n{children}"

    def _died(self, kind: str, detail: str) -> dict[str, Any]:
        source = self._current.read_text() if self._current.exists() else ""
        return {"kind": kind, "detail": detail, "source": source}

    def check(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request for a program; "skipped" where plain PyTorch crashes or hangs, too."""
        answer = self.ask(request)
        if not answer["kind"].startswith(("crash", "hang")):
            return answer
        source = answer["source"]
        if "seed" in request and not source and not answer["kind"].startswith("crash 1"):
            return {
                **answer,
                "kind": "skipped",
                "detail": "plain PyTorch crashes while the program is written",
            }
        if source and self.ask({"plain": source})["kind"] != "same":
            return {**answer, "kind": "skipped", "detail": "plain PyTorch crashes or hangs, too"}
        return answer

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()
            self._process = None


def _descendants(pid: int) -> str:
    """What the processes that one has started are doing, a line each."""
    lines = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # some end meanwhile
            for child in task.read_text().split():
                place = Path(f"/proc/{child}")
                command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (place / "stat").read_text().rpartition(") ")[2].split()
                ticks = f"state {state[0]}, {state[11]} ticks of its own, {state[13]} of its children"
                lines += [f"process {child} ({ticks}): {command[:300]}", _descendants(int(child))]
    return "\n".join(filter(None, lines))


class Search:
    """Programs, what came of them, and where findings are written."""

    def __init__(self, out: Path, folder: Path, timeout_s: float, most: int, verify: bool) -> None:
        self._out, self._folder, self._timeout_s, self._most, self._verify = (
            out,
            folder,
            timeout_s,
            most,
            verify,
        )
        self._lock = threading.Lock()
        self._begin = time.monotonic()
        self._reduced = 0
        self.kinds: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.lenient: Counter[str] = Counter()
        self.operators: set[str] = set()
        self.findings: list[tuple[str, dict[str, Any], str]] = []
        self.reason = ""

    def sample_requests(self, every: int, match: str) -> list[dict[str, Any]] | None:
        """One request for each sample; None where the database cannot be imported, for ``reason``."""
        worker = Worker(self._folder, 0, _COUNT_SECONDS, self._verify)
        answer = worker.ask({"count": match})
        worker.stop()
        if "samples" not in answer:
            self.reason = answer["detail"]
            return None
        found = [
            {"operator": index, "sample": sample}
            for index, count in enumerate(answer["samples"])
            for sample in range(count)
        ]
        return found[::every]

    def _worker(self, number: int) -> Worker:
        return Worker(self._folder, number, self._timeout_s, self._verify)

    def run(self, requests: Iterable[dict[str, Any]], workers: int) -> None:
        self._begin = time.monotonic()
        source = iter(requests)
        threads = [
            threading.Thread(target=self._serve, args=(source, self._worker(number)))
            for number in range(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self, requests: Any, worker: Worker) -> None:
        while True:
            with self._lock:
                request = next(requests, None)
            if request is None:
                worker.stop()
                return
            answer = worker.check(request)
            label = "_".join(f"{key}{value}" for key, value in request.items())
            with self._lock:
                kind = answer["kind"]
                self.kinds[kind if kind in ("same", "skipped", "lenient", "sensitive") else "finding"] += 1
                self.operators.update(answer.get("operators", ()))
                done = sum(self.kinds.values())
                if done % 500 == 0:
                    print(
                        f"{done} programs, {len(self.findings)} findings, {self._seconds():.0f} s", flush=True
                    )
                if kind == "skipped":
                    self.skipped[answer["detail"][:90]] += 1
                if kind == "lenient":
                    self.lenient[answer["detail"][:110]] += 1
                if kind in ("same", "skipped", "lenient", "sensitive"):
                    continue
                self._reduced += 1
                with_reduction = self._reduced <= self._most
            small = self._reduce(answer, worker) if with_reduction else answer["source"]
            with self._lock:
                self.findings.append((label, answer, small))
                with (self._out / "findings.txt").open("a") as file:
                    file.write(f"{label} | {kind} | {answer['detail'][:400]!r}\n")
                if with_reduction:
                    (self._out / f"{label}.py").write_text(
                        f"# {kind}\n"
                        + "".join(f"# {line}\n" for line in answer["detail"].splitlines())
                        + small
                    )

    def _reduce(self, answer: dict[str, Any], worker: Worker) -> str:
        if not answer["source"]:
            return ""

        def differs(text: str) -> bool:
            again = worker.check({"source": text})
            same_kind = again["kind"] == answer["kind"]
            if same_kind and again["kind"].startswith("raises"):
                same_kind = again["detail"][:60] == answer["detail"][:60]
            if same_kind:
                answer["smaller"] = again["detail"]
            return same_kind

        return reduce_program(answer["source"], differs, _REDUCE_SECONDS if self._timeout_s > 1 else 1.0)

    def _seconds(self) -> float:
        return time.monotonic() - self._begin

    def summary(self) -> str:
        """The findings by kind, and the table."""
        lines = []
        by_kind = Counter(answer["kind"] for _, answer, _ in self.findings)
        for kind, count in by_kind.most_common():
            examples = [(label, answer) for label, answer, _ in self.findings if answer["kind"] == kind]
            lines.append(f"{count:5d}  {kind}: {' '.join(label for label, _ in examples[:8])}")
            lines.append(f"       {examples[0][1]['detail'][:240]}")
        for title, counter in (("skipped", self.skipped), ("eager alone raises", self.lenient)):
            lines += [f"{title}: {n} × {text}" for text, n in counter.most_common(6)]
        errors = sum(answer["kind"].startswith(("raises", "crash", "hang")) for _, answer, _ in self.findings)
        titles = (
            "programs",
            "operators",
            "different",
            "errors",
            "eager alone raises",
            "sensitive",
            "skipped",
            "seconds",
        )
        values = (
            sum(self.kinds.values()),
            len(self.operators),
            len(self.findings) - errors,
            errors,
            self.kinds["lenient"],
            self.kinds["sensitive"],
            self.kinds["skipped"],
            round(self._seconds()),
        )
        lines += [
            "",
            "  ".join(titles),
            "  ".join(str(v).rjust(len(t)) for t, v in zip(titles, values, strict=True)),
        ]
        return "\n".join(lines)
