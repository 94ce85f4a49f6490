"""Between rows of a unit file and the engine: a row becomes a Request, a Completion becomes finished lines.

A row is one request, whatever number of lines shares it; its completion fans out to those that aren't done yet.
The bill of a line is made here: cached tokens are the larger of what was planned and what the cache held, so a line
that is run again costs what it was planned to cost, or less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchsvc.batches import answers, budget_queries, part_file
from batchsvc.batches.choices import REASONS, choices_of, warnings_of
from batchsvc.batches.magic import PARAM
from batchsvc.batches.part_file import PartLine
from batchsvc.batches.resume_file import Unfinished
from batchsvc.batches.sampling_body import sampling_params
from batchsvc.batches.unit_file import UnitFile, UnitRow, line_seed
from batchsvc.batches.unit_queries import ClaimedUnit
from batchsvc.money import Rates, format_dollars, line_cost_nanos
from engine.request import Begun, Completion, Expectation, FinishReason, Pooling, Request, SamplingParams
from workers.generated import Generated, joined

# codes of requests that no engine could run
OWN_FAULT = {"context_length_exceeded", "invalid_value", "grammar_not_usable"}
_NEVER_RAN = {budget_queries.CODE}  # only the engine of test mode ends a request so
_SAME_AGAIN = OWN_FAULT | _NEVER_RAN | {"kv_capacity_exceeded", "poison"}  # that another attempt would only repeat


@dataclass(frozen=True, slots=True)
class FinishedLine:
    """A line that has its result, its bit in the unit's done bitmap, and the work that it was predicted to be."""

    bit: int
    line: PartLine
    est_tokens: int = 0
    num_answers: int = 1
    is_over_budget: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRow:
    """A row of a unit that still lacks lines. `members` are (bit, place in the row) of the lines it lacks; `resumed` is
    what an earlier owner generated of its answers."""

    request_id: str
    row: UnitRow
    members: tuple[tuple[int, int], ...]
    resumed: Unfinished | None = None


def open_rows(unit: ClaimedUnit, file: UnitFile, saved: Mapping[int, Unfinished] | None = None) -> Iterator[OpenRow]:
    """The rows that still have to run, in plan order. `saved`: unfinished sequences by the first line of their row."""
    done = int.from_bytes(unit.done_bitmap, "little")
    lacking: dict[int, list[tuple[int, int]]] = {}
    for line in file.lines():
        if not done >> line.bit & 1:
            lacking.setdefault(line.row, []).append((line.bit, line.member))
    for index, members in lacking.items():
        row = file.rows[index]
        yield OpenRow(
            request_id=f"{unit.id}:{unit.epoch}:{index}",
            row=row,
            members=tuple(members),
            resumed=_usable(row, (saved or {}).get(row.line_nos[0])),
        )


def _usable(row: UnitRow, saved: Unfinished | None) -> Unfinished | None:
    """What an earlier owner saved of a row, unless it lacks logprobs that the row asks for."""
    if saved and "logprobs" in row.params and any(len(one.logprobs) < len(one.token_ids) for one in saved.answers):
        return None
    return saved


def to_expectation(unit: ClaimedUnit, file: UnitFile) -> Expectation | None:
    """What later units of the window share with this one: prefixes of its last prompt. None if they share nothing."""
    if not file.prefix_uses:
        return None
    uses = tuple((use.depth_tokens, use.later_units) for use in file.prefix_uses)
    deepest = max(depth for depth, _ in uses)
    return Expectation(prompt_ids=file.rows[-1].prompt_ids[:deepest].tolist(), uses=uses, salt=unit.salt)


def to_request(unit: ClaimedUnit, open_row: OpenRow) -> Request:
    """What the engine runs. Raises RequestError if the parameters can't be run."""
    row, params = open_row.row, open_row.row.params
    if "pooling" in params:
        return Request(
            id=open_row.request_id,
            prompt_ids=row.prompt_ids.tolist(),
            salt=unit.salt,
            params=SamplingParams(max_tokens=1, temperature=0),
            pooling=Pooling(params["pooling"]),
            segments=tuple(params.get("segments", ())),
            magic=params.get(PARAM, ""),
        )
    seed = params.get("seed")
    begun = open_row.resumed.answers if open_row.resumed else (Begun(),)
    return Request(
        id=open_row.request_id,
        prompt_ids=row.prompt_ids.tolist(),
        salt=unit.salt,
        n=row.num_answers,
        params=sampling_params(
            {**params, "max_tokens": row.max_tokens},
            line_seed(unit.batch_id, row.line_nos[0]) if seed is None else seed,
        ),
        resume_ids=begun[0].token_ids if row.num_answers == 1 else (),
        resume_logprobs=begun[0].logprobs if row.num_answers == 1 else (),
        resume_choices=begun if row.num_answers > 1 else (),
        resume_hit_tokens=open_row.resumed.hit_tokens if open_row.resumed else 0,
        magic=params.get(PARAM, ""),
    )


