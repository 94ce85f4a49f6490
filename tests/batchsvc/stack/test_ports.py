"""Ports are remembered; a taken one is replaced, except the one that the user named."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchsvc.stack import ports
from batchsvc.stack.children import api_url
from batchsvc.stack.datadir import DataDir
from batchsvc.stack.options import StackOptions
from batchsvc.stack.services import GRPC_OFFSET, WEED_PORTS, is_free

LOOPBACK = "127.0.0.1"


@contextmanager
def listening(port: int) -> Iterator[None]:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((LOOPBACK, port))
        server.listen()
        yield


@pytest.fixture
def directory(tmp_path: Path) -> DataDir:
    made = DataDir(tmp_path)
    made.create()
    return made


def chosen(directory: DataDir, *, port: int | None) -> dict[str, int]:
    """What a stack that ends at once would choose."""
    held = ports.HeldPorts()
    try:
        return ports.choose(directory, host=LOOPBACK, port=port, held=held)
    finally:
        held.release()


def test_ports_are_distinct_and_remembered(directory: DataDir) -> None:
    first = chosen(directory, port=0)
    assert set(first) == {"api", "valkey", *WEED_PORTS}
    used = [*first.values(), *(first[name] + GRPC_OFFSET for name in WEED_PORTS)]
    assert len(set(used)) == len(used)
    assert chosen(directory, port=None) == first


def test_no_connection_can_hold_a_port_of_ours(directory: DataDir) -> None:
    first_outgoing = 32_768  # of Linux, unless someone set another
    assert max(chosen(directory, port=0).values()) + GRPC_OFFSET < first_outgoing


def test_a_remembered_port_is_no_twin_of_a_chosen_one(directory: DataDir) -> None:
    first = chosen(directory, port=0)
    directory.write_json("ports.json", {"valkey": first["filer"] + GRPC_OFFSET})  # as an older release may have chosen
    second = chosen(directory, port=0)
    used = [*second.values(), *(second[name] + GRPC_OFFSET for name in WEED_PORTS)]
    assert len(set(used)) == len(used)


@pytest.mark.parametrize(
    "clash",
    [
        lambda port: {"filer": port, "valkey": port + GRPC_OFFSET},
        lambda port: {"filer": port, "master": port},
        lambda port: {"s3": port, "engine": port + GRPC_OFFSET},
        lambda port: {"filer": port - GRPC_OFFSET, "s3": port},
    ],
    ids=["twin", "same", "a worker's", "one of before the range"],
)
def test_remembered_ports_that_clash_are_chosen_anew(
    directory: DataDir, clash: Callable[[int], dict[str, int]]
) -> None:
    """As an older release may have chosen them; the first stays."""
    port = chosen(directory, port=0)["filer"]
    directory.write_json("ports.json", clash(port))
    held = ports.HeldPorts()
    try:
        found = ports.choose(directory, host=LOOPBACK, port=0, held=held, workers=("engine",))
    finally:
        held.release()
    used = [*found.values(), *(found[name] + GRPC_OFFSET for name in WEED_PORTS)]
    assert len(set(used)) == len(used)
    assert set(clash(port).items()) & set(found.items())


@pytest.mark.parametrize("remembered", [{"filer": 60_000}, {"api": 70_000}, {"valkey": 0}, {"s3": -1}])
def test_remembered_ports_that_are_none_are_chosen_anew(directory: DataDir, remembered: dict[str, int]) -> None:
    directory.write_json("ports.json", remembered)
    assert not set(remembered.items()) & set(chosen(directory, port=None).items())


def test_taken_ports_are_chosen_anew(directory: DataDir) -> None:
    first = chosen(directory, port=0)
    with listening(first["api"]), listening(first["valkey"]), listening(first["filer"] + GRPC_OFFSET):
        second = chosen(directory, port=None)
    changed = {name for name in first if first[name] != second[name]}
    assert changed == {"api", "valkey", "filer"}


def test_a_named_port_that_is_taken_is_refused(directory: DataDir) -> None:
    port = chosen(directory, port=0)["api"]
    with listening(port), pytest.raises(ports.PortTakenError, match=f"Port {port} on 127.0.0.1 is taken"):
        chosen(directory, port=port)
    assert chosen(directory, port=port)["api"] == port


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_an_address_of_ipv6_works_like_any_other() -> None:
    with socket.socket(socket.AF_INET6) as server:
        try:
            server.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no ::1")
        server.listen()
        port = server.getsockname()[1]
        assert not is_free(port, "::1")
    assert is_free(port, "::1")


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("my.host", "my.host")],
)
def test_the_url_is_one_that_clients_can_use(host: str, shown: str) -> None:
    assert api_url(StackOptions(root=Path("/d"), host=host), {"api": 8080}) == f"http://{shown}:8080/v1"


def test_a_broken_file_is_no_obstacle(directory: DataDir) -> None:
    (directory.run / "ports.json").write_text('{"api": "x", "valkey": null}')
    assert chosen(directory, port=0)["valkey"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="ports are held by Linux's abstract names")
def test_stacks_that_start_together_choose_different_ports(tmp_path: Path) -> None:
    held, chosen_ports = [ports.HeldPorts() for _ in range(3)], []
    for number, mine in enumerate(held):
        directory = DataDir(tmp_path / str(number))
        directory.create()
        chosen_ports += ports.choose(directory, host=LOOPBACK, port=None, held=mine).values()
    assert len(set(chosen_ports)) == len(chosen_ports)
    with pytest.raises(ports.PortTakenError):
        ports.choose(directory, host=LOOPBACK, port=chosen_ports[0], held=held[-1])
    for mine in held:
        mine.release()
