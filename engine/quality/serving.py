"""The formats that a model is served in, with the verdict on them: what workers and the bench ask before they load it.

`auto` means int8, of weights and of KV, where each stays within its limit on this model, else bf16; and the weights of
a quantized checkpoint as they are. A format over its limit is refused, unless that is forced.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.config import Formats
from engine.errors import ConfigError, QualityError
from engine.load.quantization import stored_format
from engine.quality.judge import PLAIN, Judge
from engine.quality.limits import Part, Verdict, Word, shown_change

AUTO = "auto"
_NARROW = "int8"

Say = Callable[[str], None]


def resolve_formats(
    model: str, weight_format: str, kv_format: str, say: Say, *, force: bool = False
) -> tuple[Formats, Verdict]:
    """The formats to use for those asked for, and the verdict on them.

    Raises QualityError for a format that is over its limit, unless forced.
    """
    judge = Judge(model, say)
    formats = _chosen(judge, weight_format, kv_format, say)
    verdict = judge.verdict(formats)
    if verdict.word is Word.OVER and not force:
        raise QualityError(refusal(judge, verdict))
    if verdict.word is Word.OVER:
        say(f"{judge.meta.name} is served {_over(verdict)}: that was forced.")
    return formats, verdict


def refusal(judge: Judge, verdict: Verdict) -> str:
    """Why formats that are over their limits aren't served, what would be, and how to force them."""
    return (
        f"{judge.meta.name} isn't served {_over(verdict)}: {_way_out(judge, verdict)}, "
        "or force it with --force-format or BATCHSVC_FORCE_FORMAT=true."
    )


def _chosen(judge: Judge, weight_format: str, kv_format: str, say: Say) -> Formats:
    plain_kv = PLAIN if kv_format == AUTO else kv_format
    if weight_format != AUTO:
        return Formats(weight_format, "float32" if (weight_format, kv_format) == ("float32", AUTO) else plain_kv)
    if stored := stored_format(judge.meta.path):
        return Formats(stored, plain_kv)
    narrow = Formats(_NARROW, _NARROW)
    try:
        if not _is_better(judge, judge.weights(_NARROW), "", say):
            return Formats(PLAIN, plain_kv)
        has_narrow_kv = kv_format == AUTO and _is_better(judge, judge.kv(narrow), "with KV ", say)
    except ConfigError as error:
        say(f"{judge.meta.name} runs in bf16: {error}")
        return Formats(PLAIN, plain_kv)
    return narrow if has_narrow_kv else Formats(_NARROW, plain_kv)


def _is_better(judge: Judge, part: Part, what: str, say: Say) -> bool:
    """Whether a format is within its limit, and faster here."""
    if part.word is Word.OVER:
        say(f"{judge.meta.name} runs {what}in bf16, not {_figures(part, what)}.")
    if part.word is not Word.WITHIN or part.quality is None:
        return False
    if not part.quality.is_fused:
        say(f"{judge.meta.name} runs {what}in bf16: {part.format} isn't faster here, without compiled kernels for it.")
    return part.quality.is_fused


def _over(verdict: Verdict) -> str:
    """Which formats are over their limits, and by how much."""
    parts = ((verdict.weights, ""), (verdict.kv, "with KV "))
    return " and ".join(_figures(part, what) for part, what in parts if part.word is Word.OVER)


def _figures(part: Part, what: str) -> str:
    quality, limit = part.quality, part.limit
    assert limit is not None, "what is over a limit has one"
    assert quality is not None, "and was measured"
    return (
        f"{what}in {part.format}, where its mean KL is {quality.kl:.4f} (at most {limit.kl:g}) "
        f"and its perplexity {shown_change(quality.perplexity)} (at most {shown_change(limit.perplexity)})"
    )


def _way_out(judge: Judge, verdict: Verdict) -> str:
    if verdict.weights.word is not Word.OVER:
        return "KV in bf16 would do (BATCHSVC_KV_FORMAT=bf16)"
    if judge.stored is None:
        return "bf16 would do (BATCHSVC_WEIGHT_FORMAT=bf16)"
    base = "the model that it was made from" if judge.origin is None else judge.origin.model
    return f"run {base}, or quantize that in {'8 bits' if judge.stored.bits == 4 else 'another way'}"
