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
