"""Where the ranks meet: the address, port and job name that rank 0 chooses and sends to all ranks.

The port is one that was free on rank 0's node a moment ago. Rank 0's own process binds it when it calls
``init_process_group``, some seconds later, and another program can come between. So the port is not one of those that
the operating system hands out for connections and to whoever binds port 0, as NCCL does many times for each rank.
"""

import random
import socket
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gradsplit.launch.launch_spec import LaunchSpec
from gradsplit.launch.rank_placement import RankPlacement


@dataclass(frozen=True)
class Rendezvous:
    """What ``init_process_group("env://")`` needs besides ranks."""

    master_address: str
    master_port: int
    run_id: str
    log_name: str = ""
    """The folder of this job's logs in that of all jobs."""

    def torchrun_variables(self) -> dict[str, str]:
        """Return torchrun's variables of the meeting place.

        ``TORCHELASTIC_USE_AGENT_STORE`` is not among them: it says that an agent hosts the store, and there
        is none; rank 0 hosts it.
        """
        return {
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RUN_ID": self.run_id,
        }


def choose_rendezvous(spec: LaunchSpec, first: RankPlacement, run_id: str | None = None) -> Rendezvous:
    """Return the meeting place; called by rank 0 alone, whose placement is ``first``. A restart keeps its ``run_id``.

    What the user set in ``spec`` wins. Otherwise the address is rank 0's host name, by which MPI's nodes
    reach each other, or the loopback address on a single node, where a host name need not resolve.
    """
    default_address = "127.0.0.1" if first.node_count == 1 else first.hostname
    unique = uuid.uuid4().hex
    return Rendezvous(
        master_address=spec.master_address or default_address,
        master_port=spec.master_port or find_free_port(),
        run_id=run_id or spec.run_id or unique,
        log_name=unique if spec.run_id is None else f"{spec.run_id}_{unique[:8]}",
    )


def find_free_port() -> int:
    """Return a TCP port that nobody uses now at any address of this machine: rank 0's store listens on all of them."""
    ports = range(_FIRST_PORT, _first_handed_out())
    for port in random.SystemRandom().sample(ports, min(_TRIES, len(ports))):
        with suppress(OSError):
            return _bound(port)
    return _bound(0)


def _bound(port: int) -> int:
    with socket.socket() as probe:
        probe.bind(("", port))
        return probe.getsockname()[1]


_FIRST_PORT = 20_000
_TRIES = 100


def _first_handed_out() -> int:
    """The first port that the operating system gives to those that ask for any."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
