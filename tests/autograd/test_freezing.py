"""Parameters folded for calls without gradients: the same numbers, computed once, and anew whenever one changes."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradsplit
from gradsplit.compile_core import pipeline
from gradsplit.compile_core.autograd.bound_graphs import folded_graph
from gradsplit.compile_core.autograd.captured_graphs.held_inputs import held_inputs
from gradsplit.compile_core.ir.captured import GraphInput
from gradsplit.compile_core.ir.packed_weights import has_bfloat16_kernels
from gradsplit.compile_core.ir.sources import LocalSource
from gradsplit.compile_core.runtime.cuda_graphs import graph_programs
from tests.runtime.recorder_on_cpu import LendingRecorder

FROZEN = {"freezing": True}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values were computed each time that some were."""
    counts: list[int] = []
    compute = folded_graph.FoldedParameters._run

    def counting(self: Any, given: list[Tensor]) -> list[Tensor]:
        values = compute(self, given)
        counts.append(len(values))
        return values

    monkeypatch.setattr(folded_graph.FoldedParameters, "_run", counting)
    return counts


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def trained(model: nn.Module) -> nn.Module:
    """The model with statistics and weights of batch norms as after training."""
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            for statistic in (part.running_mean, part.running_var, part.weight, part.bias):
                if statistic is not None:
                    statistic.uniform_(0.5, 2)
    return model.eval()


def assert_right(mine: Tensor, model: nn.Module, *inputs: Tensor) -> None:
    """As close to what float64 gives as plain PyTorch is, but for a factor."""
    exact = copy.deepcopy(model).double()(*(x.double() if x.is_floating_point() else x for x in inputs))
    plain = model(*inputs)
    assert mine.dtype == plain.dtype and mine.stride() == plain.stride()
    bound = 4 * (plain - exact).abs().max() + 8 * torch.finfo(plain.dtype).eps * exact.abs().max()
    assert (mine - exact).abs().max() <= bound


def small_network() -> nn.Module:
    return trained(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()))


LAYERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": lambda: (nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), torch.randn(6, 5)),
    "groups": lambda: (
        nn.Sequential(nn.Conv2d(4, 6, 3, groups=2, padding=1), nn.BatchNorm2d(6, affine=False)),
        torch.randn(2, 4, 5, 5),
    ),
    "transposed": lambda: (
        nn.Sequential(nn.ConvTranspose1d(3, 4, 3, stride=2, bias=False), nn.BatchNorm1d(4)),
        torch.randn(2, 3, 7),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_batch_norms_are_in_the_weights_before_them(name: str, tmp_path: Path) -> None:
    model, x = LAYERS[name]()
    frozen = gradsplit.compile(trained(model), options={**FROZEN, "trace_folder": tmp_path})
    assert_right(frozen(x), model, x)
    (text,) = [path.read_text() for path in tmp_path.glob("*.joint.fold_parameters.txt")]
    assert "rsqrt" in text.partition("once: folded_0, folded_1")[0]
    assert "rsqrt" not in text.partition("once:")[2] and "mul" not in text.partition("once:")[2]


def train_only() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def norm_read_twice() -> nn.Module:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return self.norm(y) + y

    return trained(Twice())


@pytest.mark.parametrize("make", [train_only, norm_read_twice])
def test_other_batch_norms_stay(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    model, x = make(), torch.randn(3, 4)
    plain = copy.deepcopy(model)
    frozen = gradsplit.compile(model, options={**FROZEN, "trace_folder": tmp_path})
    for _ in range(2):
        torch.testing.assert_close(frozen(x), plain(x))
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    captured = next(tmp_path.glob("*.captured.fold_batch_norms.txt")).read_text()
    assert "batch_norm(" in captured and "folded_weight" not in captured


def change_in_place(model: nn.Module) -> None:
    model[0].weight.mul_(2)  # type: ignore[index]


def load(model: nn.Module) -> None:
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})


def load_by_assigning(model: nn.Module) -> None:
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=True)


