"""Imports what the processes of a sweep need, so that the compile time of neither side has it."""

from __future__ import annotations

import importlib
from contextlib import suppress

for _name in (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "transformers.modeling_utils",
    "tests.sweeps.measure",
    "tests.sweeps.transformers_cases",
    "tests.sweeps.timm_cases",
    "tests.sweeps.torchvision_cases",
):
    with suppress(Exception):  # a library that is not installed, or not for this torch
        importlib.import_module(_name)
