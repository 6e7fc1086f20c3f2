"""``torch.compiler.set_stance``, by which a program says for a while whether anything is to be compiled.

Torch's front end keeps it; a program that has not imported that has set none.
"""

from __future__ import annotations

import sys

_FRONT_END = "torch._dynamo.eval_frame"


def stance() -> str:
    """The name of the stance that is set. Of torch's names, "force_eager" and "eager_on_recompile" and
    "fail_on_recompile" mean here what they mean there; the others leave all to the first call, as "default"."""
    front_end = sys.modules.get(_FRONT_END)
    return "default" if front_end is None else getattr(front_end, "_stance", _NONE).stance


class _NONE:
    """Of a torch without stances."""

    stance = "default"