def give_other_memory(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data * 2  # type: ignore[index, operator]


def give_other_memory_twice(model: nn.Module) -> None:
    """The allocator gives memory that has just been freed."""
    give_other_memory(model)
    give_other_memory(model)


def replace_a_parameter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight * 2)  # type: ignore[index]


def step(model: nn.Module, **settings: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, **settings)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def train_statistics(model: nn.Module) -> None:
    model.train()
    model(torch.randn(4, 3, 8, 8))
    model.eval()


def convert(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)
    model[0].weight.add_(1)  # type: ignore[index]


@pytest.mark.parametrize(
    "change",
    [
        change_in_place,
        load,
        load_by_assigning,
        give_other_memory,
        give_other_memory_twice,
        replace_a_parameter,
        step,
        lambda model: step(model, fused=True),
        lambda model: step(model, foreach=True),
        train_statistics,
        convert,
    ],
)
def test_changes_are_seen(change: Callable[[nn.Module], None], computed: list[int]) -> None:
    model, x = small_network(), torch.randn(2, 3, 8, 8)
    frozen = gradsplit.compile(model, options=FROZEN)
    assert_right(frozen(x), model, x)
    before = len(computed)
    assert torch.equal(frozen(x), frozen(x)) and len(computed) == before
    change(model)
    for _ in range(2):
        assert_right(frozen(x), model, x)
    assert len(computed) == before + 1
    change(model)
    assert_right(frozen(x), model, x)


def test_a_change_in_inference_mode(computed: list[int]) -> None:
    model, x = small_network(), torch.randn(2, 3, 8, 8)
    frozen = gradsplit.compile(model, options=FROZEN)
    with torch.inference_mode():
        assert_right(frozen(x), model, x)
        model[0].weight.mul_(2)  # type: ignore[index]
        assert_right(frozen(x), model, x)
    assert len(computed) == 2


def test_a_model_made_in_inference_mode_is_not_held(computed: list[int]) -> None:
    with torch.inference_mode():
        model, x = small_network(), torch.randn(2, 3, 8, 8)
        frozen = gradsplit.compile(model, options=FROZEN)
        for _ in range(2):
            torch.testing.assert_close(frozen(x), model(x))
            model[0].weight.mul_(2)  # type: ignore[index]
    assert not computed


def test_a_model_made_in_inference_mode_beside_another(computed: list[int]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        models, x = [small_network()], torch.randn(2, 3, 8, 8)
    with torch.inference_mode():
        models.append(small_network())
        for _ in range(2):
            for model in models:
                torch.testing.assert_close(gradsplit.compile(model, options=FROZEN)(x), model(x))
            models[1][0].weight.mul_(2)  # type: ignore[index]
    assert computed.count(2) == len(computed) in (1, 3)  # in two entries, or in one


def test_gradients_and_results_that_are_parameters(computed: list[int]) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("calls", torch.zeros(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            self.calls += 1
            doubled = 2 * self.weight
            return x @ doubled, doubled, self.weight

    model, x = Both(), torch.randn(2, 4)
    frozen = gradsplit.compile(model, options=FROZEN)
    with torch.enable_grad():
        frozen(x)[0].sum().backward()
        assert model.weight.grad is not None
    assert not computed
    for count in (2, 3, 4):
        product, doubled, weight = frozen(x)
        torch.testing.assert_close(product, x @ (2 * model.weight))
        assert weight is model.weight and torch.equal(doubled, 2 * weight)
        doubled.zero_()  # it is the caller's
        assert torch.equal(model.calls, torch.full((4,), count))


def test_casts_of_autocast(computed: list[int]) -> None:
    model, x = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 8)), torch.randn(2, 8)
    frozen = gradsplit.compile(model, options=FROZEN)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            torch.testing.assert_close(frozen(x), model(x))
        assert computed == [4]
    assert_right(frozen(x), model, x)  # without it there is nothing to compute
    assert computed == [4]


def test_products_in_bfloat16_read_packed_weights(computed: list[int], tmp_path: Path) -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 8), nn.Linear(8, 4, bias=False)
            self.table = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            return (self.last(self.first(x).relu()) @ self.table).float()

    if not has_bfloat16_kernels():
        pytest.skip("oneDNN computes in float32 alone on this machine")
    model, x = Products().bfloat16(), torch.randn(2, 3, 16).bfloat16()
    options = {**FROZEN, "trace_folder": tmp_path, "compile_elsewhere": False}
    frozen = gradsplit.compile(model, options=options, dynamic=True)
    for count in (2, 3, 2):
        x = torch.randn(count, 3, 16).bfloat16()
        torch.testing.assert_close(frozen(x), model(x))
    assert computed == [3]
    assert next(tmp_path.glob("*fold_parameters.txt")).read_text().count("= mkldnn._linear_pointwise") == 3
    model.table.mul_(2)
    torch.testing.assert_close(frozen(x), model(x))
    x[0, 0, 0] = torch.nan
    torch.testing.assert_close(frozen(x), model(x), equal_nan=True)


