"""Where tenants may have us send: every trick by which a private address looks like another one."""

from __future__ import annotations

import ipaddress
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.egress import Address, Egress, EgressError, faces_of, is_public

NOBODY = Egress()
V4 = st.integers(0, 2**32 - 1).map(IPv4Address)
V6 = st.integers(0, 2**128 - 1).map(IPv6Address)
PUBLIC_V4 = V4.filter(is_public)
METADATA = ("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254")
REFUSED = (
    *("127.0.0.1", "127.255.0.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1"),
    *("169.254.1.1", "192.0.0.1", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.9", "192.88.99.1"),
    *("224.0.0.1", "239.1.2.3", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "fe80::1", "fc00::1", "fd12::1", "ff02::1", "fec0::1", "100::1", "2001:db8::1", "3fff::1"),
    *("2001::1", "2001:10::1", "2001:20::1", "2002:808:808::1", "5f00::1", "4000::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808", "2002:7f00:1::", "2001:0:7f00:1::"),
    *("2600:1f18::5efe:a00:1", "2600:1f18::200:5efe:7f00:1"),
)


def embeddings(address: IPv4Address) -> list[IPv6Address]:
    """IPv6 addresses by which a packet may reach an IPv4 address."""
    number = int(address)
    return [
        IPv6Address((0xFFFF << 32) | number),  # mapped
        IPv6Address((0x64FF9B << 96) | number),  # NAT64
        IPv6Address((0x2002 << 112) | (number << 80)),  # 6to4
        IPv6Address((0x20010000 << 96) | (number << 64)),  # Teredo's server
        IPv6Address((0x20010000 << 96) | (number ^ 0xFFFFFFFF)),  # its client
        IPv6Address((0x26001F18 << 96) | (0x5EFE << 32) | number),  # ISATAP
    ]


@pytest.mark.parametrize("text", [*REFUSED, *METADATA])
def test_what_is_not_public_is_refused(text: str) -> None:
    assert not NOBODY.permits("x.example", ipaddress.ip_address(text))


@pytest.mark.parametrize("text", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"])
def test_what_is_public_is_reached(text: str) -> None:
    assert NOBODY.permits("x.example", ipaddress.ip_address(text))


@given(address=V4 | V6)
def test_no_address_is_public_that_pythons_own_tables_call_special(address: Address) -> None:
    if NOBODY.permits("x", address):
        for face in faces_of(address):
            assert not (face.is_private and face not in ipaddress.ip_network("64:ff9b::/96"))
            assert not (face.is_multicast or face.is_loopback or face.is_link_local or face.is_unspecified)


@given(address=V4)
def test_an_address_in_an_address_is_never_more_than_itself(address: IPv4Address) -> None:
    alone = NOBODY.permits("x", address)
    for carrier in embeddings(address):
        assert address in faces_of(carrier)
        assert alone or not NOBODY.permits("x", carrier)


@given(address=st.sampled_from(METADATA).map(ipaddress.ip_address), embedded=st.integers(0, 5))
def test_metadata_is_never_permitted(address: Address, embedded: int) -> None:
    everything = Egress.parse("0.0.0.0/0,::/0,metadata.example")
    assert not everything.permits("metadata.example", address)
    if isinstance(address, IPv4Address):
        assert not everything.permits("metadata.example", embeddings(address)[embedded])


@given(address=V4)
def test_a_permitted_network_permits_itself_and_nothing_else(address: IPv4Address) -> None:
    egress = Egress.parse("10.1.0.0/16, fd12::/16")
    inside = address in ipaddress.ip_network("10.1.0.0/16")
    assert egress.permits("x", address) == (inside or is_public(address))
    assert egress.permits("x", address, only_named=True) == inside
    assert egress.permits("x", IPv6Address("fd12::5")) and not egress.permits("x", IPv6Address("fd13::5"))
    assert egress.permits("x", IPv6Address("64:ff9b::a01:5")) and not egress.permits("x", IPv6Address("64:ff9b::a02:5"))


@pytest.mark.parametrize("text", ["10.0.0.0/33", "10.0.0.1/8", "-x", "a b", "127.1", "0x7f000001", "2130706433", "*"])
def test_what_an_operator_mistypes_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="neither a network"):
        Egress.parse(f"10.0.0.0/8,{text}")


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://x.example/",
            "ftp://x.example/",
            "//x.example/",
            "x.example",
            "",
            "https://",
            "https:///p",
            "file:///e",
        ),
        *("https://u@x.example/", "https://u:p@x.example/", "https://x.example@10.0.0.1/", "https://@x.example/"),
        *("https://x.example/#f", "https://x.example/#", "https://x.example:22/", "https://x.example:0/"),
        *("https://x.example:99999/", "https://x.example:x/", "https://x.example\\@y/", "https://x.example/a b"),
        *("https://x.example/\n", "https://x\t.example/", "https://bücher.example/", "https://x..example/"),
        *(
            "https://[::1/",
            "https://[fe80::1%25eth0]/",
            "https://[v1.x]/",
            "https://-x.example/",
            "https://x%2e.example/",
        ),
        "https://x.example/" + "a" * 2048,
        "https://" + "a." * 130 + "example/",
    ],
)
def test_a_url_that_could_be_understood_in_two_ways_is_refused(url: str) -> None:
    with pytest.raises(EgressError):
        NOBODY.place(url)


