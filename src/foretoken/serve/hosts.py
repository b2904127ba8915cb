"""The ``Host`` headers that a server answers.

A web page can point its own domain name at 127.0.0.1 and then talk to a server there as its own origin (DNS
rebinding). The browser still sends the page's domain name as ``Host``, so a server on loopback refuses such names.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.errors import InvalidRequest

_HEADER = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]+)?")
_PATTERN = re.compile(r"\*|(?:\*\.)?[a-z0-9_-][a-z0-9._-]*")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class AllowedHosts:
    """Allows ``localhost``, the loopback addresses, and ``names``: host names, addresses, ``*.domain``, or ``*``."""

    names: tuple[str, ...]

    def allows(self, header: str) -> bool:
        """Returns whether a request with this ``Host`` header is answered. Any port is allowed."""
        match = _HEADER.fullmatch(header.lower())
        if match is None or (match[1] is not None and _address(match[1]) is None):
            return "*" in self.names
        host = _normal(match[1] or match[2])
        address = _address(host)
        if host == "localhost" or host.endswith(".localhost") or (address is not None and address.is_loopback):
            return True
        return any(
            name == "*" or host == name or (name.startswith("*.") and host.endswith(name[1:]))
            for name in map(_normal, self.names)
        )


def allowed_hosts(host: str, bound: str, keys: bool, given: Sequence[str]) -> AllowedHosts | None:
    """Returns the hosts to check for, or None for no check.

    A server on loopback without API keys is always checked. Other servers are checked only if
    ``given`` has names, because the names by which other machines reach them are not known.

    Args:
        host: what the user asked to listen on.
        bound: the address that it became.
        keys: whether the server asks for an API key.
        given: further names, from the user.

    Raises:
        InvalidRequest: a given name is not a host name, an address, ``*.domain`` or ``*``.
    """
    for name in given:
        if not _PATTERN.fullmatch(name.lower()) and _address(name) is None:
            raise InvalidRequest(
                f"--allowed-host must be a host name, an address, *.DOMAIN or *, without scheme and port; got {name!r}"
            )
    address = _address(bound)
    loopback = address is not None and address.is_loopback
    if not given and (keys or not loopback):
        return None
    own = [name for name in (host, bound) if not _always_allowed(name)]
    return AllowedHosts(tuple(dict.fromkeys((*own, *given))))


def _always_allowed(name: str) -> bool:
    bracketed = f"[{name}]" if ":" in name else name
    return AllowedHosts(()).allows(bracketed)


def _normal(name: str) -> str:
    """Returns the canonical spelling of a name or address."""
    name = name.lower().removesuffix(".")
    address = _address(name)
    return name if address is None else str(address)


def _address(text: str) -> _Address | None:
    """Returns the address in ``text`` without IPv6 zone, and the IPv4 address of an IPv4-mapped one."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
