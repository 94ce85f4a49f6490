"""A repeated run goes on with the same unfinished work, and never with other work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchsvc.cli.attach import MODEL_KEY, SHA_KEY, URI_KEY, Wish, find
from batchsvc.cli.awaited import Awaited
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.stack.datadir import DataDir


class Listed:
    """A listing of batches, newest first; all that `find` asks a client for."""

    def __init__(self, *batches: dict[str, Any]) -> None:
        self.batches = batches

    def newest_batches(self, most: int) -> Iterator[dict[str, Any]]:
        return iter(self.batches[:most])


def batch(batch_id: str, status: str, *, sha: str = "a", name: str | None = None, **more: Any) -> dict[str, Any]:
    metadata = {SHA_KEY: sha} | ({MODEL_KEY: more["model"]} if "model" in more else {})
    shown = {"id": batch_id, "status": status, "name": name, "metadata": metadata, "on_invalid": more.get("on_invalid")}
    return {**shown, "endpoint": more.get("endpoint", "/v1/embeddings")}


def wish(*, name: str | None = None, has_results: bool = False, model: str | None = None) -> Wish:
    asked = {"sha256": "a", "endpoint": "/v1/embeddings", "on_invalid": "fail"}
    return Wish(**asked, name=name, model=model, has_results=has_results)


def found(asked: Wish, *batches: dict[str, Any]) -> str | None:
    result = find(Listed(*batches), asked)
    return result["id"] if result else None


@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing"])
def test_unfinished_work_goes_on(status: str) -> None:
    assert found(wish(), batch("b1", status)) == "b1"
    assert found(wish(name="n"), batch("b2", status), batch("b1", status, name="n")) == "b1"


@pytest.mark.parametrize(
    "other",
    [
        batch("b", "in_progress", sha="other"),
        batch("b", "in_progress", name="n"),
        batch("b", "in_progress", model="m"),
        batch("b", "in_progress", on_invalid="skip"),
        batch("b", "in_progress", endpoint="/v1/responses"),
        batch("b", "cancelled"),
        batch("b", "cancelling"),
        batch("b", "failed"),
        batch("b", "expired"),
        batch("b", "completed"),
        {"id": "b", "status": "in_progress"},
    ],
)
def test_other_work_is_left_alone(other: dict[str, Any]) -> None:
    assert found(wish(), other) is None


def test_a_name_fetches_finished_work_until_its_results_are_written() -> None:
    done = batch("b", "completed", name="n")
    assert found(wish(name="n"), done) == "b"
    assert found(wish(name="n", has_results=True), done) is None


def test_what_completed_when_nobody_followed_it_is_fetched_once(tmp_path: Path) -> None:
    directory = DataDir(tmp_path)
    directory.create()
    awaited, done = Awaited(directory), batch("b1", "completed")
    assert awaited.ids() == frozenset()
    awaited.add("b1")
    assert found(replace(wish(), awaited=Awaited(directory).ids()), done) == "b1"
    assert found(replace(wish(has_results=True), awaited=Awaited(directory).ids()), done) is None
    assert found(replace(wish(), awaited=Awaited(directory).ids()), batch("b2", "completed")) is None
    awaited.drop("b1")
    awaited.drop("b1")
    assert found(replace(wish(), awaited=Awaited(directory).ids()), done) is None
    elsewhere = Awaited(None)
    elsewhere.add("b1")
    assert elsewhere.ids() == frozenset()


def test_a_name_with_other_unfinished_input_is_refused() -> None:
    with pytest.raises(CommandError, match=r"batch_1.*another --name") as refused:
        found(wish(name="n"), batch("batch_1", "in_progress", sha="other", name="n"))
    assert refused.value.code == Exit.USAGE
    assert found(wish(name="n"), batch("batch_1", "completed", sha="other", name="n")) is None


def test_work_in_s3_is_known_by_its_addresses() -> None:
    asked: dict[str, Any] = {"endpoint": "/v1/embeddings", "on_invalid": "fail", "name": None, "model": None}
    here = Wish(**asked, sha256=None, uri="s3://b/in", output_s3="s3://b/out/", has_results=True)
    made = {"id": "b1", "status": "in_progress", "name": None, "endpoint": "/v1/embeddings"}
    made |= {"metadata": {URI_KEY: "s3://b/in"}, "output_s3": {"prefix": "s3://b/out/", "state": "pending"}}
    assert found(here, made) == "b1"
    for other in (
        {"metadata": {URI_KEY: "s3://b/other"}},
        {"metadata": {SHA_KEY: "a"}},
        {"output_s3": None},
        {"output_s3": {"prefix": "s3://b/other/"}},
        {"status": "completed"},
    ):
        assert found(here, made | other) is None