@given(url=st.text(max_size=60) | st.text("ht:/@[]%.0x1a#?\\ ", max_size=40).map("https://".__add__))
def test_any_text_gives_a_place_or_a_refusal(url: str) -> None:
    try:
        place = NOBODY.place(url)
    except EgressError:
        return
    assert place.scheme == "https" and place.port in (443, 8443) and place.host and place.target[0] in "/?"


def test_the_parts_of_a_url() -> None:
    place = NOBODY.place("https://Hooks.Example.:8443/a?b=c")
    assert (place.host, place.port, place.target) == ("hooks.example", 8443, "/a?b=c")
    assert place.authority == "hooks.example:8443"
    assert NOBODY.place("https://[2606:4700::1111]").authority == "[2606:4700::1111]"


@pytest.mark.parametrize("host", ["127.1", "0x7f.1", "2130706433", "017700000001", "localhost", "127.0.0.1", "[::1]"])
def test_spellings_of_this_machine_lead_nowhere(host: str) -> None:
    """Asks the resolver of this machine, which is what reads such numbers."""
    with pytest.raises(EgressError, match="no public address"):
        NOBODY.addresses(NOBODY.place(f"https://{host}/"))


def test_one_private_address_among_public_ones_refuses_all() -> None:
    place = NOBODY.place("https://x.example/")
    assert NOBODY.addresses(place, lambda *_: ["8.8.8.8", "8.8.8.8", "1.1.1.1"]) == [
        IPv4Address("8.8.8.8"),
        IPv4Address("1.1.1.1"),
    ]
    for found in (["8.8.8.8", "10.0.0.1"], ["10.0.0.1", "8.8.8.8"], ["fe80::1%eth0"], []):
        with pytest.raises(EgressError) as refused:
            NOBODY.addresses(place, lambda *_, found=found: found)
        assert "10.0.0.1" not in refused.value.message, "a tenant learns no address of our network"


def test_a_name_that_is_not_there_looks_like_a_private_one() -> None:
    def fails(*_: object) -> list[str]:
        raise OSError("unknown name")

    place = NOBODY.place("https://x.example/")
    with pytest.raises(EgressError) as unknown:
        NOBODY.addresses(place, fails)
    with pytest.raises(EgressError) as private:
        NOBODY.addresses(place, lambda *_: ["10.0.0.1"])
    assert unknown.value.message == private.value.message


def test_plain_http_and_other_ports_are_for_what_the_operator_named() -> None:
    egress = Egress.parse("127.0.0.0/8,hooks.lan")
    here, lan = egress.place("http://127.0.0.1:8000/"), egress.place("http://hooks.lan:8000/")
    assert egress.addresses(here) == [IPv4Address("127.0.0.1")]
    assert egress.addresses(lan, lambda *_: ["10.0.0.1"]) == [IPv4Address("10.0.0.1")]
    for url in ("http://x.example/", "https://x.example:25/"):
        with pytest.raises(EgressError):
            egress.addresses(egress.place(url), lambda *_: ["8.8.8.8"])
    assert egress.addresses(egress.place("https://x.example/"), lambda *_: ["8.8.8.8"])
