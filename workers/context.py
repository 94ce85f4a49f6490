"""Composition root of the worker processes: builds the parts of a control process or of an engine process.

Everything else gets its collaborators as arguments. Torch is imported in one place, by `_engine`, when an engine
process runs the real engine; a control process never loads it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from sqlalchemy.exc import DBAPIError

from batchsvc import ids, logs
from batchsvc.accounts import service as accounts
from batchsvc.batches import worker_queries
from batchsvc.batches.offpeak import Night
from batchsvc.batches.reading import PlanContext
from batchsvc.clock import monotonic_s, now_ms
from batchsvc.db.session import Database
from batchsvc.dispatch import FINALIZE_TASK, PLAN_TASK, QUOTE_TASK, CeleryDispatcher
from batchsvc.errors import ServiceError, UnavailableError
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from engine.config import EngineConfig, Formats
from engine.errors import EngineError
from engine.load.fetch import locate
from engine.load.meta import read_meta
from engine.load.origin import draft_project_of
from engine.text import load_text
from workers import split, switching
from workers.exporter import Exporter
from workers.finalize import Finalizer
from workers.importer import Importer
from workers.plan import Planner
from workers.pump import EngineLike
from workers.reaper import Reaper
from workers.step import EngineRun
from workers.switching import Announcer, Baton, LineUp, NotLoadedError, OwnModel, Switcher
from workers.tasks import guarded
from workers.test_mode import TestMode
from workers.webhooks import Courier

if TYPE_CHECKING:
    from engine.engine import Engine

_TEXTS = 4  # tokenizers that a control process keeps
_SILENT_TICKS, _LEAST_SILENCE_S = 20, 120.0  # of a reaper, before something is wrong: a tick may merge a batch itself

log = structlog.get_logger(__name__)


class ControlRun:
    """What a control process does: plan, finalize, reap, send webhooks, export results."""

    def __init__(self, settings: Settings) -> None:
        owner = new_owner()
        self._is_stopping = False
        self._most_silent_s = max(_LEAST_SILENCE_S, _SILENT_TICKS * settings.reaper_s)
        self._db = Database(settings.database_url)
        self._dispatcher = CeleryDispatcher(settings.redis_url)
        store = ObjectStore(settings)
        _check_services(self._db, store)
        texts = lru_cache(maxsize=_TEXTS)(lambda path: load_text(locate(path)))
        plan_context = PlanContext(db=self._db, store=store, settings=settings, text_loader=texts)
        self._importer = Importer()
        self.planner = Planner(plan_context, self._db, self._dispatcher, owner, self._importer)
        self.finalizer = Finalizer(settings, self._db, store, owner, is_stopping=lambda: self._is_stopping)
        self._courier = Courier(settings, self._db)
        self._exporter = Exporter(settings, self._db, store)
        self._test_mode = TestMode(settings, new_owner)
        self.reaper = Reaper(
            settings,
            self._db,
            store,
            self._dispatcher,
            plan=guarded(PLAN_TASK, self.planner.plan),
            finalize=guarded(FINALIZE_TASK, self.finalizer.finalize),
            quote=guarded(QUOTE_TASK, self.planner.quote),
            wake_senders=(self._courier.wake, self._exporter.wake),
        )

    def start(self) -> None:
        self._courier.start()
        self._exporter.start()
        self._test_mode.start()
        self.reaper.start()

    def trouble(self) -> str | None:
        """Why nothing is repaired, or no line of a test key run, in a sentence; None: all is well."""
        silent_s = monotonic_s() - self.reaper.ticked_s
        if silent_s >= self._most_silent_s:
            return f"The reaper hasn't ended a tick for {silent_s:.0f} s."
        return self._test_mode.trouble()

    def signalled(self) -> None:
        """Called in the signal handler: what is being merged is let go of soon."""
        self._is_stopping = True

    def stop(self) -> None:
        """Let go of what is being merged, and end the reaper; another process, or the next start, goes on."""
        self._is_stopping = True
        self._test_mode.stop()
        self.reaper.stop()
        self._importer.stop()
        self._courier.stop()
        self._exporter.stop()

    def close(self) -> None:
        """Send what is buffered and close the connections."""
        self._dispatcher.close()
        self._db.dispose()


def open_engine_run(settings: Settings, baton: Baton | None = None) -> EngineRun:
    """An engine process, ready to start. Raises EngineError or ServiceError with one sentence if it can't serve.

    With a `baton` it goes on for a process that served another model before.
    """
    db, store = Database(settings.database_url), ObjectStore(settings)
    _check_services(db, store)
    owner, night = new_owner(), Night.from_settings(settings)
    own = baton.own if baton else switching.own_models(settings.all_models)
    line_up = LineUp(settings.worker_name or socket.gethostname(), own, baton.refused if baton else {})
    if settings.role != "unified":  # a half has one model
        chosen = own[0]
    elif baton is None:
        is_night = night.is_open(now_ms())
        chosen = switching.first_model(db, line_up, owner, is_night=is_night, renew_s=settings.renew_s)
    else:
        line_up.look(db)
        chosen = OwnModel(baton.digest, baton.source)
    if chosen.digest != own[0].digest:  # what was chosen for the first model may not fit another
        spec = "auto" if settings.spec in ("draft", "heads") else settings.spec
        settings = settings.model_copy(update={"draft": None, "spec": spec})
    with (
        nullcontext()
        if baton is None
        else Announcer(db, owner, chosen.digest, line_up.place(), baton.before, settings.renew_s)
    ):
        try:
            run = _open_run(settings, db, store, chosen, owner, line_up, checked=() if baton else own)
        except Exception as error:  # whatever it was, the start would choose this model again, and starve the others
            failed = baton or Baton(own=own, digest=chosen.digest, source=chosen.source)
            back = None
            if settings.role == "unified":
                back = replace(failed, back=failed.back or line_up.other_than(chosen.digest)).returned(_sentence(error))
            if back is None:
                raise
            log.warning("model.not_loaded", model=chosen.digest[:16], **logs.where(error))
            raise NotLoadedError(_sentence(error), back) from error
    run.swap_began_s = baton.began_s if baton else None
    if settings.role != "unified":
        return run
    run.switcher = Switcher(
        db,
        line_up,
        worker_id=owner,
        digest=run.digest,
        period_s=settings.poll_s,
        renew_s=settings.renew_s,
        is_night=lambda: night.is_open(now_ms()),
        may_decide=run.may_change_over,
        change_over=run.change_over,
        on_crash=run.crashed,
    )
    return run


def _sentence(error: Exception) -> str:
    """Why a model can't be loaded."""
    known = isinstance(error, (EngineError, ServiceError))
    return str(error) if known else f"Loading it failed ({type(error).__name__}): the log of the worker says where."


