"""A model cut into stages: what they compute together, where it is cut, what is written, and what is refused."""

from __future__ import annotations

import gc
import itertools
import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.export import Dim

import gradsplit
from gradsplit import ExportError
from gradsplit.distributed import export_pipeline
from gradsplit.distributed.pipeline.balance import cut_evenly
from gradsplit.distributed.pipeline.export_folder import read_layout, read_stage
from tests.distributed.pipeline.tied_model import Tied, call
from tests.export.exported_models import MODELS


def run_stages(folder: Path, args: tuple[Any, ...], read: Any = read_stage) -> Any:
    """The stages one after the other, with torch's kernels."""
    layout, _ = read_layout(folder)
    values: dict[int, Tensor] = {-1 - k: tensor for k, tensor in enumerate(args)}
    result: Any = None
    for number, stage in enumerate(layout.stages):
        part = read(folder, number, "cpu")
        for k, edge in enumerate(layout.edges):
            if edge.is_state and edge.producer == number:
                values[k] = part.tensors[edge.name]
        result = part.module()(*[values[k] for k in stage.inputs])
        values |= dict(zip(stage.outputs, result, strict=True)) if stage.outputs else {}
    return result


@pytest.mark.parametrize("name", ["t5", "unet"])
def test_the_stages_compute_what_the_model_does(name, tmp_path):
    model, kwargs = MODELS[name]()
    model.eval()
    exported = gradsplit.export(
        model,
        tuple(kwargs.values()) if name == "unet" else (),
        {} if name == "unet" else kwargs,
        strict=False,
    )
    layout = export_pipeline(exported, (), 4, folder=tmp_path / "p")
    found = run_stages(tmp_path / "p", tuple(kwargs.values()))
    assert torch.equal(found["loss"], model(**kwargs)["loss"])
    assert len(layout.stages) == 4


def test_each_stage_has_its_own_and_no_more(tmp_path):
    model = Tied()
    layout = export_pipeline(model, call(), folder=tmp_path / "p", balance=["blocks.1", "blocks.3"])
    parts = [read_stage(tmp_path / "p", number, "cpu") for number in range(3)]
    names = [set(part.module().state_dict()) for part in parts]
    assert set().union(*names) == set(model.state_dict())
    assert names[0] == {"embedding.weight", "blocks.0.weight", "blocks.0.bias"}
    assert [(edge.name, edge.producer, edge.consumers) for edge in layout.edges if edge.is_state] == [
        ("embedding.weight", 0, (2,))
    ]
    # The embedded ids go to the last stage, past the one between.
    between = sorted((edge.producer, edge.consumers) for edge in layout.edges if not edge.is_state)
    assert between == [(0, (1,)), (0, (2,)), (1, (2,))]
    # The table follows from a buffer: each stage that adds it computes it anew.
    assert ["table" in part.tensors for part in parts] == [True, True, False]


def test_open_sizes_are_described_over_the_call(tmp_path: Path) -> None:
    """Masks that follow from sizes are computed in each stage, which needs no data of the call for that."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.first, self.last = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, ids: Tensor) -> Tensor:
            length = ids.shape[1]
            mask = torch.ones(length, length).tril()
            hidden = F.dropout(mask @ self.first(self.embedding(ids)), 0.5, self.training)
            return self.last(hidden.reshape(-1, 8)).view(-1, length, 8) * mask.sum()

    model, ids = Masked(), torch.arange(8).view(2, 4)
    sizes = {"ids": {0: Dim.DYNAMIC, 1: Dim("length", max=10)}}
    layout = export_pipeline(
        model, (ids,), folder=tmp_path / "p", balance=["first", "last"], dynamic_shapes=sizes
    )
    assert layout == read_layout(tmp_path / "p")[0]
    batch, length = "args[0].shape[0]", "args[0].shape[1]"
    assert [(edge.sizes, edge.strides) for edge in layout.edges] == [
        ((batch, length, 8), (f"8*{length}", 8, 1)),
        ((f"{batch}*{length}", 8), (8, 1)),
    ]
    assert [stage.measured for stage in layout.stages] == [(), (-1,), (-1,)]
    assert layout.conditions == (f"{batch} >= 2", f"{length} >= 2", f"{length} <= 10")
    assert (
        layout.broken_condition([(2, 10)]) == "" and layout.broken_condition([(2, 11)]) == f"{length} <= 10"
    )
    of_step = layout.at([(3, 5)])
    assert [edge.sizes for edge in of_step.edges] == [(3, 5, 8), (15, 8)]
    (draw,) = of_step.stages[1].draws
    assert draw[1][0] == {"tensor": [[3, 5, 8], [40, 8, 1], "float32"]}
    model.eval()
    export_pipeline(model, (ids,), folder=tmp_path / "q", balance=["first", "last"], dynamic_shapes=sizes)
    for other in (ids, torch.arange(15).view(3, 5)):
        assert torch.equal(run_stages(tmp_path / "q", (other,)), model(other))
    exported = gradsplit.export(model, (ids,))
    with pytest.raises(ValueError, match=r"Masked is exported, .*; give dynamic_shapes to gradsplit.export"):
        export_pipeline(exported, (), 2, folder=tmp_path / "r", dynamic_shapes=sizes)


def test_split_points_of_torch_are_taken(tmp_path):
    points = {"blocks.1": SplitPoint.END}
    layout = export_pipeline(Tied(), call(), 2, folder=tmp_path / "p", balance=points)
    part = read_stage(tmp_path / "p", 1, "cpu")
    assert len(layout.stages) == 2
    assert "blocks.2.weight" in part.tensors and "blocks.1.weight" not in part.tensors


@pytest.mark.parametrize("balance", ["time", "memory", "parameters"])
def test_a_model_without_data_is_exported(balance, tmp_path):
    with torch.device("meta"):
        model = Tied()
    ids, labels = call()
    layout = export_pipeline(
        model, (ids.to("meta"), labels.to("meta")), 3, folder=tmp_path / "p", balance=balance
    )
    assert sum(stage.state_bytes for stage in layout.stages) >= sum(p.nbytes for p in model.parameters())
    assert all(stage.seconds > 0 for stage in layout.stages)


def test_the_greatest_part_is_as_small_as_can_be():
    for costs, parts, best in (([1, 2, 3, 4, 5], 2, 9), ([5, 1, 1, 1, 5], 3, 5), ([1] * 8, 4, 2)):
        cuts = cut_evenly(costs, range(1, len(costs)), parts, [0] * (len(costs) + 1))
        bounds = itertools.pairwise([0, *cuts, len(costs)])
        assert max(sum(costs[first:end]) for first, end in bounds) == best
    # Of two cuts that are about as good, that which sends less.
    assert cut_evenly([1, 1, 1, 1.01], [1, 2, 3], 2, [0, 9, 9, 0.1, 0]) == (3,)
    assert cut_evenly([50, 50, 1, 99], [1, 2, 3], 2, [0, 0, 0.2, 0.1, 0]) == (3,)
    assert cut_evenly([50, 50, 9, 91], [1, 2, 3], 2, [0, 0, 0.2, 0.1, 0]) == (2,)


def private_bytes() -> int:
    """Memory of this process that is not a file's."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) * 1024


