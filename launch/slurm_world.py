"""The tasks that ``srun`` started without MPI, as the supervisors use them: over connections of all to the first.

Rank 0 listens until all have come, on the first node at a port that follows from job and step (`slurm_task`). Each
says which task of which step it is; rank 0 and it prove to each other that they belong to the same user (`same_user`).
Messages are JSON and never pickles, as over MPI. The end of a connection is the end of its task; the kernel ends it
when the other machine has been silent for a minute.
"""

import contextlib
import errno
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from gradsplit.launch.errors import LAUNCHER_GONE, LaunchError, RankLostError, silent_for
from gradsplit.launch.failure import ranges
from gradsplit.launch.same_user import can_be_proved, is_proof_of, proof_of
from gradsplit.launch.slurm_task import SlurmTask, slurm_task

JOIN_S = 120.0
"""How long tasks wait for each other: a cold file system may take a minute to start Python."""
_STRANGER_S = 5.0
_SILENCE_S = 60
_HELLO_BYTES = 65536


class SlurmWorld:
    """All tasks of the step, seen from one. Create it with `join_slurm_world`."""

    signal_grace_s = 30.0
    """As torchrun's, and Slurm's own from SIGTERM to SIGKILL."""

    def __init__(self, rank: int, size: int, connections: dict[int, Connection]) -> None:
        self.rank = rank
        self.size = size
        self._connections = connections
        self._values: dict[int, Any] = {}
        self._gathered: list[Any] | None = None
        self._announcements = 0
        self._done: set[int] = set()
        self._all_done = False
        self._lost: RankLostError | None = None

    def gather_everywhere(self, value: Any) -> list[Any]:
        """Return every task's ``value`` as JSON knows it, in order of rank. Blocks until all call it."""
        if self.rank:
            self._send("value", value)
        else:
            self._values[0] = json.loads(json.dumps(value))
        while self._gathered is None:
            self._listen(1.0)
            if len(self._values) == self.size:
                self._gathered = [self._values.pop(rank) for rank in range(self.size)]
                self._send("values", self._gathered)
            elif self._gathered is None:
                self.beat()
        gathered, self._gathered = self._gathered, None
        return gathered

    def announce(self) -> None:
        """Tell every other task, without waiting. At most once a task until all `settle`."""
        self._send("announcement")

    def take_announcement(self) -> bool:
        """Return whether another task's announcement has arrived, each once."""
        self._listen(0)
        self._announcements -= (taken := self._announcements > 0)
        return taken

    def beat(self) -> None:
        """Called again and again while anything is waited for. Raises `RankLostError`."""
        self._listen(0)
        if self._lost is not None:
            raise self._lost

    def everyone_is_done(self) -> bool:
        """Say that this task is done, and return whether every task has said so. Called again until true."""
        if self.rank not in self._done:
            self._done.add(self.rank)
            if self.rank:
                self._send("done")
        self._listen(0)
        if len(self._done) == self.size and not self._all_done:
            self._all_done = True
            self._send("all done")
        return self._all_done

    def settle(self, announcements_pending: int) -> None:
        """Be ready for the next announcement, once `everyone_is_done`."""
        for _ in range(announcements_pending):
            while not self.take_announcement():
                self.beat()
                time.sleep(0.001)
        self._done, self._all_done = set(), False

    def leave(self) -> None:
        """Leave in good order, as all tasks do."""
        self._send("leaves")
        deadline = time.monotonic() + _STRANGER_S
        while self.rank == 0 and self._connections and time.monotonic() < deadline:
            self._listen(0.1)
        self._close()

    def leave_after_signal(self, exit_code: int) -> None:
        """Tell the others that a signal has ended this task, on purpose, and leave."""
        self._send("ended", [self.rank, exit_code])
        self._close()

    def abort(self, exit_code: int) -> None:
        """End all tasks: their connections end. For a fault of the launcher itself."""
        self._close()

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def _send(self, kind: str, value: Any = None, but: int | None = None) -> None:
        for rank, connection in list(self._connections.items()):
            if rank != but:
                with contextlib.suppress(OSError):  # It has gone, and what it said last is still to be read.
                    _send_value(connection, [kind, value])

    def _listen(self, timeout_s: float) -> None:
        """Take what has arrived."""
        ranks = {connection: rank for rank, connection in self._connections.items()}
        for connection in wait(list(ranks), timeout_s):
            assert isinstance(connection, Connection)
            rank = ranks[connection]
            try:
                kind, value = _receive_value(connection)
            except (OSError, EOFError) as error:
                silent = isinstance(error, OSError) and error.errno != errno.ECONNRESET
                self._connections.pop(rank).close()
                self._lose(rank, silent=silent)
                continue
            match kind:
                case "value":
                    self._values[rank] = value
                case "values":
                    self._gathered = value
                case "announcement":
                    self._announcements += 1
                    self._send(kind, but=rank)
                case "done":
                    self._done.add(rank)
                case "all done":
                    self._all_done = True
                case "ended":
                    self._lost = self._lost or RankLostError(value[0], "", exit_code=value[1])
                    self._send(kind, value, but=rank)
                case "lost":
                    self._lost = self._lost or RankLostError(*value)
                case "leaves":
                    self._connections.pop(rank).close()

    def _lose(self, rank: int, *, silent: bool) -> None:
        if self._lost is None:
            message = silent_for(_SILENCE_S) if silent else LAUNCHER_GONE
            # Rank 0 prints it, and where that has gone, the next one.
            self._lost = RankLostError(rank, message, found_here=self.rank <= 1)
            if self.rank == 0:
                self._send("lost", [rank, message])