def _open_run(
    settings: Settings,
    db: Database,
    store: ObjectStore,
    chosen: OwnModel,
    owner: str,
    line_up: LineUp,
    *,
    checked: Collection[OwnModel],  # whose files were just read
) -> EngineRun:
    path, digest = locate(chosen.source), chosen.digest
    if chosen not in checked and read_meta(path).digest != digest:
        raise UnavailableError(
            f"The files in {path} aren't the model that was registered: register them again with "
            f"`batchsvc models add {chosen.source}`."
        )
    formats, quality = (None, None) if settings.engine == "fake" else _formats(settings, path)
    device = "cpu"
    note: Callable[[], str | None] | None = None
    if formats is None:
        engine: EngineLike = _fake_engine(settings, path)
    else:
        real = _engine(settings, db, path, formats)
        engine, device = real, real.device
        if settings.role == "decode":
            engine = side = split.decode_side(real, db, settings, digest)
            note = split.Waiting(side).note
    return EngineRun(
        settings,
        db,
        store,
        CeleryDispatcher(settings.redis_url),
        engine,
        digest=digest,
        owner=owner,
        formats=formats,
        device=device,
        quality=quality,
        note=note,
        place=line_up.place,
        problems=line_up.problems,
    )


def open_prefill_run(settings: Settings) -> split.PrefillRun:
    """A prefill process, ready to serve. Raises EngineError or ServiceError with one sentence if it can't."""
    db, store = Database(settings.database_url), ObjectStore(settings)
    _check_services(db, store)
    path = locate(settings.model)
    formats, _ = _formats(settings, path)
    engine = _engine(settings.model_copy(update={"draft": None, "spec": "off"}), db, path, formats)
    return split.PrefillRun(db, split.prefill_side(engine, settings), digest=read_meta(path).digest, owner=new_owner())


