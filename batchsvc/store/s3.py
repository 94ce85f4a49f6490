"""The object store: S3 through boto3, nothing else. Every error of botocore becomes one of ours here.

Objects are immutable, so a read that breaks off is continued where it stopped, under the ETag it began with: what
comes back is one version of the object, whole, or an error.

A write with a `writer` (a token of the caller's own) is made once: it never replaces an object, and when its answer is
an error or gets lost, size and writer of the object that is there decide whether it was done.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from batchsvc.errors import NotFoundError, ServiceError, UnavailableError
from batchsvc.settings import Settings

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef, GetObjectRequestTypeDef

MIN_PART_BYTES = 5 * 1024 * 1024  # S3 refuses smaller multipart parts, except the last
_NO_BUCKET = "NoSuchBucket"  # a wrong setting or a store that is being restored, never a lost object
MISSING = {"404", "NoSuchKey", "NotFound", "NoSuchUpload"}
OTHER_VERSION = {"412", "PreconditionFailed"}
OBJECTS_KEPT = "objects_kept"  # the code of an answer that is about these objects alone
_BUSY = {"ConditionalRequestConflict", "OperationAborted"}  # 409: another write of the key is under way
_WRITER = "writer"  # metadata of an object
_BUSY_ATTEMPTS, _BUSY_S = 5, 0.05
_DELETE_LIMIT = 1_000  # most keys in one DeleteObjects call
_READ_ATTEMPTS = 4  # reads in a row that may break off without bringing a byte
_URL_LIFE_S = 300  # of an address that is signed for a client: time to begin with
_PLAIN_TYPE = "binary/octet-stream"  # what S3 takes bytes for that have no type


class OtherVersionError(UnavailableError):
    """The object that is there isn't the one that the call was about."""


class BusyError(UnavailableError):
    """Another write of the same object is under way. An upload in parts has to begin again."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Size and version of a stored object, and the writer that made it known."""

    size_bytes: int
    etag: str
    writer: str | None = None


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """An upload in parts that is neither complete nor given up."""

    key: str
    upload_id: str
    started_ms: int


