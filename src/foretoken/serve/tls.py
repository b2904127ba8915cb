"""TLS options, by uvicorn's and vLLM's names."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from foretoken.core.errors import InvalidRequest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """A certificate, and what is asked of clients.

    Args:
        certificate: The server's certificate chain in PEM.
        key: Its private key in PEM; None if that is in ``certificate``.
        authorities: Certificates that sign those of clients, in PEM.
        client_certificates: 0 asks clients for none, 1 takes one if they have it, 2 requires it.
    """

    certificate: Path
    key: Path | None = None
    authorities: Path | None = None
    client_certificates: int = 0

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
        for each in (trial, context):
            try:
                each.load_cert_chain(self.certificate, self.key, _no_password)
                if self.authorities is not None:
                    each.load_verify_locations(self.authorities)
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
