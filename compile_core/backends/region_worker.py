"""A process that makes loops and kernels of regions. Run as a script, it is the other end of
``compile_elsewhere``.

It reads a request a line from its input and answers each with a line, both JSON. It never touches a GPU.
"""

from __future__ import annotations

import base64
import json
import os
import select
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

_IDLE_S = 60.0
# The run that is recorded is that of the process that asks.
os.environ.pop("GRADSPLIT_DEBUG", None)

import torch  # noqa: E402

from gradsplit.compile_core.backends.generated_kernels import generate_region  # noqa: E402
from gradsplit.compile_core.backends.region_transport import (  # noqa: E402
    RegionRequest,
    named_constants,
    packed,
    unpacked,
)
from gradsplit.compile_core.ir.open_graphs import SizeValues  # noqa: E402
from gradsplit.compile_core.lowering.build import build  # noqa: E402
from gradsplit.compile_core.lowering.triton_kernels.build_triton import compile_into_cache  # noqa: E402
from gradsplit.compile_core.observe.dump import StageDump  # noqa: E402


def compile_region(request: RegionRequest, values: SizeValues) -> dict[str, Any]:
    """The loop program, and the sources of its kernels, which lie compiled in the cache."""
    torch.set_num_threads(request.threads)
    module, _ = request.graph.bind(request.attributes, values)
    compute = replace(request.signature, module=module)
    program, sources = generate_region(compute, request.options, StageDump(None))
    compile_into_cache(
        [source for source in sources if source.language == "triton"],
        request.options.cache_folder,
        request.targets,
    )
    build([source for source in sources if source.language == "cpp"], request.options.cache_folder)
    return {"program": named_constants(program, module), "sources": sources}


def _serve() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)
    while select.select([0], [], [], _IDLE_S)[0]:
        line = sys.stdin.readline()
        if not line.endswith("\n"):
            return  # the parent process has ended
        answer = json.dumps(_answer(json.loads(line))).encode() + b"\n"
        while answer:
            answer = answer[os.write(answers, answer) :]


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        region, values = (unpacked(base64.b64decode(request[name])) for name in ("region", "values"))
        made = compile_region(region, values)
        texts = {part: base64.b64encode(packed(value)).decode() for part, value in made.items()}
        return {"error": None, **texts}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


if __name__ == "__main__":
    os.nice(5)
    # The parent process may be gone.
    with suppress(BrokenPipeError):
        _serve()
