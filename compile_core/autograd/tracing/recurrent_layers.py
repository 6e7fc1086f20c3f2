"""Runs recurrent networks of open sizes layer by layer, with the dropout between their layers.

Torch's decomposition for sizes that are symbols has all layers in it and leaves their dropout out, for its condition
``num_layers < i - 1`` never holds. A call of one layer has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gradsplit.compile_core.torch_facts.autograd_engine import AutoDispatchBelowAutograd

Network = Callable[..., Any]


def layered_networks(fake_mode: FakeTensorMode) -> Mapping[Network, Network]:
    """What to trace in the place of torch's recurrent networks, where a size may be a symbol."""
    if fake_mode.shape_env is None:
        return {}
    return {network: _layered(network) for network in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)}


def _layered(network: Network) -> Network:
    def run(sequence: Tensor, states: Any, weights: Any, *settings: Any) -> Any:
        if isinstance(weights, Tensor):  # of a packed sequence, whose sizes are known
            return network(sequence, states, weights, *settings)
        has_biases, layers, dropout, train, bidirectional, batch_first = settings
        if not (train and dropout) or layers == 1:
            return network(sequence, states, weights, *settings)
        sequence = sequence.transpose(0, 1) if batch_first else sequence
        directions = 2 if bidirectional else 1
        of_layer = [directions, len(weights) // layers]
        last: list[Sequence[Tensor]] = []
        for layer in range(layers):
            begin, weights_begin = (layer * count for count in of_layer)
            end, weights_end = begin + of_layer[0], weights_begin + of_layer[1]
            first = states[begin:end] if isinstance(states, Tensor) else [one[begin:end] for one in states]
            one_layer = (has_biases, 1, 0.0, train, bidirectional, False)
            sequence, *left = network(sequence, first, weights[weights_begin:weights_end], *one_layer)
            last.append(left)
            if layer < layers - 1:
                sequence = torch.dropout(sequence, dropout, train=True)
        sequence = sequence.transpose(0, 1) if batch_first else sequence
        return (sequence, *(torch.cat(parts) for parts in zip(*last, strict=True)))

    return run


# oneDNN's layer of an LSTM, as an operator that keeps what its backward needs under ``no_grad``, too.
#
# Torch's operator fills the workspace of its backward only where gradients are enabled, and a compiled forward runs
# where they are not. So a forward that is differentiated has an operator of ours in its place, which enables them for
# the call.

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
