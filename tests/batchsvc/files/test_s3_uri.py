"""Addresses in S3: what is refused, and that nothing under a prefix leads out of it, however a server reads keys."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.errors import InvalidRequestError
from batchsvc.files.s3_uri import MAX_CHARS, S3Uri, parse_object, parse_prefix

STEP = st.text("ab.é ?#%+\\~*", min_size=0, max_size=4)
PATH = st.lists(STEP, min_size=1, max_size=5).map("/".join)


BAD_STEPS = ("", "/", "a/", "/a", "a//b", "..", ".", "a/../b", "a/./b", "../b", "a/..")
BAD_CHARACTERS = ("a\nb", "a\x7fb", "a\u0085b", "a\ud800")
TOO_LONG = ("x" * 1025, "é" * 513)
BAD_BUCKETS = ("", "ab", "a" * 64, "Bucket", "buc_ket", "-ab", "ab-", "a..b", ".ab", "ab.", "b@c", "buc%2fket", "b?c")


@pytest.mark.parametrize("key", [*BAD_STEPS, *BAD_CHARACTERS, *TOO_LONG])
def test_a_key_that_two_readers_may_take_for_two_objects_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parse_object(f"s3://bucket/{key}", "input_file_id")
    assert (refused.value.code, refused.value.param) == ("invalid_s3_uri", "input_file_id")


@pytest.mark.parametrize("bucket", [*BAD_BUCKETS, "arn:aws:s3:::x", "bücket"])
def test_what_is_no_name_of_a_bucket_is_refused(bucket: str) -> None:
    for parse in (parse_object, parse_prefix):
        with pytest.raises(InvalidRequestError):
            parse(f"s3://{bucket}/a", "x")


@pytest.mark.parametrize("text", ["", "bucket/a", "S3://bucket/a", "s3:/bucket/a", "https://bucket/a", "file-x"])
def test_what_is_no_such_address_is_refused(text: str) -> None:
    for parse in (parse_object, parse_prefix):
        with pytest.raises(InvalidRequestError):
            parse(text, "x")


def test_keys_are_taken_as_they_are() -> None:
    for key in ("a", "a/b.jsonl", "a?b#c%2e%2e/ö +.jsonl", "...", "a/..b/c..", "x" * 1024):
        assert parse_object(f"s3://bucket/{key}", "x") == S3Uri("bucket", key)
        assert str(S3Uri("bucket", key)) == f"s3://bucket/{key}" and len(str(S3Uri("b" * 63, key))) <= MAX_CHARS


def test_a_prefix_is_a_folder_or_a_whole_bucket() -> None:
    assert parse_prefix("s3://bucket", "x") == parse_prefix("s3://bucket/", "x") == S3Uri("bucket", "")
    assert parse_prefix("s3://bucket/a/b", "x") == parse_prefix("s3://bucket/a/b/", "x") == S3Uri("bucket", "a/b/")
    for text in ("s3://bucket//", "s3://bucket/a//", "s3://bucket/../", "s3://bucket/" + "x" * 901):
        with pytest.raises(InvalidRequestError):
            parse_prefix(text, "x")
    folder = S3Uri("bucket", "a/")
    assert folder.covers(S3Uri("bucket", "a/b")) and S3Uri("bucket", "").covers(folder) and folder.covers(folder)
    for other in (S3Uri("bucket", "ab"), S3Uri("bucket", "a"), S3Uri("other", "a/b")):
        assert not folder.covers(other)


@given(PATH, PATH)
def test_what_a_prefix_covers_stays_under_it_also_when_the_key_is_resolved(prefix: str, key: str) -> None:
    try:
        folder, one = parse_prefix(f"s3://bucket/{prefix}", "x"), parse_object(f"s3://bucket/{key}", "x")
    except InvalidRequestError:
        return
    assert posixpath.normpath(one.key) == one.key, "resolving changes nothing"
    inside = posixpath.normpath("/base/" + one.key).startswith(posixpath.normpath("/base/" + folder.key) + "/")
    assert folder.covers(one) == (inside or folder.key == "")


@given(PATH)
def test_an_address_is_read_as_it_is_written(key: str) -> None:
    for parse in (parse_object, parse_prefix):
        try:
            found = parse(f"s3://bucket/{key}", "x")
        except InvalidRequestError:
            continue
        assert parse(str(found), "x") == found
