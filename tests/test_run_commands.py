from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from asyncgrpo_agent import cli
from asyncgrpo_agent.core.join import decode


@pytest.fixture(autouse=True)
def two_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Folders of a trainer's machine and of a proxy, and no configuration."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ASYNCGRPO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ASYNCGRPO_STATE_DIR", str(tmp_path / "own"))


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert cli.main(words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def say(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Put it on standard input."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def keyless_line(capsys: pytest.CaptureFixture[str], role: str = "trainer") -> str:
    """A line of a proxy that has the public half of run "demo" only."""
    if not Path("own").exists():
        public = output(capsys, "run", "create", "demo").strip()
        output(capsys, "run", "add", "demo", "--public-key", public, "--state-dir", "proxy")
    words = ["token", "create", "--role", role, "--run", "demo", "--address", "a:1"]
    return output(capsys, *words, "--state-dir", "proxy")


@pytest.mark.parametrize("given", ["text", "file", "stdin"])
def test_the_public_half_is_brought_to_the_proxy(
    given: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = output(capsys, "run", "create", "demo")
    Path("demo.pub").write_text(printed)
    say(monkeypatch, printed)
    word = {"text": printed.strip(), "file": "demo.pub", "stdin": "-"}[given]
    output(capsys, "run", "add", "demo", "--public-key", word, "--state-dir", "proxy")
    assert [path.name for path in Path("proxy").rglob("run.*")] == ["run.pub"]
    rows = json.loads(output(capsys, "run", "list", "--json", "--state-dir", "proxy"))
    assert rows == [{"run": "demo", "public_key": printed.strip(), "private_key": "elsewhere"}]


def test_runs_are_listed_without_private_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "run", "list") == "no runs\n"
    public = output(capsys, "run", "create", "demo").strip()
    secret = Path("own/runs/demo/run.key").read_text().strip()
    shown = output(capsys, "run", "list")
    assert shown.splitlines()[1:] == [f"demo  {public}  here"]
    assert secret not in shown + output(capsys, "run", "list", "--json")
    words = ["token", "create", "--role", "replica", "--run", "demo", "--address", "a:1"]
    output(capsys, *words)  # it is a proxy's folder now
    note = "run demo: run key is on this host: adapters are not protected from it"
    assert output(capsys, "run", "list").splitlines()[2:] == [note]


@pytest.mark.parametrize("given", ["file", "stdin"])
def test_a_join_line_is_completed_on_its_way(
    given: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = keyless_line(capsys)
    Path("join.txt").write_text(line)
    say(monkeypatch, line)
    words = ["join.txt"] if given == "file" else []
    completed = output(capsys, "join", "add-key", *words)
    private = decode(completed).run_private_key
    assert private is not None
    assert private.hex() == Path("own/runs/demo/run.key").read_text().strip()
    assert decode(completed).token == decode(line).token
    say(monkeypatch, line)
    assert output(capsys, "join", "add-key", *words, "--output", "trainer.join") == ""
    assert Path("trainer.join").read_text() == completed
    assert Path("trainer.join").stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_completed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, of_replica = keyless_line(capsys), keyless_line(capsys, "replica")
    for text, words, code, reason in (
        (of_replica, (), 78, "for a replica, which never signs adapters"),
        (line[:-9], (), 78, "is cut or mistyped"),
        (line, ("--state-dir", "proxy"), 78, "the private key of run 'demo' is not on this host"),
        ("", ("none.txt",), 2, "none.txt: cannot be read: No such file"),
        ("", (line.strip(),), 2, "this is a join line, which is a secret"),
    ):
        say(monkeypatch, text)
        assert cli.main(["join", "add-key", *words]) == code
        shown = capsys.readouterr()
        assert reason in shown.err
        assert line[8:40] not in shown.err
        assert shown.out == ""


def test_what_is_no_public_key(capsys: pytest.CaptureFixture[str]) -> None:
    output(capsys, "run", "create", "demo")
    Path("short.pub").write_text("00ff")
    for word, code, reason in (
        ("short.pub", 78, "short.pub: holds no public key"),
        ("own/runs/demo/run.key", 78, "is the private half"),
        ("none.pub", 2, "none.pub: cannot be read"),
    ):
        words = ["run", "add", "demo", "--public-key", word, "--state-dir", "proxy"]
        assert cli.main(words) == code
        assert reason in capsys.readouterr().err
    assert not Path("proxy").exists()


def test_a_run_of_another_key_is_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    public = output(capsys, "run", "create", "demo").strip()
    assert cli.main(["run", "create", "demo"]) == 78
    assert "exists already" in capsys.readouterr().err
    output(capsys, "run", "add", "demo", "--public-key", public)
    assert cli.main(["run", "add", "demo", "--public-key", "ab" * 32]) == 78
    assert "It has another key" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["run create", "run add", "run list", "join add-key"])
def test_help_of_every_action(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*action.split(), "--help"])
    out = capsys.readouterr().out
    assert out.startswith(f"usage: asyncgrpo-agent {action}")
    assert max(map(len, out.splitlines())) <= 98
