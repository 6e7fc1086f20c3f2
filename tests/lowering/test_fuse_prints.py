"""What the compiler makes of the programs that training spends its time in, as printed loops."""

from __future__ import annotations

from textwrap import dedent

import torch
import torch.nn.functional as F

from gradsplit.compile_core.ir.loops import LoopProgram
from gradsplit.compile_core.ir.print_loops import print_nest, print_program
from tests.lowering.lowering_harness import check, check_module, nests, trace_joint


def _printed(program: LoopProgram) -> str:
    return "".join(print_nest(nest) + "\n" for nest in nests(program))


def _is(program: LoopProgram, expected: str) -> None:
    assert _printed(program) == dedent(expected).lstrip("\n"), "\n" + _printed(program)


def test_layer_norm() -> None:
    program = check(
        lambda x, w, b: F.layer_norm(x, (8,), w, b), torch.randn(2, 5, 8), torch.randn(8), torch.randn(8)
    )
    _is(
        program,
        """
        nest fused_mean_sub_mul_add_rsqrt_0 [i:10 | j:8]
          %0 = load arg0_1[8*i + j] float32
          %1 = reduce_sum(%0) float32
          %2 = 0.125 float32
          %3 = mul(%1, %2) float32
          %4 = sub(%0, %3) float32
          %5 = mul(%4, %4) float32
          %6 = reduce_sum(%5) float32
          %7 = mul(%2, %6) float32
          %8 = mul(%3, %3) float32
          %9 = 0.0 float32
          %10 = mul(%8, %9) float32
          %11 = add(%7, %10) float32
          %12 = 9.999999747378752e-06 float32
          %13 = add(%11, %12) float32
          %14 = rsqrt(%13) float32
          %15 = mul(%4, %14) float32
          %16 = load arg1_1[j] float32
          %17 = mul(%15, %16) float32
          %18 = load arg2_1[j] float32
          %19 = add(%17, %18) float32
          add_2[8*i + j] = %19
        """,
    )


def test_bias_and_gelu() -> None:
    program = check(lambda x, b: F.gelu(x + b), torch.randn(3, 4), torch.randn(4))
    _is(
        program,
        """
        nest fused_add_mul_erf_0 [i:3, j:4]
          %0 = load arg0_1[4*i + j] float32
          %1 = load arg1_1[j] float32
          %2 = add(%0, %1) float32
          %3 = 0.5 float32
          %4 = mul(%2, %3) float32
          %5 = 0.7071067690849304 float32
          %6 = mul(%2, %5) float32
          %7 = erf(%6) float32
          %8 = 1.0 float32
          %9 = add(%7, %8) float32
          %10 = mul(%4, %9) float32
          mul_2[4*i + j] = %10
        """,
    )


def test_softmax() -> None:
    _is(
        check(lambda x: F.softmax(x, -1), torch.randn(3, 2, 4)),
        """
        nest fused_amax_sub_exp_sum_reciprocal_mul_0 [i:6 | j:4]
          %0 = load arg0_1[4*i + j] float32
          %1 = reduce_max(%0) float32
          %2 = sub(%0, %1) float32
          %3 = exp(%2) float32
          %4 = reduce_sum(%3) float32
          %5 = reciprocal(%4) float32
          %6 = mul(%3, %5) float32
          mul[4*i + j] = %6
        """,
    )


def test_layer_norm_backward() -> None:
    def gradients(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, g: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, w, b)]
        return torch.autograd.grad(F.layer_norm(leaves[0], (8,), *leaves[1:]), leaves, g)

    inputs = torch.randn(6, 8), torch.randn(8), torch.randn(8), torch.randn(6, 8)
    _is(
        check_module(trace_joint(gradients, *inputs), inputs, 1e-4),
        """
        nest fused_mean_sub_mul_add_rsqrt_sum_0 [i:6 | j:8]
          %0 = load arg0_1[8*i + j] float32
          %1 = reduce_sum(%0) float32
          %2 = 0.125 float32
          %3 = mul(%1, %2) float32
          mean[i] = %3
          %5 = sub(%0, %3) float32
          %6 = mul(%5, %5) float32
          %7 = reduce_sum(%6) float32
          %8 = mul(%2, %7) float32
          %9 = mul(%3, %3) float32
          %10 = 0.0 float32
          %11 = mul(%9, %10) float32
          %12 = add(%8, %11) float32
          %13 = 9.999999747378752e-06 float32
          %14 = add(%12, %13) float32
          %15 = rsqrt(%14) float32
          rsqrt[i] = %15
          %17 = load arg3_1[8*i + j] float32
          %18 = load arg1_1[j] float32
          %19 = mul(%17, %18) float32
          %20 = reduce_sum(%19) float32
          %21 = mul(%5, %15) float32
          %22 = mul(%19, %21) float32
          %23 = reduce_sum(%22) float32
          %24 = mul(%21, %23) float32
          %25 = add(%20, %24) float32
          %26 = mul(%2, %25) float32
          %27 = sub(%19, %26) float32
          %28 = mul(%15, %27) float32
          mul_10[8*i + j] = %28
        nest fused_sub_mul_sum_1 [i:8 | j:6]
          %0 = load arg3_1[i + 8*j] float32
          %1 = load arg0_1[i + 8*j] float32
          %2 = load mean[j] float32
          %3 = sub(%1, %2) float32
          %4 = load rsqrt[j] float32
          %5 = mul(%3, %4) float32
          %6 = mul(%0, %5) float32
          %7 = reduce_sum(%6) float32
          sum_3[i] = %7
          %9 = reduce_sum(%0) float32
          sum_4[i] = %9
        """,
    )


def test_whole_program() -> None:
    program = check(lambda x, w: (x @ w.t()).relu().sum(1), torch.randn(3, 4), torch.randn(2, 4))
    assert print_program(program) == dedent(
        """\
        program program(arg0_1, arg1_1)
          input arg0_1: float32[3, 4] cpu
          input arg1_1: float32[2, 4] cpu
          temporary mm: float32[3, 2] cpu
          temporary sum_1: float32[3] cpu
          _ = aten.mm.out(arg0_1(3,4)@(4,1), arg1_1(4,2)@(1,4), out=mm(3,2)@(2,1))
          nest fused_relu_sum_1 [i:3 | j:2]
            %0 = load mm[2*i + j] float32
            %1 = 0.0 float32
            %2 = maximum(%0, %1) float32
            %3 = reduce_sum(%2) float32
            sum_1[i] = %3
          return sum_1(3)@(1)
        """
    )
