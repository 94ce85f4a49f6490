"""The layout of the bucket: one function a kind of object, so that no key is put together anywhere else.

Keys are made of our own ids, never of a user's text. Objects are immutable: a key that carries an epoch is written by
the owner of that epoch alone.
"""

from __future__ import annotations

PROBE = "probe/ready"  # written by the readiness check
INPUTS = "in/"  # prefix of all inputs
UPLOADS = "up/"  # prefix of the parts of uploads that aren't complete
BATCHES = "batch/"  # prefix of all that belongs to batches
_PLAIN = ".plain"
OUTPUT_KINDS = ("output", "error")


def input_file(project_id: str, file_id: str) -> str:
    """An uploaded file."""
    return f"in/{project_id}/{file_id}"


def of_upload(project_id: str, upload_id: str) -> str:
    """Prefix of the parts of an upload."""
    return f"up/{project_id}/{upload_id}/"


def upload_part(project_id: str, upload_id: str, part_id: str) -> str:
    """A part of an upload that isn't complete."""
    return f"up/{project_id}/{upload_id}/{part_id}"


def plain_input(input_key: str) -> str:
    """The lines that an upload in another format was decoded to."""
    return f"{input_key}{_PLAIN}"


def input_of(key: str) -> str:
    """The upload that an object belongs to: itself, or that which it was decoded from."""
    return key.removesuffix(_PLAIN)


def of_batch(batch_id: str) -> str:
    """Prefix of all objects of a batch or a quote."""
    return f"{BATCHES}{batch_id}/"


def unit(batch_id: str, plan_epoch: int, no: int) -> str:
    """The tokenized requests of one unit (Parquet)."""
    return f"batch/{batch_id}/unit/{plan_epoch}-{no}.parquet"


def part(batch_id: str, epoch: int, part_id: str) -> str:
    """Finished lines of one unit (JSONL, zstd)."""
    return f"batch/{batch_id}/part/{epoch}-{part_id}.jsonl.zst"


def progress_of(batch_id: str, unit_id: str, epoch: int, no: int) -> str:
    """Unfinished sequences of one unit (JSON, zstd), as its owner of this epoch saved them for the `no`-th time."""
    return f"batch/{batch_id}/progress/{unit_id}/{epoch}-{no}.json.zst"


def window_lines(batch_id: str, plan_epoch: int, no: int) -> str:
    """Line numbers and custom_ids of a window, for the lines that never ran."""
    return f"batch/{batch_id}/window/{plan_epoch}-{no}.lines"


def output(batch_id: str, fin_epoch: int, kind: str) -> str:
    """A published result file; `kind` is output or error."""
    return f"batch/{batch_id}/out/{fin_epoch}/{kind}.jsonl"


def batch_of(key: str) -> str | None:
    """The batch that an object belongs to, or None for an input."""
    kind, _, rest = key.partition("/")
    return rest.partition("/")[0] if kind == "batch" else None
