from __future__ import annotations

import base64
import hashlib
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.join import PREFIX, Join, decode, encode, with_run_key
from asyncgrpo_agent.errors import EXIT_CONFIG, ConfigError

KEY = bytes(range(32))
JOIN = Join(
    addresses=("proxy.example.org:7843",),
    ca_der=b"certificate" * 40,
    token="t0ken-that-is-secret",
    role="trainer",
    run="demo",
    run_public_key=KEY,
    run_private_key=b"\xa5" * 32,
)
LINE = encode(JOIN)
keys = st.binary(min_size=32, max_size=32)


@given(
    st.lists(st.text(min_size=1), min_size=1, max_size=3),
    st.binary(max_size=600),
    st.text(max_size=60),
    st.sampled_from(["replica", "trainer"]),
    keys,
    st.none() | keys,
)
def test_what_is_encoded_is_decoded(
    addresses: list[str], ca: bytes, token: str, role: str, public: bytes, private: bytes | None
) -> None:
    join = Join(
        addresses=tuple(addresses),
        ca_der=ca,
        token=token,
        role=role,  # type: ignore[arg-type]
        run="demo",
        run_public_key=public,
        run_private_key=private,
    )
    assert decode(encode(join)) == join


def test_line_is_one_word_that_shells_and_files_take_as_it_is() -> None:
    assert LINE.startswith("agrpo1.")
    assert set(LINE) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")


def test_white_space_from_wrapping_is_ignored() -> None:
    wrapped = "\n".join(LINE[at : at + 76] for at in range(0, len(LINE), 76))
    assert decode(f"  {wrapped}\r\n") == JOIN


@given(st.integers(0, len(LINE) - 1), st.sampled_from("abcXYZ019-_.=+/ é"))
def test_no_character_can_be_changed(at: int, other: str) -> None:
    changed = LINE[:at] + other + LINE[at + 1 :]
    if changed != LINE:
        with pytest.raises(ConfigError):
            decode(changed)


@given(st.integers(0, len(LINE) - 1))
def test_cut_line_is_refused(length: int) -> None:
    with pytest.raises(ConfigError):
        decode(LINE[:length])


def test_a_line_that_is_nested_without_end_is_refused() -> None:
    body = b'{"x":' + b"[" * 5_000 + b"]" * 5_000 + b"}"
    data = hashlib.sha256(body).digest()[:4] + body
    with pytest.raises(ConfigError, match="another version"):
        decode(PREFIX + base64.urlsafe_b64encode(data).decode().rstrip("="))


@pytest.mark.parametrize("text", ["", "agrpo2." + LINE.removeprefix(PREFIX), LINE * 2, "{}"])
def test_other_text_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(text)
    assert caught.value.where == "the join line"
    assert "token create" in caught.value.fix
    assert caught.value.exit_code == EXIT_CONFIG


def test_refusal_repeats_nothing_of_the_line() -> None:
    with pytest.raises(ConfigError) as caught:
        decode(LINE[:-9])
    assert LINE[8:24] not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("wrong", [{"run_public_key": b"short"}, {"run_private_key": b""}])
def test_key_of_another_size_is_refused(wrong: dict[str, bytes]) -> None:
    fields = {name: getattr(JOIN, name) for name in Join.__dataclass_fields__}
    with pytest.raises(ConfigError, match="lacks an address or a key"):
        decode(encode(Join(**{**fields, **wrong})))


def test_a_key_is_added_to_the_join_of_its_run_only() -> None:
    private = b"\x07" * 32
    public = Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
    keyless = replace(JOIN, run_public_key=public, run_private_key=None)
    assert with_run_key(keyless, private) == replace(keyless, run_private_key=private)
    with pytest.raises(ConfigError, match="another key than that of run 'demo'") as caught:
        with_run_key(keyless, b"\x08" * 32)
    assert "08" * 4 not in str(caught.value)


def test_repr_shows_no_secret() -> None:
    assert JOIN.token not in repr(JOIN)
    assert "a5" not in repr(JOIN)
    assert "demo" in repr(JOIN)
