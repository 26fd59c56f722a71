from __future__ import annotations

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.wire.host_proof import proof_fault, with_proof
from asyncgrpo_agent.wire.messages import Hello

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
HELLO = Hello(1, "replica", "demo", "r1", "i1", "1.0", "token")
NONCE = "ab" * 32
UNPROVED = "its proof does not fit its host key and this connection"

replace = msgspec.structs.replace


def test_a_proof_holds_for_its_connection_and_process_only() -> None:
    hello = with_proof(HELLO, NONCE, KEY)
    assert hello.host_key == KEY.public_key().public_bytes_raw().hex()
    assert proof_fault(hello, NONCE) == ""
    assert proof_fault(hello, "cd" * 32) == UNPROVED
    for changed in (
        replace(hello, run="other"),
        replace(hello, role="trainer"),
        replace(hello, name="r2"),
        replace(hello, instance="i2"),
        replace(hello, host_key=with_proof(HELLO, NONCE, OTHER).host_key),
        replace(hello, host_proof=with_proof(HELLO, NONCE, OTHER).host_proof),
        replace(hello, host_proof=""),
        replace(hello, host_proof="00" * 64),
    ):
        assert proof_fault(changed, NONCE) == UNPROVED


def test_what_need_not_be_the_same_is_not_signed() -> None:
    hello = replace(with_proof(HELLO, NONCE, KEY), capacity=9, token="new", attempt_seen=3)
    assert proof_fault(hello, NONCE) == ""


def test_fields_cannot_be_shifted_into_each_other() -> None:
    hello = with_proof(replace(HELLO, name="r1", instance="i1"), NONCE, KEY)
    assert proof_fault(replace(hello, name='r1","i1', instance=""), NONCE) == UNPROVED
    assert proof_fault(replace(hello, name="r1i", instance="1"), NONCE) == UNPROVED


def test_a_hello_without_a_key_claims_nothing() -> None:
    assert proof_fault(HELLO, NONCE) == ""


@pytest.mark.parametrize(
    ("key", "fault"),
    [
        ("zz", "not in hex"),
        ("ab", "its host key is none"),
        ("ab" * 33, "its host key is none"),
        (KEY.public_key().public_bytes_raw().hex().upper(), "its host key is none"),
        (" " + KEY.public_key().public_bytes_raw().hex(), "its host key is none"),
        ("00" * 32, UNPROVED),
        ("ff" * 32, UNPROVED),
    ],
)
def test_keys_that_are_none(key: str, fault: str) -> None:
    hello = replace(with_proof(HELLO, NONCE, KEY), host_key=key)
    assert fault in proof_fault(hello, NONCE)


@given(st.text(max_size=80), st.text(max_size=160))
def test_any_text_is_a_fault_and_no_error(key: str, proof: str) -> None:
    fault = proof_fault(replace(HELLO, host_key=key, host_proof=proof), NONCE)
    assert bool(fault) == bool(key)
