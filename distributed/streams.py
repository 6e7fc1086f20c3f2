"""The current stream of a GPU, asked for several times for every bucket of a step: torch's own function takes the host
several times as long."""

from __future__ import annotations

from functools import cache

import torch

from gradsplit.compile_core.torch_facts.cuda import current_stream_parts


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """As ``torch.cuda.current_stream``, of a device with an index; the same object for the same stream."""
    return _stream(*current_stream_parts(device.index))


@cache
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
