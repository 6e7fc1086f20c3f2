"""Which forms recurrent networks take in a trace, and oneDNN's layer of an LSTM.

The layer is an operator that keeps what its backward needs under ``no_grad``, too. Torch's operator fills the workspace
of its backward only where gradients are enabled, and a compiled forward runs where they are not. So a forward that is
differentiated has an operator of ours in its place, which enables them for the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradsplit.compile_core.torch_facts.autograd_engine import AutoDispatchBelowAutograd
from gradsplit.compile_core.torch_facts.recurrent_networks import NETWORKS, Network, layered


def layered_networks(fake_mode: FakeTensorMode) -> Mapping[Network, Network]:
    """What to trace in the place of torch's recurrent networks."""
    return {network: layered(network, fake_mode.shape_env is not None) for network in NETWORKS}


aten = torch.ops.aten

_library = torch.library.Library("gradsplit", "FRAGMENT")
_SCHEMA = str(aten.mkldnn_rnn_layer.default._schema)
_library.define("lstm_layer" + _SCHEMA[_SCHEMA.index("(") :], tags=(torch.Tag.pt2_compliant_tag,))


def _run(*arguments: Any) -> Any:
    # Nothing is differentiated here: no history is to be made of what the program knows to require gradients.
    with AutoDispatchBelowAutograd(), torch.enable_grad():
        output, hidden, cell, workspace = aten.mkldnn_rnn_layer.default(*arguments)
    # Torch 2.11's states have another dimension of size 1 where gradients are enabled.
    _, _, _, _, _, hidden_before, cell_before, *_ = arguments
    return output, hidden.view_as(hidden_before), cell.view_as(cell_before), workspace


def _with_workspace(*arguments: Any) -> Any:
    if not torch.is_grad_enabled():
        return NotImplemented
    return torch.ops.gradsplit.lstm_layer.default(*arguments)


_library.impl("lstm_layer", _run, "CPU")
_library.impl("lstm_layer", aten.mkldnn_rnn_layer.default, "Meta")

DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {aten.mkldnn_rnn_layer.default: _with_workspace}
