"""README: its commands work or have flags that exist, and its example configuration is one."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from asyncgrpo_agent import cli
from asyncgrpo_agent.config import sources
from asyncgrpo_agent.core.join import Join, JoinRole, decode, encode
from asyncgrpo_agent.flags import Parser, add_config_flags
from asyncgrpo_agent.roles.trainer_job import history_file
from asyncgrpo_agent.store.history import History
from fakes.bucket import PUBLIC_KEY, FakeTrainer

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line
    for kind, block in BLOCKS
    if kind == "sh"
    for line in block.splitlines()
    if line.startswith("asyncgrpo-agent --role")
]


def stories() -> list[list[tuple[str, list[str]]]]:
    """Commands about runs, joins and tokens, each with its host; `run create` begins a story."""
    found: list[list[tuple[str, list[str]]]] = []
    for block in (block for kind, block in BLOCKS if kind == "sh"):
        host = "proxy"
        for line in block.splitlines():
            if named := re.match("# on the (.+)", line):
                host = named[1]
            elif re.match("asyncgrpo-agent (run|join|token) ", line):
                words = shlex.split(line)[1:]
                if words[:2] == ["run", "create"]:
                    found.append([])
                found[-1].append((host, words))
    return found


@pytest.fixture
def bare_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ASYNCGRPO_")]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.mark.parametrize("story", stories())
def test_commands_about_runs_and_tokens_work(
    story: list[tuple[str, list[str]]],
    bare_host: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In order, on hosts whose files have been copied to each other."""
    for host, words in story:
        monkeypatch.setenv("ASYNCGRPO_STATE_DIR", str(bare_host / host))
        arguments, file = (words[:-2], words[-1]) if words[-2] == ">" else (list(words), "")
        if arguments[:2] == ["token", "revoke"]:
            arguments[2] = first_token(capsys)
        capsys.readouterr()
        assert cli.main(arguments) == 0, capsys.readouterr().err
        if file:
            Path(file).write_text(capsys.readouterr().out)
    assert decode(Path("trainer.join").read_text()).run_private_key is not None
    assert decode(Path("replica.join").read_text()).run_private_key is None


def first_token(capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert cli.main(["token", "list", "--json"]) == 0
    return str(json.loads(capsys.readouterr().out)[0]["id"])


def test_every_command_about_runs_and_tokens_is_shown() -> None:
    shown = {tuple(words[:2]) for story in stories() for _, words in story}
    assert shown == {
        ("run", "create"),
        ("run", "add"),
        ("run", "list"),
        ("join", "add-key"),
        ("token", "create"),
        ("token", "list"),
        ("token", "revoke"),
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_roles_parse(command: str) -> None:
    words = shlex.split(command)[1:]
    parser = Parser("readme", "readme", "")
    add_config_flags(parser)
    parser.parse_args(words[: words.index("--")] if "--" in words else words)


def test_commands_about_adapters_work(
    bare_host: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCGRPO_STATE_DIR", str(bare_host / "state"))
    monkeypatch.setattr("asyncgrpo_agent.logs.set_up", lambda **_options: None)
    adapter_world(bare_host)
    commands = re.findall(r"^asyncgrpo-agent (adapters .+)$", "".join(b for _, b in BLOCKS), re.M)
    for command in commands:
        if "--bucket" not in command and "--config" not in command:
            continue  # asks a proxy: tests/roles/test_adapter_link.py
        words = shlex.split(command.replace("/mnt/bucket", str(bare_host / "bucket")))
        assert cli.main(words) == 0, capsys.readouterr().err
    assert (bare_host / "demo-newest").is_dir()
    assert (bare_host / "demo-best").is_dir()


def adapter_world(folder: Path) -> None:
    """What the commands about adapters find: a bucket, a history, joins and trainer.toml."""
    (folder / "bucket").mkdir()
    found = FakeTrainer(folder / "local", folder / "bucket" / "demo").publish(0)
    with History(history_file(folder / "state", "demo")) as history:
        history.record("started", 1.0, attempt=found.adapter.attempt)
        history.record("metrics", 2.0, values={"reward": 0.5})
    roles: tuple[JoinRole, ...] = ("replica", "trainer")
    for role in roles:
        join = Join(
            addresses=("a:1",),
            ca_der=b"",
            token="t",
            role=role,
            run="demo",
            run_public_key=PUBLIC_KEY,
        )
        (folder / f"{role}.join").write_text(encode(join))
    (block,) = (block for kind, block in BLOCKS if kind == "toml")
    (folder / "trainer.toml").write_text(block.replace("/mnt/bucket", str(folder / "bucket")))


def test_the_smallest_trainer_configuration_is_one(tmp_path: Path) -> None:
    (block,) = (block for kind, block in BLOCKS if kind == "toml")
    config = sources.parse(
        role="trainer",
        cwd=tmp_path,
        document=sources.Document(text=block, name="trainer.toml", folder=tmp_path),
        environ={"ASYNCGRPO_JOIN": "agrpo1.x"},
    )
    assert config.trainer.min_replicas == 2
    assert config.train.passthrough == {"max_steps": 500, "num_generations": 8}
