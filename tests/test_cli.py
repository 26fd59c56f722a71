import os
import subprocess  # noqa: TID251 - a fresh interpreter shows what the command line imports
import sys
from pathlib import Path

import pytest

from asyncgrpo_agent import cli
from asyncgrpo_agent.config.sections import ROLES, Config, Role
from asyncgrpo_agent.config.sources import load
from asyncgrpo_agent.errors import ConfigError, LinkError


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    ours = [name for name in os.environ if name.startswith("ASYNCGRPO_")]
    for name in ("STATE_DIRECTORY", "XDG_STATE_HOME", *ours):
        monkeypatch.delenv(name, raising=False)


class FakeRole:
    """Stands for a role's module: keeps the configuration, then returns or raises."""

    def __init__(self, outcome: int | BaseException = 0) -> None:
        self.outcome = outcome
        self.config: Config | None = None

    def run(self, config: Config) -> int:
        self.config = config
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def start(monkeypatch: pytest.MonkeyPatch, role: FakeRole, *words: str) -> int:
    monkeypatch.setattr(cli, "role_entry", lambda _name: role.run)
    monkeypatch.setattr("asyncgrpo_agent.logs.set_up", lambda **_options: None)
    return cli.main(["--role", "proxy", *words])


def test_flags_reach_the_role(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    role = FakeRole(7)
    words = "--listen [::1]:9 --state-dir s --run r --name n --model m --bucket b --replicas 3"
    more = "--engine-python p --min-replicas 2 --log-level debug --log-json --join j --proxy a:1"
    code = start(monkeypatch, role, *words.split(), *more.split(), "--", "--enforce-eager")
    assert code == 7
    config = role.config
    assert config is not None
    assert (config.proxy.listen, config.run.name, config.replica.name) == ("[::1]:9", "r", "n")
    assert config.state_dir == tmp_path / "s"
    assert (config.model.path, config.bucket.path) == (f"{tmp_path}/m", f"{tmp_path}/b")
    assert (config.local.replicas, config.trainer.min_replicas) == (3, 2)
    assert (config.engine.python, config.engine.args) == ("p", ["--enforce-eager"])
    assert (config.agent.log_level, config.agent.log_json) == ("debug", True)
    assert (config.link.join, config.link.proxy) == (f"{tmp_path}/j", "a:1")


def test_replicas_are_those_of_the_role(monkeypatch: pytest.MonkeyPatch) -> None:
    role = FakeRole(0)
    words = ["--join=j", "--bucket=b", "--model=m", "--gpus=0,1"]
    assert start(monkeypatch, role, "--role=replica", *words, "--replicas=auto") == 78  # no host
    monkeypatch.setattr("asyncgrpo_agent.config.host.resolved", lambda config, _stdin: config)
    assert start(monkeypatch, role, "--role=replica", *words, "--replicas=auto") == 0
    assert role.config is not None
    assert (role.config.replica.replicas, role.config.replica.gpus) == ("auto", "0,1")
    assert role.config.local.replicas == 2  # its own default


def test_set_takes_toml_and_bare_words(monkeypatch: pytest.MonkeyPatch) -> None:
    role = FakeRole()
    words = ["--set", "train.max_steps=3", "--set", "engine.dtype=float32", "--join", "-"]
    assert start(monkeypatch, role, *words, "--set", "train.extra=a=b") == 0
    assert role.config is not None
    assert role.config.train.passthrough == {"max_steps": 3, "extra": "a=b"}
    assert (role.config.engine.dtype, role.config.link.join) == ("float32", "-")


@pytest.mark.parametrize(
    ("outcome", "code", "text"),
    [
        (LinkError("lost", where="proxy:1", fix="Wait"), 1, "error: proxy:1: lost. Wait\n"),
        (ConfigError("bad"), 78, "error: bad\n"),
        (KeyboardInterrupt(), 130, ""),
        (ExceptionGroup("g", [ExceptionGroup("h", [ConfigError("bad")])]), 78, "error: bad\n"),
        (ExceptionGroup("g", [ConfigError("a"), LinkError("b")]), 78, "error: b\n"),
        (BaseExceptionGroup("g", [KeyboardInterrupt()]), 130, ""),
        (OSError(28, "No space left", "/s/f"), 1, "/s/f: cannot be written: No space left. Make"),
        (ExceptionGroup("g", [OSError(28, "No space left")]), 1, "error: a local disk: cannot"),
        (BaseExceptionGroup("g", [KeyboardInterrupt(), LinkError("b")]), 1, "error: b\n"),
    ],
)
def test_errors_become_a_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: BaseException,
    code: int,
    text: str,
) -> None:
    assert start(monkeypatch, FakeRole(outcome)) == code
    said = capsys.readouterr().err
    assert text in said
    assert bool(text) == bool(said)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.RaisesGroup(ValueError, ConfigError):
        start(monkeypatch, FakeRole(ExceptionGroup("g", [ValueError("bug"), ConfigError("bad")])))
    for bug in (ValueError("bug"), OSError(9, "bug")):
        with pytest.raises(type(bug), match="bug"):
            start(monkeypatch, FakeRole(bug))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "no role was given. Use --role proxy|replica|trainer|local"),
        (["--role", "boss"], "there is no role 'boss'"),
        (["--role", "proxy", "--listn", "x"], "unrecognized arguments: --listn x"),
        (["--role", "proxy", "--set", "x"], "--set x: expected SECTION.KEY=VALUE"),
        (["--role", "proxy", "--set", "run.name"], "expected SECTION.KEY=VALUE"),
        (["run", "delete", "x"], "invalid choice: 'delete'"),
        (["join", "x"], "invalid choice: 'x'"),
        (["join"], "required: action"),
        (["token", "create", "--role", "replica"], "--run is missing"),
        (["token", "create", "--role", "proxy", "--run", "x"], "invalid choice: 'proxy'"),
        (["init"], "required: --role"),
        (["serve"], "unrecognized arguments: serve"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    assert cli.main(words) == 2
    assert text in capsys.readouterr().err


def test_problems_stand_on_lines_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--role", "proxy", "--listen", "x", "--replicas", "none"]) == 78
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "asyncgrpo-agent: error: 2 problems in the configuration:"
    assert [line.split(":")[0] for line in lines[1:]] == [
        "  local.replicas (--replicas)",
        "  proxy.listen (--listen)",
    ]


def test_a_role_does_not_start_on_a_host_that_lacks_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    role = FakeRole()
    words = ["--set", "proxy.certificate=a.pem", "--set", "proxy.key=b.pem"]
    assert start(monkeypatch, role, *words) == 78
    assert role.config is None
    assert "b.pem does not exist" in capsys.readouterr().err


def test_a_join_line_as_an_argument_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--role", "proxy", "--join", "eyJ" + "A" * 200]) == 78
    err = capsys.readouterr().err
    assert "link.join (--join): this is a join line" in err
    assert "AAA" not in err


@pytest.mark.parametrize("role", ROLES)
def test_init_writes_a_file_once(
    role: Role, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", "--role", role]) == 0
    written = (tmp_path / f"{role}.toml").read_text()
    assert cli.main(["init", "--role", role, "--output", "-"]) == 0
    assert capsys.readouterr().out == written
    (tmp_path / f"{role}.toml").write_text("mine")
    assert cli.main(["init", "--role", role]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / f"{role}.toml").read_text() == "mine"
    assert cli.main(["init", "--role", role, "--force"]) == 0
    assert (tmp_path / f"{role}.toml").read_text() == written


def test_init_into_a_missing_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "--role", "proxy", "--output", "none/a.toml"]) == 1
    assert "none/a.toml: cannot be written" in capsys.readouterr().err


