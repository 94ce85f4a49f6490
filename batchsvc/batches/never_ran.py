"""Codes of the error lines that stand for requests which nobody has run: what the end of a batch left undone."""

from __future__ import annotations

from batchsvc.batches.lifecycle import Status

BY_END = {
    Status.CANCELLED: ("batch_cancelled", "This request was not run before the batch was cancelled."),
    Status.EXPIRED: ("batch_expired", "This request could not be executed before the completion window expired."),
    Status.COMPLETED: (
        "unit_unreadable",
        "The stored work of this request is damaged and could not be rebuilt from the input file.",
    ),
}
"""What a batch that ended so says of its lines without a result: code and message."""
CODES = frozenset(code for code, _ in BY_END.values())