def to_unfinished(open_row: OpenRow, generated: Generated | None) -> Unfinished | None:
    """What the next owner of a row can begin with: what was resumed here, and what was generated since."""
    first = open_row.resumed or generated
    if first is None:
        return None
    answers = joined(open_row.resumed.answers if open_row.resumed else (), generated.answers if generated else ())
    return Unfinished(line_no=open_row.row.line_nos[0], answers=answers, hit_tokens=first.hit_tokens)


def may_run_again(completion: Completion) -> bool:
    """Whether a request failed for a reason of the engine, so that another attempt may do."""
    return completion.finish_reason is FinishReason.ERROR and completion.error_code not in _SAME_AGAIN


def to_lines(
    unit: ClaimedUnit, open_row: OpenRow, completion: Completion, *, fingerprint: str | None = None
) -> list[FinishedLine]:
    """The finished lines of a completion that is an answer or an error; an aborted one has none. `fingerprint` says
    what gave the answer."""
    if completion.finish_reason is FinishReason.ABORT:
        return []
    if completion.finish_reason is FinishReason.ERROR:
        code = completion.error_code or "engine_error"
        says = completion.error_message or "The engine could not run this request."
        status = None if code in _NEVER_RAN else 400 if code in OWN_FAULT else 500
        return to_errors(unit, open_row, code=code, message=says, status=status)
    row = open_row.row
    return [
        FinishedLine(
            bit,
            _answer(unit, row, member, completion, fingerprint),
            row.est_tokens(member),
            row.num_answers,
        )
        for bit, member in open_row.members
    ]


def to_errors(
    unit: ClaimedUnit, open_row: OpenRow, *, code: str, message: str, status: int | None, param: str | None = None
) -> list[FinishedLine]:
    """Error lines of a row that can't be run. Without a `status` nobody has tried to."""
    row = open_row.row
    return [
        FinishedLine(
            bit,
            PartLine(
                line_no=row.line_nos[member],
                is_ok=False,
                row=part_file.error_row(
                    batch_id=unit.batch_id,
                    line_no=row.line_nos[member],
                    custom_id=row.custom_ids[member],
                    code=code,
                    message=message,
                    param=param,
                    status=status,
                ),
            ),
            row.est_tokens(member),
            is_over_budget=code == budget_queries.CODE,
        )
        for bit, member in open_row.members
    ]


def to_over_budget(unit: ClaimedUnit, open_row: OpenRow, most_nanos: int) -> list[FinishedLine]:
    """Error lines of a row that there is no money for."""
    says = f"It was not run: it can cost {format_dollars(most_nanos)}, which is more than its batch may still spend."
    return to_errors(unit, open_row, code=budget_queries.CODE, message=says, status=None)


def _answer(unit: ClaimedUnit, row: UnitRow, member: int, completion: Completion, fingerprint: str | None) -> PartLine:
    usage = completion.usage
    planned = row.cached_tokens(member)
    cached = min(max(planned, usage.hit_tokens), usage.prompt_tokens)
    tokens = {"input_tokens": usage.prompt_tokens, "cached_tokens": cached, "output_tokens": usage.output_tokens}
    cost = line_cost_nanos(_rates(unit.rates, "tier"), **tokens)
    ident = f"{unit.batch_id}:{row.line_nos[member]}"
    warnings = warnings_of(completion.answers)
    body = answers.body_of(
        answers.Answered(
            line_ident=part_file.line_ident(unit.batch_id, row.line_nos[member]),
            model=unit.model_id,
            created_s=unit.created_s,
            params=row.params,
            text=completion.text,
            finish_reason=REASONS.get(completion.finish_reason, "stop"),
            vectors=completion.vectors,
            choices=completion.answers,
            system_fingerprint=fingerprint,
            **tokens,
            cost_nanos=cost,
        )
    )
    return PartLine(
        line_no=row.line_nos[member],
        is_ok=True,
        **tokens,
        cost_nanos=cost,
        standard_nanos=line_cost_nanos(_rates(unit.rates, "standard"), **tokens),
        steps=usage.steps,
        row=part_file.answer_row(
            batch_id=unit.batch_id,
            line_no=row.line_nos[member],
            custom_id=row.custom_ids[member],
            body=body,
            warnings=warnings,
        )
        if body is not None
        else part_file.success_row(
            batch_id=unit.batch_id,
            line_no=row.line_nos[member],
            custom_id=row.custom_ids[member],
            model=unit.model_id,
            created_s=unit.created_s,
            choices=choices_of(completion, row.params, ident=ident),
            system_fingerprint=fingerprint,
            service_tier=row.params.get("service_tier"),
            warnings=warnings,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=cached,
            completion_tokens=usage.output_tokens,
            cost_nanos=cost,
        ),
    )


def _rates(rates: dict[str, Any], book: str) -> Rates:
    return Rates(**rates[book])
