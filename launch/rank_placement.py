"""Where each rank sits, and the variables by which torchrun would tell it so.

MPI gives a rank and a world size; nodes are distinguished by host name, since MPI's own variables do not number
them (Open MPI's ``OMPI_COMM_WORLD_NODE_RANK``, for one, counts the ranks of a node). A node's index is its
place in order of first appearance by rank; a local rank is the position among the ranks of the host. Ranks
need not be contiguous on a node (``mpiexec --map-by node``).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gradsplit.launch.errors import LaunchError
from gradsplit.launch.launch_spec import LaunchSpec


@dataclass(frozen=True)
class RankPlacement:
    """One rank's place in the job; all numbers count from 0, sizes are of the whole group that they name."""

    hostname: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_index: int
    node_count: int

    def torchrun_variables(self) -> dict[str, str]:
        """Return torchrun's variables of the rank's place; all ranks have torchrun's default role."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_index),
            "GROUP_WORLD_SIZE": str(self.node_count),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
        }


def place_ranks(hostnames: Sequence[str]) -> list[RankPlacement]:
    """Return each rank's placement, given each rank's host name (both in order of rank)."""
    ranks_on = Counter(hostnames)  # A Counter keeps the order of first appearance.
    node_indices = {hostname: index for index, hostname in enumerate(ranks_on)}
    seen: Counter[str] = Counter()
    placements = []
    for rank, hostname in enumerate(hostnames):
        placements.append(
            RankPlacement(
                hostname=hostname,
                rank=rank,
                world_size=len(hostnames),
                local_rank=seen[hostname],
                local_world_size=ranks_on[hostname],
                node_index=node_indices[hostname],
                node_count=len(ranks_on),
            )
        )
        seen[hostname] += 1
    return placements


def check_placement(spec: LaunchSpec, placements: Sequence[RankPlacement]) -> None:
    """Raise `LaunchError` when the ranks that MPI started are not those that ``spec`` asks for."""
    node_count = placements[0].node_count
    if spec.nodes is not None and not spec.nodes[0] <= node_count <= spec.nodes[1]:
        wanted = ":".join(map(str, dict.fromkeys(spec.nodes)))
        raise LaunchError(f"--nnodes {wanted}, but the ranks were placed on {node_count} node(s)")
    for placement in placements:
        if spec.processes_per_node not in (None, placement.local_world_size):
            raise LaunchError(
                f"--nproc-per-node {spec.processes_per_node}, but mpiexec or srun started "
                f"{placement.local_world_size} rank(s) on {placement.hostname}; these must match"
            )
