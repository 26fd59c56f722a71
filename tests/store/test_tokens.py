from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
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


@pytest.mark.parametrize(
    ("role", "run", "shown"),
    [
        ("viewer", "demo", ["demo"]),
        ("viewer", tokens.ALL_RUNS, ["demo", "other"]),
        ("replica", "demo", []),
        ("trainer", "demo", []),
    ],
)
def test_who_looks_on_at_which_runs(tmp_path: Path, role: str, run: str, shown: list[str]) -> None:
    facts = facts_of(tmp_path, tokens.create_token(tmp_path, role=role, run=run, now_unix_s=NOW_S))
    assert [name for name in ("demo", "other") if facts.shows(name)] == shown
    assert facts.scopes == (["view"] if shown else [])


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


def test_what_ended_over_a_week_ago_goes_when_the_file_is_written(tmp_path: Path) -> None:
    """By whichever of the three that write it; what may still let somebody in never goes."""
    week_s = tokens.KEEP_ENDED_S
    lasting, used_up = made(tmp_path), made(tmp_path, uses=1)
    note_use(tmp_path, facts_of(tmp_path, used_up).id, "a", NOW_S)
    coming = made(tmp_path, life_s=week_s * 9)
    kept = {lasting, used_up, coming}
    writes: list[Callable[[float], object]] = [
        lambda now_s: tokens.create_token(tmp_path, role="trainer", run="b", now_unix_s=now_s),
        lambda now_s: note_use(tmp_path, facts_of(tmp_path, lasting).id, "a", now_s),
        lambda now_s: revoke_token(
            tmp_path, facts_of(tmp_path, made(tmp_path)).id, now_unix_s=now_s
        ),
    ]
    for number, write in enumerate(writes):
        expired, revoked = made(tmp_path, life_s=60), made(tmp_path)
        revoke_token(tmp_path, facts_of(tmp_path, revoked).id, now_unix_s=NOW_S + 60)
        write(NOW_S + 60 + week_s)
        assert find_token(tmp_path, expired)
        assert find_token(tmp_path, revoked)
        write(NOW_S + 61 + week_s + 60 * number)
        assert find_token(tmp_path, expired) is None
        assert find_token(tmp_path, revoked) is None
        assert all(find_token(tmp_path, token) for token in kept)


def test_of_what_has_ended_only_the_last_are_kept(tmp_path: Path) -> None:
    lasting = made(tmp_path)
    row = msgspec.structs.replace(facts_of(tmp_path, lasting), expires_unix_s=NOW_S)
    many = [
        msgspec.structs.replace(row, sha256=f"{n:08}{0:056}", expires_unix_s=NOW_S + n)
        for n in range(2 * tokens.MAX_ENDED)
    ]
    file = tokens.tokens_file(tmp_path)
    file.write_bytes(msgspec.json.encode([*many, facts_of(tmp_path, lasting)]))
    made(tmp_path)
    at_s = NOW_S + 5000
    tokens.create_token(tmp_path, role="replica", run="demo", now_unix_s=at_s)
    left = tokens.list_tokens(tmp_path)
    assert [facts.expires_unix_s for facts in left if facts.ended(at_s)] == [
        facts.expires_unix_s for facts in many[tokens.MAX_ENDED :]
    ]
    assert len(left) == tokens.MAX_ENDED + 3
    assert find_token(tmp_path, lasting)


def test_one_that_was_revoked_long_ago_is_still_told_to_who_revokes_it_again(
    tmp_path: Path,
) -> None:
    token_id = facts_of(tmp_path, made(tmp_path)).id
    revoke_token(tmp_path, token_id, now_unix_s=NOW_S)
    later_s = NOW_S + 2 * tokens.KEEP_ENDED_S
    assert revoke_token(tmp_path, token_id, now_unix_s=later_s).revoked_unix_s == NOW_S
    assert tokens.list_tokens(tmp_path) == []


def test_a_token_that_nobody_holds_is_discarded_at_once(tmp_path: Path) -> None:
    first, second = made(tmp_path), made(tmp_path)
    for token in (first, first, "unknown"):
        tokens.discard_token(tmp_path, token, now_unix_s=NOW_S)
    assert find_token(tmp_path, first) is None
    assert find_token(tmp_path, second)


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
