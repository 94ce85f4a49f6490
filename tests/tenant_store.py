"""A tenant's store: a bucket on an S3 server that isn't ours, with keys that aren't ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from socket import SHUT_RDWR, create_server
from threading import Event, Thread
from typing import Any

import boto3

from batchsvc.db.session import Database
from batchsvc.egress import Egress
from batchsvc.files import store_service
from batchsvc.files.store_schemas import RegisterStore
from batchsvc.files.store_service import OwnStore
from batchsvc.files.tables import TenantStore
from batchsvc.sealing import Seals
from batchsvc.store.foreign import Access, ForeignBucket
from tests.servers import SECRET_KEY, S3Server

LOOPBACK = "127.0.0.0/8"
SEALS = Seals.of(SECRET_KEY)


@dataclass
class Tenant:
    """A bucket of a tenant, seen with the tenant's own client."""

    server: S3Server
    bucket: str
    client: Any

    def uri(self, key: str) -> str:
        return f"s3://{self.bucket}/{key}"

    def put(self, key: str, data: bytes) -> str:
        """Write an object, or replace it; returns its ETag."""
        return str(self.client.put_object(Bucket=self.bucket, Key=key, Body=data)["ETag"]).strip('"')

    def get(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read())

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=key)

    def objects(self) -> list[str]:
        """The keys of all objects."""
        return [item["Key"] for item in self.client.list_objects_v2(Bucket=self.bucket).get("Contents", [])]

    def uploads(self) -> list[str]:
        """Keys of uploads in parts that nobody has completed."""
        return [item["Key"] for item in self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])]

    def access(self, **changes: Any) -> Access:
        found = {"bucket": self.bucket, "endpoint": self.server.endpoint, "region": "us-east-1"}
        found |= {"access_key": self.server.access_key, "secret_key": self.server.secret_key}
        return Access(**(found | changes))

    def opened(self) -> ForeignBucket:
        return ForeignBucket(self.access(), Egress.parse(LOOPBACK))

    def registration(self, project: str, prefix: str = "", **changes: Any) -> dict[str, Any]:
        """The body of a registration."""
        body = {"project": project, "uri": self.uri(prefix), "endpoint": self.server.endpoint}
        body |= {"access_key": self.server.access_key, "secret_key": self.server.secret_key}
        return body | changes

    def register(self, db: Database, project: str, prefix: str = "", **changes: Any) -> TenantStore:
        body = RegisterStore(**self.registration(project, prefix, **changes))
        return db.run(lambda session: store_service.register(session, body, OwnStore("ours", None, SEALS)))


@contextmanager
def made(server: S3Server, bucket: str) -> Iterator[Tenant]:
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=bucket)
    yield Tenant(server, bucket, client)
    client.delete_bucket(Bucket=bucket)  # SeaweedFS takes its objects along
    client.close()


@contextmanager
def listening() -> Iterator[tuple[str, list[bytes]]]:
    """A server that counts: its address, and what came over each connection. It answers nobody."""
    came: list[bytes] = []
    with create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    came.append(connection.recv(65536))

        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", came
        server.shutdown(SHUT_RDWR)
        thread.join(10)


@contextmanager
def dripping(head: bytes) -> Iterator[int]:
    """A server that sends this to everybody, and then a byte now and then, for ever. Yields its port."""
    stopped = Event()
    with create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            while not stopped.is_set():
                try:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(head)
                        while not stopped.wait(0.05):
                            connection.sendall(b"x")
                except OSError:
                    continue

        thread = Thread(target=drip, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        stopped.set()
        server.shutdown(SHUT_RDWR)
        thread.join(10)
