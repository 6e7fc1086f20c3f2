"""Random programs, forward and backward, with the default backend against plain PyTorch, on any number of processes.

    python -m tests.differential --count 20000 --workers 16 --out out/differential
    python -m tests.differential --operators --workers 16 --out out/operators      samples of torch's operator database
    python -m tests.differential --seed 7 --show                                   the program of one seed
    python -m tests.differential.compare FILE...                                   programs that were written to files

Programs that differ are made smaller and written under ``--out``; the summary and a table come last. Each worker is a
process of its own: a crash or a program that takes longer than ``--timeout`` is a finding like any other. Where torch
cannot import its operator database, ``--operators`` says so and ends.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

from tests.differential.search import Search
from tests.differential.write_program import with_open_sizes, write_program


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, help="programs (200), or samples (all)")
    parser.add_argument("--first", "--seed", type=int, default=0, help="the first program's seed, or sample")
    parser.add_argument("--open-sizes", action="store_true", help="compile each program once for three sizes")
    parser.add_argument(
        "--data-sizes", action="store_true", help="with sizes that depend on data, kept in graphs"
    )
    parser.add_argument("--operators", action="store_true", help="the operator database's samples")
    parser.add_argument("--every", type=int, default=1, help="of the samples only every so many")
    parser.add_argument("--match", default="", help="samples only of operators whose name has this")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for a program")
    parser.add_argument("--out", type=Path, default=Path("out/differential"))
    parser.add_argument("--most", type=int, default=30, help="programs that are made smaller and written")
    parser.add_argument("--verify", action="store_true", help="check what every stage hands on")
    parser.add_argument("--show", action="store_true", help="print the program of the seed")
    arguments = parser.parse_args()
    if arguments.show:
        source = write_program(arguments.first, arguments.data_sizes)
        print(with_open_sizes(source, arguments.first % 2 == 1) if arguments.open_sizes else source)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="differential", ignore_cleanup_errors=True) as folder:
        search = Search(arguments.out, Path(folder), arguments.timeout, arguments.most, arguments.verify)
        if arguments.operators:
            requests = search.sample_requests(arguments.every, arguments.match)
            if requests is None:
                print("The operator database cannot be imported here:", search.reason)
                return 0
            requests = requests[arguments.first :][: arguments.count]
        else:
            seeds = range(arguments.first, arguments.first + (arguments.count or 200))
            requests = [
                {"seed": n, "open_sizes": arguments.open_sizes, "data_sizes": arguments.data_sizes}
                for n in seeds
            ]
        search.run(itertools.chain(requests), arguments.workers)
    print(search.summary())
    return int(bool(search.findings))


if __name__ == "__main__":
    sys.exit(main())
