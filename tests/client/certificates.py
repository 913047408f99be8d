"""Makes certificates for tests with the openssl program."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and of its key."""

    certificate: Path
    key: Path

    def install(self, at: Pair) -> None:
        """Replaces the files of `at` with copies of this pair, one after the other."""
        for source, target in ((self.certificate, at.certificate), (self.key, at.key)):
            draft = target.with_suffix(".new")
            draft.write_bytes(source.read_bytes())
            draft.replace(target)


def _openssl(*words: object) -> None:
    subprocess.run(
        ["openssl", *map(str, words)], check=True, capture_output=True, text=True
    )


def make_authority(folder: Path, name: str) -> Pair:
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    _openssl(
        *("req", "-x509", *_KEY, "-days", 30, "-subj", f"/CN={name}"),
        *("-keyout", pair.key, "-out", pair.certificate),
    )
    return pair


def make_identity(folder: Path, name: str, authority: Pair) -> Pair:
    """Makes a certificate for 127.0.0.1 and localhost."""
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    _openssl("req", *_KEY, "-subj", f"/CN={name}", "-keyout", pair.key, "-out", request)
    _openssl(
        *("x509", "-req", "-in", request, "-days", 30, "-extfile", extensions),
        *("-CA", authority.certificate, "-CAkey", authority.key, "-CAcreateserial"),
        *("-out", pair.certificate),
    )
    return pair
