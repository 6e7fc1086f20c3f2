"""``flex_attention``: one graph with the program's functions of scores as bodies, values and gradients of torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention as operator
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

import gradsplit
from gradsplit.compile_core.errors import Unsupported

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")  # by the plain program

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
DOCUMENTS = torch.tensor([0] * 30 + [1] * 50 + [2] * 20)


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def same_document(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j)


def some_rows(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i % 3 != 0) & (j <= i)


def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score + SLOPES[h] * (j - i)


def softcap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 3 * torch.tanh(score / 3)


def block_mask(mask: Callable[..., Any], length: int = 100, heads: int | None = None) -> BlockMask:
    return create_block_mask(mask, None, heads, length, length, device="cpu", BLOCK_SIZE=32)


def tensors(heads: int = 4, kv_heads: int = 2, length: int = 100, requires_grad: bool = False) -> list[Any]:
    torch.manual_seed(0)
    sizes = [(2, heads, length, 8), (2, kv_heads, length, 8), (2, kv_heads, length, 16)]
    return [torch.randn(size).requires_grad_(requires_grad) for size in sizes]


def compare_gradients(program: Callable[..., Any], rest: tuple[Any, ...], backend: str, *leaves: Any) -> Any:
    """Of the operator itself, since ``flex_attention`` refuses gradients on a CPU."""
    compiled = gradsplit.compile(program, backend=backend, fullgraph=True)
    found = []
    for run in (program, compiled):
        given = tensors(requires_grad=True)
        results = run(*given, *rest)
        sum(
            (result * torch.linspace(1, 2, result.numel()).view(result.shape)).sum() for result in results
        ).backward()
        found.append([*results, *(tensor.grad for tensor in given), *(leaf.grad for leaf in leaves)])
        for leaf in leaves:
            leaf.grad = None
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=2e-4)
    return compiled


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "triton"])
def test_gradients_are_those_of_torchs_operator(backend: str) -> None:
    def attend(query: Any, key: Any, value: Any, mask: BlockMask) -> Any:
        return operator(query, key, value, alibi, mask.as_tuple(), 0.3, {})[:1]

    compare_gradients(attend, (block_mask(same_document),), backend)


def test_gradients_through_the_sums_of_rows_some_of_which_are_empty() -> None:
    def attend(query: Any, key: Any, value: Any, mask: BlockMask) -> Any:
        result, sums, _ = operator(query, key, value, softcap, mask.as_tuple(), 0.3, {})
        return result, torch.where(sums == -math.inf, 0.0, sums)

    compare_gradients(attend, (block_mask(some_rows),), "eager")


def test_a_tensor_that_the_scores_read_has_a_gradient() -> None:
    slopes = torch.randn(4, requires_grad=True)

    def attend(query: Any, key: Any, value: Any, mask: BlockMask) -> Any:
        def scaled(score: Any, b: Any, h: Any, i: Any, j: Any, read: Any) -> Any:
            return score * read[h]

        return operator(query, key, value, scaled, mask.as_tuple(), 0.3, {}, (slopes,))[:1]

    compare_gradients(attend, (block_mask(causal),), "aot_eager", slopes)


@pytest.mark.parametrize("score_mod", [None, alibi, softcap])
def test_the_function_of_torch(score_mod: Any) -> None:
    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return flex_attention(
            query.transpose(1, 2).contiguous().transpose(1, 2), key, value, score_mod, mask, enable_gqa=True,
            kernel_options={"BLOCK_M": 64}, return_aux=AuxRequest(lse=True),
        )  # fmt: skip

    compiled = gradsplit.compile(attend, backend="eager", fullgraph=True)
    for mask in (block_mask(same_document), block_mask(some_rows), None):
        given = tensors()
        result, aux = compiled(*given, mask)
        expected, expected_aux = attend(*given, mask)
        torch.testing.assert_close([result, aux.lse], [expected, expected_aux.lse])
        assert result.stride() == expected.stride()
        assert mask is None or mask.mask_mod is not some_rows or not result[:, :, 0].any()


def test_another_block_mask_of_the_sizes_is_no_other_graph() -> None:
    def make(documents: torch.Tensor) -> BlockMask:
        return block_mask(lambda b, h, i, j: documents[i] == documents[j])

    compiled = gradsplit.compile(flex_attention, backend="eager", fullgraph=True)
    given = tensors(heads=2)
    for documents in (DOCUMENTS, DOCUMENTS.flip(0), DOCUMENTS * 0):
        torch.testing.assert_close(
            compiled(*given, block_mask=make(documents)), flex_attention(*given, block_mask=make(documents))
        )
    assert len(compiled.entries) == 1


def test_another_function_is_another_graph() -> None:
    compiled = gradsplit.compile(flex_attention, backend="eager", fullgraph=True)
    given = tensors(heads=2)
    for score_mod in (alibi, softcap):
        torch.testing.assert_close(compiled(*given, score_mod), flex_attention(*given, score_mod))


def test_autocast_casts_what_is_attended() -> None:
    def attend(query: Any, key: Any, value: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return flex_attention(query, key, value, alibi)

    given = tensors(kv_heads=4)
    for backend in ("eager", "aot_eager"):
        found = gradsplit.compile(attend, backend=backend, fullgraph=True)(*given)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, attend(*given))


def test_a_mask_that_would_need_a_gradient_is_refused() -> None:
    shift = torch.randn(1, requires_grad=True)
    mask = block_mask(lambda b, h, i, j: i + shift[0] >= j)
    with pytest.raises(Unsupported, match="requires gradients"):
        gradsplit.compile(flex_attention, backend="eager", fullgraph=True)(*tensors(heads=2), block_mask=mask)
