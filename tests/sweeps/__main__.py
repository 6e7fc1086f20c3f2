"""What is captured of the models of a library, beside torch.compile.

    python -m tests.sweeps [transformers] [timm] [torchvision] [--training] [--autocast] [--backend eager]
        [--device cuda] [--workers 2] [--only PART] [--every N] [--out out/sweep.json]

The backend "eager" shows what is captured in a few seconds a model; without one, each side compiles with its default.
Results are written as they come, one model a line, and a sweep that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.sweeps.cases import LIBRARIES, cases_of
from tests.sweeps.measure import Setting
from tests.sweeps.report import print_report
from tests.sweeps.workers import run_all


def main() -> None:
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
    parser.add_argument("--alone", action="store_true", help="without torch.compile")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=int, default=300, help="seconds that a model may take")
    parser.add_argument("--only", default="", help="models with this in their names")
    parser.add_argument("--every", type=int, default=1, help="one of so many models")
    parser.add_argument("--out", type=Path, default=Path("out/sweep.json"))
    given = parser.parse_args()
    setting = Setting(given.training, given.autocast, given.device, given.backend, not given.alone)
    found = [name for library in given.libraries or LIBRARIES for name in cases_of(library)]
    chosen = [name for name in found if given.only in name][:: given.every]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    results = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {result["name"] for result in results}
    tasks = [(name, setting, given.limit) for name in chosen if name not in done]
    with given.out.open("a") as file:
        for result in run_all(tasks, given.workers):
            results.append(result)
            file.write(json.dumps(result) + "\n")
            file.flush()
    print_report(results)


if __name__ == "__main__":
    main()