def test_check_shows_effective_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[proxy]\nqueue_limit = 5\n")
    assert cli.main(["check", "--role", "proxy", "--config", "a.toml", "--log-json"]) == 0
    out = capsys.readouterr().out
    assert "queue_limit = 5\n" in out
    assert "# proxy.queue_limit: from a.toml\n# agent.log_json: from --log-json\n" in out
    (tmp_path / "b.toml").write_text(out)  # what it shows is a configuration again
    assert load(role="proxy", file="b.toml", environ={}).proxy.queue_limit == 5


def test_check_fails_on_what_the_host_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "proxy.certificate=a.pem", "--set", "proxy.key=b.pem"]
    assert cli.main(["check", "--role", "proxy", *words]) == 78
    assert "a.pem does not exist" in capsys.readouterr().err


def test_runs_and_join_lines_are_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCGRPO_STATE_DIR", str(tmp_path / "state"))
    assert cli.main(["run", "create", "demo"]) == 0
    capsys.readouterr()
    words = ["token", "create", "--role", "replica", "--run", "demo"]
    assert cli.main([*words, "--address", "a:1", "b:2"]) == 0
    line = capsys.readouterr().out
    assert line.endswith("\n")
    assert len(line.split()) == 1
    assert cli.main([*words, "--address", "a:1", "--output", "replica.join"]) == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "replica.join").stat().st_mode & 0o777 == 0o600
    assert cli.main([*words, "--address", "a:1", "--output", "replica.join"]) == 2
    assert cli.main([*words, "--address", "nowhere"]) == 2
    assert "--address nowhere: expected HOST:PORT" in capsys.readouterr().err


def test_the_engine_command_is_shown_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--role", "replica", "--join", "-", "--model", "m", "--bucket", "b"]
    words += ["--engine-python", sys.executable, "--set", "engine.env.HF_TOKEN=hidden"]
    assert cli.main([*words, "--print-engine-command", "--", "--max-model-len", "512"]) == 0
    out = capsys.readouterr().out
    for part in (sys.executable, "vllm.entrypoints.openai.api_server", "--max-model-len 512"):
        assert part in out
    assert "hidden" not in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("asyncgrpo-agent ")
    for part in ("(source)", "Python 3.", "OpenSSL "):
        assert part in out


def test_help_is_the_same_on_every_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit) as stopped:
            cli.main(["--help"])
        assert stopped.value.code == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert max(map(len, texts[0].splitlines())) <= 98


@pytest.mark.parametrize("command", ["", "init", "check", "run", "join", "token", "drain", "plan"])
def test_help_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    assert capsys.readouterr().out.startswith(f"usage: asyncgrpo-agent {command}".rstrip())


def test_the_command_line_imports_nothing_heavy() -> None:
    code = "import sys, asyncgrpo_agent.cli; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(cli.__file__).parent.parent)},
    )
    loaded = {name.partition(".")[0] for name in result.stdout.split()}
    heavy = {
        "trio",
        "h2",
        "h11",
        "httpcore",
        "cryptography",
        "rich",
        "watchfiles",
        "ssl",
        "asyncio",
    }
    assert loaded.isdisjoint(heavy | {"torch", "vllm", "trl", "transformers", "numpy"})
