"""The one judge of fault tests: reads files, rows, ledger, witness, logs and what a client saw, and asserts I1 to I15.

I1 each line once · I2 input order · I3 counts add up · I4 the money agrees · I5 an end is an end · I6 files are whole ·
I7 nothing is left leased · I8 downloads repeat · I9 texts are those of a run without faults · I10 no needless run ·
I11 tenants are apart · I12 no orphan stays, nothing needed goes · I13 no secret in a log · I14 a client sees no step
back · I15 it ends (whoever waits for the end asserts that).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import func, select

from batchsvc.batches.body import fit, parse_chat
from batchsvc.batches.choices import choices_of
from batchsvc.batches.lifecycle import TERMINAL, Status
from batchsvc.batches.rendering import render_chat
from batchsvc.batches.sampling_body import sampling_params
from batchsvc.batches.tables import Batch, Garbage, Part
from batchsvc.billing.tables import LedgerEntry, LedgerTransaction, UsageRow
from batchsvc.files.tables import File
from batchsvc.store import keys
from engine.fake import FakeEngine
from engine.request import Request
from engine.text import TextModel, load_text
from tests.dispatchers import NullDispatcher
from tests.faults import witness
from tests.faults.cluster import Cluster, Job, sha256
from workers.reaper import Reaper

_BROUGHT = {Status.CANCELLED: "batch_cancelled", Status.EXPIRED: "batch_expired"}
_GONE_STATES = {"done", "sealed", "split"}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What an ended batch came to."""

    status: str
    output: list[dict[str, Any]]
    errors: list[dict[str, Any]]
    runs: Counter[int]  # line number -> how often an engine began it

    @property
    def codes(self) -> Counter[str]:
        """Codes of the error lines."""
        return Counter(code_of(line) for line in self.errors)

    @property
    def needless(self) -> int:
        """Runs beyond the first of each line."""
        return sum(count - 1 for count in self.runs.values() if count > 1)


def judge(
    cluster: Cluster,
    job: Job,
    *,
    errors: Iterable[str] = (),
    counts_may_fall: bool = False,
    history_was_lost: bool = False,
) -> Verdict:
    """Assert the invariants of an ended batch. `errors`: codes of error lines that the test brought about.

    `counts_may_fall`: a damaged part was taken back, so a client saw fewer lines done than before (row 43 alone).
    `history_was_lost`: the database came back without its last commits (rows 50 and 53), so that a client may have
    seen what is gone, and epochs were given twice: I5, I10 and I14 can't hold across the loss.
    """
    batch = cluster.batch(job)
    assert batch.status in TERMINAL, f"{job.id} hasn't ended: {batch.status}"
    if not history_was_lost:
        _judge_view(cluster, job, counts_may_fall=counts_may_fall)
    _judge_logs(cluster)
    _judge_tenants(cluster, batch)
    if batch.in_progress_ms is None:  # it ended while it was planned: no lines, no files, no cost
        verdict = Verdict(status=batch.status, output=[], errors=[], runs=Counter())
        assert (batch.total, batch.completed, batch.failed, batch.cost_nanos) == (0, 0, 0, 0)
        assert batch.output_file_id is None
        assert batch.error_file_id is None
    else:
        output, error = (_file(cluster, batch, kind) for kind in ("output", "error"))
        verdict = Verdict(
            status=batch.status, output=output, errors=error, runs=_judge_runs(cluster, job, history_was_lost)
        )
        _judge_lines(cluster, job, batch, verdict, set(errors))
        if not history_was_lost and cluster.alive("api"):
            got = cluster.call("GET", f"/v1/batches/{job.id}/results").content.splitlines()
            followed = sorted(orjson.loads(line)["line"] for line in got)
            assert followed == list(range(1, len(job.lines) + 1)), "I1: who follows the results gets each line once"
    _judge_money(cluster, batch, verdict)
    _judge_rows(cluster, job, batch)
    _judge_store(cluster, job)
    return verdict


def code_of(line: dict[str, Any]) -> str:
    """The code of an error line, of a request that was rejected or of one that never ran."""
    error = line["error"] or line["response"]["body"]["error"]
    return str(error["code"])


