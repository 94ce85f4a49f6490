"""Addresses of a split: which are none, which can't be listened at here, and which need a key."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.errors import PeerError
from engine.split import wires
from engine.split.signed import NO_KEY, SplitKey


@pytest.mark.parametrize(
    "bad", ["", "gloo", "gloo://host", "gloo://:5", "tcp://host:5", "shm://host/path", "gloo://h:x", "gloo://h:5/p"]
)
def test_what_is_no_address_is_refused(bad: str) -> None:
    with pytest.raises(PeerError, match="is no address of a prefill engine"):
        wires.parse(bad)


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "0x0", "[::]", "[::0]", "[::ffff:0.0.0.0]"])
def test_who_listens_everywhere_could_not_be_found(host: str) -> None:
    with pytest.raises(PeerError, match="is no address that others could connect to"):
        wires.listen(f"gloo://{host}:0")


@pytest.mark.parametrize("use", [wires.listen, wires.connect])
@pytest.mark.parametrize("host", ["192.0.2.1", "[2001:db8::1]", "[::ffff:192.0.2.1]"])
@pytest.mark.parametrize("scheme", ["gloo", "nccl", "nixl"])
def test_beyond_this_host_there_is_a_key_or_nothing(use: Callable[[str], object], host: str, scheme: str) -> None:
    with pytest.raises(
        PeerError, match=r"is beyond this host.*give both sides the same BATCHSVC_SPLIT_KEY, as `openss"
    ):
        use(f"{scheme}://{host}:4100")


@pytest.mark.parametrize("address", ["gloo://127.0.0.2:1", "gloo://localhost:1", "nixl://[::1]:1", "shm:///a/path"])
def test_on_this_host_no_key_is_needed(address: str) -> None:
    wires.check_reach(address, NO_KEY)


def test_with_a_key_other_hosts_may_come() -> None:
    key = SplitKey(b"k" * 32)
    wires.check_reach("gloo://192.0.2.1:4100", key)
    with pytest.raises(PeerError, match=r"^Can't listen at gloo://192\.0\.2\.1:0"):
        wires.listen("gloo://192.0.2.1:0", key=key)


def test_a_host_that_nobody_knows_is_refused() -> None:
    with pytest.raises(PeerError, match=r"Can't listen at gloo://nowhere\.invalid:0: "):
        wires.listen("gloo://nowhere.invalid:0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("use", [wires.listen, wires.connect])
def test_without_a_gpu_nccl_is_refused_with_the_way_out(use: Callable[[str], object]) -> None:
    with pytest.raises(PeerError, match=r"need an NVIDIA GPU and a torch with NCCL.*gloo:// needs neither\.$"):
        use("nccl://127.0.0.1:0")
