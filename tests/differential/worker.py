"""A process that writes and checks programs, one request a line; it may crash or hang, and is replaced then."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import gradsplit
from tests.differential.compare import check, run_plainly
from tests.differential.operator_samples import count_samples, write_sample
from tests.differential.write_program import with_open_sizes, write_program


def answer(request: dict[str, Any], current: Path) -> dict[str, Any]:
    """Checks ``{"seed": n}`` (with ``"open_sizes": true`` at several sizes, with ``"data_sizes": true`` of
    data, too), ``{"operator": n, "sample": n}`` or
    ``{"source": text}``; ``{"plain": text}`` is only run with plain PyTorch; ``{"count": name}`` counts."""
    begin = time.monotonic()
    if "plain" in request:
        run_plainly(request["plain"])
        return {"kind": "same"}
    if "count" in request:
        try:
            return {"samples": count_samples(request["count"])}
        except Exception as error:
            return {"detail": f"{type(error).__name__}: {error}"}
    try:
        if "source" in request:
            source = request["source"]
        elif "seed" in request:
            source = write_program(request["seed"], request.get("data_sizes", False))
            if request.get("open_sizes"):
                source = with_open_sizes(source, meanwhile=request["seed"] % 2 == 1)
        else:
            source = write_sample(request["operator"], request["sample"])
    except Exception as error:
        return {
            "kind": "skipped",
            "detail": f"not written: {type(error).__name__} {error}"[:300],
            "source": "",
        }
    current.write_text(source)
    # Kernels are cached by their text; a name of its own keeps tracebacks from showing another program.
    verdict = check(source, f"<program {hash(source) & 0xFFFFFF}>")
    return {
        "kind": verdict.kind,
        "detail": verdict.detail,
        "operators": sorted(verdict.operators),
        "source": source if verdict.kind != "same" else "",
        "seconds": time.monotonic() - begin,
    }


def main() -> None:
    current = Path(sys.argv[1])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    gradsplit.config.log_level = 60
    answers = os.fdopen(os.dup(1), "w")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line), current)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
