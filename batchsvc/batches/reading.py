"""Reads one window of a batch's input: its records fetched, checked, rendered and tokenized, from where it begins.

The input is pinned by the ETag of its upload: another object under its key, or none, is a reason that ends planning,
also when it is replaced in the middle of a window; lines of two versions never mix. Planning reads each window once;
rebuilding what was damaged reads one again and gets the same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache

from batchsvc.batches import plan_queries, window, window_file
from batchsvc.batches.damage import verified
from batchsvc.batches.plan_queries import PlanClaim
from batchsvc.batches.window import WindowDraft
from batchsvc.db.session import Database
from batchsvc.errors import NotFoundError
from batchsvc.files.envelope import EnvelopeCheck, SeenIds
from batchsvc.files.lines import Problem, Record, jsonl_records
from batchsvc.files.parquet import MAGIC, RangeFile, parquet_records
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
    """What planning works with. `text_loader` gives the text side of the model at a path; it may keep them."""

    db: Database
    store: ObjectStore
    settings: Settings
    text_loader: Callable[[str], TextModel]
    known_ids: KnownIds = field(default_factory=KnownIds)


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
        self._text: TextModel | None = None
        self._resolve = lru_cache(maxsize=1024)(self._resolve_anew)
        self._check: EnvelopeCheck | None = None

    @property
    def model_id(self) -> str | None:
        """The model that the batch or a line has settled so far."""
        return self._check.model_id if self._check else None

    def read(self, limits: window.Limits) -> WindowDraft:
        """The window. Raises BatchFailedError for a reason of the whole file."""
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
        )
        try:
            with closing(self._records()) as records:
                return window.collect(
                    self._check.check_all(records),
                    batch_id=claim.batch_id,
                    limits=limits,
                    offset=claim.offset,
                    text_model=self._text_model,
                    is_strict=claim.is_strict,
                    is_failing=claim.num_problems > 0,
                )
        except OtherVersionError as error:
            raise _replaced() from error
        except NotFoundError as error:
            raise _gone() from error

    def _records(self) -> Generator[Record, None, None]:
        claim, settings, store = self._claim, self._context.settings, self._context.store
        source = claim.input
        info = None if source is None else store.head(source.s3_key)
        if source is None or info is None:
            raise _gone()
        if source.etag and info.etag != source.etag:
            raise _replaced()

        def fetch(start: int, end: int) -> bytes:
            self._keep()
            return b"".join(store.stream(source.s3_key, start=start, end=end, etag=info.etag))

        if fetch(0, len(MAGIC)) == MAGIC:
            yield from parquet_records(
                RangeFile(info.size_bytes, fetch),
                endpoint=claim.endpoint,
                max_line_bytes=settings.max_line_bytes,
                max_decoded_bytes=settings.max_input_bytes,
                first_row=claim.offset,
            )
            return
        with closing(self._kept(store.stream(source.s3_key, start=claim.offset, etag=info.etag))) as chunks:
            yield from jsonl_records(
                chunks,
                max_line_bytes=settings.max_line_bytes,
                first_line=claim.first_line,
                offset=claim.offset,
            )

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
            model = plan_queries.resolve(session, name, self._claim.aliases)
            return None if model is None else model.id

    def _text_model(self) -> TextModel:
        """The tokenizer and template of the model; the first call settles the model of the batch."""
        self._keep()
        if self._text is None:
            assert self.model_id is not None, "a line is only rendered after the model is settled"
            try:
                self._text = self._context.text_loader(self._path_of(self.model_id))
            except ModelError as error:
                raise BatchFailedError("model_not_available", str(error), "model") from error
        return self._text

    def _kept(self, chunks: Iterator[bytes]) -> Generator[bytes, None, None]:
        for chunk in chunks:
            self._keep()
            yield chunk


def _gone() -> BatchFailedError:
    return BatchFailedError("invalid_request", "The input file doesn't exist any more.", "input_file_id")


def _replaced() -> BatchFailedError:
    return BatchFailedError("invalid_request", "The input file was replaced after its upload.", "input_file_id")
