"""Jobs whose input is in a tenant's store and whose results go there, by the command line against a running stack."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import orjson

from tests.e2e.conftest import Result, Stack, line, read_lines, write_lines
from tests.tenant_store import Tenant


def test_a_job_goes_from_a_store_and_back(
    stack: Stack, stack_cli: Callable[..., Result], tenant: Tenant, tmp_path: Path
) -> None:
    rows = [line(i, stack.model) for i in range(5)]
    source = write_lines(tmp_path / "requests.jsonl", rows)
    tenant.put("in/requests.jsonl", source.read_bytes())
    refused = stack_cli("run", tenant.uri("in/requests.jsonl"), "-o", tmp_path / "o.jsonl")
    assert refused.code == 1 and "batchsvc admin stores add" in refused.err
    secret = tmp_path / "secret"
    secret.write_text(tenant.server.secret_key)
    keys = ("--access-key", tenant.server.access_key, "--secret-file", secret, "--endpoint", tenant.server.endpoint)
    assert stack_cli("admin", "stores", "add", "default", tenant.uri("in"), *keys).code == 0
    assert stack_cli("admin", "stores", "add", "default", tenant.uri("out"), *keys).code == 0

    there = stack_cli("run", tenant.uri("in/requests.jsonl"), "--output-s3", tenant.uri("out/x"), "--json")
    assert there.code == 0, there.err
    batch, folder = there.json, f"out/x/{there.json['id']}"
    assert batch["output_s3"]["state"] == "done" and batch["metadata"] == {"input_s3": tenant.uri("in/requests.jsonl")}
    manifest = orjson.loads(tenant.get(f"{folder}/manifest.json"))
    (output,) = manifest["files"]
    data = tenant.get(f"{folder}/output.jsonl")
    assert (output["lines"], output["bytes"], output["sha256"]) == (5, len(data), hashlib.sha256(data).hexdigest())

    here = stack_cli("run", tenant.uri("in/requests.jsonl"), "-o", tmp_path / "here.jsonl", "--json")
    assert here.code == 0 and here.json["id"] != batch["id"] and here.json["output_s3"] is None, here.err
    assert here.json["input_file_id"] == batch["input_file_id"], "the same version is the same file"
    assert [row["custom_id"] for row in read_lines(tmp_path / "here.jsonl")] == [row["custom_id"] for row in rows]

    quoted = stack_cli("quote", tenant.uri("in/requests.jsonl"), "--json")
    assert quoted.code == 0 and quoted.json["input_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    both = stack_cli(
        *(
            "run",
            source,
            "-o",
            tmp_path / "both.jsonl",
            "--output-s3",
            tenant.uri("out/x"),
            "--quote",
            quoted.json["id"],
        )
    )
    assert both.code == 0 and "manifest.json" in both.out and len(read_lines(tmp_path / "both.jsonl")) == 5, both.err
    watched = stack_cli("watch", batch["id"], "--json")
    assert watched.code == 0 and watched.json["output_s3"]["state"] == "done"
    shown = stack_cli("show", batch["id"])
    assert f"{tenant.uri(folder)}/ (done)" in shown.out


def test_what_can_not_be_meant_is_wrong_usage(stack: Stack, stack_cli: Callable[..., Result], tmp_path: Path) -> None:
    source = write_lines(tmp_path / "requests.jsonl", [line(1, stack.model)])
    for arguments, says in (
        ((source, "-o", "s3://bucket/out"), "--output-s3"),
        ((source, "--output-s3", "s3://bucket/a/../b"), "--output-s3: "),
        (("s3://bucket/a/../b",), "FILE: "),
        (("s3://bucket/a.csv", "--prompt", "Say {x}"), "fetch s3://bucket/a.csv first"),
    ):
        found = stack_cli("run", *arguments)
        assert found.code == 2 and says in found.err, found.err
