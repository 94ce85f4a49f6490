"""Figures of quality that no model was run for."""

from __future__ import annotations

from typing import Any

from engine.quality.figures import TAIL_SHARES, Quality

AGAINST = "ab" * 32


def made_quality(**changes: Any) -> Quality:
    """Figures within every limit, but for what is changed."""
    values: dict[str, Any] = {
        "weight_format": "int8",
        "kv_format": "bf16",
        "against": AGAINST,
        "tokens": 1000,
        "kl": 0.001,
        "kl_error": 0.0001,
        "tail": tuple(0.001 * (1 + index) for index in range(len(TAIL_SHARES))),
        "top1": 0.98,
        "perplexity": 1.001,
        "perplexity_error": 0.0005,
        "reference_perplexity": 20.0,
        "is_fused": True,
    }
    return Quality(**(values | changes))
