"""Which addresses a model may reach: every odd spelling of an inner one is refused."""

from __future__ import annotations

import csv
import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import CASES

from greenroom.runtime.tools.addresses import UrlRefused, judge, judge_all, read_url

with (CASES / "C44_urls.tsv").open(newline="") as file:
    URLS = list(csv.DictReader(file, delimiter="\t"))


def allowed(shown: str) -> bool:
    try:
        if shown.startswith("DNS"):
            name, _, answers = shown.rpartition(" -> ")
            judge_all(name.split()[-1], answers.strip("[]").split(", "))
        else:
            read_url(shown)
    except UrlRefused:
        return False
    return True


@pytest.mark.parametrize("row", URLS, ids=lambda row: row["url_or_answer"])
def test_the_rows(row: dict[str, str]) -> None:
    assert allowed(row["url_or_answer"]) is (row["want"] == "allow")


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://0x7f000001/",
            "http://0x7f.1/",
            "http://017700000001/",
            "http://127.0.0.1.:80/",
            "http://127.000.0.1/",
        ),
        *("http://[::]/", "http://[::127.0.0.1]/", "http://[64:ff9b::7f00:1]/", "http://[64:ff9b:1::808:808]/"),
        *("http://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/", "http://[2606:4700::5efe:7f00:1]/", "http://[ff0e::1]/"),
        *(
            "http://224.0.0.1/",
            "http://255.255.255.255/",
            "http://10.0.0.1/",
            "http://172.31.0.1/",
            "http://192.168.1.1/",
        ),
        *("http://sub.localhost/", "http://LOCALHOST/", "http:///path", "http://", "//good.test/", "good.test", ""),
        *(
            "http://good.test:0/",
            "http://good.test:/",
            "http://good.test:99999/",
            "http://good.test:8o/",
            "http://a b/",
        ),
        *(
            "http://good.test\t/",
            "http://good.test\r\nHost: x/",
            "http://g\u043e\u043ed.test/",
            "http://-x.test/",
            "http://x..test/",
        ),
        *("ftp://good.test/", "data:text/plain,x", "javascript:1", "http://user:pw@good.test/", "http://[v1.x]/"),
        *("http://[::ffff:127.0.0.1%25lo]/", "http://[::1", "http://" + "a" * 64 + ".test/", "http://%31%32%37.0.0.1/"),
        "http://good.test/" + "x" * 9000,
    ],
)
def test_more_that_is_refused(url: str) -> None:
    assert not allowed(url)


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("https://Good.Test./a/b?c=d#e", "https://good.test/a/b?c=d"),
        ("http://good.test:8080", "http://good.test:8080/"),
        ("https://good.test:443/", "https://good.test/"),
        ("http://[2606:4700::1111]:81/x", "http://[2606:4700::1111]:81/x"),
        ("http://8.8.8.8/", "http://8.8.8.8/"),
        ("http://xn--bcher-kva.test/?q=%C3%BC", "http://xn--bcher-kva.test/?q=%C3%BC"),
        ("http://my_host.test/", "http://my_host.test/"),
        ("http://[64:ff9b::808:808]/", "http://[64:ff9b::808:808]/"),
    ],
)
def test_what_is_public_is_read_as_it_stands(url: str, read: str) -> None:
    assert str(read_url(url)) == read


@given(st.integers(0, 2**32 - 1))
def test_an_address_is_judged_alike_however_it_is_wrapped(number: int) -> None:
    plain = ipaddress.IPv4Address(number)
    wrapped = [f"::ffff:{plain}", f"64:ff9b::{plain}", str(ipaddress.IPv6Address((0x2002 << 112) | (number << 80) | 1))]
    ways = [allowed(f"http://{plain}/"), *(allowed(f"http://[{text}]/") for text in wrapped)]
    assert len(set(ways)) == 1
    assert not (ways[0] and (plain.is_private or plain.is_loopback or plain.is_link_local or plain.is_multicast))
    assert not allowed(f"http://[::{plain}]/"), "nobody routes it"


def test_no_inner_network_is_left_out() -> None:
    for network in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "169.254.0.0/16", "100.64.0.0/10"):
        found = ipaddress.ip_network(network)
        for address in (found[0], found[1], found[-1]):
            with pytest.raises(UrlRefused):
                judge(address)
