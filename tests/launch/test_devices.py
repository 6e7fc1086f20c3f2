"""Which GPU and which processors a rank gets, and what is told of machines before a job on several."""

import os

import pytest

from gradsplit.launch.devices import Gpu, bound_to_one_device, gpu_of
from gradsplit.launch.errors import LaunchError
from gradsplit.launch.numa_binding import MODES, processors_near
from gradsplit.launch.preflight import preflight_table
from gradsplit.launch.rank_environment import torchrun_variables
from gradsplit.launch.rank_placement import place_ranks
from gradsplit.launch.rendezvous import Rendezvous
from tests.launch.test_launch_units import parse

GPUS = [Gpu(str(i), f"GPU-{i}", "570.1", f"00000000:{i + 1:02X}:00.0") for i in range(4)]


def test_the_gpu_of_a_rank():
    assert gpu_of(GPUS, None, 1) == GPUS[1]
    assert gpu_of(GPUS, "3, 1", 0) == GPUS[3]
    assert gpu_of(GPUS, "GPU-2", 0) == GPUS[2]
    assert gpu_of(GPUS, "0", 1) is gpu_of(GPUS, "", 0) is gpu_of([], None, 0) is None


class World:
    """One supervisor, which says what all say."""

    def __init__(self, *gathered):
        self.rank, self.gathered = 0, list(gathered)

    def gather_everywhere(self, value):
        others = self.gathered.pop(0)
        return [value, *others]


@pytest.mark.parametrize(
    ("own", "others", "uuids", "bound"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, ["1"], [], True),
        ({"ZE_AFFINITY_MASK": "0.1"}, ["0.0"], [], True),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ["0"], ["GPU-1"], True),  # Control groups: each calls its own 0.
        ({"CUDA_VISIBLE_DEVICES": "0"}, ["0"], ["GPU-0"], False),  # A user's: both share it.
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, [None], [], False),
        ({}, [None], [], False),
    ],
)
def test_a_device_that_the_scheduler_has_bound(monkeypatch, own, others, uuids, bound):
    monkeypatch.setattr("gradsplit.launch.devices.list_gpus", lambda: GPUS[:1])
    placements = place_ranks(["a", "a"])
    assert bound_to_one_device(World(others, uuids), placements, own) is bound
    variables = torchrun_variables(parse("t.py"), placements[1], Rendezvous("a", 1, "x"), 0, "1", bound)
    assert variables["LOCAL_RANK"] == ("0" if bound else "1")


def test_machines_are_compared_in_a_table():
    facts = {"Python": "3.11.7", "torch": "2.13.0", "NCCL": "2.27", "driver": "570.1", "gradsplit": "a1"}
    facts["GPUs"] = "\n".join(f"{g.index},{g.uuid},{g.driver},{g.pci_address}" for g in GPUS[:2])
    placements = place_ranks(["a", "a", "b", "b"])
    machines = {"a": {**facts, "script": "11"}, "b": {**facts, "script": "22"}}
    told = preflight_table(placements, machines, [None, None, "1,1", "1,1"], bound=False).splitlines()
    assert told[0].split() == [
        "launch:",
        "rank",
        "host",
        "GPU",
        "Python",
        "torch",
        "NCCL",
        "driver",
        "gradsplit",
        "script",
    ]
    assert told[2].split() == ["launch:", "1", "a", "GPU-1", "3.11.7", "2.13.0", "2.27", "570.1", "a1", "11"]
    assert told[5:] == [
        "launch: the machines differ in script: 11 on a; 22 on b",
        "launch: ranks 2, 3 on b share GPU-1",
    ]
    machines["b"] = {}  # It did not answer in time.
    told = preflight_table(placements, machines, [None] * 4, bound=False).splitlines()
    assert told[4].split() == ["launch:", "3", "b", "-", "?", "?", "?", "?", "?", "?"]
    assert "launch: ranks without a GPU: 2, 3" in told


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("node", [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6]]),
        ("socket", [[0, 1, 2, 3, 4, 5, 6]] * 3),
        ("exclusive", [[0, 2], [1, 3], [4, 5, 6]]),
        ("core-complex", [[0, 2], [1, 3], [4, 5]]),
    ],
)
def test_numa_binding(tmp_path, monkeypatch, mode, expected):
    """One socket of two nodes with four processors each, two a core; GPUs 0 and 1 at the first, 2 at the second."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    files = {f"bus/pci/devices/0000:0{i + 1}:00.0/numa_node": n for i, n in enumerate((0, -1, 1))}
    files |= {"devices/system/node/possible": "0-1"}
    for node in range(2):
        files[f"devices/system/node/node{node}/cpulist"] = f"{4 * node}-{4 * node + 3}"
    siblings = ["0,2", "1,3", "0,2", "1,3", "4-5", "4-5", "6-7", "6-7"]
    for cpu, shared in enumerate(siblings):
        place = f"devices/system/cpu/cpu{cpu}/"
        files |= {place + "topology/physical_package_id": 0, place + "topology/thread_siblings_list": shared}
        files |= {place + "cache/index0/level": 1, place + "cache/index0/shared_cpu_list": cpu}
        files |= {place + "cache/index3/level": 3, place + "cache/index3/shared_cpu_list": shared}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert [processors_near(mode, GPUS[:3], None, rank, tmp_path) for rank in range(3)] == expected
    with pytest.raises(LaunchError, match="has no GPU"):
        processors_near(mode, GPUS, "1", 1, tmp_path)
    with pytest.raises(LaunchError, match="does not tell where GPU-3 is"):
        processors_near(mode, GPUS, None, 3, tmp_path)


def test_numa_modes_are_torchs():
    binding = pytest.importorskip("torch.numa.binding")
    assert {mode.value for mode in binding.AffinityMode} <= set(MODES)
    with pytest.raises(LaunchError, match="allowed: node, socket"):
        parse("--numa-binding", "near", "t.py")