def new_owner() -> str:
    """An id of this start of this process."""
    return ids.worker_id(socket.gethostname(), os.getpid())


def _check_services(db: Database, store: ObjectStore) -> None:
    """Raise UnavailableError if database or store don't answer. Redis may be away: it only makes things faster."""
    try:
        with db.reading() as session:
            worker_queries.is_beating(session, socket.gethostname(), os.getpid())
    except DBAPIError as error:
        raise UnavailableError(
            f"The database doesn't answer, or isn't migrated: {error.orig}".splitlines()[0]
        ) from error
    store.ensure_bucket()


def _formats(settings: Settings, path: Path) -> tuple[Formats, dict[str, Any]]:
    """What the model is served in, and the verdict on it. Raises QualityError where that is refused."""
    from engine.quality.serving import resolve_formats

    formats, verdict = resolve_formats(
        str(path), settings.weight_format, settings.kv_format, _say, force=settings.force_format
    )
    return formats, verdict.shown()


def _say(sentence: str) -> None:
    log.info("engine.note", says=sentence)


def draft_salt(db: Database, draft: Path) -> str | None:
    """The salt of the project whose requests alone a draft may draft for; None: all. Raises UnavailableError where that
    project isn't one of this service's."""
    project = draft_project_of(draft)
    if project is None:
        return None
    with db.reading() as session:
        salt = accounts.salts(session, [project]).get(project)
    if salt is None:
        raise UnavailableError(
            f"The draft in {draft} learned from lines of the project {project}, which isn't one of this service's; "
            "choose another with BATCHSVC_DRAFT, or none with BATCHSVC_SPEC=ngram."
        )
    return salt


def _engine(settings: Settings, db: Database, path: Path, formats: Formats) -> Engine:
    from engine.engine import Engine

    return Engine(engine_config(settings, db, path, formats), say=_say)


def engine_config(settings: Settings, db: Database, path: Path, formats: Formats) -> EngineConfig:
    """What the engine is told: also for whose requests alone it may draft. Raises EngineError or UnavailableError."""
    from engine.spec.choose import draft_directory

    draft = None if settings.draft is None else locate(settings.draft)
    config = EngineConfig(
        model=str(path),
        weight_format=formats.weights,
        kv_format=formats.kv,
        kv_bytes=settings.kv_bytes,
        spec=settings.spec,
        draft=None if draft is None else str(draft),
        step_tokens=settings.step_tokens,
        max_running=settings.max_running,
        ttft_target_ms=settings.ttft_target_ms,
        itl_target_ms=settings.itl_target_ms,
        device=settings.device,
        threads=settings.threads,
    )
    drafts = draft_directory(config)
    return config if drafts is None else replace(config, draft_salt=draft_salt(db, drafts))


def _fake_engine(settings: Settings, path: Path) -> EngineLike:
    from engine.fake import FakeEngine
    from engine.faults import Faults

    return FakeEngine(
        load_text(path),
        witness=Path(settings.fake_witness) if settings.fake_witness else None,
        tokens_per_s=settings.fake_tokens_per_s,
        max_running=settings.max_running,
        faults=Faults.parse(settings.fake_faults),
    )
