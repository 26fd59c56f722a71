from datetime import timedelta

import pytest
from cryptography import x509

from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.store.certificates import ends_at, issue_server
from fakes.certificates import authority, today


def test_certificates_live_as_long_as_said() -> None:
    now = today()
    ca = x509.load_pem_x509_certificate(authority()[0])
    leaf = x509.load_pem_x509_certificates(issue_server(*authority(), [], now=now)[0])[0]
    assert ca.not_valid_after_utc - now > timedelta(days=20 * 365 - 1)
    assert timedelta(days=89) < leaf.not_valid_after_utc - now <= timedelta(days=90)
    assert leaf.not_valid_before_utc < now


def test_the_end_of_a_chain_is_that_of_its_first_certificate() -> None:
    now = today()
    chain = issue_server(*authority(), [], now=now)[0]
    assert timedelta(days=89) < ends_at(chain) - now <= timedelta(days=90)
    with pytest.raises(ConfigError, match="does not parse"):
        ends_at(b"nothing")
