"""packaging/docs: what agents are said to say is in their source, and every command is one.

Blocks of commands that need more than a host say so in their first line, beside `sh`: `gpu` (or a
container engine), `cloud` (an account), `systemd`; `tested`, `slurm` and `state` name no need, but
what runs them. All others are run here, or have the flags that they are given.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess  # noqa: TID251 - a batch script is run as Slurm runs it
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from asyncgrpo_agent import cli
from asyncgrpo_agent.config import sources
from asyncgrpo_agent.config.sections import Role
from asyncgrpo_agent.flags import Parser, add_config_flags
from fakes import fleet
from fakes.archives import KEY, packed, printing_agent
from fakes.fleet import Site, model_folder

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "packaging" / "docs"
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "agent").rglob("*.py")))
JOINED = re.sub(r'"\s*\n\s*f?"', "", SOURCE)  # texts over several lines
ROWS = [
    line.split("|")[1]
    for line in (DOCS / "troubleshooting.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| it says")
]
BLOCKS = [
    (path.name, kind, block)
    for path in sorted(DOCS.glob("*.md"))
    for kind, block in re.findall(r"```(\w+(?: \w+)?)\n(.*?)```", path.read_text(), re.DOTALL)
]
SHELL = [(page, kind, block) for page, kind, block in BLOCKS if kind.split()[0] == "sh"]
# Pages that show how to begin, somewhere.
BEGINNINGS = (
    *("air-gapped.md", "buckets.md", "on-prem.md", "quick-start.md", "slurm.md", "spot.md"),
    "static-upstreams.md",
)
NEEDS = ("gpu", "cloud", "systemd", "slurm", "tested", "state")
COMMANDS = [
    line
    for _, _, block in SHELL
    for line in block.splitlines()
    if line.startswith("asyncgrpo-agent ") and not line.startswith("asyncgrpo-agent --role")
]
# Whatever starts a role, here or on another host, in a container or in a batch script.
STARTS = [
    words
    for _, _, block in SHELL
    for line in block.splitlines()
    for words in re.findall(r"(?:asyncgrpo-agent|--args) (--role .+?)(?: &)?$", line)
]
FILES = [(page, block) for page, kind, block in BLOCKS if kind == "toml" and page in BEGINNINGS]


@pytest.mark.parametrize("said", [text for row in ROWS for text in re.findall("`([^`]+)`", row)])
def test_agents_say_it(said: str) -> None:
    assert said in JOINED


def test_every_row_quotes_something() -> None:
    assert len(ROWS) > 30
    assert [row for row in ROWS if "`" not in row] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_and_their_flags_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command, comments=True)[1:]
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    verbs = words[: 2 if words[0] in ("token", "run", "join", "rollouts", "model") else 1]
    with pytest.raises(SystemExit) as ended:
        cli.main([*verbs, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert [flag for flag in flags if flag not in shown] == []


PLANS = [command for command in COMMANDS if command.split()[1] == "plan"]


@pytest.mark.parametrize("command", PLANS)
def test_plans_are_made(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of less virtual time, which says the same of the flags."""
    words = shlex.split(command)[1:]
    assert cli.main([*words, "--simulate=20s", "--placed-replicas=2"]) == 0
    assert "ottleneck: " in capsys.readouterr().out


# --- how to begin ----------------------------------------------------------------------------


@pytest.mark.parametrize("words", STARTS)
def test_what_starts_a_role_has_flags_that_exist(words: str) -> None:
    parser = Parser("docs", "docs", "")
    add_config_flags(parser)
    assert parser.parse_args(shlex.split(words)).role in ("replica", "trainer", "proxy")


@pytest.mark.parametrize(("page", "block"), FILES)
def test_configurations_have_keys_that_exist(page: str, block: str) -> None:
    named = re.match(r"# (proxy|replica|trainer)\.toml", block)
    assert named, page
    roles: dict[str, Role] = {"proxy": "proxy", "replica": "replica", "trainer": "trainer"}
    settings = {"link.join": "j", "bucket.path": "/b", "model.path": "/m"}
    settings |= {"train.dataset": "d.jsonl", "train.rewards": '["r:f"]'}
    if "embed_proxy" in block:
        del settings["link.join"]
    given = [
        sources.Setting(path=path, value=value, origin="test")
        for path, value in settings.items()
        if not re.search(rf"^{path.rpartition('.')[2]} = ", block, re.M) and named[1] != "proxy"
    ]
    sources.parse(
        role=roles[named[1]],
        cwd=Path("/"),
        document=sources.Document(text=block, name=named[0], folder=Path("/")),
        settings=given,
    )


@pytest.mark.parametrize(("page", "kind", "block"), SHELL)
def test_every_other_command_is_run_or_says_what_it_needs(page: str, kind: str, block: str) -> None:
    if kind != "sh":
        assert kind.removeprefix("sh ") in NEEDS, page
        return
    if page in BEGINNINGS:
        others = [line for line in block.splitlines() if not line.startswith("asyncgrpo-agent ")]
        assert others == [], page


