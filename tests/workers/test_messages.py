"""Whatever somebody puts into the queues, a worker refuses it without repeating it, and goes on."""

from __future__ import annotations

import base64
import json
import pickle
import uuid
from pathlib import Path
from typing import Any

import redis

from batchsvc.batches.lifecycle import Status
from batchsvc.dispatch import CONTROL_QUEUE, TICKET_TASK, queue_of
from tests.workers.conftest import World
from tests.workers.test_processes import environment, process, until

CANARY = "canary-7f3a"


def envelope(body: bytes, content_type: str = "application/json", queue: str = "q", **headers: Any) -> bytes:
    """A message as kombu puts it into a list."""
    return json.dumps(
        {
            "body": base64.b64encode(body).decode(),
            "content-encoding": "utf-8",
            "content-type": content_type,
            "headers": headers,
            "properties": {
                "correlation_id": "x",
                "delivery_mode": 2,
                "delivery_info": {"exchange": "", "routing_key": queue},
                "priority": 0,
                "body_encoding": "base64",
                "delivery_tag": str(uuid.uuid4()),
            },
        }
    ).encode()


def task(name: str = TICKET_TASK, args: Any = (), kwargs: Any = None, **changes: Any) -> bytes:
    body = json.dumps([list(args), kwargs or {}, {}]).encode()
    return envelope(**{"body": body, "lang": "py", "task": name, "id": str(uuid.uuid4()), **changes})


class Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


def hostile(path: Path) -> list[bytes]:
    pickled = pickle.dumps(([Bomb(path)], {CANARY: 1}, {}))
    return [
        CANARY.encode(),
        b"\xff\xfe" + CANARY.encode(),
        json.dumps([CANARY]).encode(),
        json.dumps(CANARY).encode(),
        json.dumps({"body": CANARY}).encode(),
        json.dumps({"body": CANARY, "properties": {}, "headers": {}}).encode(),
        b"null",
        b"{" * 50_000 + CANARY.encode(),
        envelope(CANARY.encode()),
        envelope(b"{", task=TICKET_TASK, id=CANARY),
        task(name=f"os.system.{CANARY}"),
        task(name=TICKET_TASK, args=[CANARY]),
        task(name=TICKET_TASK, kwargs={CANARY: CANARY}),
        task(body=pickled, content_type="application/x-python-serialize"),
        task(body=CANARY.encode()),
        task(body=json.dumps({CANARY: 1}).encode()),
        task(body=json.dumps([CANARY]).encode()),
        envelope(pickled, content_type="application/x-python-serialize"),
        envelope(json.dumps({"task": TICKET_TASK, "id": CANARY, "args": CANARY}).encode()),
        task(eta=CANARY),
        task(expires=CANARY),
        task(timelimit=CANARY),
    ]


def test_hostile_messages_are_refused_without_their_contents(
    sqlite_world: World, tiny: tuple[Path, str], tmp_path: Path, redis_url: str
) -> None:
    """Polling is off: the batch can only end if both workers still take messages after all of these."""
    world, bomb = sqlite_world, tmp_path / "exploded"
    broker = redis.Redis.from_url(redis_url)
    broker.flushall()
    env = environment(world.settings, tiny[0], TEST_LOGS=tmp_path, BATCHSVC_POLL_S=600)
    with process("control", env) as control, process("engine", env) as engine:
        for queue in (CONTROL_QUEUE, queue_of(tiny[1])):
            for message in hostile(bomb):
                broker.lpush(f"batchsvc:{queue}", message)
        batch_id = world.add_batch(num_lines=12, unit_lines=4, digest=tiny[1])
        until(lambda: world.batch(batch_id).status == Status.COMPLETED, "the end of the batch")
        until(lambda: not broker.llen(f"batchsvc:{CONTROL_QUEUE}"), "the control queue is empty")
        assert control.poll() is None and engine.poll() is None
        assert not broker.hlen("batchsvc:unacked"), "nothing comes back after the visibility timeout"
    world.judge(batch_id, Status.COMPLETED)
    said = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert said.count("message.refused") >= 30 and CANARY not in said and "Traceback" not in said, said[-3000:]
    assert not bomb.exists()
