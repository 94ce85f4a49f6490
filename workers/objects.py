"""What a worker stores of a unit: finished lines as a part, unfinished sequences for whoever takes over."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from batchsvc import ids
from batchsvc.batches import line_set, part_file, resume_file
from batchsvc.batches.resume_file import Unfinished
from batchsvc.batches.resume_queries import SavedSequences
from batchsvc.batches.unit_queries import ClaimedUnit, NewPart
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectStore
from workers.translate import FinishedLine


def store_part(store: ObjectStore, unit: ClaimedUnit, lines: Sequence[FinishedLine]) -> NewPart:
    """Store finished lines under a new key; they don't count yet."""
    part_id = ids.part_id()
    key = keys.part(unit.batch_id, unit.epoch, part_id)
    parts = [finished.line for finished in lines]
    data = part_file.encode(parts)
    store.put(key, data)
    bits = 0
    for finished in lines:
        bits |= 1 << finished.bit
    return NewPart(
        id=part_id,
        s3_key=key,
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        bitmap=bits.to_bytes((unit.num_lines + 7) // 8, "little"),
        line_nos=line_set.encode(line.line_no for line in parts),
        lines_ok=sum(line.is_ok for line in parts),
        lines_err=sum(not line.is_ok for line in parts),
        num_answers=sum(finished.num_answers for finished in lines if finished.line.is_ok),
        est_tokens=sum(finished.est_tokens for finished in lines),
        input_tokens=sum(line.input_tokens for line in parts),
        cached_tokens=sum(line.cached_tokens for line in parts),
        output_tokens=sum(line.output_tokens for line in parts),
        cost_nanos=sum(line.cost_nanos for line in parts),
        standard_nanos=sum(line.standard_nanos for line in parts),
        over_budget=sum(finished.is_over_budget for finished in lines),
    )


def store_sequences(store: ObjectStore, unit: ClaimedUnit, sequences: Sequence[Unfinished], no: int) -> SavedSequences:
    """Store unfinished sequences, for the `no`-th time under this epoch; the unit's row doesn't name them yet."""
    key = keys.progress_of(unit.batch_id, unit.id, unit.epoch, no)
    data = resume_file.encode(sequences)
    store.put(key, data)
    return counted(sequences, key=key, sha256=hashlib.sha256(data).hexdigest())


def counted(sequences: Sequence[Unfinished], *, key: str | None = None, sha256: str | None = None) -> SavedSequences:
    """How much the sequences are, stored or not."""
    num_tokens = sum(one.num_tokens for one in sequences)
    return SavedSequences(num_lines=len(sequences), num_tokens=num_tokens, key=key, sha256=sha256)


def load_sequences(store: ObjectStore, unit: ClaimedUnit) -> dict[int, Unfinished]:
    """What an earlier owner left unfinished, by line. Raises ValueError or ServiceError; to do without is as right."""
    if unit.resume_key is None:
        return {}
    return resume_file.decode(store.get(unit.resume_key), unit.resume_sha256)
