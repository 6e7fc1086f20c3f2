"""On which streams gradients of a round were stored: the engine runs a backward on those of the forward."""

from __future__ import annotations

import torch

from gradsplit.distributed.streams import current_stream


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
