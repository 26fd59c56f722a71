"""README: its commands work or have flags that exist, and its example configuration is one.

The packaged recipes pass `check` on a host that has what they name.
"""

import json
import os
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from asyncgrpo_agent import cli
from asyncgrpo_agent.config import sources
from asyncgrpo_agent.core.join import Join, JoinRole, decode, encode
from asyncgrpo_agent.flags import Parser, add_config_flags
from asyncgrpo_agent.roles.trainer_job import history_file
from asyncgrpo_agent.store.history import History
from fakes.bucket import PUBLIC_KEY, FakeTrainer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = ROOT / "packaging" / "examples"
RECIPES = (
    ("recipe-trainer", "trainer"),
    ("recipe-replica", "replica"),
    ("single-gpu", "local"),
    ("cpu-demo", "local"),
)
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


# --- recipes ---------------------------------------------------------------------------------


def on_a_host(folder: Path, name: str) -> Path:
    """A copy of the example `name`, and all that it names, below `folder`."""
    text = (EXAMPLES / f"{name}.toml").read_text()
    text = re.sub(r'"(?=/(srv|mnt|etc|var)/)', f'"{folder}', text)
    file = folder / "etc" / "examples" / f"{name}.toml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    found = tomllib.loads(text)
    model = file.parent / found["model"]["path"]
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    train = found.get("train", {})
    files = [
        train.get("dataset"),
        train.get("eval", {}).get("dataset"),
        found.get("link", {}).get("join"),
    ]
    for path in (file.parent / one for one in files if one):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("line\n")
        path.chmod(0o600)
    if "bucket" in found:
        Path(found["bucket"]["path"]).mkdir(parents=True)
    return file


@pytest.mark.parametrize(("name", "role"), RECIPES)
def test_a_packaged_recipe_passes_the_check(
    name: str, role: str, bare_host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = on_a_host(bare_host, name)
    words = ["check", f"--role={role}", f"--config={file}", f"--engine-python={sys.executable}"]
    assert cli.main(words) == 0, capsys.readouterr().err


def test_the_published_recipe_is_complete() -> None:
    trainer, replica = (
        tomllib.loads((EXAMPLES / f"recipe-{role}.toml").read_text())
        for role in ("trainer", "replica")
    )
    train = trainer["train"]
    assert trainer["model"] == replica["model"]
    assert trainer["model"]["path"].endswith("/Qwen2.5-Math-1.5B")
    assert (train["lora"]["r"], train["lora"]["lora_alpha"]) == (1, 2)
    assert (train["learning_rate"], train["num_generations"]) == (4e-5, 8)
    assert train["per_device_train_batch_size"] * train["gradient_accumulation_steps"] == 128
    assert (train["max_completion_length"], train["token_budget"]) == (3000, 16384)
    assert train["max_staleness"] == 4
    assert replica["engine"]["max_loras"] == train["max_staleness"] + 4
    assert replica["engine"]["max_lora_rank"] >= train["lora"]["r"]


def test_the_packaged_demo_is_the_demo() -> None:
    """But for where its files are from there."""
    text = (EXAMPLES / "cpu-demo.toml").read_text()
    text = text.replace('"../demo"', '"."').replace('"../demo/', '"')
    assert tomllib.loads(text) == tomllib.loads((ROOT / "scripts/demo_task/demo.toml").read_text())
