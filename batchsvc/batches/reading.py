"""Reads one window of a batch's input: its records fetched, checked, rendered and tokenized, from where it begins.

The input is pinned by the ETag of its upload: another object under its key, or none, is a reason that ends planning,
also when it is replaced in the middle of a window; lines of two versions never mix. Planning reads each window once;
rebuilding what was damaged reads one again and gets the same lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache

from batchsvc import mode
from batchsvc.batches import endpoints, line_set, magic, plan_queries, window, window_file
from batchsvc.batches.damage import verified
from batchsvc.batches.kept_lease import LeaseLostError
from batchsvc.batches.message_body import MESSAGES, parse_message
from batchsvc.batches.plan_queries import PlanClaim
from batchsvc.batches.window import UnusableModelError, WindowDraft
from batchsvc.db.session import Database
from batchsvc.errors import NotFoundError
from batchsvc.files import importing
from batchsvc.files.envelope import EnvelopeCheck, SeenIds
from batchsvc.files.importing import ImportFailedError, Origin
from batchsvc.files.lines import Problem, Record
from batchsvc.files.plain import limits_of as decode_limits
from batchsvc.files.plain import plain_file
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore, OtherVersionError
from engine.errors import ModelError
from engine.text import TextModel


class KnownIds:
    """The custom_ids of finished windows that this process has read, of the last few batches that it planned.

    Windows' objects are immutable, so their keys say what is known; without this each window would read all before it.
    """

    _MOST_BATCHES = 2

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[str, ...], SeenIds]] = {}

    def of(self, batch_id: str, keys: tuple[str, ...]) -> tuple[int, SeenIds]:
        """How many of these windows, from the first on, are known, and what is known of them."""
        known, seen = self._kept.get(batch_id, ((), SeenIds()))
        return (len(known), seen.finished()) if keys[: len(known)] == known else (0, SeenIds())

    def keep(self, batch_id: str, keys: tuple[str, ...], seen: SeenIds) -> None:
        kept = {name: found for name, found in self._kept.items() if name != batch_id}
        newest = list(kept.items())[1 - self._MOST_BATCHES :]
        self._kept = {**dict(newest), batch_id: (keys, seen.finished())}


@dataclass(frozen=True, slots=True)
class PlanContext:
    """What planning works with. `text_loader` gives the text side of the model at a path; it may keep them.
    `is_stopping`: a copy of a tenant's object is let go of."""

    db: Database
    store: ObjectStore
    settings: Settings
    text_loader: Callable[[str], TextModel]
    is_stopping: Callable[[], bool] = lambda: False
    known_ids: KnownIds = field(default_factory=KnownIds)

    def pinned(self, claim: PlanClaim) -> PlanContext:
        """The same with the settings that a quote has pinned for this plan."""
        return replace(self, settings=self.settings.model_copy(update=claim.limits)) if claim.limits else self


