"""Streams of GPUs, asked for and changed for every bucket of a step: torch's own functions take the host several times
as long."""

from __future__ import annotations

from functools import cache

import torch


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """As ``torch.cuda.current_stream``, of a device with an index; the same object for the same stream."""
    return _stream(*torch._C._cuda_getCurrentStream(device.index))


@cache
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


class OnStream:
    """As ``torch.cuda.stream``: what is queued inside of it is queued on this stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._device_before = torch._C._cuda_getDevice()
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        _set_stream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *_: object) -> None:
        _set_stream(*self._before)
        if self._device_before != self._stream.device_index:
            torch._C._cuda_setDevice(self._device_before)


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    """Makes its device the current one, too."""
    torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)
