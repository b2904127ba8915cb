"""Settings of a server: its options, packages, socket, allowed hosts and TLS.

Imports nothing heavy, so that errors are raised at once; options of ``foretoken serve`` are generated from them.
"""

import ipaddress
import logging
import re
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from foretoken.core.checks import named
from foretoken.core.errors import ForetokenError, InvalidRequest
from foretoken.core.verdict import KINDS

_HEADER = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]+)?")
_PATTERN = re.compile(r"\*|(?:\*\.)?[a-z0-9_-][a-z0-9._-]*")
_log = logging.getLogger(__name__)


@contextmanager
def packages_of_extra(extra: str, user: str) -> Iterator[None]:
    """Raises ForetokenError if an import in the block fails. user: what needs the packages, such as "traces need"."""
    try:
        yield
    except ImportError as error:
        install = f"pip install 'foretoken[{extra}]'"
        raise ForetokenError(f"{user} packages that are not installed ({error.name}); {install}") from error


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


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class AllowedHosts:
    """Allows ``localhost``, the loopback addresses, and ``names``: host names, addresses, ``*.domain``, or ``*``.

    A web page can point its own domain name at 127.0.0.1 and then talk to a server there as its own origin (DNS
    rebinding). The browser still sends the page's domain name as ``Host``, so a server on loopback refuses such names.
    """

    names: tuple[str, ...]

    def allows(self, header: str) -> bool:
        """Returns whether a request with this ``Host`` header is answered. Any port is allowed."""
        match = _HEADER.fullmatch(header.lower())
        if match is None or (match[1] is not None and _address(match[1]) is None):
            return "*" in self.names
        host = _normal(match[1] or match[2])
        if host == "localhost" or host.endswith(".localhost") or is_loopback(host):
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
        host: the address in the user's words.
        bound: the address that the socket is bound to.
        given: further names, from the user.

    Raises:
        InvalidRequest: a given name is not a host name, an address, ``*.domain`` or ``*``.
    """
    for name in given:
        if not _PATTERN.fullmatch(name.lower()) and _address(name) is None:
            raise InvalidRequest(
                f"--allowed-host must be a host name, an address, *.DOMAIN or *, without scheme and port; got {name!r}"
            )
    if not given and (keys or not is_loopback(bound)):
        return None
    always = AllowedHosts(())
    listening_names = [name for name in (host, bound) if not always.allows(f"[{name}]" if ":" in name else name)]
    return AllowedHosts(tuple(dict.fromkeys((*listening_names, *given))))


def is_loopback(address: str) -> bool:
    """Returns whether an address is reached from this machine alone."""
    parsed = _address(address)
    return parsed is not None and parsed.is_loopback


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


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """A certificate, and the policy about certificates of clients."""

    certificate: Path  # the server's certificate chain in PEM
    key: Path | None = None  # its private key in PEM; None if that is in ``certificate``
    authorities: Path | None = None  # certificates that sign the clients' certificates, in PEM
    client_certificates: int = 0  # 0 requests none, 1 makes them optional, 2 requires them

    def context(self) -> ssl.SSLContext:
        """Returns the context of the listening socket. Raises InvalidRequest."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.load(context)
        context.verify_mode = ssl.VerifyMode(self.client_certificates)
        return context

    def load(self, context: ssl.SSLContext) -> None:
        """Reads the files into a context, for connections from then on. Raises InvalidRequest."""
        for option, file in (("certfile", self.certificate), ("keyfile", self.key), ("ca-certs", self.authorities)):
            if file is not None and not file.is_file():
                raise InvalidRequest(f"--ssl-{option}: there is no file {file}")
        trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # a file that cannot be used leaves ``context`` as it was
        for target in (trial, context):
            try:
                target.load_cert_chain(self.certificate, self.key, _no_password)
                if self.authorities is not None:
                    target.load_verify_locations(self.authorities)
            except (OSError, ssl.SSLError, ValueError) as error:
                raise InvalidRequest(
                    f"--ssl-certfile and --ssl-keyfile must be a certificate and its private key without a password, "
                    f"--ssl-ca-certs certificates, all in PEM: {error}"
                ) from error

    def reload(self, context: ssl.SSLContext) -> None:
        """Reads the files again. Bad files leave the context as it was, and the log says why."""
        try:
            self.load(context)
        except InvalidRequest as error:
            _log.error("the certificate stays as it was: %s", error)
        else:
            _log.info("read the certificate %s", self.certificate)