class BatchFailedError(Exception):
    """The batch can't run, whatever its other lines say."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.problem = Problem(line=None, code=code, message=message, param=param)


class WindowReader:
    """Reads the window that a claim names. `keep` is called often, and raises when the reader must stop; `path_of`
    gives the path of the model with this id, once a line (or the batch) has settled it.
    """

    def __init__(
        self, context: PlanContext, claim: PlanClaim, *, keep: Callable[[], None], path_of: Callable[[str], str]
    ) -> None:
        self._context = context
        self._claim = claim
        self._keep = keep
        self._path_of = path_of
        self._texts: dict[str, TextModel | UnusableModelError] = {}
        self._resolve = lru_cache(maxsize=1024)(self._resolve_anew)
        self._check: EnvelopeCheck | None = None

    @property
    def model_id(self) -> str | None:
        """The model that the batch or a line has settled so far."""
        return self._check.model_id if self._check else None

    def read(
        self,
        limits: window.Limits,
        *,
        keeps_chats: int = 0,
        chosen: Callable[[Iterator[Record]], Iterable[Record]] = iter,
    ) -> WindowDraft:
        """The window, of the lines that `chosen` takes. Raises BatchFailedError for a reason of the whole file."""
        claim = self._claim
        model_id = claim.model_id
        if claim.model_requested is not None:
            model_id = self._resolve(claim.model_requested)
            if model_id is None:
                raise BatchFailedError(
                    "model_not_found", f"The model {claim.model_requested!r} does not exist here.", "model"
                )
        self._check = EnvelopeCheck(
            endpoint=claim.endpoint,
            resolve=self._resolve,
            seen=self._seen_ids(),
            model_id=model_id,
            is_model_given=claim.model_requested is not None,
            is_by_line=claim.is_by_line,
        )
        try:
            with closing(self._records()) as records:
                lines = self._check.check_all(chosen(self._chosen(records)))
                is_test = mode.is_test(claim.project_id)
                return window.collect(
                    magic.checked(lines) if is_test else lines,
                    batch_id=claim.batch_id,
                    limits=limits,
                    offset=claim.offset,
                    text_model=self._text_model,
                    is_strict=claim.is_strict,
                    is_failing=claim.num_problems > 0,
                    keeps_chats=keeps_chats,
                    parse=parse_message if claim.endpoint == MESSAGES else endpoints.PARSERS[claim.endpoint],
                    more_params=magic.params_of if is_test else None,
                )
        except OtherVersionError as error:
            raise _replaced() from error
        except NotFoundError as error:
            raise _gone() from error

    def _records(self) -> Generator[Record, None, None]:
        claim, settings, store = self._claim, self._context.settings, self._context.store
        source = claim.input
        if source is not None and source.origin is not None:
            source = replace(source, etag=self._imported(source.origin), origin=None)
        info = None if source is None else store.head(source.s3_key)
        if source is None or info is None:
            raise _gone()
        if source.etag and info.etag != source.etag:
            raise _replaced()

        plain = plain_file(store, source.s3_key, info.etag, info.size_bytes, decode_limits(settings), self._keep)
        with closing(self._kept(store.stream(plain.s3_key, start=claim.offset, etag=plain.etag))) as chunks:
            yield from plain.records(
                chunks,
                endpoint=claim.endpoint,
                max_line_bytes=settings.max_line_bytes,
                first_line=claim.first_line,
                offset=claim.offset,
            )

    def _imported(self, origin: Origin) -> str:
        context = self._context
        try:
            return importing.fetch(context.db, context.store, context.settings, origin, self._keep_copying)
        except ImportFailedError as error:
            raise BatchFailedError(error.code, str(error), importing.PARAM) from error

    def _keep_copying(self) -> None:
        self._keep()
        if self._context.is_stopping():
            raise LeaseLostError

    def _chosen(self, records: Iterator[Record]) -> Iterator[Record]:
        """The records of a batch that runs lines of another one again are these lines."""
        if self._claim.chosen_lines is None:
            yield from records
            return
        wanted = set(line_set.decode(self._claim.chosen_lines).tolist())
        last = max(wanted)
        for record in records:
            if record.line_no in wanted:
                yield record
            if record.line_no >= last:
                return

    def _seen_ids(self) -> SeenIds:
        windows, batch_id = self._claim.finished_windows, self._claim.batch_id
        keys = tuple(finished.key for finished in windows)
        num_known, seen = self._context.known_ids.of(batch_id, keys)
        for finished in windows[num_known:]:
            self._keep()
            data = verified(self._context.store.get, finished.key, finished.sha256)
            seen.add_finished(*window_file.read(data))
        self._context.known_ids.keep(batch_id, keys, seen)
        return seen

    def _resolve_anew(self, name: str) -> str | None:
        with self._context.db.reading() as session:
            model = plan_queries.resolve(session, name, self._claim.aliases, self._claim.project_id)
            return None if model is None else model.id

    def _text_model(self, model_id: str) -> TextModel:
        """The tokenizer and template of a model; the first call settles the model of the batch. One of several models
        that can't be used costs its lines where bad lines are skipped, else the batch."""
        self._keep()
        if model_id not in self._texts:
            try:
                self._texts[model_id] = self._loaded(model_id)
            except UnusableModelError as error:
                if self._claim.is_strict or not self._claim.is_by_line:
                    raise BatchFailedError(error.code, str(error), "model") from error
                self._texts[model_id] = error
        found = self._texts[model_id]
        if isinstance(found, UnusableModelError):
            raise found
        return found

    def _loaded(self, model_id: str) -> TextModel:
        try:
            text = self._context.text_loader(self._path_of(model_id))
        except ModelError as error:
            raise UnusableModelError("model_not_available", str(error)) from error
        quoted = self._claim.quoted_template(model_id)
        if quoted is not None and quoted != template_sha256(text):
            says = f"The chat template of {model_id} has changed since it was quoted."
            raise BatchFailedError("quote_changed", says, "quote_id")
        return text

    def _kept(self, chunks: Iterator[bytes]) -> Generator[bytes, None, None]:
        for chunk in chunks:
            self._keep()
            yield chunk


def limits_of(claim: PlanClaim, settings: Settings) -> window.Limits:
    """Where the next window of a plan ends."""
    return window.Limits(
        window_lines=settings.window_lines,
        window_tokens=settings.window_tokens,
        lines_left=settings.max_lines - claim.num_lines,
        max_problems=max(0, settings.max_problems - claim.num_listed),
        default_max_tokens=settings.default_max_tokens,
    )


def why_not(draft: WindowDraft, claim: PlanClaim, settings: Settings) -> Problem | None:
    """Why the whole file can't be run, as this window shows; None: nothing speaks against it."""
    if draft.unreadable:
        return draft.unreadable
    if draft.has_too_many:
        says = f"The file has more than {settings.max_lines} requests."
        return Problem(line=None, code="too_many_tasks", message=says, param="input_file_id")
    if claim.endpoint == endpoints.EMBEDDINGS and claim.num_prompts + draft.num_prompts > settings.max_inputs:
        says = f"The lines of the file have more than {settings.max_inputs} inputs in all: split it."
        return Problem(line=None, code="too_many_inputs", message=says, param="input_file_id")
    if not draft.line_nos and claim.num_lines == 0:
        return Problem(line=None, code="empty_file", message="The file has no requests.", param="input_file_id")
    return None


def template_sha256(text: TextModel) -> str:
    """Names the chat template of a model; one that has none has the name of the empty template."""
    return hashlib.sha256((text.meta.chat_template or "").encode()).hexdigest()


def _gone() -> BatchFailedError:
    return BatchFailedError("invalid_request", "The input file doesn't exist any more.", "input_file_id")


def _replaced() -> BatchFailedError:
    return BatchFailedError("invalid_request", "The input file was replaced after its upload.", "input_file_id")