class Bucket:
    """One bucket. Thread-safe. Raises NotFoundError for a missing object, UnavailableError for everything else."""

    def __init__(self, bucket: str, client: S3Client) -> None:
        self.bucket = bucket
        self._client = client
        self._client.meta.events.register("before-call.s3.UploadPart", _name_type)

    def put(
        self, key: str, data: bytes, *, content_type: str = "application/octet-stream", writer: str | None = None
    ) -> str:
        """Store an object in one call and return its ETag. With `writer`, once: see above."""
        once: dict[str, Any] = {"IfNoneMatch": "*", "Metadata": {_WRITER: writer}} if writer else {}
        try:
            for attempt in range(1, _BUSY_ATTEMPTS + 1):
                try:
                    with self._errors(key):
                        return _bare(
                            self._client.put_object(
                                Bucket=self.bucket, Key=key, Body=data, ContentType=content_type, **once
                            )["ETag"]
                        )
                except BusyError:
                    if attempt == _BUSY_ATTEMPTS:
                        raise
                    time.sleep(_BUSY_S * 2**attempt * random.uniform(0.5, 1.0))  # noqa: S311  spreads the load
        except UnavailableError:
            if writer and (etag := self._etag_of(key, writer, len(data))):
                return etag
            raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def get(self, key: str) -> bytes:
        """A whole object, for the small ones; use `stream` for what a user's file may reach."""
        return b"".join(self.stream(key))

    def stream(
        self, key: str, *, start: int = 0, end: int | None = None, etag: str | None = None, chunk: int = 1 << 20
    ) -> Iterator[bytes]:
        """Bytes [start, end) of an object, in pieces of at most `chunk` bytes.

        With `etag`, another version than this one is an OtherVersionError. An object that ends before `end` gives what
        it has.
        """
        position, failures = start, 0
        while end is None or position < end:
            call: GetObjectRequestTypeDef = {
                "Bucket": self.bucket,
                "Key": key,
                "Range": f"bytes={position}-{'' if end is None else end - 1}",
            }
            if etag:
                call["IfMatch"] = f'"{etag}"'
            with self._errors(key):
                try:
                    answer = self._client.get_object(**call)
                except ClientError as error:
                    if code_of(error) == "InvalidRange":  # at or past the end: an empty object, or nothing left
                        return
                    raise
            if etag not in (None, _bare(answer["ETag"])):  # not every server heeds If-Match
                raise OtherVersionError(f"The object {key} was replaced.", code="store_refused")
            etag = _bare(answer["ETag"])
            body, left = answer["Body"], answer["ContentLength"]
            try:
                while left > 0:
                    piece = body.read(min(chunk, left))
                    if not piece:
                        break
                    left -= len(piece)
                    position += len(piece)
                    failures = 0
                    yield piece
            except (BotoCoreError, OSError) as error:
                failures += 1
                if failures >= _READ_ATTEMPTS:
                    raise UnavailableError("The object store broke off while reading.") from error
                continue
            finally:
                body.close()
            if left == 0:
                return
            failures += 1
            if failures >= _READ_ATTEMPTS:
                raise UnavailableError("The object store broke off while reading.")

    def head(self, key: str) -> ObjectInfo | None:
        """Size and ETag, or None if there is no such object."""
        with self._errors(key):
            try:
                answer = self._client.head_object(Bucket=self.bucket, Key=key)
            except ClientError as error:
                if code_of(error) in MISSING:
                    return None
                raise
            return ObjectInfo(answer["ContentLength"], _bare(answer["ETag"]), answer.get("Metadata", {}).get(_WRITER))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that is already gone is no error."""
        left_keys = iter(keys)
        while some := list(islice(left_keys, _DELETE_LIMIT)):
            with self._errors(some[0]):
                answer = self._client.delete_objects(
                    Bucket=self.bucket, Delete={"Objects": [{"Key": key} for key in some], "Quiet": True}
                )
            left = [error for error in answer.get("Errors", []) if error.get("Code") not in MISSING]
            if left:
                raise UnavailableError(
                    f"The object store kept {len(left)} of {len(some)} objects: {left[0]['Code']}.", code=OBJECTS_KEPT
                )

    def list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Keys under a prefix, each with the milliseconds when it was last written. For the garbage audit only."""
        with self._errors(prefix):
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix):
                for item in page.get("Contents", []):
                    yield item["Key"], int(item["LastModified"].timestamp() * 1000)

    def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """Uploads in parts that somebody has begun. For the garbage audit only."""
        with self._errors(prefix):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=prefix)
            for page in pages:
                for item in page.get("Uploads", []):
                    yield OpenUpload(item["Key"], item["UploadId"], int(item["Initiated"].timestamp() * 1000))

    def start_multipart(
        self, key: str, *, content_type: str = "application/octet-stream", writer: str | None = None
    ) -> str:
        """Begin an object that is made of parts; returns the upload's id. Complete it with the same `writer`."""
        named: dict[str, Any] = {"Metadata": {_WRITER: writer}} if writer else {}
        with self._errors(key):
            answer = self._client.create_multipart_upload(
                Bucket=self.bucket, Key=key, ContentType=content_type, **named
            )
            return answer["UploadId"]

    def upload_part(self, key: str, upload_id: str, number: int, data: bytes) -> str:
        """Upload part `number` (from 1; at least MIN_PART_BYTES unless the last) and return its ETag."""
        with self._errors(key):
            answer = self._client.upload_part(
                Bucket=self.bucket, Key=key, UploadId=upload_id, PartNumber=number, Body=data
            )
            return _bare(answer["ETag"])

    def complete_multipart(
        self, key: str, upload_id: str, etags: list[str], *, writer: str | None = None, size_bytes: int = 0
    ) -> str:
        """Join the parts 1..len(etags) into the object and return its ETag.

        With `writer`, once: see above; `size_bytes` is then the size that the object has to have. Raises BusyError
        when the upload has to begin again.
        """
        try:
            return self._complete(key, upload_id, etags, {"IfNoneMatch": "*"} if writer else {})
        except (UnavailableError, NotFoundError):  # a repeated call finds no upload if the first one was done
            if writer and (etag := self._etag_of(key, writer, size_bytes)):
                return etag
            raise

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Give an unfinished upload up; one that is already gone is no error."""
        with self._errors(key):
            try:
                self._client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload_id)
            except ClientError as error:
                if code_of(error) not in MISSING:
                    raise

    def _complete(self, key: str, upload_id: str, etags: list[str], once: dict[str, Any]) -> str:
        parts: list[CompletedPartTypeDef] = [
            {"PartNumber": number, "ETag": f'"{etag}"'} for number, etag in enumerate(etags, start=1)
        ]
        with self._errors(key):
            answer = self._client.complete_multipart_upload(
                Bucket=self.bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": parts}, **once
            )
        etag = answer.get("ETag")
        if not etag:  # a 200 whose body tells of an error
            raise UnavailableError(f"The object store didn't complete {key}.", code="store_refused")
        return _bare(etag)

    def _etag_of(self, key: str, writer: str, size_bytes: int) -> str | None:
        info = self.head(key)
        return info.etag if info and (info.writer, info.size_bytes) == (writer, size_bytes) else None

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (ClientError, BotoCoreError, HTTPClientError, OSError) as error:
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: Exception) -> ServiceError:
        """What an error of botocore is to us."""
        if not isinstance(error, ClientError):
            return UnavailableError("The object store doesn't answer.", code="store_unavailable")
        code = code_of(error)
        if code in MISSING:
            return NotFoundError(f"The object store has no object {what}.", code="object_not_found")
        kind = OtherVersionError if code in OTHER_VERSION else BusyError if code in _BUSY else UnavailableError
        return kind(f"The object store refused {what}: {code}.", code="store_refused")


class ObjectStore(Bucket):
    """The service's own bucket."""

    def __init__(self, settings: Settings) -> None:
        client: S3Client = boto3.session.Session().client(
            "s3",
            endpoint_url=settings.s3_endpoint,
            aws_access_key_id=settings.s3_access_key,
            aws_secret_access_key=settings.s3_secret_key,
            region_name=settings.s3_region,
            config=Config(
                connect_timeout=3,
                read_timeout=20,
                retries={"mode": "standard", "total_max_attempts": 4},
                max_pool_connections=32,
                # addresses of S3 stand-ins are IPs and ports, where a bucket can't be a host name
                s3={"addressing_style": "path" if settings.s3_endpoint else "auto"},
                # proxies of the shell must never see an S3 that runs beside us
                proxies={} if settings.s3_endpoint else None,
            ),
        )
        super().__init__(settings.bucket, client)
        self._public: S3Client | None = _public_client(settings) if settings.public_s3_url else None

    def ensure_bucket(self) -> None:
        """Make the bucket if it isn't there."""
        with self._errors("the bucket"):
            try:
                self._client.head_bucket(Bucket=self.bucket)
            except ClientError as error:
                if code_of(error) not in {*MISSING, _NO_BUCKET}:
                    raise
                try:
                    self._client.create_bucket(Bucket=self.bucket)
                except ClientError as race:
                    if code_of(race) not in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:
                        raise

    def public_url(self, key: str, disposition: str) -> str | None:
        """Where a client may fetch an object itself for some minutes, under this Content-Disposition; None: nowhere."""
        if self._public is None:
            return None
        asked = {
            "Bucket": self.bucket,
            "Key": key,
            "ResponseContentDisposition": disposition,
            "ResponseContentType": "application/octet-stream",
        }
        with self._errors(key):
            return self._public.generate_presigned_url("get_object", Params=asked, ExpiresIn=_URL_LIFE_S)


def _public_client(settings: Settings) -> S3Client:
    """Signs addresses of the store as clients reach it; it sends nothing itself."""
    client: S3Client = boto3.session.Session().client(
        "s3",
        endpoint_url=settings.public_s3_url,
        aws_access_key_id=settings.s3_access_key,
        aws_secret_access_key=settings.s3_secret_key,
        region_name=settings.s3_region,
        config=Config(signature_version="s3v4", s3={"addressing_style": "path" if settings.s3_endpoint else "auto"}),
    )
    return client


def _name_type(params: dict[str, Any], **_: Any) -> None:
    """Give a part a type: SeaweedFS compresses text without one, for two thirds of the time that storing it takes."""
    params["headers"].setdefault("Content-Type", _PLAIN_TYPE)


def code_of(error: ClientError) -> str:
    """What the server calls its error; of a HEAD, whose answer has no body, the status."""
    return str(error.response.get("Error", {}).get("Code", "unknown"))


def _bare(etag: str) -> str:
    return etag.strip('"')
