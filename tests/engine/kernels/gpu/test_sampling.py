"""Ids on the device: the best of each row, and draws with the same filters as engine/sample."""

import pytest
import torch

from engine.kernels import reference
from engine.kernels.gpu import sampling

WIDTH = 5000  # three chunks


def best(logits: torch.Tensor, masks: torch.Tensor | None = None) -> list[int]:
    ids = torch.full((len(logits),), 12345)
    given = torch.zeros(1, 1, dtype=torch.int32) if masks is None else masks
    sampling.best_rows[(len(logits),)](
        logits, given, ids, logits.shape[1], 0 if masks is None else len(masks), given.shape[1], SIZE=sampling.CHUNK
    )
    return ids.tolist()


def test_best_is_the_first_of_equals_and_says_where_a_value_is_not_finite() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, WIDTH)
    logits[0, [70, 3000, 4999]] = 9.0
    logits[1, 4] = float("nan")
    logits[2, 4] = float("inf")
    logits[3, :] = 1.0
    assert best(logits) == reference.best(logits).tolist()


@pytest.mark.parametrize("words", [157, 150])
def test_best_of_what_masks_allow(words: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, WIDTH)
    masks = torch.randint(-(2**31), 2**31, (4, words), dtype=torch.int64).to(torch.int32)
    masks[1] = 0
    masks[2] = 0
    masks[2, 3] = 1 << 30
    assert best(logits, masks) == reference.best(logits, masks).tolist()


def draw(
    logits: torch.Tensor, draws: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, masks=None
) -> list[int]:
    count = len(draws)
    ids = torch.full((count,), 12345)
    numbers = torch.tensor([[temperature, top_p, min_p, x] for x in draws.tolist()])
    given = torch.zeros(1, 1, dtype=torch.int32) if masks is None else masks
    sampling.sample_rows[(count,)](
        logits.expand(count, -1).contiguous(), given, ids, numbers, torch.full((count,), top_k, dtype=torch.int32),
        logits.shape[-1], 0 if masks is None else len(masks), given.shape[1],
        SIZE=256 if logits.shape[-1] < 300 else 512,
    )  # fmt: skip
    return ids.tolist()


def kept(logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """Probabilities after the filters, by sorting."""
    shares = ((logits.double() - logits.max()) / temperature).exp()
    shares[shares < min_p * (1 - 1e-6)] = 0
    if top_k:
        shares[shares < shares.topk(top_k).values[-1]] = 0
    values, order = shares.sort(descending=True)
    before = values.cumsum(0) - values
    shares[order[before >= top_p * shares.sum()]] = 0
    return shares / shares.sum()


FILTERS = [{}, {"top_k": 5}, {"min_p": 0.2}, {"top_k": 40, "top_p": 0.8, "temperature": 1.7}]


@pytest.mark.parametrize("filters", FILTERS)
def test_draws_follow_what_the_filters_keep(filters: dict[str, float]) -> None:
    """The n-th of n evenly spread draws is where the cumulative distribution passes it: no chance is in this."""
    torch.manual_seed(2)
    logits = torch.randn(200) * 2
    draws = (torch.arange(4) + 0.5) / 4
    wanted = torch.searchsorted(kept(logits, **filters).cumsum(0), draws.double(), right=True).tolist()
    found = draw(logits, draws, **filters)
    assert sum(a != b for a, b in zip(found, wanted, strict=True)) <= 1, "float32 may cross a boundary once"


def test_draws_of_what_masks_allow() -> None:
    """The first rows have masks, and draw as if nothing else were there; the last one has none."""
    torch.manual_seed(3)
    logits = torch.randn(200)
    masks = torch.zeros(2, 7, dtype=torch.int32)
    masks[0, [1, 5]] = 0x00010100
    draws = torch.tensor([0.3, 0.5, 0.7])
    allowed = torch.full((200,), float("-inf"))
    for token in (40, 48, 168, 176):
        allowed[token] = logits[token]
    found = draw(logits, draws, masks=masks, top_k=3)
    assert found[0] == torch.searchsorted(kept(allowed, top_k=3).cumsum(0), 0.3).item()
    assert found[1] == -1, "nothing may come"
    assert found[2:] == draw(logits, draws[2:], top_k=3)


def test_a_draw_at_the_end_is_a_token_that_may_come() -> None:
    logits = torch.full((300,), float("-inf"))
    logits[[3, 250]] = 0.0
    assert draw(logits, torch.tensor([0.0, 0.499, 0.5, 0.99999994])) == [3, 3, 250, 250]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_no_id_where_a_value_is_not_finite(poison: float) -> None:
    logits = torch.randn(300)
    logits[17] = poison
    assert draw(logits, torch.tensor([0.5])) == [-1]
    assert draw(torch.full((300,), float("-inf")), torch.tensor([0.5])) == [-1]
