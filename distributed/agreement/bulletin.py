"""What the ranks of a process group write to one another on the CPU, without collectives: entries in its store.

Whoever reads looks whether an entry is there before it asks for it, so nobody is blocked in the store, and a rank that
does not come can be named after a time limit. A store may also cease to answer, where the process that holds it has
stopped, and torch's client waits for it without end: a thread makes the requests, and whoever asks gives up in time.

The store is open to everybody who can connect to it. Entries hence carry a code that only the ranks can make
(RFC 2104), over name and value; what does not verify is as if it were not there.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import logging
import os
import queue
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradsplit.compile_core.errors import CompileError

logger = logging.getLogger(__name__)

# For how long a store may say nothing: a machine may be busy, and a process does not notice that it was stopped.
SILENCE_S = 18.0
_CONNECT_TIMEOUT_S = 5.0
_Request = tuple[Future[Any], Callable[[], Any]]
# A process that was stopped itself has waited for one such step.
_STEP_S = 0.5


class StoreLost(CompileError):
    """Nothing is to be heard of the other ranks any longer.

    Args:
        message: whose process is to blame, and what became of it.
        has_ended: the store has ended, and not only fallen silent.
    """

    def __init__(self, message: str, has_ended: bool) -> None:
        super().__init__(message)
        self.has_ended = has_ended


class Bulletin:
    """JSON values by name, shared by ranks; threads may use it at the same time.

    Args:
        store: a `torch.distributed.Store`, whose type stub lacks ``clone``. It gets a connection of its own: another
            one may be held by who waits for something.

    Attributes:
        session: its name, which is for everybody to see.
        has_session: entries are those of the ranks that there are now; before, none can be posted. See ``enter``.
    """

    def __init__(self, store: Any) -> None:
        self._secret, self.session = b"", ""
        self._has_warned = False
        self.has_session = False
        self._probe = _connection_to(store)
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._requests,), name="gradsplit-store", daemon=True).start()
        weakref.finalize(self, self._requests.put, None)
        if self._probe is not None:
            weakref.finalize(self, self._probe.close)
        self._store = self._open = self._ask(store.clone)  # torch tries for minutes where the store has ended
        self._open.set_timeout(timedelta(seconds=SILENCE_S))

    def enter(self, secret: bytes) -> None:
        """From now on entries are those of the ranks that know this, which is for nobody else to read. A store may
        outlive process groups, and have entries of those before."""
        self.session = hmac.digest(secret, b"session", hashlib.sha256).hex()[:16]
        self._secret = secret
        self._store = PrefixStore(f"gradsplit/{self.session}", self._store)
        self.has_session = True

    def post_openly(self, name: str, value: Any) -> None:
        """For those who wait for a session; anybody could do so. ``None`` takes an entry back."""
        self._ask(self._open.set, f"gradsplit/{name}", json.dumps(value).encode())

    def read_openly(self, name: str) -> Any:
        """What was posted openly, if it has the form of what ranks say of themselves; else ``None``."""
        with suppress(ValueError, TypeError, KeyError):
            return _checked_report(json.loads(self.read_of_group(f"gradsplit/{name}")))
        return None

    def read_of_group(self, name: str) -> bytes:
        """What the store has of the process group's own, if anything."""
        return self._ask(self._open.get, name) if self._ask(self._open.check, [name]) else b""

    def post(self, name: str, value: Any) -> None:
        self._ask(self._store.set, name, self._signed(name, value))

    def post_soon(self, name: str, value: Any) -> None:
        """Posts as soon as the store answers, and waits for nothing."""
        self._queued(self._store.set, name, self._signed(name, value))

    def post_first(self, name: str, value: Any) -> Any:
        """Posts the entry unless there is one; the entry that is there then."""
        mine, there = self._signed(name, value), b""
        while True:
            there = self._ask(self._store.compare_set, name, there, mine)
            found = self._verified(name, there)
            if found is not None:
                return found

    def has(self, name: str) -> bool:
        return self.has_all([name])

    def has_all(self, names: Sequence[str]) -> bool:
        """Whether there are entries of these names, whoever has posted them."""
        return self._ask(self._store.check, list(names))

    def read(self, name: str) -> Any:
        """The value of an entry that is known to be there; ``None`` where no rank has posted it."""
        return self._verified(name, self._ask(self._store.get, name))

    def read_if_there(self, name: str) -> Any:
        return self.read(name) if self.has(name) else None

    def report_of(self, rank: int) -> Any:
        """A rank's last ``Heartbeat``: the open one, if there has been none since the ranks met."""
        name = f"alive/{rank}"
        return self.read_if_there(name) or self.read_openly(name)

    def _signed(self, name: str, value: Any) -> bytes:
        text = json.dumps(value).encode()
        return self._code(name, text) + text

    def _verified(self, name: str, entry: bytes) -> Any:
        code, text = entry[:_CODE_BYTES], entry[_CODE_BYTES:]
        if hmac.compare_digest(code, self._code(name, text)):
            return json.loads(text)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the store of the job has an entry %r that no rank has made; it is ignored, and so will be others. "
                "Somebody else can reach the store: see who may connect to MASTER_ADDR and MASTER_PORT",
                name,
            )
        return None

    def _code(self, name: str, text: bytes) -> bytes:
        return hmac.digest(self._secret, name.encode() + b"\0" + text, hashlib.sha256).hex().encode()

    def _queued(self, ask: Callable[..., Any], *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        self._requests.put((answer, functools.partial(ask, *arguments)))
        return answer

    def _ask(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        self._check_probe()
        answer, waited_s = self._queued(ask, *arguments), 0.0
        while not wait([answer], _STEP_S).done:
            self._check_probe()
            waited_s += _STEP_S
            if waited_s > SILENCE_S:
                raise StoreLost(
                    f"{_holder()} has not answered for {SILENCE_S:g} s: it has been stopped, or its machine cannot be "
                    f"reached",
                    False,
                )
        try:
            return answer.result()
        except RuntimeError as error:
            raise store_has_ended() from error

    def _check_probe(self) -> None:
        if self._probe is not None and _has_ended(self._probe):
            raise store_has_ended()


def _checked_report(report: Any) -> dict[str, Any]:
    space, pid, start = map(str, report["process"])
    texts = {name: str(report.get(name, "")) for name in ("host", "doing", "place", "left", "failed")}
    return {"beat": int(report["beat"]), "process": [space, str(int(pid)), start], **texts}


_CODE_BYTES = 2 * hashlib.sha256().digest_size


def _serve(requests: queue.SimpleQueue[_Request | None]) -> None:
    while (request := requests.get()) is not None:
        answer, ask = request
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)


def store_has_ended() -> StoreLost:
    return StoreLost(f"{_holder()} has ended", True)


def is_held_by_launcher() -> bool:
    """Whether the job's store lives in the launcher's process, and not in rank 0's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _holder() -> str:
    if is_held_by_launcher():
        return "the launcher on rank 0's machine, which holds the job's store,"
    return "rank 0, whose process holds the job's store,"


def _connection_to(store: Store) -> socket.socket | None:
    """One that nothing is sent on: it ends with the process that holds the store. torch's own client prints a stack
    trace where that is gone."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        try:
            connection = socket.create_connection((store.host, store.port), _CONNECT_TIMEOUT_S)
        except ConnectionRefusedError as error:
            raise store_has_ended() from error
        except OSError:  # it may be reached in another way; whoever asks will see
            return None
        connection.setblocking(False)
        return connection
    return None


def _has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
