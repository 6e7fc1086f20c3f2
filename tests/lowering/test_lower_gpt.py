"""A whole GPT, forward and backward: correct, and in few nests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsplit.compile_core.ir.loops import LoopProgram, View
from gradsplit.compile_core.ir.verify_loops import verify_program
from gradsplit.compile_core.lowering.build import generate
from gradsplit.compile_core.lowering.fusion.batch_nests import batch_nests
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.extern_rules import fallback_calls
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from tests.lowering.loop_evaluator import evaluate
from tests.lowering.lowering_harness import calls, check_module, compute_of, kernels, nests
from tests.lowering.small_gpt import SmallGPT, cut, joint_graph

LAYERS = 2


def _model_and_batch() -> tuple[SmallGPT, Tensor, Tensor]:
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, 67, (2, 4, 24))
    targets[1, 3] = -100
    return SmallGPT(layers=LAYERS), tokens, targets


def _check_parts(autocast: torch.dtype | None, tolerance: float) -> tuple[LoopProgram, LoopProgram]:
    """Forward and backward program, each compared with torch on the values that flow between them."""
    model, tokens, targets = _model_and_batch()
    forward, backward = cut(joint_graph(model, tokens, targets, autocast=autocast))
    inputs = [*(parameter.detach() for parameter in model.parameters()), tokens, targets]
    first = check_module(forward, inputs, tolerance)
    _, *saved = forward(*inputs)
    second = check_module(backward, [*inputs, *saved], tolerance)
    assert not fallback_calls(first) and not fallback_calls(second)
    return first, second


def test_joint_graph_in_float32() -> None:
    model, tokens, targets = _model_and_batch()
    program = check_module(
        joint_graph(model, tokens, targets), [list(model.parameters()), tokens, targets], 1e-4
    )
    assert not fallback_calls(program)


def test_nests_per_block_in_float32() -> None:
    forward, backward = _check_parts(None, 1e-4)
    # A block's forward: norm (with the residual addition before it) twice, gelu. Its products and attention:
    # 5 calls. Besides: positions for the embedding's gradient, last norm, softmax statistics, loss; the
    # product of the head.
    assert len(nests(forward)) == 3 * LAYERS + 4
    assert len(calls(forward)) == 5 * LAYERS + 1
    # A block's backward: two norms (gradient of the input; of scale, shift and the bias before it), gelu with
    # its bias's gradient, the joining of the attention's gradients with their bias's. Calls: 8 products,
    # attention. Besides: softmax and what it takes of each row, last norm (2), position embedding, sum of the
    # tied embedding's gradients; 2 products, 2 scatters.
    assert len(nests(backward)) == 6 * LAYERS + 6
    assert len(calls(backward)) == 9 * LAYERS + 4


def test_nests_per_block_under_autocast() -> None:
    forward, backward = _check_parts(torch.bfloat16, 0.05)
    # beside float32's: weights cast to bfloat16 on the way in, their gradients to float32 on the way out
    assert len(kernels(forward)) <= 6 * LAYERS + 6
    assert len(kernels(backward)) <= 11 * LAYERS + 5


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_go_scaled_into_their_destinations(world: int) -> None:
    model, tokens, targets = _model_and_batch()
    joint = joint_graph(model, tokens, targets)
    output = joint.graph.output_node()
    loss, *gradients = output.args[0]  # type: ignore[misc]
    with joint.graph.inserting_before(output):
        scaled = []
        for gradient in gradients:
            node = joint.graph.call_function(torch.ops.aten.mul.Tensor, (gradient, 1 / world))
            node.meta["val"] = gradient.meta["val"]
            scaled.append(node)
    output.args = ((loss, *scaled),)
    joint.recompile()
    destinations = {f"result_{n}": f"bucket_{n}" for n in range(1, len(scaled) + 1)}
    program = fuse(lower(compute_of(joint, destinations)))
    verify_program(program)
    buffers = [torch.full(node.meta["val"].shape, float("nan")) for node in gradients]
    inputs = [*(parameter.detach() for parameter in model.parameters()), tokens, targets]
    evaluate(program, inputs, buffers)
    for mine, theirs in zip(buffers, joint(list(model.parameters()), tokens, targets)[1:], strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-4, atol=1e-5)
    # the factor costs no pass over a weight's gradient: it is the product's alpha, whose output is the
    # destination
    alphas = [call for call in calls(program) if call.keywords.get("alpha") == 1 / world]
    assert len(alphas) == 4 * LAYERS
    assert all(
        isinstance(call.out["out"], View) and call.out["out"].buffer in program.destinations
        for call in alphas
    )
    assert len(kernels(program)) <= 9 * LAYERS + 9


def test_further_equal_blocks_need_no_further_kernels() -> None:
    def texts(layers: int) -> set[str]:
        torch.manual_seed(0)
        tokens, targets = torch.randint(0, 67, (2, 4, 24))
        found = set()
        for part in cut(joint_graph(SmallGPT(layers=layers), tokens, targets)):
            program = batch_nests(fuse(lower(compute_of(part))))
            found |= {generate(step, program.buffers).text for step in kernels(program)}
        return found

    three = texts(3)
    assert len(texts(4) | three) == len(three)
