"""Check of a request to a server on this machine: which host it names, and which web page made it.

A browser lets a page of any site send requests to 127.0.0.1. It hides the answers from the page, unless the page's own
name points at 127.0.0.1 (DNS rebinding): then `Host` has that name. So a server answers only to names that are its own,
and to no page of another site that was not allowed.
"""

import ipaddress
import re
import socket
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/?#\s]+)(?::[0-9]{1,5})?", re.IGNORECASE)


def own_names(address: str) -> frozenset[str]:
    """The names of a server that listens at `address`, which a web origin may have: 127.0.0.1, localhost and ::1 for a
    loopback address, else also that address and this machine's names.

    Example:
        >>> sorted(own_names("127.0.0.1"))
        ['127.0.0.1', '::1', 'localhost']
    """
    names = {*_LOOPBACK, address.lower()}
    if address not in _LOOPBACK:
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return frozenset(names)


def why_not(headers: Mapping[str, str], names: Collection[str], *, any_ip: bool, origins: Collection[str] = ()) -> str:
    """Why a web request may not be answered by its origin; "" where it may.

    Args:
        headers: of the request, by names in lower case.
        names: that the server has, see `own_names`. Any port: a tunnel has another one at its other end.
        any_ip: whether every IP address is a name too: of a server that listens at more than a loopback address. A name
            can be pointed at a server, an address cannot.
        origins: pages of other sites that may ask, such as `https://chat.example.org`; `*`: all.

    Example:
        >>> why_not({"host": "127.0.0.1:8000"}, own_names("127.0.0.1"), any_ip=False)
        ''
        >>> why_not({"host": "evil.example"}, own_names("127.0.0.1"), any_ip=False)
        'host evil.example is none of 127.0.0.1, ::1, localhost'
    """
    asked = headers.get("host", "")
    found = _HOST.fullmatch(asked)
    host = found[1].strip("[]").lower().rstrip(".") if found else ""
    if host not in names and not (any_ip and _is_ip(host)):
        return f"host {asked[:100] or '(none)'} is none of {', '.join(sorted(names))}"
    origin = headers.get("origin", "")
    if origin and origin not in origins and "*" not in origins and urlsplit(origin).netloc != asked:
        return f"origin {origin[:100]} is another site"
    site = headers.get("sec-fetch-site", "none")
    if not origin and site not in ("none", "same-origin") and "*" not in origins:
        return "asked for by another site"
    return ""


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