@pytest.mark.parametrize(
    "block", [block for _, kind, block in SHELL if kind == "sh tested"], ids=lambda _: ""
)
def test_an_archive_is_verified_and_installed(block: str, tmp_path: Path) -> None:
    """Around a stand-in for the frozen agent, without an engine, and into a root of its own."""
    dist = tmp_path / "dist"
    packed(dist, printing_agent(dist, "0.1.0"), "0.1.0")
    public = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (dist / "release.pub").write_bytes(public)
    script = block.replace("-cuda.tar", ".tar").replace(
        "/install.sh", f"/install.sh --root {tmp_path}/root"
    )
    done = subprocess.run(
        ["sh", "-e", "-x", "-c", script], cwd=dist, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "root/usr/local/bin/asyncgrpo-agent").is_symlink()


@pytest.mark.parametrize("page", BEGINNINGS)
def test_commands_that_make_joins_and_packs_work(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In order, as one person would; the state is another's, and the pack has been copied here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("asyncgrpo_agent.logs.set_up", lambda **_options: None)
    for name in [name for name in os.environ if name.startswith("ASYNCGRPO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ASYNCGRPO_STATE_DIR", str(tmp_path / "state"))
    if page == "spot.md":
        assert cli.main(["run", "create", "demo"]) == 0
    model_folder(tmp_path)
    assert cli.main(["model", "pack", "tiny", "Qwen2.5-Math-1.5B"]) == 0
    for line in (line for at, kind, block in SHELL if (at, kind) == (page, "sh")
                 for line in block.splitlines()):  # fmt: skip
        words = shlex.split(line.replace("/var/lib/asyncgrpo-agent", str(tmp_path / "state")))[1:]
        if words[0] in ("doctor", "check"):
            continue  # of a host that is set up: tests/test_doctor.py
        assert cli.main(words) == 0, capsys.readouterr().err


def test_a_proxys_state_is_saved_and_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the page's own commands, onto an empty disk."""
    state = tmp_path / "state"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASYNCGRPO_STATE_DIR", str(state))
    assert cli.main(["run", "create", "demo"]) == 0
    words = ["token", "create", "--role=replica", "--run=demo", "--address=p.example.org:7843"]
    assert cli.main([*words, "--output=replica.join"]) == 0
    known = ["run list", "token list"]

    def told() -> str:
        capsys.readouterr()
        for command in known:
            assert cli.main([*command.split(), f"--state-dir={state}"]) == 0
        return capsys.readouterr().out

    before = told()
    save, restore = (block for _, kind, block in SHELL if kind == "sh state")
    for block in (save, restore):
        script = block.replace("/var/lib/asyncgrpo-agent", str(state))
        subprocess.run(["sh", "-e", "-c", script], check=True)
        if block is save:
            state.rename(tmp_path / "lost")
    assert told() == before
    assert "demo" in before
    assert (tmp_path / "agrpo-state.tar.gz").stat().st_mode & 0o077 == 0
    assert state.stat().st_mode & 0o077 == 0


# --- Slurm -----------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        yield made


def batch_script(site: Site) -> subprocess.Popen[bytes]:
    """The page's script, with this checkout's agent, and a scontrol that writes down its words."""
    (script,) = (block for _, kind, block in SHELL if kind == "sh slurm")
    folder = site.folder
    (folder / "script.sh").write_text(script)
    (folder / "replica.toml").write_text(
        f"[agent]\nstate_dir = '{folder}/r1'\n[bucket]\npath = '{folder}/bucket'\n"
        f"[model]\npath = '{folder}/tiny'\n[engine]\npython = '{folder}/fake-python'\n"
        "module = 'fakes.vllm'\n"
    )
    tools = {
        "asyncgrpo-agent": f'exec {sys.executable} -m asyncgrpo_agent "$@"',
        "scontrol": f'echo "$@" > {folder}/scontrol.said',
    }
    (folder / "bin").mkdir()
    for name, text in tools.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    env.pop("ASYNCGRPO_ENGINE_PYTHON", None)  # of the tests: it would come before the file's
    env["PYTHONPATH"] = str(ROOT / "agent")
    with (folder / "script.out").open("wb") as output:
        return subprocess.Popen(
            ["bash", "script.sh"], cwd=folder, env=env, stdout=output, stderr=output
        )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + fleet.PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # noqa: TID251 - other processes have no virtual clock


@pytest.mark.slow
@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_batch_job_drains_and_is_queued_again_unless_the_run_is_over(
    site: Site, is_noticed: bool
) -> None:
    site.proxy()
    process = batch_script(site)
    said = site.folder / "script.out"
    until(lambda: b"vLLM is up" in said.read_bytes())
    if is_noticed:
        process.send_signal(signal.SIGTERM)  # as Slurm does, to the script alone
    else:
        assert site.trainer(3).process.wait(fleet.PATIENCE_S) == 0
    assert process.wait(fleet.PATIENCE_S) == 0, said.read_text()
    assert "replica.draining" in said.read_text()
    told = site.folder / "scontrol.said"
    assert (told.read_text() if told.exists() else "") == ("requeue 7\n" if is_noticed else "")
