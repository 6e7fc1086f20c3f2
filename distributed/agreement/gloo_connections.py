"""Ends what waits for gloo: a process group of gloo's cannot be aborted, and waits half an hour for a rank that was
stopped.

gloo has the connections of a process in one epoll instance, with the socket at which it listens. That one's port is in
the entry that the ranks of a group find one another by. Where all this is not so, nothing is done.
"""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from itertools import filterfalse
from pathlib import Path

from gradsplit.distributed.agreement.bulletin import Bulletin

_DESCRIPTORS, _DETAILS = Path("/proc/self/fd"), Path("/proc/self/fdinfo")


class GlooConnections:
    """Those of this process, found by means of one group.

    Args:
        bulletin: over the group's store, which is read now: it may be gone when it matters.
        rank: this process, by its number in the group.
    """

    def __init__(self, bulletin: Bulletin, rank: int) -> None:
        self._entry = bulletin.read_of_group(f"cpu//0/{rank}")

    def cut(self) -> None:
        """What waits in a collective of gloo's, in whatever thread, raises."""
        if not self._entry:
            return
        with suppress(OSError):
            for descriptor in os.listdir(_DESCRIPTORS):
                with suppress(OSError):
                    if os.readlink(_DESCRIPTORS / descriptor) == "anon_inode:[eventpoll]":
                        self._cut_in(descriptor)

    def _cut_in(self, epoll: str) -> None:
        watched = [int(found) for found in re.findall(r"tfd:\s*(\d+)", (_DETAILS / epoll).read_text())]
        sockets = []
        for descriptor in watched:
            with suppress(OSError):  # something else, or closed by now
                sockets.append(socket.socket(fileno=os.dup(descriptor)))
        if any(map(self._is_groups_listener, sockets)):
            # gloo ends the process where it cannot listen any longer.
            for one in filterfalse(_is_listener, sockets):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        for one in sockets:
            one.close()

    def _is_groups_listener(self, one: socket.socket) -> bool:
        if not _is_listener(one):
            return False
        family = int(one.family).to_bytes(2, "little")
        return family + one.getsockname()[1].to_bytes(2, "big") in self._entry


def _is_listener(one: socket.socket) -> bool:
    is_network = one.family in (socket.AF_INET, socket.AF_INET6)
    return is_network and bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
