from datetime import timedelta

from cryptography import x509

from asyncgrpo_agent.store.certificates import issue_server
from fakes.certificates import authority, today


def test_certificates_live_as_long_as_said() -> None:
    now = today()
    ca = x509.load_pem_x509_certificate(authority()[0])
    leaf = x509.load_pem_x509_certificates(issue_server(*authority(), [], now=now)[0])[0]
    assert ca.not_valid_after_utc - now > timedelta(days=20 * 365 - 1)
    assert timedelta(days=89) < leaf.not_valid_after_utc - now <= timedelta(days=90)
    assert leaf.not_valid_before_utc < now
