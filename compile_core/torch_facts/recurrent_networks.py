"""Recurrent networks layer by layer, with the dropout between their layers, where torch's own form cannot be traced.

- cuDNN's kernel of all layers drops elements by a state that torch keeps on the device, a real tensor that no trace
  with fake tensors may meet, and autocast lays out the weights of all layers anew. An operator of ours calls it for one
  layer, which drops nothing; its fake results need no look at the weights.
- Torch's decomposition for sizes that are symbols has all layers in it and leaves their dropout out, for its condition
  ``num_layers < i - 1`` never holds. A call of one layer has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsplit.compile_core.torch_facts.autograd_engine import AutoDispatchBelowAutograd

Network = Callable[..., Any]

# cuDNN's numbers of the kinds (``cudnnRNNMode_t``), by torch's function.
_MODES: dict[Network, int] = {torch.rnn_relu: 0, torch.rnn_tanh: 1, torch.lstm: 2, torch.gru: 3}
NETWORKS: Sequence[Network] = tuple(_MODES)


def layered(network: Network, open_sizes: bool) -> Network:
    """What to trace in the place of a recurrent network of torch.

    Args:
        open_sizes: whether sizes may be symbols. Where they are not, only GPUs' networks are split.
    """

    def run(sequence: Tensor, states: Any, weights: Any, *settings: Any) -> Any:
        is_packed = isinstance(weights, Tensor) or (network is torch.lstm and isinstance(states, Tensor))
        if is_packed:  # its sizes are data
            return network(sequence, states, weights, *settings)
        has_biases, layers, dropout, train, bidirectional, batch_first = settings
        drops = bool(train and dropout) and layers > 1
        on_cudnn = _runs_on_cudnn(sequence)
        if not on_cudnn and not (open_sizes and drops):
            return network(sequence, states, weights, *settings)
        run_layer = partial(_cudnn_layer, network) if on_cudnn else network
        one_layer = (has_biases, 1, 0.0, train, bidirectional, False)
        sequence = sequence.transpose(0, 1) if batch_first else sequence
        directions = 2 if bidirectional else 1
        of_layer = [directions, len(weights) // layers]
        last: list[Sequence[Tensor]] = []
        for layer in range(layers):
            begin, weights_begin = (layer * count for count in of_layer)
            end, weights_end = begin + of_layer[0], weights_begin + of_layer[1]
            first = states[begin:end] if isinstance(states, Tensor) else [one[begin:end] for one in states]
            sequence, *left = run_layer(sequence, first, weights[weights_begin:weights_end], *one_layer)
            last.append(left)
            if drops and layer < layers - 1:
                sequence = torch.dropout(sequence, dropout, train=True)
        sequence = sequence.transpose(0, 1) if batch_first else sequence
        return (sequence, *(torch.cat(parts) for parts in zip(*last, strict=True)))

    return run


def _runs_on_cudnn(sequence: Tensor) -> bool:
    """Whether torch takes cuDNN's kernel for this sequence (``use_cudnn`` in its ``RNN.cpp``); never for bfloat16 here,
    which only some releases of cuDNN know, unless autocast makes float16 of it."""
    if sequence.device.type != "cuda" or torch.version.hip or not torch.backends.cudnn.enabled:
        return False
    dtypes = {torch.float16, torch.float32, torch.float64}
    if torch.is_autocast_enabled("cuda"):
        dtypes.add(torch.bfloat16)
    return sequence.dtype in dtypes and sequence.numel() != 0


def _cudnn_layer(network: Network, sequence: Tensor, states: Any, weights: Any, *one_layer: Any) -> Any:
    """One layer as cuDNN runs it: the sequence, (steps, batch, features), and the last states."""
    has_biases, _, _, train, bidirectional, _ = one_layer
    hidden, cell = (states, None) if isinstance(states, Tensor) else states
    # To float16, whatever dtype the context names: torch's rule for cuDNN.
    if torch.is_autocast_enabled("cuda"):
        sequence, hidden, *weights = map(_as_half, (sequence, hidden, *weights))
        cell = None if cell is None else _as_half(cell)
    outputs = hidden.shape[2]
    width = outputs if cell is None else cell.shape[2]
    projected = 0 if outputs == width else outputs
    settings = (_MODES[network], width, projected, has_biases, train, bidirectional)
    with torch.autocast("cuda", enabled=False):
        result = _Layer.apply(settings, sequence, hidden, cell, *weights)
    return result[: 2 if cell is None else 3]


def _as_half(tensor: Tensor) -> Tensor:
    is_eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.float16) if is_eligible else tensor


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: tuple[Any, ...],
        sequence: Tensor,
        hidden: Tensor,
        cell: Tensor | None,
        *weights: Any,
    ):
        results = torch.ops.gradsplit.cudnn_layer.default(sequence, hidden, cell, weights, *settings)
        output, _, _, reserve, flat_weights = results
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(reserve, flat_weights)
        ctx.save_for_backward(sequence, hidden, cell, output, reserve, flat_weights, *weights)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any):
        sequence, hidden, cell, output, reserve, flat_weights, *weights = ctx.saved_tensors
        for_weights = any(ctx.needs_input_grad[4:])
        found = torch.ops.gradsplit.cudnn_layer_backward.default(
            sequence,
            hidden,
            cell,
            weights,
            output,
            reserve,
            flat_weights,
            *gradients[:3],
            for_weights,
            *ctx.settings,
        )
        of_inputs = (*found[:2], None) if cell is None else found[:3]
        of_weights = found[len(found) - len(weights) :] if for_weights else [None] * len(weights)
        return None, *of_inputs, *of_weights


aten = torch.ops.aten
_library = torch.library.Library("gradsplit", "FRAGMENT")
_SETTINGS = "int mode, int width, int projected, bool has_biases, bool train, bool bidirectional"
_library.define(
    f"cudnn_layer(Tensor input, Tensor hidden, Tensor? cell, Tensor[] weights, {_SETTINGS}) -> (Tensor output, "
    "Tensor last_hidden, Tensor last_cell, Tensor reserve, Tensor flat_weights)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "cudnn_layer_backward(Tensor input, Tensor hidden, Tensor? cell, Tensor[] weights, Tensor output, Tensor reserve, "
    "Tensor flat_weights, Tensor? of_output, Tensor? of_hidden, Tensor? of_cell, bool for_weights, "
    f"{_SETTINGS}) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _weights_of_a_direction(has_biases: bool, projected: int) -> int:
    return (4 if has_biases else 2) + (1 if projected else 0)


def _forward(
    sequence: Tensor, hidden: Tensor, cell: Tensor | None, weights: list[Tensor], mode: int, width: int, projected: int,
    has_biases: bool, train: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    count = _weights_of_a_direction(has_biases, projected)
    hidden, cell = hidden.contiguous(), None if cell is None else cell.contiguous()
    # Torch has aliases of the weights lie in one piece of memory from then on, and not the weights.
    aliases = [weight.detach() for weight in weights]
    with AutoDispatchBelowAutograd(), torch.no_grad():
        flat = aten._cudnn_rnn_flatten_weight(
            aliases, count, sequence.shape[2], mode, width, projected, 1, False, bidirectional
        )
        output, last_hidden, last_cell, reserve, _ = aten._cudnn_rnn(
            sequence, aliases, count, flat, hidden, cell, mode, width, projected, 1, False, 0.0, train, bidirectional,
            [], None,
        )  # fmt: skip
    return output, last_hidden, last_cell, reserve, flat


def _backward(
    sequence: Tensor, hidden: Tensor, cell: Tensor | None, weights: list[Tensor], output: Tensor, reserve: Tensor,
    flat_weights: Tensor, of_output: Tensor | None, of_hidden: Tensor | None, of_cell: Tensor | None, for_weights: bool,
    mode: int, width: int, projected: int, has_biases: bool, train: bool, bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    """The gradients of sequence, hidden state, cell state (of LSTMs) and, where asked for, of each weight."""
    count = _weights_of_a_direction(has_biases, projected)
    hidden, cell = hidden.contiguous(), None if cell is None else cell.contiguous()
    # cuDNN writes into what the forward reserved, and a graph may be gone through again. The gradients of weights are
    # parts of one tensor, and results of an operator share no memory.
    with AutoDispatchBelowAutograd():
        of_sequence, of_first, of_first_cell, of_weights = aten._cudnn_rnn_backward(
            sequence, weights, count, flat_weights, hidden, cell, output, of_output, of_hidden, of_cell, mode, width,
            projected, 1, False, 0.0, train, bidirectional, [], None, reserve.clone(),
            [True, True, cell is not None, for_weights],
        )  # fmt: skip
    of_states = [of_first] if cell is None else [of_first, of_first_cell]
    return [of_sequence, *of_states, *(gradient.clone() for gradient in of_weights if for_weights)]


def _like_forward(
    sequence: Tensor, hidden: Tensor, cell: Tensor | None, weights: list[Tensor], mode: int, width: int, projected: int,
    has_biases: bool, train: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    steps, batch, _ = sequence.shape
    directions = 2 if bidirectional else 1
    outputs = projected or width
    output = sequence.new_empty([steps, batch, outputs * directions])
    last_hidden = hidden.new_empty([directions, batch, outputs])
    last_cell = sequence.new_empty([0] if cell is None else [directions, batch, width])
    # What is reserved is cuDNN's matter; nobody asks for its size.
    reserve = sequence.new_empty([0], dtype=torch.uint8)
    return (
        output,
        last_hidden,
        last_cell,
        reserve,
        sequence.new_empty([sum(weight.numel() for weight in weights)]),
    )


def _like_backward(
    sequence: Tensor, hidden: Tensor, cell: Tensor | None, weights: list[Tensor], output: Tensor, reserve: Tensor,
    flat_weights: Tensor, of_output: Tensor | None, of_hidden: Tensor | None, of_cell: Tensor | None, for_weights: bool,
    *settings: Any,
) -> list[Tensor]:  # fmt: skip
    of_inputs = [sequence, hidden] if cell is None else [sequence, hidden, cell]
    return [tensor.new_empty(tensor.shape) for tensor in (*of_inputs, *(weights if for_weights else ()))]


_library.impl("cudnn_layer", _forward, "CUDA")
_library.impl("cudnn_layer", _like_forward, "Meta")
_library.impl("cudnn_layer_backward", _backward, "CUDA")
_library.impl("cudnn_layer_backward", _like_backward, "Meta")
