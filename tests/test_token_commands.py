from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from asyncgrpo_agent import cli, token_commands
from asyncgrpo_agent.core.join import decode
from asyncgrpo_agent.store.tokens import find_token

CREATE = ("token", "create", "--role", "replica", "--run", "demo")


@pytest.fixture(autouse=True)
def proxy_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host with one run, and no configuration but what a test gives."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ASYNCGRPO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ASYNCGRPO_STATE_DIR", str(tmp_path / "state"))
    assert cli.main(["run", "create", "demo"]) == 0
    capsys.readouterr()


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert cli.main(words) == 0
    return capsys.readouterr().out


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(output(capsys, "token", "list", "--json", *words))
    return found


@pytest.mark.parametrize(
    ("text", "seconds"), [("7d", 604800), ("12h", 43200), ("90m", 5400), ("1m", 60)]
)
def test_durations(text: str, seconds: float) -> None:
    assert token_commands.duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "0d", "-1d", "1.5h", "1w", "7 d", "7D", "1d2h", "٣d"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no duration such as 7d"):
        token_commands.duration_s(text)


def test_tokens_are_listed_without_their_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    line = output(capsys, *CREATE, "--address", "a:1", "--expires", "7d", "--uses", "3")
    join = decode(line)
    found = find_token(Path("state").absolute(), join.token)
    assert found is not None
    (row,) = rows(capsys)
    assert row.pop("created") < row.pop("expires")
    assert row == {
        "id": found.id,
        "role": "replica",
        "run": "demo",
        "scopes": "",
        "uses_left": 3,
        "last_used": None,
        "ended": "",
    }
    table = output(capsys, "token", "list")
    assert table.splitlines()[0].split()[:3] == ["id", "role", "run"]
    assert table.splitlines()[1].split()[:3] == [found.id, "replica", "demo"]
    for shown in (table, output(capsys, "token", "list", "--json")):
        assert join.token not in shown
        assert found.sha256 not in shown


@pytest.mark.parametrize(
    ("words", "run", "scopes", "of"),
    [
        ([], "*", "view", "all runs"),
        (["--run", "demo"], "demo", "view", "run demo"),
        (["--run", "demo", "--rollouts"], "demo", "view,rollouts", "run demo"),
    ],
)
def test_viewers(
    capsys: pytest.CaptureFixture[str], words: list[str], run: str, scopes: str, of: str
) -> None:
    create = ["token", "create", "--role", "viewer", "--address", "a:1", *words]
    join = decode(output(capsys, *create))
    assert (join.role, join.run, join.run_public_key) == ("viewer", run, b"")
    (row,) = rows(capsys)
    assert (row["role"], row["run"], row["scopes"]) == ("viewer", run, scopes)
    assert cli.main(["token", "revoke", row["id"]]) == 0
    assert capsys.readouterr().err == f"token {row['id']} (viewer of {of}) revoked\n"


def test_no_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "token", "list") == "no tokens\n"
    assert rows(capsys) == []


def test_a_run_whose_key_is_beside_the_proxy_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    note = "run demo: run key is on this host: adapters are not protected from it"
    output(capsys, *CREATE, "--address", "a:1")
    assert output(capsys, "token", "list").splitlines()[-1] == note
    Path("state/runs/demo/run.key").unlink()
    assert note not in output(capsys, "token", "list")


def test_a_trainer_join_without_the_key_says_where_it_is_completed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    create = ["token", "create", "--role", "trainer", "--run", "demo", "--address", "a:1"]
    assert cli.main(create) == 0
    assert capsys.readouterr().err == ""
    Path("state/runs/demo/run.key").unlink()
    assert cli.main(create) == 0
    shown = capsys.readouterr()
    assert decode(shown.out).run_private_key is None
    assert "where `asyncgrpo-agent run create demo` ran" in shown.err
    assert "asyncgrpo-agent join add-key FILE" in shown.err
    assert cli.main([*CREATE, "--address", "a:1"]) == 0
    assert capsys.readouterr().err == ""  # a replica needs none


def test_a_revoked_token_is_shown_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        output(capsys, *CREATE, "--address", "a:1")
    first, second = rows(capsys)
    assert cli.main(["token", "revoke", first["id"]]) == 0
    assert capsys.readouterr().err == f"token {first['id']} (replica of run demo) revoked\n"
    ended = {row["id"]: row["ended"] for row in rows(capsys)}
    assert ended == {first["id"]: "the token was revoked", second["id"]: ""}
    assert cli.main(["token", "revoke", "00"]) == 78
    assert "there is no token '00'. `asyncgrpo-agent token list`" in capsys.readouterr().err


def test_addresses_and_state_come_from_the_proxys_configuration(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ASYNCGRPO_STATE_DIR")
    text = '[agent]\nstate_dir = "state"\n[proxy]\npublic_addresses = ["a:1", "[::1]:2"]\n'
    (tmp_path / "proxy.toml").write_text(text)
    by_file = decode(output(capsys, *CREATE, "--config", "proxy.toml"))
    assert by_file.addresses == ("a:1", "[::1]:2")
    by_flag = decode(output(capsys, *CREATE, "--config", "proxy.toml", "--address", "c:3", "d:4"))
    assert by_flag.addresses == ("c:3", "d:4")
    assert len(rows(capsys, "--state-dir", str(tmp_path / "state"))) == 2
    assert rows(capsys, "--config", "proxy.toml", "--state-dir", str(tmp_path / "other")) == []


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([*CREATE], 78, "no address for agents to dial. Give one: --address HOST:PORT"),
        ([*CREATE, "--address", "a:1", "--expires", "soon"], 2, "'soon' is no duration such as 7d"),
        ([*CREATE, "--address", "a:1", "--uses", "0"], 2, "--uses: '0' is no number from 1"),
        (["token", "create", "--role", "trainer"], 2, "--run is missing: a trainer is of one run"),
        ([*CREATE, "--address", "a:1", "--rollouts"], 2, "--rollouts is for role viewer"),
        (["token"], 2, "required: action"),
        (["token", "delete"], 2, "invalid choice: 'delete'"),
        (["token", "revoke"], 2, "required: ID"),
        (["token", "list", "x"], 2, "unrecognized arguments: x"),
    ],
)
def test_mistakes(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, text: str
) -> None:
    assert cli.main(words) == code
    assert text in capsys.readouterr().err
    assert rows(capsys) == []


@pytest.mark.parametrize("action", ["create", "list", "revoke"])
def test_help_of_every_action(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["token", action, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: asyncgrpo-agent token {action}")
