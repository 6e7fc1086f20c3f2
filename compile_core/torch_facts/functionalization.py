"""Torch's functionalization, which turns writes in place into new values while a graph is traced."""

from __future__ import annotations

from gradsplit.compile_core.torch_facts.private_parts import private

_PURPOSE = "tracing programs that write in place"

to_functional = private("torch:_to_functional_tensor", _PURPOSE)
from_functional = private("torch:_from_functional_tensor", _PURPOSE)
is_functional = private("torch:_is_functional_tensor", _PURPOSE)
mirror_autograd_meta = private("torch:_mirror_autograd_meta_to", _PURPOSE)
sync = private("torch:_sync", _PURPOSE)
enable_functionalization = private("torch:_enable_functionalization", _PURPOSE)
disable_functionalization = private("torch:_disable_functionalization", _PURPOSE)
has_data_mutation = private("torch:_functionalize_has_data_mutation", _PURPOSE)