def tls_files(
    certificate: Path | None, key: Path | None, authorities: Path | None, client_certificates: int
) -> TlsFiles | None:
    """Returns the files that the options name, None without a certificate. Raises InvalidRequest."""
    if certificate is None:
        if key or authorities or client_certificates:
            raise InvalidRequest("--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile")
        return None
    if client_certificates and authorities is None:
        raise InvalidRequest("--ssl-cert-reqs needs --ssl-ca-certs, which sign the certificates of clients")
    files = TlsFiles(certificate=certificate, key=key, authorities=authorities, client_certificates=client_certificates)
    files.context()
    return files


def _no_password() -> str:
    raise ValueError("the private key has a password")


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """Settings that are options of ``foretoken serve``: each field is one (see ``cli.grouped``).

    Args:
        key_file: File of API keys with scopes and limits; see foretoken keys.
        allow_admin: Let clients without a key of the scope admin switch speculation. [on loopback without keys]
        share_cache_across_keys: Let different keys share cached prompts and drafts from each other's outputs.
        tool_call_parser: How the model writes function calls. [what the chat template shows]
        reasoning_parser: How the model writes reasoning; none if it does not. [what the template shows]
        body_timeout: Seconds in which a request's body has to arrive.
        timeout: Seconds that a request may take, including its time in the queue.
        acceptance_stop: End requests that do not say by these runs of acceptance, comma-separated: repetition,
            all_accepted, none_accepted.
        strict: Refuse unknown fields of requests, which are ignored with a warning header otherwise.
    """

    key_file: Path | None = field(default=None, metadata={"option": "--api-key-file"})
    allow_admin: bool = False
    share_cache_across_keys: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    body_timeout: float = named("--body-timeout", 60.0, min=0)
    timeout: float = named("--request-timeout", 600.0, min=0)
    acceptance_stop: str = ""
    strict: bool = False

    def __post_init__(self) -> None:
        if not {*self.acceptance_stops} <= {*KINDS}:
            known = ", ".join(KINDS)
            raise InvalidRequest(f"--acceptance-stop {self.acceptance_stop!r}; expected some of {known}, with commas")

    @property
    def acceptance_stops(self) -> tuple[str, ...]:
        """The kinds of runs in ``acceptance_stop``."""
        return tuple(filter(None, map(str.strip, self.acceptance_stop.split(","))))


@dataclass(frozen=True, kw_only=True)
class ServerSettings(AppOptions):
    """Settings of an app. Without ``stored_responses`` and ``stored_bytes`` no response is stored."""

    model_names: Sequence[str] = ("foretoken",)  # answers have the one that the request names, or the first
    lora_modules: Mapping[str, str] = field(default_factory=dict)  # paths of the LoRA adapters at the start, by name
    api_keys: Sequence[str] = ()  # without keys and without a key file, no key is needed
    chat_template: str | None = None  # in place of the tokenizer's
    origins: Sequence[str] = ()  # other origins whose pages may use the API from a browser (CORS)
    hosts: AllowedHosts | None = None  # the ``Host`` headers that are answered; None answers any
    max_body: int = 4 * 2**20  # bytes
    max_n: int = 64  # completions of a prompt, or candidates of best_of
    max_prompts: int = 128  # of one request
    max_logprobs: int = 20  # of a token
    max_concurrency: int = 512  # requests that are answered at once
    stored_responses: int | None = None  # number that /v1/responses may store; None is no limit of their number
    stored_bytes: int | None = None  # bytes that they may take; None is no limit of their size
