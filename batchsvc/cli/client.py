"""The API as the commands use it: a thin HTTP client that turns every failure into one sentence and an exit code."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import httpx

from batchsvc.cli.exits import ApiError, CommandError, Exit
from batchsvc.files.formats import SUFFIXES

_PATIENCE_S = 60.0  # how long a read may fail before we give up: an API that crashed is back within seconds
_CREATE_ATTEMPTS = 4
_TURN_S = 60  # no limit of requests a minute makes anybody wait for longer
_CHUNK_BYTES = 1 << 20


class Client:
    """One server and one key. Reads are repeated while the server is away for a moment; writes never are. What was one
    call too many for its minute waits for its turn."""

    def __init__(self, url: str, api_key: str, *, is_local: bool) -> None:
        self.url = url
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(60.0, connect=5.0),
            trust_env=not is_local,
            follow_redirects=True,
        )
        self._has_answered = False

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    # -- files ---------------------------------------------------------------------------------------------------

    def upload(self, path: Path, sent: Callable[[int], None]) -> dict[str, Any]:
        """Upload an input file, streamed; `sent` gets the bytes read so far. Its name needs no ending of ours."""
        name = path.name if path.name.lower().endswith(SUFFIXES) else f"{path.name}.jsonl"
        with path.open("rb") as file:
            parts = {"file": (name, _Counted(file, sent), "application/octet-stream")}
            return self._json("POST", "/files", data={"purpose": "batch"}, files=parts, timeout=600.0)

    @contextmanager
    def content(self, file_id: str) -> Iterator[Iterator[bytes]]:
        """The bytes of a file, in chunks."""
        with self.download(f"/files/{file_id}/content") as chunks:
            yield chunks

    @contextmanager
    def download(self, path: str) -> Iterator[Iterator[bytes]]:
        """What a route answers that sends no JSON, in chunks."""
        with self._streamed(path, {}) as response:
            yield response.iter_bytes(_CHUNK_BYTES)

    @contextmanager
    def results(self, batch_id: str, *, after: str | None, order: str) -> Iterator[tuple[str, Iterator[bytes]]]:
        """The status of a batch, and its result lines after a cursor, in chunks as they come."""
        params = {"order": order} | ({"after": after} if after else {})
        with self._streamed(f"/batches/{batch_id}/results", params) as response:
            yield response.headers.get("x-batch-status", ""), response.iter_bytes()

    @contextmanager
    def _streamed(self, path: str, params: dict[str, str]) -> Iterator[httpx.Response]:
        try:
            while True:
                with self._http.stream("GET", self.url + path, params=params) as response:
                    if response.is_error:
                        response.read()
                        if _turn_came(response):
                            continue
                        raise _refusal(response)
                    yield response
                    return
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    # -- batches -------------------------------------------------------------------------------------------------

    def create_batch(self, body: dict[str, Any]) -> dict[str, Any]:
        """Create a batch. A lost answer is asked for again; the headers tell the server that it may know this one."""
        return self._create("/batches", body)

    def run_again(self, batch_id: str, scope: str, body: dict[str, Any]) -> dict[str, Any]:
        """A new batch of lines of an ended one: `retry` or `continue`."""
        return self._create(f"/batches/{batch_id}/{scope}", body)

    def _create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        key = secrets.token_hex(16)
        for attempt in range(_CREATE_ATTEMPTS):
            headers = {"Idempotency-Key": key, "x-stainless-retry-count": str(attempt)}
            try:
                return self._json("POST", path, json=body, headers=headers)
            except CommandError as error:
                if error.code != Exit.UNREACHABLE or attempt == _CREATE_ATTEMPTS - 1:
                    raise
                time.sleep(1.0)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def batch(self, batch_id: str) -> dict[str, Any]:
        return self._json("GET", f"/batches/{batch_id}")

    def cancel(self, batch_id: str) -> dict[str, Any]:
        return self._json("POST", f"/batches/{batch_id}/cancel")

    def batches(self, *, limit: int, after: str | None = None) -> dict[str, Any]:
        """One page, newest first."""
        params = {"limit": str(limit)} | ({"after": after} if after else {})
        return self._json("GET", "/batches", params=params)

    def newest_batches(self, most: int) -> Iterator[dict[str, Any]]:
        """Batches from the newest on, page by page, at most `most`."""
        after: str | None = None
        seen = 0
        while seen < most:
            page = self.batches(limit=min(100, most - seen), after=after)
            yield from page["data"]
            seen += len(page["data"])
            if not page.get("has_more") or not page["data"]:
                return
            after = page["data"][-1]["id"]

    # -- the rest ------------------------------------------------------------------------------------------------

    def models(self) -> dict[str, Any]:
        return self.get("/models")

    def get(self, path: str) -> dict[str, Any]:
        return self._json("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._json("POST", path, json=body)

    def delete(self, path: str) -> dict[str, Any]:
        return self._json("DELETE", path)

    # -- transport -----------------------------------------------------------------------------------------------

    def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        deadline = time.monotonic() + (_PATIENCE_S if self._has_answered and method == "GET" else 0)
        while True:
            try:
                response = self._http.request(method, self.url + path, **options)
            except httpx.HTTPError as error:
                if time.monotonic() < deadline:
                    time.sleep(0.5)
                    continue
                raise self._unreachable(error) from error
            if response.status_code >= 500 and time.monotonic() < deadline:
                time.sleep(0.5)
                continue
            if "files" not in options and _turn_came(response):
                continue
            if response.is_error:
                raise _refusal(response)
            self._has_answered = True
            try:
                found = response.json()
            except ValueError:
                found = None
            if not isinstance(found, dict):
                raise CommandError(f"{self.url} doesn't answer like a batch API: check the URL.", Exit.UNREACHABLE)
            return found

    def _unreachable(self, error: httpx.HTTPError) -> CommandError:
        why = "no answer in time" if isinstance(error, httpx.TimeoutException) else str(error) or type(error).__name__
        return CommandError(f"{self.url} can't be reached: {why}.", Exit.UNREACHABLE)


class _Counted:
    """A file that tells how much of it was read; httpx streams it chunk by chunk."""

    def __init__(self, file: BinaryIO, sent: Callable[[int], None]) -> None:
        self._file = file
        self._sent = sent

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._sent(self._file.tell())
        return data

    def fileno(self) -> int:
        return self._file.fileno()

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def __iter__(self) -> Iterator[bytes]:
        while data := self.read(_CHUNK_BYTES):
            yield data


def _turn_came(response: httpx.Response) -> bool:
    """Whether a call was one too many for its minute, and did nothing: then, once it is worth trying again."""
    if response.status_code != 429 or _problem(response).get("code") != "rate_limit_exceeded":
        return False
    time.sleep(min(_TURN_S, int(response.headers.get("retry-after", "1"))))
    return True


def _problem(response: httpx.Response) -> dict[str, Any]:
    """What stands in an error envelope; nothing, if the answer is none."""
    try:
        return dict(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return {}


def _refusal(response: httpx.Response) -> CommandError:
    """The sentence of an error envelope. A server that is down for the moment counts as unreachable."""
    message = str(_problem(response).get("message", f"The server answered {response.status_code}."))
    code = Exit.UNREACHABLE if response.status_code in (502, 503, 504) else Exit.FAILED
    return ApiError(message, code, status=response.status_code)
