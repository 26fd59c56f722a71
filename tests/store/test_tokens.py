from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.store import tokens
from asyncgrpo_agent.store.tokens import TokenFacts, find_token, note_use, revoke_token

NOW_S = 1_000_000.0


def made(state: Path, *, life_s: float | None = None, uses: int | None = None) -> str:
    return tokens.create_token(
        state, role="replica", run="demo", now_unix_s=NOW_S, life_s=life_s, uses=uses
    )


def facts_of(state: Path, token: str) -> TokenFacts:
    facts = find_token(state, token)
    assert facts is not None
    return facts


def test_token_allows_what_it_was_made_for(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, made(tmp_path))
    assert (facts.role, facts.run, facts.created_unix_s) == ("replica", "demo", NOW_S)
    assert (facts.expires_unix_s, facts.uses_left, facts.last_used_unix_s) == (None, None, None)
    assert facts.refusal("i", NOW_S + 1e9) == ""


def test_tokens_are_valid_side_by_side_until_one_is_revoked(tmp_path: Path) -> None:
    old, new = made(tmp_path), made(tmp_path)
    revoked = revoke_token(tmp_path, facts_of(tmp_path, old).id, now_unix_s=NOW_S + 5)
    assert revoked == facts_of(tmp_path, old)
    assert revoked.ended(NOW_S + 5) == revoked.refusal("i", NOW_S) == "the token was revoked"
    assert facts_of(tmp_path, new).refusal("i", NOW_S + 5) == ""
    again = revoke_token(tmp_path, revoked.id, now_unix_s=NOW_S + 9)
    assert again.revoked_unix_s == NOW_S + 5


def test_an_id_that_is_none_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no token 'abc'"):
        revoke_token(tmp_path, "abc", now_unix_s=NOW_S)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("at_s", "ended"), [(59.9, ""), (60.0, "the token has expired")])
def test_a_token_ends_when_its_time_is_over(tmp_path: Path, at_s: float, ended: str) -> None:
    facts = facts_of(tmp_path, made(tmp_path, life_s=60))
    assert facts.ended(NOW_S + at_s) == facts.refusal("i", NOW_S + at_s) == ended


def test_uses_are_counted_by_process(tmp_path: Path) -> None:
    token = made(tmp_path, uses=2)
    token_id = facts_of(tmp_path, token).id
    for instance in ("a", "a", "b"):
        assert facts_of(tmp_path, token).refusal(instance, NOW_S) == ""
        note_use(tmp_path, token_id, instance, NOW_S)
    facts = facts_of(tmp_path, token)
    assert facts.uses_left == 0
    assert facts.refusal("a", NOW_S) == facts.refusal("b", NOW_S) == ""
    assert facts.refusal("c", NOW_S) == "the token has no uses left"
    assert facts.ended(NOW_S) == ""  # those that are in may stay


def test_use_is_noted_at_most_once_a_minute(tmp_path: Path) -> None:
    token = made(tmp_path)
    token_id, file = facts_of(tmp_path, token).id, tokens.tokens_file(tmp_path)
    note_use(tmp_path, token_id, "a", NOW_S)
    before = file.stat().st_ino
    note_use(tmp_path, token_id, "b", NOW_S + 59)
    assert file.stat().st_ino == before
    assert facts_of(tmp_path, token).last_used_unix_s == NOW_S
    assert facts_of(tmp_path, token).instances == []  # counted only where uses are limited
    note_use(tmp_path, token_id, "a", NOW_S + 60)
    assert facts_of(tmp_path, token).last_used_unix_s == NOW_S + 60


@pytest.mark.parametrize("token", ["", "x", "\ud800"])
def test_unknown_token_is_none(tmp_path: Path, token: str) -> None:
    assert find_token(tmp_path, token) is None
    made(tmp_path)
    assert find_token(tmp_path, token) is None


def test_token_is_stored_as_a_hash_only(tmp_path: Path) -> None:
    token = made(tmp_path)
    file = tokens.tokens_file(tmp_path)
    assert token not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


def test_changes_made_at_once_all_count(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: made(tmp_path, uses=50), range(12)))
        token_id = facts_of(tmp_path, found[0]).id
        list(pool.map(lambda n: note_use(tmp_path, token_id, f"i{n}", NOW_S), range(24)))
    assert all(find_token(tmp_path, token) for token in found)
    assert len({facts.id for facts in tokens.list_tokens(tmp_path)}) == 12
    assert facts_of(tmp_path, found[0]).uses_left == 26


def test_rows_without_the_newer_fields_are_read(tmp_path: Path) -> None:
    token = made(tmp_path)
    file = tokens.tokens_file(tmp_path)
    names = ("sha256", "role", "run", "created_unix_s")
    (row,) = json.loads(file.read_text())
    file.write_text(json.dumps([{name: row[name] for name in names}]))
    assert facts_of(tmp_path, token).refusal("i", NOW_S) == ""


@pytest.mark.parametrize("text", ["{", "{}", '[{"role": 1}]', "\ud800"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    made(tmp_path)
    file = tokens.tokens_file(tmp_path)
    file.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError, match="does not parse") as caught:
        find_token(tmp_path, "x")
    assert caught.value.where == str(file)
