"""Where the ranks meet: the address, port and job name that rank 0 chooses and sends to all ranks.

The port is one that was free on rank 0's node a moment ago: bound to port 0, read, and closed again. Rank 0's
own process binds it when it calls ``init_process_group``, so another program can in principle come between;
the operating system hands such ports out in turn, which makes that rare.
"""

import socket
import uuid
from dataclasses import dataclass

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
        master_port=spec.master_port or find_free_port("127.0.0.1" if first.node_count == 1 else ""),
        run_id=run_id or spec.run_id or unique,
        log_name=unique if spec.run_id is None else f"{spec.run_id}_{unique[:8]}",
    )


def find_free_port(interface: str) -> int:
    """Return a TCP port that nobody uses now at an address of this machine; the empty one means all of them."""
    with socket.socket() as probe:
        probe.bind((interface, 0))
        return probe.getsockname()[1]
