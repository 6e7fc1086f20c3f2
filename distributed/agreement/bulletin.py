"""What the ranks of a process group tell one another on the CPU, without a collective: entries in the group's store.

Whoever reads looks whether an entry is there before it asks for it, so nobody is blocked in the store, and a rank that
does not come can be named after a time limit.
"""

from __future__ import annotations

import json
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store

# Requests are answered at once; a server that takes longer is gone.
_REQUEST_TIMEOUT = timedelta(seconds=30)
_CONNECT_TIMEOUT_S = 5.0


class Bulletin:
    """JSON values by name, shared by ranks; threads may use it at the same time.

    Args:
        store: where entries are kept; used by nobody else.

    Attributes:
        has_session: entries are those of the ranks that there are now, and not of a process group before.
    """

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("gradsplit", store)
        self.has_session = False

    def enter(self, session: str) -> None:
        """From now on entries are those of a session; see ``meet``."""
        self._store = PrefixStore(session, self._store)
        self.has_session = True

    @staticmethod
    def of_group(group: dist.ProcessGroup) -> Bulletin:
        """A connection of its own to the group's store: another one may be held by who waits for something."""
        store = _get_process_group_store(group).clone()  # pyright: ignore[reportAttributeAccessIssue]
        store.set_timeout(_REQUEST_TIMEOUT)
        return Bulletin(store)

    def require_server(self) -> None:
        """Sees to it that the process which holds the store still does: torch prints a stack trace otherwise.

        Raises:
            ConnectionRefusedError: it has ended.
        """
        store = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if isinstance(store, TCPStore):
            try:
                socket.create_connection((store.host, store.port), _CONNECT_TIMEOUT_S).close()
            except ConnectionRefusedError:
                raise
            except OSError:  # it may be reached in another way; whoever asks will see
                pass

    def post(self, name: str, value: Any) -> None:
        self._store.set(name, json.dumps(value))

    def post_first(self, name: str, value: Any) -> Any:
        """Posts the entry unless there is one; the entry that is there then."""
        return json.loads(self._store.compare_set(name, "", json.dumps(value)))

    def has(self, name: str) -> bool:
        return self._store.check([name])

    def read(self, name: str) -> Any:
        """The value of an entry that is known to be there."""
        return json.loads(self._store.get(name))

    def read_if_there(self, name: str) -> Any:
        return self.read(name) if self.has(name) else None

    def count(self, name: str, more: int = 0) -> int:
        """Adds to a counter, which has a name that no entry has."""
        return self._store.add(name, more)
