"""The quality report: formats of one or several models against their references, row by row, with verdicts.

A row measures weights, with KV plain, or KV, against the same model without: what is quantized in both ways is served
if each is within its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.config import Formats
from engine.errors import ConfigError, ModelError
from engine.load.fetch import KNOWN_MODELS, locate
from engine.load.meta import ModelMeta, read_meta
from engine.load.origin import Origin, origin_of
from engine.load.quantization import Quantization, stored_format
from engine.load.weights import open_model
from engine.memory.plan import available_bytes
from engine.quality import kept
from engine.quality.figures import TAIL_SHARES, Quality
from engine.quality.judge import BYTES_PER_PARAMETER, PLAIN, beside, found_origin, quantization_of
from engine.quality.limits import Limit, Part, kv_limit, rounded, weight_limit
from engine.quality.measure import DEFAULT_TOKENS, Reference

WEIGHTS, KV = "weights", "kv"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model to report on, and the one that its weights are held against."""

    name: str
    meta: ModelMeta
    stored: Quantization | None
    weight_formats: tuple[str, ...]
    origin: Origin | None
    base: Path
    base_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison: formats of a model against the reference at `base`; `of` says what of them it tells."""

    subject: Subject
    formats: Formats
    of: str
    base: Path
    base_name: str

    @property
    def limit(self) -> Limit | None:
        if self.of == WEIGHTS:
            return weight_limit(self.formats.weights, self.subject.stored)
        return kv_limit(self.formats.kv)

    @property
    def decides(self) -> bool:
        """Whether this is what the model is judged by when it is served."""
        if self.of == KV or self.subject.stored is None:
            return self.base == self.subject.meta.path
        return self.subject.origin is None or self.subject.origin.digest == read_meta(self.base).digest


def evaluate(
    models: Sequence[str],
    *,
    against: str | None,
    weight_formats: Sequence[str],
    kv_formats: Sequence[str],
    file: Path | None = None,
    tokens: int = DEFAULT_TOKENS,
    say: Say = lambda sentence: None,
) -> dict[str, Any]:
    """Measures all rows; the report as JSON. What is measured on our own text is kept, and served by from then on.

    Raises EngineError in one sentence.
    """
    subjects = [subject_of(model, against, weight_formats, say) for model in dict.fromkeys(models)]
    rows = [row for subject in subjects for row in rows_of(subject, kv_formats)]
    is_ours = file is None and tokens == DEFAULT_TOKENS
    found: dict[Row, Quality] = {}
    for base in dict.fromkeys(row.base for row in rows):
        mine = [row for row in rows if row.base == base]
        _check_room(mine)
        say(f"Reading the text with {mine[0].base_name} in float32.")
        reference = Reference(str(base), file=file, tokens=tokens, say=say)
        for row in mine:
            say(f"Measuring {row.subject.name} in {row.formats.weights}, KV in {row.formats.kv}.")
            found[row] = reference.compare(str(row.subject.meta.path), *row.formats)
            if is_ours and row.decides:
                kept.store(row.subject.meta, found[row])
        del reference  # before the next one is there: two may be more than there is room for
    return {
        "object": "model.quality",
        "text": "our held-out text" if file is None else str(file),
        "rows": [_document(row, found[row]) for row in rows],
    }


def subject_of(model: str, against: str | None, weight_formats: Sequence[str], say: Say) -> Subject:
    """A model by name, path or hub name. Raises ModelError for a quantized one without a model it was made from."""
    path = locate(model, say=say)
    meta, stored, kept_format = read_meta(path), quantization_of(path), stored_format(path)
    origin = None if stored is None else origin_of(path)
    base, base_name = meta.path, model
    if against is not None:
        base, base_name = locate(against, say=say), against
    elif origin is not None:
        base, base_name = found_origin(origin, say), origin.model
    if stored is not None and read_meta(base).digest == meta.digest:
        raise ModelError(
            f"{model} is quantized, so it is no measure of itself: name the model that it was made from with --against."
        )
    return Subject(
        name=_short(model),
        meta=meta,
        stored=stored,
        weight_formats=(kept_format,) if kept_format else tuple(weight_formats),
        origin=origin,
        base=base,
        base_name=_short(base_name),
    )


def rows_of(subject: Subject, kv_formats: Sequence[str]) -> Iterator[Row]:
    """Each weight format with plain KV, and each other KV format."""

    def row(weights: str, kv: str, of: str) -> Row:
        is_own = of == KV
        return Row(
            subject=subject,
            formats=Formats(weights, kv),
            of=of,
            base=subject.meta.path if is_own else subject.base,
            base_name=subject.name if is_own else subject.base_name,
        )

    for weights in subject.weight_formats:
        yield row(weights, PLAIN, WEIGHTS)
    for kv in kv_formats:
        if kv != PLAIN:
            yield row(beside(Formats(subject.weight_formats[0], kv), subject.stored).weights, kv, KV)


def _check_room(rows: Sequence[Row]) -> None:
    for path in dict.fromkeys(row.subject.meta.path for row in rows):
        config, _ = open_model(path)
        needed, free = BYTES_PER_PARAMETER * config.num_parameters, available_bytes()
        if needed > free:
            raise ConfigError(
                f"Comparing {path} with its reference in float32 takes {needed / 1e9:,.1f} GB of memory, and "
                f"{free / 1e9:,.1f} GB are free; a machine with more memory can do it."
            )


def _document(row: Row, quality: Quality) -> dict[str, Any]:
    return {
        "model": row.subject.name,
        "digest": row.subject.meta.digest,
        "weight_format": row.formats.weights,
        "kv_format": row.formats.kv,
        "of": row.of,
        "against": row.base_name,
        "against_digest": quality.against,
        "tokens": quality.tokens,
        "kl": rounded(quality.kl, 6),
        "kl_error": rounded(quality.kl_error, 6),
        "kl_tail": [
            {"share": share, "kl": rounded(kl, 6)} for share, kl in zip(TAIL_SHARES, quality.tail, strict=True)
        ],
        "top1": rounded(quality.top1, 4),
        "perplexity": rounded(quality.reference_perplexity * quality.perplexity, 4),
        "reference_perplexity": rounded(quality.reference_perplexity, 4),
        "perplexity_ratio": rounded(quality.perplexity, 5),
        "perplexity_error": rounded(quality.perplexity_error, 5),
        "is_fused": quality.is_fused,
        "limit": None if row.limit is None else asdict(row.limit),
        "verdict": str(Part(format="", limit=row.limit, quality=quality).word),
    }


def _short(model: str) -> str:
    """What a model is called in a table."""
    return model if model in KNOWN_MODELS or model.startswith("hf:") else Path(model).name
