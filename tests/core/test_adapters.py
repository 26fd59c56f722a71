import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.adapters import (
    AdapterId,
    Attempt,
    CommitKey,
    adapter_digest,
    adapter_folder,
    commit_key,
    format_attempt,
    is_run_name,
    parse_attempt,
    parse_commit_key,
    parse_name,
)

numbers = st.integers(0, 99_999)
nonces = st.text("0123456789abcdef", min_size=4, max_size=4)
versions = st.integers(0, 9_999_999)
runs = st.from_regex(r"\A[a-z0-9][a-z0-9-]{0,62}\Z")
digests = st.text("0123456789abcdef", min_size=64, max_size=64)


@given(numbers, nonces)
def test_attempts_survive_their_text(number: int, nonce: str) -> None:
    text = format_attempt(number, nonce)
    assert parse_attempt(text) == Attempt(number, nonce)
    assert str(Attempt(number, nonce)) == text


def test_attempts_are_ordered_by_number() -> None:
    texts = ["a10000-0000", "a0003-ffff", "a0021-0000"]
    in_order = [str(attempt) for attempt in sorted(map(parse_attempt, texts))]
    assert in_order == ["a0003-ffff", "a0021-0000", "a10000-0000"]


@pytest.mark.parametrize(
    "text", ["", "a3-7f3c", "a0003-7F3C", "a0003-7f3", "a00003-7f3c", "a0003-7f3c\n", "../a0003"]
)
def test_other_texts_are_no_attempts(text: str) -> None:
    with pytest.raises(ValueError, match="is not an attempt"):
        parse_attempt(text)


@given(runs, numbers, nonces, versions, digests)
def test_names_survive_their_text(
    run: str, number: int, nonce: str, version: int, digest: str
) -> None:
    attempt = format_attempt(number, nonce)
    adapter = AdapterId(run=run, attempt=attempt, version=version, digest=digest)
    parts = parse_name(adapter.name)
    assert parts is not None
    assert (parts.run, parts.attempt, parts.version) == (run, attempt, version)
    assert digest.startswith(parts.digest)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-4B",
        "r.a0001-0000.v7.0123456789ab",
        "r.a0001-0000.v0000007.0123456789ab",
        "r.a0001-0000.v000007.0123456789AB",
        "r.a0001-0000.v000007.0123456789ab\n",
        "-r.a0001-0000.v000007.0123456789ab",
        "r.a0001-0000.v\u0660\u0660\u0660\u0660\u0660\u0667.0123456789ab",
    ],
)
def test_other_names_are_not_parsed(name: str) -> None:
    assert parse_name(name) is None


def test_run_names() -> None:
    assert is_run_name("a" * 63)
    assert not any(map(is_run_name, ["", "-a", "A", "a.b", "a/b", "a" * 64, "a\n"]))


def test_keys() -> None:
    assert adapter_folder("a0003-7f3c", 7) == "adapters/a0003-7f3c/v000007"
    assert adapter_folder("a0003-7f3c", 7, 2) == "adapters/a0003-7f3c/v000007-r2"
    assert commit_key("a0003-7f3c", 7) == "commits/a0003-7f3c/000000/v000007.toml"
    assert commit_key("a0003-7f3c", 1000, 1) == "commits/a0003-7f3c/000002/v001000-r1.toml"


@given(numbers, nonces, versions, st.integers(0, 99))
def test_commit_keys_survive_their_text(number: int, nonce: str, version: int, retry: int) -> None:
    attempt = format_attempt(number, nonce)
    parts = CommitKey(attempt=attempt, version=version, retry=retry)
    assert parse_commit_key(commit_key(attempt, version, retry)) == parts


@pytest.mark.parametrize(
    "key",
    [
        "commits/a0003-7f3c/000001/v000007.toml",
        "commits/a0003-7f3c/000000/v000007-r0.toml",
        "commits/a0003-7f3c/000000/../000000/v000007.toml",
        "/commits/a0003-7f3c/000000/v000007.toml",
        "commits/a0003-7f3c/000000/v000007.toml.tmp",
    ],
)
def test_other_keys_are_not_parsed(key: str) -> None:
    assert parse_commit_key(key) is None


def test_the_digest_depends_on_names_and_bytes_and_not_on_order() -> None:
    one = adapter_digest({"a": "1", "b": "2"})
    assert one == adapter_digest({"b": "2", "a": "1"})
    assert one != adapter_digest({"a": "2", "b": "1"})
    assert len(one) == 64
