"""The protocol holds in every history that chance makes of kills, lost leases, ends, damage and repeated commits."""

from __future__ import annotations

import pytest

from tests.workers.protocol_model import Protocol, run_protocol


def test_the_protocol_holds_whatever_dies_and_whenever() -> None:
    run_protocol(Protocol, examples=15)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_protocol_holds_in_many_histories() -> None:
    run_protocol(Protocol, examples=1_500)
