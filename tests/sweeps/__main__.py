"""What is captured and compiled of the models of libraries, beside torch.compile.

    python -m tests.sweeps [transformers] [timm] [torchvision] [--training] [--autocast] [--backend eager]
        [--device cuda] [--cards 0,1,2,3] [--workers 2] [--seconds 500] [--limit 300] [--only PART] [--every N]
        [--out out/sweep.jsonl]

The backend "eager" shows what is captured in a few seconds a model; without one, each side compiles with its default,
with empty caches, in a process of its own. Results are written as they come, a model and compiler a line, and a sweep
that was stopped goes on where it was; a table of them is written beside.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

from tests.sweeps.cases import LIBRARIES, cases_of, in_order
from tests.sweeps.measure import OURS, TORCHS, Setting
from tests.sweeps.report import report, table
from tests.sweeps.workers import Resources, run_all


def main() -> None:
    start = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "libraries", nargs="*", choices=[*LIBRARIES, []], help="by default all that are installed"
    )
    parser.add_argument("--training", action="store_true", help="with gradients and dropout; else evaluation")
    parser.add_argument("--autocast", action="store_true", help="under bf16 autocast")
    parser.add_argument("--backend", help="of both sides; by default each has its own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cards", default="", help="GPUs over which processes are spread")
    parser.add_argument("--alone", action="store_true", help="without torch.compile")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf, help="nothing starts after these")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a model may take on one side")
    parser.add_argument("--only", default="", help="models with this in their names")
    parser.add_argument("--every", type=int, default=1, help="one of so many models")
    parser.add_argument("--out", type=Path, default=Path("out/sweep.jsonl"))
    given = parser.parse_args()
    setting = Setting(given.training, given.autocast, given.device, given.backend)
    cards = [card for card in given.cards.split(",") if card]
    resources = Resources(given.workers, cards, given.limit, start + given.seconds)
    found = in_order([[*cases_of(library).values()] for library in given.libraries or LIBRARIES])
    chosen = [case.name for case in found if given.only in case.name][:: given.every]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    results = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {(result["name"], result["compiler"]) for result in results}
    skipped = {result["name"] for result in results if result["skipped"]}
    tasks = [
        (name, compiler)
        for name in chosen
        for compiler in (OURS, *([] if given.alone else [TORCHS]))
        if (name, compiler) not in done and name not in skipped
    ]
    with given.out.open("a") as file:
        for result in run_all(tasks, setting, resources):
            results.append(result)
            file.write(json.dumps(result) + "\n")
            file.flush()
    left = len(chosen) - len({result["name"] for result in results} & set(chosen))
    given.out.with_suffix(".txt").write_text(f"{table(results)}\n")
    print(report(results, left))


if __name__ == "__main__":
    main()
