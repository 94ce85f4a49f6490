"""Random problems: weights, and inputs some of whose channels are large and go together, as in real models."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.quant.groups import Scheme


class Problem(NamedTuple):
    weight: Tensor
    inputs: Tensor
    scheme: Scheme

    @property
    def hessian(self) -> Tensor:
        return self.inputs.t() @ self.inputs


def make_problem(seed: int, rows: int, groups: int, scheme: Scheme, tokens: int = 200) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    columns = groups * scheme.group
    mixed = torch.randn(columns, columns, generator=generator) / columns**0.5
    spread = torch.exp(torch.randn(columns, generator=generator))
    inputs = torch.randn(tokens, columns, generator=generator) @ (mixed + torch.eye(columns)) * spread
    return Problem(torch.randn(rows, columns, generator=generator), inputs, scheme)


schemes = st.builds(
    Scheme,
    bits=st.sampled_from((4, 8)),
    group=st.sampled_from((32, 64)),
    symmetric=st.booleans(),
    scale_dtype=st.sampled_from((torch.float16, torch.bfloat16)),
)
problems = st.builds(
    make_problem,
    seed=st.integers(0, 1 << 32),
    rows=st.integers(1, 6),
    groups=st.integers(1, 3),
    scheme=schemes,
    tokens=st.sampled_from((1, 40, 300)),
)
