"""Recurrent networks as cuDNN runs them, layer by layer: here on stand-ins for its kernels, on a GPU on the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsplit
from gradsplit.compile_core.torch_facts import recurrent_networks

KINDS = {
    "lstm": (nn.LSTM, {}),
    "lstm_projected": (nn.LSTM, {"proj_size": 3, "bidirectional": True}),
    "lstm_without_biases": (nn.LSTM, {"bias": False}),
    "gru": (nn.GRU, {"bidirectional": True, "batch_first": True}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}
_NETWORKS = {mode: network for network, mode in recurrent_networks._MODES.items()}


def _forward(
    sequence: Tensor, hidden: Tensor, cell: Tensor | None, weights: list[Tensor], mode: int, *settings: Any
):
    _, _, has_biases, train, bidirectional = settings
    states = hidden if cell is None else [hidden, cell]
    with torch.no_grad():
        results = _NETWORKS[mode](sequence, states, weights, has_biases, 1, 0.0, train, bidirectional, False)
    output, last, *last_cell = (result.detach() for result in results)
    reserved = torch.zeros(11, dtype=torch.uint8)  # its size is not what a trace takes it for
    return output, last, last_cell[0] if last_cell else sequence.new_empty(0), reserved, sequence.new_ones(7)


def _backward(
    sequence: Tensor, hidden: Tensor, cell: Tensor | None, weights: list[Tensor], output: Tensor, reserve: Tensor,
    flat: Tensor, of_output: Tensor | None, of_hidden: Tensor | None, of_cell: Tensor | None, for_weights: bool,
    mode: int, *settings: Any,
):  # fmt: skip
    assert reserve.shape == (11,) and flat.shape == (7,)
    _, _, has_biases, train, bidirectional = settings
    states = [hidden] if cell is None else [hidden, cell]

    def gradients() -> tuple[Tensor, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in (sequence, *states, *weights)]
        x, *others = inputs
        first = others[0] if cell is None else others[:2]
        weights_again = others[len(states) :]
        results = _NETWORKS[mode](x, first, weights_again, has_biases, 1, 0.0, train, bidirectional, False)
        pairs = [
            pair
            for pair in zip(results, (of_output, of_hidden, of_cell), strict=False)
            if pair[1] is not None
        ]
        roots, seeds = zip(*pairs, strict=True)
        return torch.autograd.grad(roots, inputs, seeds)

    with ThreadPoolExecutor(1) as another:  # in which autograd is not left out, as it is below an operator
        found = another.submit(gradients).result()
    return list(found[: None if for_weights else 1 + len(states)])


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(recurrent_networks, "_runs_on_cudnn", lambda sequence: True)
    library = torch.library.Library("gradsplit", "FRAGMENT")
    library.impl("cudnn_layer", _forward, "CPU")
    library.impl("cudnn_layer_backward", _backward, "CPU")
    yield
    library._destroy()


def _train(network: nn.Module, call: Any, x: Tensor, states: Any) -> list[Tensor]:
    output, last = call(x, states)
    (output.float().square().sum() + sum(one.float().sin().sum() for one in _tuple(last))).backward()
    assert x.grad is not None
    gradients = [x.grad, *(parameter.grad for parameter in network.parameters())]
    x.grad = None
    network.zero_grad()
    return [output, *_tuple(last), *gradients]


def _tuple(states: Any) -> tuple[Tensor, ...]:
    return states if isinstance(states, tuple) else (states,)


def _check(kind: str, device: str, autocast: bool, caplog: pytest.LogCaptureFixture) -> None:
    make, settings = KINDS[kind]
    torch.manual_seed(0)
    plain = make(4, 6, num_layers=2, **settings).to(device)
    network = make(4, 6, num_layers=2, **settings).to(
        device
    )  # no deep copy, whose weights are not in one piece
    network.load_state_dict(plain.state_dict())
    compiled = gradsplit.compile(network, fullgraph=True)
    for steps in (5, 5, 3, 2):
        x = torch.randn(3, steps, 4, device=device, requires_grad=True)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            wanted = _train(plain, plain, x, None)
            found = _train(network, compiled, x, None)
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype and one.stride() == other.stride()
            bound = 2e-3 if autocast else 1e-5  # float16 under autocast
            assert (one - other).abs().max() <= bound * other.abs().max().clamp(min=1)
    assert not [one for one in caplog.records if one.levelname == "WARNING"]  # of a graph that raised


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("kind", KINDS)
def test_layers_give_what_the_network_does(
    kind: str, stand_ins: None, caplog: pytest.LogCaptureFixture
) -> None:
    _check(kind, "cpu", False, caplog)


def test_what_is_between_layers_is_dropped(stand_ins: None) -> None:
    """All of it, so that the values are known."""
    torch.manual_seed(0)
    network = nn.LSTM(4, 6, num_layers=3, dropout=1.0)
    x = torch.randn(5, 3, 4)
    for one, other in zip(
        _train(network, gradsplit.compile(network, fullgraph=True), x.requires_grad_(), None),
        _train(network, network, x, None),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_on_cudnn_give_what_the_network_does(
    kind: str, autocast: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _check(kind, "cuda", autocast, caplog)
