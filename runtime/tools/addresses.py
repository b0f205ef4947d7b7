"""Which URLs a model may be let at: public web addresses, and nothing that leads back inside. Pure.

A URL is read strictly: whatever two readers could take differently is refused. An address is judged by what it leads
to: an IPv4 address inside an IPv6 one counts as itself. Names are for whoever resolves them, who judges every answer.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import urlsplit

from greenroom.runtime.errors import GreenroomError

MAX_URL = 8000
"""Characters."""

PORTS = {"http": 80, "https": 443}

_NEVER = tuple(
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8",
        "100.64.0.0/10",  # shared by carriers
        "192.0.0.0/24",  # special purposes; Python takes some of it for global
        "192.88.99.0/24",  # relays into IPv6
        "198.18.0.0/15",  # benchmarks
        "240.0.0.0/4",
        "64:ff9b:1::/48",  # translation inside a site
        "100::/64",
        "2001::/23",  # Teredo and other protocols
        "2001:db8::/32",
        "3fff::/20",
        "5f00::/16",
        "fec0::/10",  # site-local; Python takes it for global
    )
)
_V4_COMPATIBLE = ipaddress.ip_network("::/96")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SIX_TO_FOUR = ipaddress.ip_network("2002::/16")
_ISATAP = (0x00005EFE, 0x02005EFE)
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"0x[0-9a-f]*|[0-9]+")


class UrlRefused(GreenroomError, ValueError):
    """The URL, or where it leads, is not for a model to reach."""


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that was read: `host` a name in lower case or an address; `path` with its query, beginning with a slash."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port

    @property
    def netloc(self) -> str:
        """Host and port as a Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def address(self) -> IPv4Address | IPv6Address | None:
        """The address, if the URL names one instead of a name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.path}"


def read_url(url: str) -> Target:
    """The URL's parts; raises UrlRefused. Addresses in it are judged, names are not resolved."""
    if len(url) > MAX_URL:
        raise UrlRefused(f"the URL has {len(url)} characters, more than {MAX_URL}")
    if not url.isascii() or "\\" in url or any(character <= " " or character == "\x7f" for character in url):
        raise UrlRefused(
            f"{url[:200]!r} has characters that no URL has",
            hint="Write it in ASCII: a host as xn--..., anything else %-encoded, and no backslash",
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UrlRefused(f"{url[:200]!r} is no URL: {error}") from None
    scheme = parts.scheme.lower()
    if scheme not in PORTS:
        raise UrlRefused(f"{url[:200]!r} is not http or https", hint="Give a web address")
    if "@" in parts.netloc:
        raise UrlRefused("the URL names a user", hint="Leave out what stands before the @; say it in a header")
    if port == 0 or (port is None and parts.netloc.endswith(":")):
        raise UrlRefused(f"{url[:200]!r} has no valid port")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(scheme, _host(parts.netloc, parts.hostname or ""), port or PORTS[scheme], path)


def _host(netloc: str, host: str) -> str:
    if netloc.startswith("["):
        try:
            address = IPv6Address(host)
        except ValueError:
            raise UrlRefused(f"{host!r} is no IPv6 address") from None
        judge(address)
        return str(address)
    name = host.removesuffix(".")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):  # to a browser and to the system's resolver this is an address
        try:
            plain = IPv4Address(host)
        except ValueError:
            raise UrlRefused(f"{host!r} is an address in an odd spelling", hint="Write it as 1.2.3.4") from None
        judge(plain)
        return str(plain)
    if len(name) > 253 or not all(_NAME.fullmatch(label) for label in labels):
        raise UrlRefused(f"{host!r} is no host name")
    if labels[-1] == "localhost":
        raise UrlRefused(f"{host!r} is this machine")
    return name


def judge(address: IPv4Address | IPv6Address) -> None:
    """Raises UrlRefused unless it is a public address of one machine, whatever is embedded in it."""
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            raise UrlRefused(f"{address} names an interface of this machine")
        inner = _embedded(address)
        if inner is not None:
            judge(inner)
            if address not in _NAT64 and address.ipv4_mapped is None and address not in _SIX_TO_FOUR:
                raise UrlRefused(f"{address} is no public address")
            return
    if not address.is_global or address.is_multicast or any(address in network for network in _NEVER):
        raise UrlRefused(f"{address} is no public address", hint="Only servers on the internet can be reached")


def _embedded(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that packets to this one end at, if it holds one."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    number = int(address)
    if address in _NAT64 or (address in _V4_COMPATIBLE and number > 1):
        return IPv4Address(number & 0xFFFFFFFF)
    if address in _SIX_TO_FOUR:
        return IPv4Address((number >> 80) & 0xFFFFFFFF)
    if (number >> 32) & 0xFFFFFFFF in _ISATAP:
        return IPv4Address(number & 0xFFFFFFFF)
    return None


def judge_all(host: str, answers: list[str]) -> list[str]:
    """The addresses of a name, if every one of them may be reached; raises UrlRefused."""
    if not answers:
        raise UrlRefused(f"{host!r} has no address")
    found: list[str] = []
    for answer in answers:
        try:
            address = ipaddress.ip_address(answer)
        except ValueError:
            raise UrlRefused(f"{host!r} leads to {answer!r}, which is no address") from None
        try:
            judge(address)
        except UrlRefused as error:
            raise UrlRefused(f"{host!r} leads to {error.message}", hint=error.hint) from None
        found.append(str(address))
    return found