def _judge_lines(cluster: Cluster, job: Job, batch: Batch, verdict: Verdict, allowed: set[str]) -> None:
    both = verdict.output + verdict.errors
    wanted = {number: line["custom_id"] for number, line in enumerate(job.lines, 1)}
    assert Counter((line["line"], line["custom_id"]) for line in both) == Counter(wanted.items()), "I1: each line once"
    for lines in (verdict.output, verdict.errors):
        assert [line["line"] for line in lines] == sorted(line["line"] for line in lines), "I2: input order"
    found = (batch.total, batch.completed, batch.failed)
    assert found == (len(both), len(verdict.output), len(verdict.errors)), "I3: counts are those of the files"
    with cluster.db.reading() as session:
        counted = session.execute(
            select(func.coalesce(func.sum(Part.lines_ok), 0), func.coalesce(func.sum(Part.lines_err), 0)).where(
                Part.batch_id == batch.id, *_counting()
            )
        ).one()
    never_ran = sum(code_of(line) == _BROUGHT.get(Status(batch.status)) for line in verdict.errors)
    assert tuple(counted) == (len(verdict.output), len(verdict.errors) - never_ran), "I3: parts and lines never run"
    unexpected = set(verdict.codes) - allowed - {_BROUGHT.get(Status(batch.status), "")}
    assert not unexpected, f"error lines that nothing explains: {verdict.codes}"
    for line in verdict.output:  # I9
        wanted = _answer(cluster.model.path, orjson.dumps(job.lines[line["line"] - 1]["body"]))
        assert line["response"]["body"]["choices"] == wanted, "I9: the text, of every choice, with its logprobs"


def _judge_money(cluster: Cluster, batch: Batch, verdict: Verdict) -> None:
    usage = [line["response"]["body"]["usage"] for line in verdict.output]
    bill = sum(line["cost_nanos"] for line in usage)
    assert batch.cost_nanos == bill, "I4: the batch's cost is that of its lines"
    assert batch.input_tokens == sum(line["prompt_tokens"] for line in usage)
    assert batch.output_tokens == sum(line["completion_tokens"] for line in usage)
    assert batch.cached_tokens == sum(line["prompt_tokens_details"]["cached_tokens"] for line in usage)
    with cluster.db.reading() as session:
        entries = session.execute(
            select(LedgerTransaction.kind, LedgerTransaction.key, LedgerEntry.account, LedgerEntry.amount_nanos)
            .join(LedgerEntry, LedgerEntry.transaction_id == LedgerTransaction.id)
            .where(LedgerTransaction.batch_id == batch.id)
        ).all()
        used = session.execute(
            select(func.sum(UsageRow.cost_nanos), func.sum(UsageRow.output_tokens), func.sum(UsageRow.requests)).where(
                UsageRow.batch_id == batch.id
            )
        ).one()
        parts = session.scalars(select(Part.id).where(Part.batch_id == batch.id, Part.unit_id.is_not(None))).all()
    balance: Counter[str] = Counter()
    for entry in entries:
        balance[entry.account.partition(":")[0]] += entry.amount_nanos
        balance[entry.key] += entry.amount_nanos
    assert balance["revenue"] == bill, "I4: the ledger earned what the lines cost"
    assert balance["reserved"] == 0, "I4: the reservation is released"
    assert balance["available"] == -bill
    assert not any(balance[entry.key] for entry in entries), "I4: every posting is balanced"
    posted = {entry.key for entry in entries if entry.kind == "part"}
    assert posted == {f"part:{part}" for part in parts}, "I4: one posting a part"
    spent = (bill, batch.output_tokens, len(verdict.output))
    assert tuple(int(value or 0) for value in used) == spent, "I4: the usage API adds up to the bill"


def _judge_rows(cluster: Cluster, job: Job, batch: Batch) -> None:
    assert (batch.why, batch.plan_lease_ms, batch.fin_lease_ms) == (batch.status, 0, 0) or batch.in_progress_ms is None
    assert batch.ended_ms, "I5"
    states = {unit.state for unit in cluster.units(job)}
    assert states <= _GONE_STATES, f"I7: a batch that has ended holds no work: {states}"


def _judge_runs(cluster: Cluster, job: Job, history_was_lost: bool) -> Counter[int]:
    """I10: a line runs again only under a new epoch of its unit, and an epoch is only raised by a claim."""
    units = cluster.units(job)
    testimony = witness.read(cluster.witness).of_units({unit.id for unit in units})
    if history_was_lost:
        return testimony.starts_of_lines(units, cluster.store)
    epochs = {unit.id: unit.epoch for unit in units}
    for (unit_id, row), count in testimony.starts().items():
        assert count <= epochs[unit_id], f"I10: row {row} of {unit_id} ran {count} times in {epochs[unit_id]} epochs"
    once = Counter((run.unit_id, run.epoch, run.row) for run in testimony.runs if run.event == "start")
    assert max(once.values(), default=0) <= 1, "I10: within an epoch a row runs once"
    return testimony.starts_of_lines(units, cluster.store)


