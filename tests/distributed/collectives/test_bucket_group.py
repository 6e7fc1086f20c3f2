"""When buckets get a process group of their own; with fakes, since NCCL takes GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed.collectives import bucket_group as under_test
from distributed.collectives.bucket_group import bucket_group

DEVICE = torch.device("cuda", 0)


class Options:
    """Of a backend; its configuration is copied when it is set, as in torch."""

    def __init__(self, is_high_priority_stream: bool = False, cluster: int = -1) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = "10 minutes"
        self._config = {"cga_cluster_size": cluster, "min_ctas": 4}

    @property
    def config(self) -> Any:
        return _Config(self._config)

    @config.setter
    def config(self, config: Any) -> None:
        self._config = {**config.values}


class _Config:
    def __init__(self, values: dict[str, int]) -> None:
        object.__setattr__(self, "values", values)

    def __getattr__(self, name: str) -> int:
        return self.values[name]

    def __setattr__(self, name: str, value: int) -> None:
        self.values[name] = value


class Group(dist.ProcessGroup):
    """One of NCCL's."""

    def __init__(self, size: int, options: Options | None = None) -> None:
        super().__init__(0, size)
        self.options = options or Options()

    def _get_backend(self, device: torch.device) -> Any:
        return self


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """With which arguments groups have been made."""
    calls: list[dict[str, Any]] = []

    def new_group(**arguments: Any) -> Group:
        calls.append(arguments)
        return Group(2)

    monkeypatch.delenv("NCCL_CGA_CLUSTER_SIZE", raising=False)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(under_test, "_get_default_group", lambda: Group(2))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return calls


def alone(reason: str) -> bool:
    return not reason


def test_all_ranks_make_one_group_for_all_modules(made: list[dict[str, Any]]) -> None:
    group = Group(2, Options(is_high_priority_stream=True))
    buckets = bucket_group(group, DEVICE, alone)
    assert buckets is not group and bucket_group(group, DEVICE, alone) is buckets
    (arguments,) = made
    # Of all ranks, and named by the number of groups that all have made.
    assert arguments.keys() == {"timeout", "backend", "pg_options", "device_id"}
    assert arguments["pg_options"].is_high_priority_stream
    assert arguments["pg_options"].config.values == {"cga_cluster_size": 8, "min_ctas": 4}
    assert group.options.config.cga_cluster_size == -1


def test_a_part_of_the_ranks_has_no_group_for_buckets(
    made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would have to take part in making it."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    group = Group(2)
    assert bucket_group(group, DEVICE, alone) is group and not made


@pytest.mark.parametrize("reason", ["GPU", "size", "environment", "other rank", "bound"])
def test_where_one_rank_cannot_none_does(
    reason: str, made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, told = Group(2, Options(cluster=4 if reason == "size" else -1)), []
    if reason == "GPU":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    if reason == "environment":
        monkeypatch.setenv("NCCL_CGA_CLUSTER_SIZE", "2")
    if reason == "bound":
        default = Group(2)
        default.bound_device_id = torch.device("cuda", 1)
        monkeypatch.setattr(under_test, "_get_default_group", lambda: default)

    def all_can(mine: str) -> bool:
        told.append(mine)
        return False

    assert bucket_group(group, DEVICE, all_can) is group and not made
    assert bool(told[0]) == (reason != "other rank")
