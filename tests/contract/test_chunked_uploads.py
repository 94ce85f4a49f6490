"""Files that come in parts, as the official client sends them: any order, checked as a whole, nothing left behind."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from batchsvc.batches import garbage_queries
from batchsvc.files import upload_service
from batchsvc.files.tables import Upload
from batchsvc.store import keys
from tests.contract.conftest import Api
from tests.contract.test_http import envelope

LINES = b"".join(b'{"custom_id":"%d"}\n' % number for number in range(1000))


def begin(api: Api, size: int = len(LINES), **changes: Any) -> openai.types.Upload:
    arguments = {"bytes": size, "filename": "a.jsonl", "mime_type": "application/jsonl", "purpose": "batch"}
    return api.client().uploads.create(**{**arguments, **changes})


def add(api: Api, upload_id: str, data: bytes) -> str:
    return api.client().uploads.parts.create(upload_id, data=data).id


def complete(api: Api, upload_id: str, part_ids: list[str], **more: str) -> httpx.Response:
    return api.call("POST", f"/v1/uploads/{upload_id}/complete", json={"part_ids": part_ids, **more})


def part_keys(api: Api) -> list[str]:
    return [key for key, _ in api.store.list_keys(f"{keys.UPLOADS}{api.project_id}/")]


def expired_parts(api: Api) -> list[str]:
    """What the reaper marks to be deleted."""
    marked: list[str] = []
    api.db.run(lambda session: upload_service.expire(session, discard=lambda _, key: marked.append(key)))
    return marked


def pieces(size: int) -> Iterator[bytes]:
    return (LINES[start : start + size] for start in range(0, len(LINES), size))


def test_the_clients_chunked_upload_becomes_a_file(api: Api, tmp_path: Path) -> None:
    path = tmp_path / "tickets.jsonl"
    path.write_bytes(LINES)
    done = api.client().uploads.upload_file_chunked(
        file=path, mime_type="application/jsonl", purpose="batch", part_size=5000, md5=hashlib.md5(LINES).hexdigest()
    )
    assert (done.status, done.bytes, done.filename, done.object) == ("completed", len(LINES), path.name, "upload")
    assert done.file is not None and (done.file.bytes, done.file.purpose) == (len(LINES), "batch")
    assert api.client().files.content(done.file.id).content == LINES
    assert api.call("GET", f"/v1/files/{done.file.id}").json()["sha256"] == hashlib.sha256(LINES).hexdigest()
    made = api.client().batches.create(
        input_file_id=done.file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert made.status == "validating"


def test_parts_come_in_any_order_and_the_call_that_completes_says_which(api: Api) -> None:
    upload = begin(api)
    parts = list(pieces(7000))
    ids = [add(api, upload.id, data) for data in reversed(parts)]
    lost = add(api, upload.id, parts[0])  # as a client sends it again whose answer got lost
    assert len(part_keys(api)) == len(parts) + 1
    answer = complete(api, upload.id, [lost, *ids[::-1][1:]], md5=hashlib.md5(LINES).hexdigest().upper())
    assert answer.status_code == 200
    file_id = answer.json()["file"]["id"]
    assert api.call("GET", f"/v1/files/{file_id}/content").content == LINES
    again = complete(api, upload.id, [lost, *ids[::-1][1:]])
    assert again.json() == answer.json(), "a repeated call makes no second file"
    assert len(api.call("GET", "/v1/files").json()["data"]) == 1
    assert envelope(complete(api, upload.id, ids), 400)["code"] == "upload_not_pending"
    with api.db.reading() as session:
        assert upload_service.known_keys(session, part_keys(api)) == set(), "the parts are garbage"
        due = set(garbage_queries.referred_to(session, part_keys(api)))
    assert due == set()


def test_wrong_orders_and_sums_are_refused_and_the_upload_stays_open(api: Api) -> None:
    upload = begin(api)
    ids = [add(api, upload.id, data) for data in pieces(9000)]
    other = begin(api)
    foreign = add(api, other.id, b"x")
    for part_ids, more, param in (
        ([], {}, "part_ids"),
        (ids[:-1], {}, "part_ids"),
        ([*ids, ids[0]], {}, "part_ids"),
        ([*ids[:-1], foreign], {}, "part_ids"),
        ([*ids[:-1], "upart_nope"], {}, "part_ids"),
        (ids, {"md5": "abc"}, "md5"),
        (ids[::-1], {"md5": hashlib.md5(LINES).hexdigest()}, "md5"),
    ):
        assert envelope(complete(api, upload.id, part_ids, **more), 400)["param"] == param
    assert envelope(api.call("POST", f"/v1/uploads/{upload.id}/complete", json={}), 400)["param"] == "part_ids"
    assert list(api.store.list_keys(f"{keys.INPUTS}{api.project_id}/")) == [], "nothing half made can be seen"
    assert complete(api, upload.id, ids, md5=hashlib.md5(LINES).hexdigest()).status_code == 200


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"bytes": 0}, "bytes"),
        ({"bytes": 24 * 1024 * 1024 + 1}, "bytes"),
        ({"filename": "a.txt"}, "filename"),
        ({"purpose": "vision"}, "purpose"),
        ({"expires_after": {"anchor": "created_at", "seconds": 60}}, "expires_after.seconds"),
    ],
)
def test_what_no_batch_could_read_is_refused_before_a_byte_comes(api: Api, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        begin(api, **changes)
    assert refused.value.param == param


def test_cancelled_and_expired_uploads_take_nothing_more(api: Api) -> None:
    for how in ("cancelled", "expired"):
        upload = begin(api)
        part = add(api, upload.id, LINES)
        if how == "cancelled":
            assert api.client().uploads.cancel(upload.id).status == how
            assert api.client().uploads.cancel(upload.id).status == how, "again, it changes nothing"
        else:
            with api.db.transaction() as session:
                session.get_one(Upload, upload.id).expires_ms = 1
            assert envelope(api.call("POST", f"/v1/uploads/{upload.id}/cancel"), 400)["code"] == "upload_not_pending"
            assert any(upload.id in key for key in expired_parts(api))
        with pytest.raises(openai.BadRequestError, match=how):
            add(api, upload.id, b"x")
        assert envelope(complete(api, upload.id, [part]), 400)["code"] == "upload_not_pending"


def test_parts_have_limits(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_service, "MAX_PART_BYTES", 1000)
    upload = begin(api)
    for size, status in ((1000, 200), (1001, 413)):
        answer = api.call("POST", f"/v1/uploads/{upload.id}/parts", files={"data": b"x" * size})
        assert answer.status_code == status
    assert envelope(answer, 413)["param"] == "data"
    monkeypatch.setattr(upload_service, "_MAX_PARTS", 1)
    answer = api.call("POST", f"/v1/uploads/{upload.id}/parts", files={"data": b"x"})
    assert envelope(answer, 400)["code"] == "too_many_parts"
    assert len(part_keys(api)) == 1, "what was refused is gone"
    for wrong in ({"file": b"x"}, {"data": (None, b"x")}):
        answer = api.call("POST", f"/v1/uploads/{upload.id}/parts", files=wrong)
        assert envelope(answer, 400)["param"] == "data"
    kind = {"content-type": "multipart/form-data; boundary=B"}
    torn = b'--B\r\nContent-Disposition: form-data; name="data"; filename="a"\r\n\r\nxyz'
    answer = api.call("POST", f"/v1/uploads/{upload.id}/parts", content=torn, headers=kind)
    assert envelope(answer, 400)["code"] == "invalid_body"


def test_a_file_of_a_completed_upload_lives_as_long_as_was_asked(api: Api) -> None:
    upload = begin(api, expires_after={"anchor": "created_at", "seconds": 7200})
    life_s = api.settings.upload_ttl_s  # of the upload itself, until it is completed
    assert upload.expires_at - upload.created_at in (life_s, life_s + 1)
    file = complete(api, upload.id, [add(api, upload.id, LINES)]).json()["file"]
    assert file["expires_at"] - file["created_at"] in (7200, 7201)
