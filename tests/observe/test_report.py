"""``gradsplit.report``: what a run leaves, merged over ranks into a page whose links all lead somewhere."""

from __future__ import annotations

import json
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gradsplit
from gradsplit import report
from gradsplit.compile_core import run_record
from tests.start_ranks import start_ranks

TRAINING = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsplit
from examples.gpt import GPT, GPTConfig

dist.init_process_group("gloo")
torch.manual_seed(0)
model = gradsplit.compile(DistributedDataParallel(GPT(GPTConfig(vocabulary=64, context=16, layers=1, width=32))))
for step in range(16):
    tokens = torch.randint(64, (2, 16))
    model(tokens, tokens).backward()
if dist.get_rank() == 1:
    gradsplit.compile(torch.sin)(torch.ones(3))
dist.destroy_process_group()
"""


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            kept = {"id": self.anchors, "href": self.links, "src": self.sources}.get(name)
            if kept is not None:
                kept.append(value or "")


def _page_of(folder: Path) -> tuple[dict, _Page]:
    started = time.perf_counter()
    written = report.write_report(folder)
    assert time.perf_counter() - started < 10
    page = _Page(written.read_text())
    assert len(set(page.anchors)) == len(page.anchors)
    assert {link.removeprefix("#") for link in page.links} <= set(page.anchors)
    assert all(link.startswith("#") for link in page.links) and not page.sources  # it needs no network
    return json.loads((folder / "report.json").read_text()), page


@pytest.mark.multi_process
@pytest.mark.timeout(240)
def test_two_ranks_of_a_gpt_are_one_page(tmp_path: Path):
    program, folder = tmp_path / "train.py", tmp_path / "run"
    program.write_text(TRAINING)
    run = start_ranks([str(program)], 200, GRADSPLIT_DEBUG=str(folder))
    assert run.returncode == 0, run.stderr
    assert "Profiler clears events" not in run.stderr  # torch 2.11 warned of that on each rank
    found, page = _page_of(folder)
    assert list(found["ranks"]) == ["rank 0", "rank 1"]
    assert all(rank["step_ms"] > 0 and rank["peak_bytes"] > 0 for rank in found["ranks"].values())
    graph, only_one = found["graphs"]
    assert graph["ranks"] == ["rank 0", "rank 1"] and only_one["ranks"] == ["rank 1"]
    assert any("only on rank 1" in difference for difference in found["differences"])
    for event in found["ddp"].values():
        assert event["measured"]["exposed_ms"] <= event["measured"]["all_reduce_ms"]
        stored = [name for region in graph["regions"] for name in region["stores"]]
        reduced = [name for bucket in event["buckets"] for name in bucket["parameters"]]
        assert sorted(stored) == sorted(reduced) and all(bucket["reason"] for bucket in event["buckets"])
    timed = [loop for loop in graph["loops"] if loop["us"]]
    assert {"kernel", "call"} == {loop["kind"] for loop in timed}
    assert f"{graph['id']}-joint-{graph['joint'][-1]['name']}" in page.anchors
    # From a line of the model to the loops of its forward and of its backward, by links alone.
    captured = {
        node["name"] for node in graph["captured"] if node["place"] and "gelu" in node["place"]["text"]
    }
    joint = {node["name"] for node in graph["joint"] if node["captured"] in captured}
    programs = {region["name"]: region["program"] for region in graph["regions"]}
    assert {programs[loop["region"]] for loop in graph["loops"] if joint & {*loop["nodes"]}} == {
        "forward",
        "backward",
    }


def test_breaks_and_recompilations_name_the_line_the_values_and_what_to_do(tmp_path: Path, capsys):
    def program(x: torch.Tensor, flag: bool) -> torch.Tensor:
        y = x * 2
        print("a break")
        return y.sin() if flag else y

    compiled = gradsplit.compile(program)
    run_record.record_into(tmp_path)
    try:
        compiled(torch.ones(3), True)
        compiled(torch.ones(4), True)
        compiled(torch.ones(4), False)
    finally:
        run_record.record_into(None)
    found, _ = _page_of(tmp_path)
    (graph_break,) = found["breaks"]
    assert "print" in graph_break["stack"][-1]["text"] and graph_break["hint"]
    shown = {(each["reason"], each["found"]) for each in found["recompilations"]}
    (of_flag,) = [each for each in found["recompilations"] if each["found"] == "flag is False"]
    assert of_flag["reason"] == "not: flag is True"
    assert of_flag["place"]["text"] == "return y.sin() if flag else y"
    guards = [guard for each in found["guards"] for guard in each["guards"]]
    assert "y = x * 2" in {guard["place"]["text"] for guard in guards if guard["of"] == "x"}
    assert any("float32[3]" in reason and now == "x is float32[4] cpu" for reason, now in shown)
    assert report.main([str(tmp_path)]) == 0
    assert "1 graph breaks" in capsys.readouterr().out


_MODE = "sin"


def test_python_values_of_all_kinds_are_named_with_old_and_new_value_and_line(tmp_path: Path, monkeypatch):
    settings, table, shift = SimpleNamespace(scale="one"), {"names": ["a"]}, "up"

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() if _MODE == "sin" else x.cos()
        y = y * {"one": 1, "two": 2}[settings.scale]
        y = y * len(table["names"])
        return y + 1 if shift == "up" else y - 1

    compiled = gradsplit.compile(program, backend="eager")
    run_record.record_into(tmp_path)
    try:
        compiled(torch.ones(3))
        monkeypatch.setitem(program.__globals__, "_MODE", "cos")
        compiled(torch.ones(3))
        settings.scale = "two"
        compiled(torch.ones(3))
        table["names"].append("b")
        compiled(torch.ones(3))
        shift = "down"
        compiled(torch.ones(3))
    finally:
        run_record.record_into(None)
    found, _ = _page_of(tmp_path)
    shown = [(each["reason"], each["found"], each["place"]["text"]) for each in found["recompilations"]]
    assert shown == [
        (
            "not: globals['_MODE'] == 'sin'",
            "globals['_MODE'] is 'cos'",
            'y = x.sin() if _MODE == "sin" else x.cos()',
        ),
        (
            "not: settings.scale == 'one'",
            "settings.scale is 'two'",
            'y = y * {"one": 1, "two": 2}[settings.scale]',
        ),
        ("not: len(table['names']) == 1", "table['names'] is ['a', 'b']", 'y = y * len(table["names"])'),
        ("not: shift == 'up'", "shift is 'down'", 'return y + 1 if shift == "up" else y - 1'),
    ]


def test_a_folder_without_a_run_and_one_that_cannot_be_written(tmp_path: Path, capsys, caplog):
    assert report.main([str(tmp_path / "nowhere")]) == 2
    assert "start the program with GRADSPLIT_DEBUG" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    run_record.record_into(tmp_path / "file")
    gradsplit.compile(torch.cos)(torch.ones(3))
    assert not run_record.is_recording() and "nothing more is recorded" in caplog.text


def test_the_records_that_a_killed_process_leaves_are_read(tmp_path: Path):
    run_record.record_into(tmp_path)
    gradsplit.compile(lambda x: x.exp())(torch.ones(3))
    run_record.record_into(None)
    (process,) = tmp_path.iterdir()
    (process / ".000999_stage.json").write_text('{"kind": "st')
    found, _ = _page_of(tmp_path)
    assert any(line.startswith("Killed before they ended") for line in found["verdict"])
