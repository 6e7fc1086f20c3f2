"""Writes through views whose elements share memory: what plain PyTorch allows is done by it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gradsplit
from tests.autograd.scenarios import BACKENDS, check_scenario, for_each, outcome


def first_row(write):
    def program(b):
        rows = b.expand(2, 3)
        write(rows[0])
        return rows.sin()

    return program


def whole(write):
    return lambda b: write(b.expand(2, *b.shape))


WRITES = {
    "zero": whole(lambda e: e.zero_()),
    "fill": whole(lambda e: e.fill_(3.0)),
    "mul": whole(lambda e: e.mul_(2)),
    "copy": whole(lambda e: e.copy_(torch.ones(2, 3))),
    "masked_fill": whole(lambda e: e.masked_fill_(torch.tensor([True, False, True]), 7.0)),
    "relu": whole(lambda e: torch.nn.functional.relu(e, inplace=True)),
    "item": first_row(lambda row: row.fill_(5.0)),
    "multiplied": first_row(lambda row: row[1:].mul_(5.0)),
    "out": first_row(lambda row: torch.sin(torch.ones(3), out=row)),
    "checkpointed": lambda b: checkpoint(lambda b: whole(lambda e: e.zero_())(b * 1), b, use_reentrant=False),
    "same shape": lambda b: b.expand_as(b).mul_(-0.25),
    "strided": lambda b: b.as_strided((2, 2), (1, 1))[1].mul_(2),
    "vectorized": lambda b: torch.func.vmap(lambda row: whole(lambda e: e.zero_())(row * 1))(b.expand(2, 3)),
}


@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded:UserWarning")
@pytest.mark.parametrize("backend", BACKENDS[1:])
@for_each(WRITES, "program")
def test_writes_through_expanded_views(program, backend):
    def scenario(compile):
        def run(b):
            b = b * 1
            return program(b), b

        with_infinity = torch.tensor([1.0, torch.inf, torch.nan])
        return [outcome(compile(run), b) for b in (torch.arange(1.0, 4.0), with_infinity)]

    check_scenario(scenario, backend, breaks=True)


def test_what_is_read_of_expanded_views_is_compiled():
    def program(b):
        e = b.expand(2, 3)
        b.mul_(2)
        return e + b

    report = gradsplit.explain(program)(torch.ones(3))
    assert report.graph_count == 1
    check_scenario(lambda compile: compile(program)(torch.ones(3)), "aot_eager")
