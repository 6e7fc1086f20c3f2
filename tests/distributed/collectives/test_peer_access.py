"""Which ranks may copy between their GPUs."""

from __future__ import annotations

import pytest

from gradsplit.distributed.collectives.peer_access import _forbidding_setting, _RankPlace, _reason_of

HERE = _RankPlace("host", 0, frozenset({1, 2}), "nccl")
THERE = _RankPlace("host", 1, frozenset({0, 2}), "nccl")


@pytest.mark.parametrize(
    ("name", "value", "is_forbidden"),
    [("NCCL_P2P_DISABLE", "1", True), ("NCCL_P2P_DISABLE", "0", False), ("NCCL_P2P_LEVEL", "LOC", True)],
)
def test_settings_of_nccl_hold(
    name: str, value: str, is_forbidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    assert _forbidding_setting() == (f"{name}={value}" if is_forbidden else "")


def test_one_rank_has_nothing_to_copy() -> None:
    assert _reason_of([HERE]) == "there is one rank"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (THERE, ""),
        (_RankPlace("host", 1, frozenset({0}), "gloo"), "not NCCL's"),
        (_RankPlace("host", 1, frozenset({0}), "nccl", "NCCL_P2P_DISABLE=1"), "NCCL_P2P_DISABLE=1 is set"),
        (_RankPlace("elsewhere", 1, frozenset({0}), "nccl"), "several hosts"),
        (_RankPlace("host", 0, frozenset({1}), "nccl"), "sees its GPU alone"),
        (_RankPlace("host", 3, frozenset({0}), "nccl"), "GPU 0 does not reach the memory of GPU 3"),
        (_RankPlace("host", 1, frozenset(), "nccl"), "GPU 1 does not reach the memory of GPU 0"),
    ],
)
def test_which_ranks_can(other: _RankPlace, reason: str) -> None:
    found = _reason_of([HERE, other])
    assert reason in found and bool(reason) == bool(found)
