"""Records of runs: what a seal lets through, and which commit a revision means."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from asyncgrpo_agent.core.run_record import RunRecord, is_commit, known_commit, sealed, unsealed
from asyncgrpo_agent.errors import AdapterRefusedError

PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = PRIVATE.public_key().public_bytes_raw()
COMMIT = "ab" * 20
RECORD = RunRecord(run="demo", model_name="tiny", id="acme/tiny", revision="", commit=COMMIT)
SEALED = sealed(RECORD, bytes(range(32)))


def test_a_record_is_read_as_it_was_sealed() -> None:
    assert unsealed(SEALED, "demo", PUBLIC) == RECORD


@pytest.mark.parametrize(
    ("data", "run", "key", "reason"),
    [
        (SEALED.replace(b"acme/tiny", b"evil/tiny"), "demo", PUBLIC, "corrupt"),
        (SEALED[:-9], "demo", PUBLIC, "cut"),
        (b"", "demo", PUBLIC, "cut"),
        (SEALED, "other", PUBLIC, "is that of run 'demo'"),
        (SEALED, "demo", Ed25519PrivateKey.generate().public_key().public_bytes_raw(), "signed"),
    ],
)
def test_others_words_are_refused(data: bytes, run: str, key: bytes, reason: str) -> None:
    with pytest.raises(AdapterRefusedError, match=reason):
        unsealed(data, run, key)


@pytest.mark.parametrize(
    ("model", "revision", "record", "commit"),
    [
        ("acme/tiny", "", RECORD, COMMIT),
        ("acme/tiny", "main", RECORD, COMMIT),
        ("acme/tiny", "v2", RECORD, ""),  # this host's own word
        ("acme/other", "", RECORD, ""),
        ("acme/tiny", "", None, ""),
        ("acme/tiny", "cd" * 20, RECORD, "cd" * 20),
        ("acme/tiny", "", RunRecord(run="demo", model_name="tiny"), ""),
    ],
)
def test_which_commit_a_revision_is(
    model: str, revision: str, record: RunRecord | None, commit: str
) -> None:
    assert known_commit(model, revision, record) == commit


@pytest.mark.parametrize("text", ["main", "", "AB" * 20, "ab" * 19, "ab" * 20 + "\n"])
def test_no_commit(text: str) -> None:
    assert not is_commit(text)
