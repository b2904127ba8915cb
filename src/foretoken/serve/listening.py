"""The socket that a server listens on. Imports nothing heavy, so that a busy port is refused at once."""

from __future__ import annotations

import socket

from foretoken.core.errors import ForetokenError


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises ForetokenError if the address cannot be bound."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise ForetokenError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another with --host or --port"
        ) from error
    return listening
