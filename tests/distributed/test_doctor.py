"""What the doctor says is wrong."""

import pytest

from gradsplit.bucketing.link_model import LinkModel
from gradsplit.distributed.doctor import complaints

WELL = {"address": "10.0.0.1", "ranks": 2, "torch": "2.13", "gpus": ["H100"] * 2, "apart": [], "nccl": "2.27"}
WELL |= {"fabric": {"mlx5_0/ports/1": "ACTIVE"}, "shared_bytes": 1 << 34}
FAST = LinkModel(1e-5, 1e-9)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({}, []),
        ({"address": None}, ["b: its host name has no address"]),
        ({"address": "127.0.1.1"}, ["b: its host name means 127.0.1.1"]),
        ({"ranks": 4}, ["b: 4 ranks for 2 GPUs"]),
        ({"nccl": None}, ["b: this torch has no NCCL", "the machines differ in nccl: 2.27 on a, None on b"]),
        ({"apart": [(0, 1)]}, ["b: GPUs (0, 1) cannot read each other's memory"]),
        ({"fabric": {"mlx5_0/ports/1": "DOWN"}}, ["b: not active: mlx5_0/ports/1"]),
        ({"shared_bytes": 1 << 26}, ["b: /dev/shm has 64 MiB"]),
        ({"torch": "2.12"}, ["the machines differ in torch"]),
    ],
)
def test_a_machine_that_is_not_well(other, said):
    machines = [{"name": "a", **WELL}, {"name": "b", **WELL, **other}]
    told = complaints(machines, [], {"b": 0.01}, {"a": FAST, "b": FAST})
    assert len(told) == len(said) and all(map(str.startswith, told, said))


def test_what_lies_between_machines():
    machines = [{"name": name, **WELL, "fabric": {}} for name in "abc"]
    links = {"a": FAST, "b": FAST, "c": LinkModel(1e-5, 1e-8)}
    told = complaints(machines, [("a", "b")], {"b": -2.0}, links)
    assert [line.split(";")[0].split(":")[0] for line in told] == [
        "no InfiniBand or RoCE port is seen",
        "a cannot connect to a fresh port of b",
        "the clock of b is 2.0 s late",
        "c",
    ]