def test_tied_weights_and_norms_of_weights(computed: list[int]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
            self.table = nn.Embedding(10, 6)
            self.head = nn.Linear(6, 10, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.layer(self.table(tokens)))

    model, tokens = Tied(), torch.tensor([[1, 2, 3]])
    frozen = gradsplit.compile(model, options=FROZEN)
    assert_right(frozen(tokens), model, tokens)
    model.table.weight.mul_(2)
    assert_right(frozen(tokens), model, tokens)
    model.layer.parametrizations.weight.original0.mul_(2)
    assert_right(frozen(tokens), model, tokens)
    assert computed == [1, 1]


def test_models_of_one_code_have_values_of_their_own(computed: list[int]) -> None:
    models, x = [small_network() for _ in range(2)], torch.randn(2, 3, 8, 8)
    models.append(copy.deepcopy(models[0]))
    models[2][0] = models[0][0]  # type: ignore[index]
    frozen = [gradsplit.compile(model, options=FROZEN) for model in models]
    for _ in range(2):
        for model, mine in zip(models, frozen, strict=True):
            assert_right(mine(x), model, x)
    assert len(computed) == 3
    models[0][0].weight.mul_(2)  # type: ignore[index]
    for model, mine in zip(models, frozen, strict=True):
        assert_right(mine(x), model, x)
    assert len(computed) == 5


def test_values_go_with_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    create = folded_graph.FoldedParameters.__init__
    monkeypatch.setattr(
        folded_graph.FoldedParameters,
        "__init__",
        lambda self, *arguments: [made.append(self), create(self, *arguments)][-1],
    )
    model, x = small_network(), torch.randn(2, 3, 8, 8)
    frozen = gradsplit.compile(model, options=FROZEN)
    frozen(x)
    (parameters,) = made
    (kept,) = parameters._kept.values()
    values = [weakref.ref(value) for value in kept.values]
    del model, frozen, kept
    gc.collect()
    assert not parameters._kept and all(value() is None for value in values)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_are_compiled_in_full(fused: bool, computed: list[int]) -> None:
    """What hears of optimizers ends no graph; a model without gradients is no optimizer's."""
    model, teacher, x = small_network(), small_network().requires_grad_(False), torch.randn(2, 3, 8, 8)
    compiled = [gradsplit.compile(each, options=FROZEN) for each in (model, teacher)]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    step = optimizer.step if fused else gradsplit.compile(lambda: optimizer.step(), fullgraph=True)
    for _ in range(3):
        for mine, each in zip(compiled, (model, teacher), strict=True):
            assert_right(mine(x), each, x)
        step()
    assert len(computed) == 4


def test_open_sizes(computed: list[int]) -> None:
    model = trained(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU()))
    frozen = gradsplit.compile(model, options={**FROZEN, "compile_elsewhere": False}, dynamic=True)
    for count in (2, 3, 7, 3):
        x = torch.randn(count, 5)
        assert_right(frozen(x), model, x)
    assert computed == [2]
    model[0].bias.add_(1)  # type: ignore[index, operator]
    assert_right(frozen(x), model, x)