def _judge_view(cluster: Cluster, job: Job, *, counts_may_fall: bool) -> None:
    watch = cluster.watches.get(job.id)
    if watch is None or not any(api.is_alive for api in cluster.processes if api.role == "api"):
        return
    end = cluster.get(job)
    watch.seen.append(end)
    watch.seen.append(cluster.get(job))  # I5: shown again, shown the same
    watch.check(counts_may_fall=counts_may_fall)


def _judge_logs(cluster: Cluster) -> None:
    canaries = [*cluster.secrets, *(job.canary for job in cluster.jobs)]
    for process in cluster.processes:
        said = process.text()
        for canary in filter(None, canaries):
            assert canary not in said, f"I13: the log of {process.name} tells a secret or a prompt"
        assert "Traceback" not in said, (
            f"I13: {process.name} logged a traceback:\n{said[said.index('Traceback') :][:2000]}"
        )


def _judge_tenants(cluster: Cluster, batch: Batch) -> None:
    if not cluster.alive("api"):
        return
    _, stranger = cluster.add_project("strangers")
    files = [name for name in (batch.output_file_id, batch.error_file_id, batch.input_file_id) if name]
    paths = [f"/v1/batches/{batch.id}", *(f"/v1/files/{name}{end}" for name in files for end in ("", "/content"))]
    for path in paths:
        assert cluster.call("GET", path, key=stranger).status_code == 404, f"I11: {path}"


def _judge_store(cluster: Cluster, job: Job) -> None:
    """I12 and I6, after a collection of garbage without grace, once every job of the cluster was judged."""
    cluster.judged.add(job.id)
    is_quiet = cluster.judged >= {known.id for known in cluster.jobs}
    if is_quiet:
        at_once = cluster.settings.model_copy(update={"garbage_grace_s": 0.0})
        nothing = NullDispatcher()
        Reaper(
            at_once,
            cluster.db,
            cluster.store,
            nothing,
            plan=lambda _: None,
            finalize=lambda _: None,
            quote=lambda _: None,
        ).audit()
    with cluster.db.reading() as session:
        rows = session.scalars(select(File)).all()
        garbage = set(session.scalars(select(Garbage.s3_key)))
        parts = set(session.scalars(select(Part.s3_key).where(*_counting())))  # kept for readers, as long as the files
    named = {row.s3_key: row for row in rows if row.deleted_ms is None}
    assert len(named) == sum(row.deleted_ms is None for row in rows), "I6: no object belongs to two files"
    for key, row in named.items():
        data = cluster.store.get(key)
        assert (len(data), sha256(data)) == (row.size_bytes, row.sha256), f"I6: {row.filename} is what was recorded"
    if is_quiet:
        left = {key for prefix in (keys.BATCHES, keys.INPUTS) for key, _ in cluster.store.list_keys(prefix)}
        needed = set(named) | parts
        assert left - garbage <= needed, f"I12: nobody needs {sorted(left - garbage - needed)[:5]}"


def _file(cluster: Cluster, batch: Batch, kind: str) -> list[dict[str, Any]]:
    file_id = batch.output_file_id if kind == "output" else batch.error_file_id
    if file_id is None:
        return []
    with cluster.db.reading() as session:
        row = session.get_one(File, file_id)
    data = cluster.store.get(row.s3_key)
    assert (len(data), sha256(data)) == (row.size_bytes, row.sha256), f"I6: the {kind} file is what was recorded"
    if cluster.alive("api"):
        for _ in range(2):
            got = cluster.call("GET", f"/v1/files/{file_id}/content")
            assert got.status_code == 200, f"I8: a download is answered, not {got.status_code} {got.text[:200]}"
            assert got.content == data, "I8: a download repeats byte for byte"
    return [orjson.loads(line) for line in data.splitlines()]


def _counting() -> tuple[Any, ...]:
    """Parts that count: one that was found damaged is void."""
    void = getattr(Part, "is_void", None)
    return () if void is None else (void.is_(False),)


@lru_cache(maxsize=2)
def _text(path: Path) -> TextModel:
    return load_text(path)


@lru_cache(maxsize=50_000)
def _answer(path: Path, body_json: bytes) -> list[dict[str, Any]]:
    """The choices that the fake engine gives to a chat that names its seed, without any service around it."""
    text = _text(path)
    call, prompt = render_chat(parse_chat(orjson.loads(body_json)), text)
    prompt_ids, context_tokens = text.tokenizer.encode(prompt), text.meta.context_tokens
    params = fit(call, prompt_tokens=len(prompt_ids), context_tokens=context_tokens, default_max_tokens=1024)
    sampling = sampling_params(params, params["seed"] or 0)
    request = Request(id="r", prompt_ids=prompt_ids, params=sampling, n=params.get("n", 1))
    (completion,) = FakeEngine(text).run([request])
    return choices_of(completion, params, ident="")
