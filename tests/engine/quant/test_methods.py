"""GPTQ and AWQ are never worse than rounding on what they look at, and GPTQ does what its derivation says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.errors import ModelError
from engine.quant.awq import clipped, scaled_moments, search_scale
from engine.quant.gptq import DAMPING, gptq
from engine.quant.groups import Scheme, grid, output_error, round_to_nearest
from tests.engine.quant.problems import Problem, make_problem, problems

INT4 = Scheme(bits=4, group=32)


@settings(max_examples=40, deadline=None)
@given(problems, st.booleans())
def test_gptq_changes_no_output_more_than_rounding(problem: Problem, act_order: bool) -> None:
    weight, hessian, scheme = problem.weight, problem.hessian, problem.scheme
    found = gptq(weight, hessian, scheme, act_order=act_order)
    least = output_error(round_to_nearest(weight, scheme), weight, hessian)
    assert (output_error(found, weight, hessian) <= least * (1 + 1e-9)).all()
    assert found.codes.max() <= scheme.top


@pytest.mark.parametrize("act_order", [True, False])
def test_gptq_changes_outputs_much_less_where_inputs_go_together(act_order: bool) -> None:
    weight, _, scheme = problem = make_problem(1, 16, 4, INT4, tokens=60)
    error = output_error(gptq(weight, problem.hessian, scheme, act_order=act_order), weight, problem.hessian).sum()
    assert error < 0.5 * output_error(round_to_nearest(weight, scheme), weight, problem.hessian).sum()


@settings(max_examples=20, deadline=None)
@given(problems, st.booleans())
def test_gptq_is_rounding_where_inputs_have_nothing_in_common(problem: Problem, act_order: bool) -> None:
    """No column can make up for another, in whatever order they come; so each code must come back to its place."""
    found = gptq(problem.weight, problem.hessian.diagonal().diag(), problem.scheme, act_order=act_order)
    rounded = round_to_nearest(problem.weight, problem.scheme)
    assert torch.equal(found.codes, rounded.codes)
    assert torch.equal(found.scale, rounded.scale)


@pytest.mark.parametrize("act_order", [True, False])
def test_gptq_is_optimal_brain_surgery_in_a_fixed_order(act_order: bool) -> None:
    """The paper's starting point, column by column with H's inverse eliminated each time: slow, and plain to see."""
    problem = make_problem(2, 5, 2, INT4, tokens=500)
    found = gptq(problem.weight, problem.hessian, INT4, act_order=act_order)
    slow = surgery(problem.weight.double(), problem.hessian.double(), act_order)
    assert torch.allclose(found.dequantized().double(), slow, atol=1e-5)


def surgery(weight: Tensor, hessian: Tensor, act_order: bool) -> Tensor:
    size = len(hessian)
    inverse = (hessian + DAMPING * hessian.diagonal().mean() * torch.eye(size, dtype=torch.float64)).inverse()
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(size)
    rest, done = weight.clone(), weight.clone()
    scale, zero = grid(weight.float().view(len(weight), -1, 32), INT4)
    for step, column in enumerate(order.tolist()):
        if not act_order and step % 32 == 0:
            scale[:, column // 32], zero[:, column // 32] = grid(rest[:, column : column + 32].float(), INT4)
        s, z = scale[:, column // 32].double(), zero[:, column // 32].double()
        done[:, column] = (((rest[:, column] / s).round() + z).clamp(0, 15) - z) * s
        error = (rest[:, column] - done[:, column]) / inverse[column, column]
        rest -= torch.outer(error, inverse[column])
        inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return done


def test_gptq_lives_with_channels_that_are_never_used_and_refuses_what_is_no_number() -> None:
    problem = make_problem(3, 4, 2, INT4)
    problem.inputs[:, 5:40] = 0
    assert gptq(problem.weight, problem.hessian, INT4).dequantized().isfinite().all()
    assert gptq(problem.weight, torch.zeros_like(problem.hessian), INT4).dequantized().isfinite().all()
    with pytest.raises(ModelError, match="aren't numbers"):
        gptq(problem.weight, problem.hessian * float("nan"), INT4)


@settings(max_examples=30, deadline=None)
@given(problems)
def test_awq_scales_and_clips_only_where_outputs_change_less(problem: Problem) -> None:
    weight, hessian, scheme = problem.weight, problem.hessian, problem.scheme
    scale = search_scale(weight, hessian, problem.inputs.abs().mean(0), scheme)
    assert (scale > 0).all() and scale.isfinite().all()

    def error(by: Tensor) -> float:
        found = round_to_nearest(weight * by, scheme)
        return float(output_error(found, weight * by, scaled_moments(hessian, by)).sum())

    rounded = round_to_nearest(weight, scheme)
    slack = 1e-5 * float((rounded.dequantized() - weight).square().sum() * hessian.trace())  # searched in float32
    assert error(scale) <= error(torch.ones_like(scale)) + slack
    least = output_error(round_to_nearest(weight, scheme), weight, hessian)
    assert (output_error(clipped(weight, hessian, scheme), weight, hessian) <= least * (1 + 1e-9)).all()


def test_awq_keeps_what_large_inputs_read() -> None:
    problem = make_problem(4, 16, 2, INT4)
    problem.inputs[:, 7] = problem.inputs.norm(dim=1) * 3
    scale = search_scale(problem.weight, problem.hessian, problem.inputs.abs().mean(0), INT4)
    assert scale.argmax() == 7
    assert scale[7] > 2 * scale.median()
