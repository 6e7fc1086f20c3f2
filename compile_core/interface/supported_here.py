"""Whether anything can be compiled with this process's CPython and torch; said once where it is not, or not tested."""

from __future__ import annotations

import functools
import logging

import torch
from torch.torch_version import TorchVersion

from gradsplit.compile_core.capture.code_objects.python_versions import KNOWN_VERSIONS, VERSION
from gradsplit.compile_core.torch_facts.private_parts import TESTED_TORCHES, missing_parts

logger = logging.getLogger(__name__)

_TABLE = "`python -m gradsplit.support` prints what is relied upon"


def why_nothing_is_compiled() -> str | None:
    """The reason for which all programs of this process run as plain Python; ``None`` if there is none."""
    if VERSION not in KNOWN_VERSIONS:
        python, newest = (".".join(map(str, version)) for version in (VERSION, KNOWN_VERSIONS[-1]))
        return f"the bytecode of CPython {python} is not known to this release of gradsplit, which knows up to {newest}"
    missing = [part.name for part in missing_parts()]
    if not missing:
        return None
    return f"torch {torch.__version__} has no {', '.join(missing)}; {_TABLE}"


@functools.cache
def say_once(reason: str | None) -> None:
    """Warns that nothing is compiled, or says that torch is newer than any that is tested."""
    if reason is not None:
        logger.warning("nothing is compiled, programs run as plain Python: %s", reason)
    elif TorchVersion(torch.__version__) >= f"{TESTED_TORCHES[1]}.99":
        logger.warning(
            "torch %s is newer than %s, the newest tested; %s", torch.__version__, TESTED_TORCHES[1], _TABLE
        )