def test_loading_a_stage_takes_its_own_weights_of_memory(tmp_path):
    model = nn.Sequential(*(nn.Linear(1536, 1536) for _ in range(8)))
    export_pipeline(model, (torch.zeros(1, 1536),), 2, folder=tmp_path / "p", balance="parameters")
    del model
    read_stage(tmp_path / "p", 1, "cpu")  # what is imported and allocated once
    peak, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.001):
            peak = max(peak, private_bytes())

    gc.collect()
    before = private_bytes()
    watcher = threading.Thread(target=watch)
    watcher.start()
    module = read_stage(tmp_path / "p", 0, "cpu").module()
    ended.set()
    watcher.join()
    own = sum(parameter.nbytes for parameter in module.parameters())
    assert own > 30e6
    assert max(peak, private_bytes()) - before <= 1.10 * own


REFUSED = [
    ({"num_stages": 99}, ValueError, r"Tied can be cut into \d+ stages at the most, not 99"),
    ({"num_stages": 0}, ValueError, "num_stages is a positive number"),
    ({"num_stages": 2, "balance": "speed"}, ValueError, "balance is 'time', 'memory', 'parameters'"),
    ({"balance": ["blocks.9"]}, ValueError, "no submodule 'blocks.9' computes anything"),
    ({"num_stages": 5, "balance": ["blocks.1"]}, ValueError, "1 split points make 2 stages, not 5"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_bad_requests_are_one_line_and_write_nothing(options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        export_pipeline(Tied(), call(), folder=tmp_path / "p", **options)
    assert not list(tmp_path.iterdir())


def test_a_graph_break_names_the_line(tmp_path):
    def program(x):
        print(x)
        return x * 2

    with pytest.raises(gradsplit.Unsupported, match=r"print\(x\)"):
        export_pipeline(program, (torch.ones(2),), 2, folder=tmp_path / "p")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("pipelines")
    for name in ("one", "other"):
        export_pipeline(Tied(), call(), 2, folder=place / name)
    return place / "one", place / "other"


def damage(folder: Path, other: Path, what: str) -> None:
    if what == "missing":
        shutil.rmtree(folder / "stage_1")
    elif what == "other":
        shutil.rmtree(folder / "stage_1")
        shutil.copytree(other / "stage_1", folder / "stage_1")
    elif what == "tensors":
        tensors = folder / "stage_1" / "tensors.safetensors"
        content = bytearray(tensors.read_bytes())
        content[-1] ^= 1
        tensors.write_bytes(content)
    elif what == "manifest":
        text = (folder / "pipeline.json").read_text()
        (folder / "pipeline.json").write_text(text.replace('"producer": 0', '"producer": 1', 1))
    else:
        content = json.loads((folder / "pipeline.json").read_text())
        (folder / "pipeline.json").write_text(json.dumps({**content, "version": 2}))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", "lacks stage 1"),
        ("other", "is of another export"),
        ("tensors", "is damaged"),
        ("manifest", "is damaged"),
        ("version", "written in version 2 of the format, and this gradsplit reads version 3; export again"),
    ],
)
def test_what_does_not_fit_is_not_loaded(what, message, folders, tmp_path):
    shutil.copytree(folders[0], tmp_path / "p")
    damage(tmp_path / "p", folders[1], what)
    with pytest.raises(ExportError, match=message):
        read_stage(tmp_path / "p", 1, "cpu")
    with pytest.raises(ExportError, match="has the stages 0 to 1, and no stage 7"):
        read_stage(folders[0], 7, "cpu")


def test_what_is_timed_leaves_the_generator_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    before = torch.get_rng_state()
    loss = (nn.functional.mse_loss, torch.zeros(2, 4))
    exported = gradsplit.export(model, (torch.ones(2, 4),))
    export_pipeline(exported, (), 2, folder=tmp_path / "stages", loss=loss)
    assert torch.equal(before, torch.get_rng_state())
