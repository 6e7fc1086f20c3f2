"""The current stream of a GPU, asked for several times for every bucket of a step, and the streams on which gradients
of a round were stored: the engine runs a backward on those of the forward."""

from __future__ import annotations

from functools import cache

import torch

from gradsplit.compile_core.torch_facts.cuda import current_stream_parts


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """As ``torch.cuda.current_stream``, of a device with an index, in a fraction of its time; the same object for the
    same stream."""
    return _stream(*current_stream_parts(device.index))


@cache
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


class WritingStreams:
    """Those of one device's gradients in one round.

    Args:
        device: where the gradients are.
        has_streams: whether work is ordered by streams there at all.
    """

    def __init__(self, device: torch.device, has_streams: bool) -> None:
        self._device, self._has_streams = device, has_streams
        self._streams: set[torch.cuda.Stream] = set()

    def note(self) -> None:
        """Something was stored on the current stream."""
        if self._has_streams:
            self._streams.add(current_stream(self._device))

    def wait(self) -> None:
        """What is queued next on the current stream finds all that was stored."""
        for stream in self._streams:
            here = current_stream(stream.device)
            if stream is not here:
                here.wait_stream(stream)