def test_images_of_open_sizes(computed: list[int]) -> None:
    """Packed weights, which are chosen for no size then; what follows is no number where the image is none."""
    model = small_network()
    frozen = gradsplit.compile(model, options={**FROZEN, "compile_elsewhere": False}, dynamic=True)
    for size in (8, 12, 9):
        x = torch.randn(2, 3, size, 8)
        assert_right(frozen(x), model, x)
    assert computed == [2]
    model[0].weight.mul_(2)  # type: ignore[index, operator]
    assert_right(frozen(x), model, x)
    x[0, 0, 0, 0] = torch.nan
    torch.testing.assert_close(frozen(x), model(x), equal_nan=True)


def test_convolutions_and_views_between_them() -> None:
    class Shuffle(nn.Module):
        """Channels of groups take turns, as in ShuffleNet; then a kernel that is applied to each image's channels."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, groups=8)
            self.up = nn.ConvTranspose2d(8, 3, 2, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).relu()
            y = y.view(2, 2, 4, *y.shape[2:]).transpose(1, 2).flatten(1, 2)
            return self.up(self.second(y) * y.mean((2, 3), keepdim=True)).add(1).permute(0, 2, 3, 1)

    model, x = Shuffle(), torch.randn(2, 3, 10, 10)
    frozen = gradsplit.compile(model, options=FROZEN)
    for each in (x, x.to(memory_format=torch.channels_last)):
        assert_right(frozen(each), model, each)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(frozen(x), model(x), rtol=0.05, atol=0.02)


def test_nothing_larger_than_its_parameters_is_kept(computed: list[int]) -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.row = nn.Parameter(torch.randn(300))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.row.exp()[:, None] * self.row.sin()[None, :]

    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Parameter(torch.randn(40, 1)), nn.Parameter(torch.randn(1, 40 * 16))

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, (self.left.cos() @ self.right.sin()).view(40, 40, 4, 4))

    for model, x in ((Spread(), torch.randn(300, 300)), (LowRank(), torch.randn(1, 40, 5, 5))):
        assert_right(gradsplit.compile(model, options=FROZEN)(x), model, x)
    assert computed == [2, 2]


def test_random_numbers_and_views_are_left_in_the_calls(computed: list[int]) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ F.dropout(self.weight, 0.5, training=True).t() + self.weight.t()

    frozen = gradsplit.compile(Noisy(), options=FROZEN)
    assert not torch.equal(frozen(torch.ones(4, 4)), frozen(torch.ones(4, 4)))
    assert not computed


def test_recordings_read_values_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = LendingRecorder()
    monkeypatch.setattr(pipeline, "with_cuda_graphs", functools.partial(graph_programs, recorder=recorder))
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(300, 300)), nn.ReLU())
    frozen = gradsplit.compile(model, options={**FROZEN, "triton.cudagraphs": True})
    for step in range(8):
        x = torch.randn(300, 300)
        assert_right(frozen(x), model, x)
        if step in (3, 5):
            model[0].parametrizations.weight.original0.mul_(2)  # type: ignore[index, union-attr]
    assert recorder.replayed == 7


def test_which_inputs_are_held() -> None:
    def is_held(kind: Any, real: Tensor) -> bool:
        return held_inputs([GraphInput("x", LocalSource("x"), real, kind)], [real]) == {0}

    statistic = torch.zeros(3)
    assert is_held("buffer", statistic) and is_held("parameter", nn.Parameter(statistic))
    assert not is_held("argument", statistic) and not is_held("state", nn.Parameter(statistic))
    # Only on the CPU are statistics compared with what they were.
    assert not is_held("buffer", statistic.to("meta")) and is_held("buffer", torch.zeros(3, 3, device="meta"))
    with torch.enable_grad():
        assert not is_held("buffer", statistic)
