"""The proxy's certificates: a private CA, made once, and the leaf that the listener shows.

Agents trust that CA and nothing else, so no public authority can stand in for a proxy, and the leaf
can be issued anew at every start. The proxy is known by one fixed DNS name whatever address it is
dialled at. Pure computation; `store.identity` keeps the files.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from asyncgrpo_agent.errors import ConfigError

SERVER_NAME: Final = "asyncgrpo-proxy"
CA_LIFE: Final = timedelta(days=20 * 365)
SERVER_LIFE: Final = timedelta(days=90)
_CLOCK_SKEW: Final = timedelta(days=1)  # hosts whose clock is behind must still be able to join


def make_ca(name: str, *, now: datetime) -> tuple[bytes, bytes]:
    """A new private CA: (certificate, key), both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        _builder(subject, subject, key.public_key(), now=now, life=CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(sign_certificates=True), critical=True)
    )
    return _pem(builder.sign(key, hashes.SHA256())), _key_pem(key)


def issue_server(
    ca_pem: bytes, ca_key_pem: bytes, names: Sequence[str], *, now: datetime
) -> tuple[bytes, bytes]:
    """A certificate for the proxy, also under `names` (DNS names, IP addresses): (chain, key) PEM.

    The chain ends with the CA, so that a peer that knows only its fingerprint can check it.
    """
    ca = x509.load_pem_x509_certificate(ca_pem)
    ca_key = serialization.load_pem_private_key(ca_key_pem, password=None)
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise ConfigError("the CA's key is not an elliptic-curve key")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    alternatives = [_general_name(name) for name in dict.fromkeys((SERVER_NAME, *names))]
    builder = (
        _builder(subject, ca.subject, key.public_key(), now=now, life=SERVER_LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
    )
    return _pem(builder.sign(ca_key, hashes.SHA256())) + _pem(ca), _key_pem(key)


def ends_at(chain_pem: bytes) -> datetime:
    """When the first certificate of a chain ends. Raises ConfigError."""
    try:
        return x509.load_pem_x509_certificates(chain_pem)[0].not_valid_after_utc
    except ValueError as error:
        raise ConfigError(f"the certificate does not parse: {error}") from error


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    *,
    now: datetime,
    life: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
