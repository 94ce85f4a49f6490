"""Prefixed ids: one function a kind of object, so that an id says what it names."""

from __future__ import annotations

import secrets

from batchsvc.clock import now_ns

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def random_text(length: int) -> str:
    """`length` random characters of [0-9A-Za-z], about 5.95 bits each."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def file_id() -> str:
    return "file-" + random_text(24)


def upload_id() -> str:
    return "upload_" + random_text(24)


def upload_part_id() -> str:
    return "upart_" + random_text(24)


def batch_id() -> str:
    return "batch_" + random_text(24)


def message_batch_id() -> str:
    return "msgbatch_" + random_text(24)


def call_id() -> str:
    return "call_" + random_text(24)


def quote_id() -> str:
    return "quote_" + random_text(24)


def project_id() -> str:
    return "proj_" + random_text(20)


def unit_id() -> str:
    return "unit_" + random_text(24)


def part_id() -> str:
    return "part_" + random_text(24)


def invoice_id() -> str:
    return "inv_" + random_text(24)


def endpoint_id() -> str:
    return "we_" + random_text(24)


def event_id() -> str:
    return "evt_" + random_text(24)


def delivery_id() -> str:
    return "whd_" + random_text(24)


def store_id() -> str:
    return "store_" + random_text(24)


def audit_id() -> str:
    """Ids sort as they were made, for rows of one millisecond; hexadecimal does so in every collation."""
    return f"audit_log-{now_ns():016x}{random_text(8)}"


def service_account_id() -> str:
    return "svc_acct_" + random_text(24)


def worker_id(host: str, pid: int) -> str:
    """Unique for every start of a process: a restarted worker must not look like its dead self."""
    return f"{host}:{pid}:{random_text(8)}"
