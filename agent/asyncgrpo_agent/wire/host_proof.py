"""Proof, bound to one connection, that a dialler holds the host key that its hello names.

TLS has proved the proxy to the agent, so a random nonce from the proxy is all that it takes: the
agent signs it together with who it says it is. A hello that was captured proves nothing on another
connection. A hello without a key proves nothing and claims nothing.
"""

from __future__ import annotations

from typing import Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from asyncgrpo_agent.wire.messages import Hello

NONCE_BYTES: Final = 32
_CONTEXT: Final = "asyncgrpo host key proof 1"  # so that no other signature of the key fits here
_KEY_BYTES: Final = 32


def with_proof(hello: Hello, nonce: str, key: Ed25519PrivateKey) -> Hello:
    """The hello that answers the proxy's challenge."""
    named = msgspec.structs.replace(hello, host_key=key.public_key().public_bytes_raw().hex())
    return msgspec.structs.replace(named, host_proof=key.sign(_signed(named, nonce)).hex())


def proof_fault(hello: Hello, nonce: str) -> str:
    """Why the hello's key is not proved on the connection with this nonce; "" if it is, or none."""
    if not hello.host_key:
        return ""
    try:
        key, proof = bytes.fromhex(hello.host_key), bytes.fromhex(hello.host_proof)
    except ValueError:
        return "its host key or proof is not in hex"
    if len(key) != _KEY_BYTES or key.hex() != hello.host_key:  # one key has one spelling
        return "its host key is none"
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(proof, _signed(hello, nonce))
    except (InvalidSignature, ValueError):
        return "its proof does not fit its host key and this connection"
    return ""


def _signed(hello: Hello, nonce: str) -> bytes:
    """JSON keeps the fields apart, whatever they contain."""
    fields = [hello.run, hello.role, hello.name, hello.instance, hello.host_key]
    return msgspec.json.encode([_CONTEXT, nonce, *fields])