def join_slurm_world(environment: Mapping[str, str] = os.environ) -> SlurmWorld:
    """Meet the other tasks of the step that ``environment`` describes, and return the world of all of them.

    Raises `LaunchError`, on all that are there, when tasks do not come or do not agree on how many they are.
    """
    task = slurm_task(environment)
    connections = _welcome_all(task) if task.rank == 0 else {0: _find_first(task)}
    return SlurmWorld(task.rank, task.size, connections)


def _welcome_all(task: SlurmTask) -> dict[int, Connection]:
    connections: dict[int, Connection] = {}
    problem = None
    with _listener(task) as listener:
        if not can_be_proved():
            where = f"{task.first_host}:{listener.getsockname()[1]}"
            print(
                f"launch: no munge here: who reached {where} first was believed", file=sys.stderr, flush=True
            )
        deadline = time.monotonic() + JOIN_S
        while len(connections) < task.size - 1 and problem is None:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                arrived, _ = listener.accept()
            except TimeoutError:
                missing = ranges(sorted(set(range(1, task.size)) - connections.keys()))
                problem = (
                    f"task {missing} of {task.size} did not come to {task.first_host} within {JOIN_S:.0f} s"
                )
                break
            arrived.settimeout(None)
            connection = _connection(arrived)
            try:
                rank, size = _check(connection, task)
            except (OSError, EOFError, ValueError, TypeError, KeyError):
                connection.close()  # A stranger.
                continue
            if size != task.size:
                problem = (
                    f"task {rank} was told of {size} tasks, task 0 of {task.size}: these are different steps"
                )
            elif not 0 < rank < size or (rank in connections and not wait([connections[rank]], 0)):
                problem = f"srun started task {rank} of {size} twice"
            connections[rank if problem is None else -1] = connection
    for connection in connections.values():
        with contextlib.suppress(OSError):
            _send_value(connection, {"problem": problem})
            _set_timeouts(connection, _SILENCE_S)
    if problem is not None:
        raise LaunchError(problem)
    return connections


def _listener(task: SlurmTask) -> socket.socket:
    """Listen at the address by which the others know this node, or, with one node, within it alone."""
    address = "127.0.0.1"
    if task.node_count > 1:
        with contextlib.suppress(OSError):
            address = socket.gethostbyname(task.first_host)
        if address.startswith("127."):  # Its own name for itself, which the others do not share.
            address = ""
    for port in task.ports():
        for interface in dict.fromkeys((address, "" if task.node_count > 1 else address)):
            with contextlib.suppress(OSError):
                return socket.create_server((interface, port), backlog=task.size)
    ports = ", ".join(map(str, task.ports()))
    raise LaunchError(
        f"task 0 can listen at none of the ports of step {task.step} on {task.first_host}: {ports}"
    )


def _check(connection: Connection, task: SlurmTask) -> tuple[int, int]:
    """Return rank and size of who has come, if it is of this step and user; else raise or tell it so and raise."""
    challenge = secrets.token_hex(16)
    _send_value(connection, {"step": task.step, "challenge": challenge})
    said = _receive_value(connection, _HELLO_BYTES)
    if said["step"] != task.step or not is_proof_of(f"{task.step} {said['rank']} {challenge}", said["proof"]):
        raise ValueError(said)
    _send_value(connection, {"proof": proof_of(f"{task.step} {said['challenge']}")})
    return int(said["rank"]), int(said["size"])


def _find_first(task: SlurmTask) -> Connection:
    host = task.first_host if task.node_count > 1 else "127.0.0.1"
    deadline = time.monotonic() + JOIN_S
    while time.monotonic() < deadline:
        for port in task.ports():
            try:
                connection = _connection(socket.create_connection((host, port), 2.0))
            except OSError:
                continue
            try:
                _introduce(connection, task)
                _set_timeouts(connection, int(JOIN_S) + _SILENCE_S)
                problem = _receive_value(connection, _HELLO_BYTES)["problem"]
            except (OSError, EOFError, ValueError, TypeError, KeyError):
                connection.close()  # Somebody else's port.
                continue
            if problem is not None:
                raise LaunchError(problem)
            _set_timeouts(connection, _SILENCE_S)
            return connection
        time.sleep(0.1)
    ports = ", ".join(map(str, task.ports()))
    raise LaunchError(
        f"task {task.rank} did not find task 0 of {task.size} within {JOIN_S:.0f} s, at {host}, ports {ports}",
        known_here_alone=True,
    )


def _introduce(connection: Connection, task: SlurmTask) -> None:
    hello = _receive_value(connection, _HELLO_BYTES)
    if hello["step"] != task.step:
        raise ValueError(hello)
    challenge = secrets.token_hex(16)
    proof = proof_of(f"{task.step} {task.rank} {hello['challenge']}")
    said = {"step": task.step, "rank": task.rank, "size": task.size, "challenge": challenge, "proof": proof}
    _send_value(connection, said)
    if not is_proof_of(f"{task.step} {challenge}", _receive_value(connection, _HELLO_BYTES)["proof"]):
        raise ValueError(challenge)


def _connection(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 5),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_S),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    connection = Connection(connected.detach())
    _set_timeouts(connection, _STRANGER_S)
    return connection


def _set_timeouts(connection: Connection, seconds: float) -> None:
    """Have what is sent or received fail when it stops in the middle for so long."""
    borrowed = socket.socket(fileno=connection.fileno())
    for option in socket.SO_RCVTIMEO, socket.SO_SNDTIMEO:
        borrowed.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))
    borrowed.detach()


def _send_value(connection: Connection, value: Any) -> None:
    connection.send_bytes(json.dumps(value).encode())


def _receive_value(connection: Connection, most: int | None = None) -> Any:
    return json.loads(connection.recv_bytes(most))
