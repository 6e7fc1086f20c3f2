"""Captured forwards split on buckets: where pieces begin, and what becomes of a graph in a DDP module's forward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsplit
from gradsplit.compile_core.backends.registry import resolve_backend
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.interface.module_compilers import CompileRequest
from gradsplit.compile_core.options import parse_options
from gradsplit.distributed import DDPOptions, compile_ddp, inspect_ddp
from gradsplit.distributed.agreement.agreement import agreement_of
from gradsplit.distributed.ddp_module import process_group
from gradsplit.distributed.reducer.graph_in_ddp import GraphInDDP
from gradsplit.distributed.reducer.split_forward import SplitForward
from gradsplit.distributed.reducer.stock_buckets import stock_buckets
from gradsplit.distributed.reducer.wrapped_parameters import reduced_parameters
from gradsplit.distributed.reducer_way import ReducerWay

EAGER = CompileRequest(resolve_backend("eager"), parse_options(None, None), fullgraph=True)


def split(function, *inputs):
    """What is known of the graph of one call."""
    found = []

    def compile_graph(captured, given):
        examples = [entry.example for entry in captured.inputs]
        found.append(SplitForward(captured.module, examples, given))
        return captured.module

    CompiledFunction(function, compile_graph)(*inputs)
    return found[0]


def weights(count):
    return [nn.Parameter(torch.randn(3, 3)) for _ in range(count)]


def test_a_piece_begins_where_a_bucket_is_complete():
    a, b, c, d = weights(4)
    known = split(lambda x: x @ a @ b @ c @ d, torch.ones(2, 3))
    assert known.ready_order == [d, c, b, a]
    assert known.begins([[d], [c, b], [a]]) == (1, 3)
    assert [len(piece.inputs) for piece in known.pieces((1, 3))] == [2, 3, 2]


def test_buckets_start_in_order_so_none_is_complete_before_those_before_it():
    a, b, c, d = weights(4)
    known = split(lambda x: x @ a @ b @ c @ d, torch.ones(2, 3))
    assert known.begins([[a], [b], [c], [d]]) == ()
    assert known.begins([[c], [d], [b], [a]]) == (1, 2)


def test_a_tied_weight_is_final_behind_its_first_use():
    a, b, c = weights(3)
    known = split(lambda x: x @ a @ b @ c @ a, torch.ones(2, 3))
    assert known.ready_order == [c, b, a]
    assert known.begins([[c], [a, b]]) == (2,)


def test_a_use_without_gradients_is_none():
    a, b = weights(2)

    def function(x):
        with torch.no_grad():
            scale = b.mean()
        return (x @ a * scale) @ b

    known = split(function, torch.ones(2, 3))
    assert known.ready_order == [b, a]
    assert len(known.begins([[b], [a]])) == 1


def test_parameters_are_found_in_keywords_lists_and_nested_structures():
    a, b, c = weights(3)
    table = {"inner": [(a,), {"w": b}]}

    def function(x, table):
        y = torch.addmm(input=x[0], mat1=x, mat2=table["inner"][0][0])
        y = torch.cat([y, table["inner"][1]["w"]])
        return torch.stack([y, y], dim=0) @ c

    known = split(function, torch.ones(2, 3), table)
    assert known.ready_order == [c, b, a]
    begins = known.begins([[c], [b], [a]])
    assert len(begins) == 2
    assert len(known.pieces(begins)) == 3


def test_a_piece_begins_earlier_where_the_graph_cannot_be_cut():
    a, b, c = weights(3)

    def function(x):
        y = x @ a @ b
        z = y.view(-1)
        w = c * 2
        z.mul_(3.0)
        return y @ w

    known = split(function, torch.ones(2, 3))
    # From the second product on, whose memory is changed later, there is no cut.
    assert known.ready_order == [c, b, a]
    assert known.begins([[c], [b], [a]]) == (1,)


def test_gradients_are_said_to_arrive_as_they_do():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            self.inner, self.shortcut = nn.Conv1d(3, 3, 3, padding=1), nn.Conv1d(3, 3, 1)
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x, scale):
            x = self.layer(self.embed(x))
            x = torch.relu(self.norm(self.inner(x)) + self.shortcut(x))
            return x @ self.embed.weight.t() * scale, x

    module = Block()
    names = {parameter: name for name, parameter in module.named_parameters()}
    arrived = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: arrived.append(names[parameter]))
    inputs = torch.zeros(2, 3, dtype=torch.int64), torch.ones(())
    known = split(module, *inputs)
    logits, hidden = module(*inputs)
    (logits.sum() + hidden.sum()).backward()
    assert [names[parameter] for parameter in known.ready_order] == arrived


def test_a_beginning_without_gradients_is_no_piece():
    a, b = weights(2)
    known = split(lambda x: x.sin().cos() @ a @ b, torch.ones(2, 3))
    assert known.begins([[b], [a]]) == (3,)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layers(count=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


def names(module, buckets):
    by_parameter = {parameter: name for name, parameter in module.named_parameters()}
    return [[by_parameter[parameter] for parameter in bucket] for bucket in buckets]


@pytest.mark.parametrize(
    "ddp_options",
    [
        {"bucket_cap_mb": 0.0004},
        {"bucket_cap_mb": None},
        {"bucket_cap_mb": 0.0004, "static_graph": True},
        {"bucket_cap_mb_list": [0.0002, 0.0006, 0.0003]},
    ],
)
def test_predicted_buckets_are_those_that_the_reducer_rebuilds(one_rank, ddp_options):
    module = layers()
    if "bucket_cap_mb_list" in ddp_options:
        supported = hasattr(DistributedDataParallel(module), "bucket_bytes_cap_list")
        if not supported:
            pytest.skip("this torch has no limits for each bucket")
    ddp = DistributedDataParallel(module, **ddp_options)
    arrived = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(arrived.append)
    ddp(torch.ones(2, 8)).sum().backward()
    predicted = names(module, stock_buckets(ddp, arrived))
    while not ddp._has_rebuilt_buckets:
        ddp(torch.ones(2, 8)).sum().backward()
    assert predicted == names(module, stock_buckets(ddp, []))


def test_frozen_and_ignored_parameters_are_in_no_bucket(one_rank):
    module = layers()
    module[0].bias.requires_grad_(False)
    module[3].weight = module[1].weight
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["2.weight", "1.weight"])
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.0002)
    ready = list(module.parameters())[::-1]
    found = {name for bucket in names(module, stock_buckets(ddp, ready)) for name in bucket}
    # To DDP the tied weight is to be ignored under one of its names only.
    assert found == {"0.weight", "1.bias", "1.weight", "2.bias", "3.bias"}
    assert found == reduced_parameters(ddp).keys()


def test_a_graph_has_a_form_for_each_active_module(one_rank):
    module = layers()
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.00026)
    made = []

    def compile_graph(captured, inputs):
        made.append(GraphInDDP(captured, EAGER))
        return made[0]

    compiled = CompiledFunction(module, compile_graph)
    x = torch.ones(2, 8)
    compiled(x)
    graph = made[0]
    inputs = [x, *module.parameters()]
    whole = graph.form_for(inputs)
    with ddp._inside_ddp_forward():
        inside = compiled(x)
        form = graph.form_for(inputs)
    assert (whole.begins, form.begins) == ((), (1, 2, 3))
    assert torch.equal(inside, module(x))
    assert graph.form_for(inputs) is whole
    assert len(made) == 1


class EitherWay(nn.Module):
    """Its layers, the last one first if asked to."""

    def __init__(self):
        super().__init__()
        self.layers = layers(3)

    def forward(self, x, reverse=False):
        for layer in reversed(self.layers) if reverse else self.layers:
            x = layer(x)
        return x


def test_a_graph_is_split_anew_when_the_reducer_has_other_buckets(one_rank):
    module = EitherWay()
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.00026)
    way = ReducerWay(ddp, EAGER)
    x = torch.ones(2, 8)
    with ddp.no_sync():
        way(x)
    (entry,) = way.forward.entries

    def form():
        with ddp._inside_ddp_forward():
            return entry.compiled.form_for([x, *module.parameters()])

    assert (form().begins, form().is_final) == ((1, 2), False)
    ddp(x, True).sum().backward()
    expected, found = module(x), way(x)
    # The reducer starts the first layer's bucket first now, which is complete at the very end.
    assert (form().begins, form().is_final) == ((), True)
    assert torch.equal(expected, found)


def test_the_other_ranks_hear_of_a_compilation_that_fails(one_rank):
    def fail(*_):
        raise RuntimeError("a fault")

    ddp = DistributedDataParallel(layers(), process_group=dist.new_group())
    compiled = compile_ddp(ddp, DDPOptions(overlap="reducer"), backend=fail)
    with pytest.raises(RuntimeError, match="a fault"):
        compiled(torch.ones(2, 8))
    told = "compilation failed on rank 0: RuntimeError: a fault"
    assert agreement_of(process_group(ddp)).watch.failure == told
    with pytest.raises(CompileError, match=told):
        compiled(torch.ones(2, 8))


def test_hooks_of_the_ddp_module_run_round_its_compiled_forward(one_rank):
    module = layers()
    ddp = DistributedDataParallel(module)
    seen = []
    ddp.register_forward_pre_hook(lambda *_: seen.append("before"))
    ddp.register_forward_hook(lambda _, args, result: (seen.append("after"), result * 2)[1])
    compiled = compile_ddp(ddp, DDPOptions(overlap="reducer"), backend="eager")
    x = torch.ones(2, 8)
    assert torch.equal(compiled(x), module(x) * 2)
    assert seen == ["before", "after"]
    assert len(inspect_ddp(compiled).reducer_way.graphs) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"overlap": "both"}, "in_graph, reducer"), ({"agreement_timeout_s": 0}, "positive")],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        DDPOptions(**settings)


def test_only_ddp_modules_are_compiled_as_such():
    with pytest.raises(TypeError, match="not Linear"):
        compile_ddp(nn.Linear(2, 2))


class Chosen(nn.Module):
    """Of the rows that a first layer gives a second one takes as many as the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.first(x)
        return self.second(rows[rows.sum(1) > 0]).sin().sum() + rows.sum() * (x > 0).sum().item()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda module: DistributedDataParallel(gradsplit.compile(module)),
        lambda module: gradsplit.compile(DistributedDataParallel(module)),
    ],
)
def test_sizes_that_depend_on_data_end_graphs_of_ddp_modules(one_rank, wrap):
    module, plain = Chosen(), Chosen()
    run = wrap(module)
    for _ in range(3):
        x = torch.randn(6, 8)
        losses = [call(x) for call in (run, plain)]
        for each, loss in zip((module, plain), losses, strict=True):
            each.zero_grad()
            loss.backward()
        torch.testing.assert_close(*losses)
        for found, expected in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)
