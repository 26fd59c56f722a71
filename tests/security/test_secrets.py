"""Secrets are planted in a fleet at work, and then searched for in everything that it shows."""

import stat
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from asyncgrpo_agent.config.sections import Agent, Config, Engine, Model
from asyncgrpo_agent.core.join import decode
from asyncgrpo_agent.errors import AgentError
from asyncgrpo_agent.roles.model_source import have_model
from fakes import fleet
from fakes.fleet import Site

pytestmark = pytest.mark.slow

HUB_TOKEN = "hf_planted0123456789abcdef"
BUCKET_KEY = "plantedS3secretKey0123456789"
TRACKER_KEY = "0123456789planted0123456789abcdef01234567"
PASSWORD = "plantedPassword"
ODD = "plantedUnderAHarmlessName"
ODD_SETTINGS = (
    f"--set=engine.env.HARMLESS={ODD}",
    f"--set=engine.args=['--harmless', '{ODD}']",
)
PLANTED = {
    "HF_TOKEN": HUB_TOKEN,
    "AWS_SECRET_ACCESS_KEY": BUCKET_KEY,
    "WANDB_API_KEY": TRACKER_KEY,
    "HTTPS_PROXY": f"http://me:{PASSWORD}@127.0.0.1:9",
    "NO_PROXY": "127.0.0.1",
}
# An engine that writes its whole environment to its output, as crash reports do.
TELLTALE = '#!/bin/sh\n[ "$2" = fakes.vllm ] || [ "$2" = asyncgrpo_engine.train ] && env\n'
# What of the user's secrets each child may have; what is not here may have none. Engines reach
# model hubs through the site's proxy.
CHILDREN: dict[str, tuple[str, ...]] = {
    "fakes.vllm": ("hub token", "password"),
    "fakes.trl": ("hub token", "password", "tracker's key"),
    "mount-worker": (),
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    with fleet.site(tmp_path) as made:
        python = tmp_path / "fake-python"
        python.write_text(python.read_text().replace("#!/bin/sh\n", TELLTALE, 1))
        yield made


def secrets_of(folder: Path) -> dict[str, str]:
    """Every secret of the fleet, by a name for the reader."""
    found = {"hub token": HUB_TOKEN, "bucket key": BUCKET_KEY, "password": PASSWORD}
    found |= {"tracker's key": TRACKER_KEY, "odd": ODD}
    for role in ("replica", "trainer"):
        line = (folder / f"{role}.join").read_text().strip()
        found |= {f"join of the {role}": line[:200], f"token of the {role}": decode(line).token}
    found["run key"] = (folder / "proxy/runs/demo/run.key").read_text().strip()
    found["CA key"] = (folder / "proxy/proxy/ca.key").read_text().splitlines()[1]
    return found


def assert_none_in(text: str, secrets: dict[str, str], where: object) -> None:
    assert [name for name, secret in secrets.items() if secret in text] == [], where


def processes(folder: Path) -> list[tuple[Path, str]]:
    """Those that belong to this fleet, and whatever they started, with their command lines."""
    lines: dict[str, str] = {}
    parents: dict[str, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                lines[entry.name] = (entry / "cmdline").read_bytes().decode(errors="replace")
                stat = (entry / "stat").read_text().rpartition(")")[2]
                parents[entry.name] = stat.split()[1]

    def is_ours(pid: str) -> bool:
        return str(folder) in lines.get(pid, "") or (pid in parents and is_ours(parents[pid]))

    return [(Path("/proc", pid), line) for pid, line in lines.items() if is_ours(pid)]


def environment(entry: Path) -> str:
    try:
        return (entry / "environ").read_bytes().decode(errors="replace")
    except OSError:  # it has ended
        return ""


def scraped(address: str) -> str:
    """What an agent shows to the monitoring of its host."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_no_output_of_a_fleet_shows_a_secret(site: Site) -> None:
    folder = site.folder
    addresses = [fleet.free_address() for _ in range(3)]
    listen = [f"--set=telemetry.listen={address}" for address in addresses]
    site.proxy(listen[0])
    line = (folder / "replica.join").read_text().strip()
    calls = [
        f'--set=replica.{name}_command=["sh", "-c", "env > {folder}/{name}.seen; exit {code}"]'
        for name, code in (("on_exit", 0), ("notice", 1))
    ]
    replica = site.replica("r1", listen[1], *calls, env={"ASYNCGRPO_JOIN": line})
    trainer = site.trainer(20, listen[2], "--set=train.fake_rollouts=16", "--log-level=debug")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    secrets = secrets_of(folder)
    for address, name in zip(addresses, ("run_step", "engine_ready", "trainer_step"), strict=True):
        text = scraped(address)
        assert f"asyncgrpo_{name}{{" in text
        assert_none_in(text, secrets, f"/metrics with {name}")
    seen = set()
    for entry, words in processes(folder):
        assert_none_in(words, secrets, words)
        if "--role=" not in words:  # a child; an agent's own is what its user gave it
            environ = environment(entry)
            named = words.replace("asyncgrpo_engine.train", "fakes.trl")  # what is to become it
            kind = next((kind for kind in CHILDREN if environ and kind in named), "")
            seen.add(kind)
            allowed = CHILDREN.get(kind, ())
            hidden = {name: text for name, text in secrets.items() if name not in allowed}
            assert_none_in(environ, hidden, words)
            assert "ASYNCGRPO_JOIN" not in environ
    assert seen >= CHILDREN.keys(), [words for _, words in processes(folder)]
    for role in ("replica", "trainer"):
        flags = [f"--role={role}", f"--join={role}.join", f"--model={folder}/tiny"]
        flags += [f"--engine-python={folder}/fake-python", f"--bucket={folder}/bucket"]
        flags += [f"--state-dir={folder}/r1", *ODD_SETTINGS]
        for command in ("doctor", "check", "diag"):
            more = ("--json",) if command == "doctor" else ()
            if role == "trainer":
                more = (*more, "--set=train.dataset=data.jsonl", '--set=train.rewards=["m:f"]')
            shown = site.hosts.run(
                command, [*site.hosts.program, command, *flags, *more], {"ASYNCGRPO_JOIN": line}
            )
            assert shown.process.wait(60) in (0, 1), shown.text()
            if command == "diag":
                bundle = Path(shown.text().split()[-1])
                collected = zipfile.ZipFile(site.hosts.folder / bundle)
                assert {"config.toml", "doctor.json"} <= set(collected.namelist())
                for name in collected.namelist():
                    assert_none_in(collected.read(name).decode(), secrets, name)
            else:
                assert len(shown.text()) > 200
    assert trainer.process.wait(60) == 0, trainer.text()
    assert replica.process.wait(20) == 0
    for name in ("on_exit", "notice"):
        environ = (folder / f"{name}.seen").read_text()
        hidden = {name: text for name, text in secrets.items() if name != "password"}
        assert_none_in(environ, hidden, name)
        assert "PATH=" in environ
        assert "ASYNCGRPO_JOIN" not in environ
        (folder / f"{name}.seen").unlink()
    searched = 0
    for path in sorted(folder.rglob("*")):
        is_home = path.suffix in (".join", ".key")
        if path.is_file() and not is_home:
            searched += 1
            assert_none_in(path.read_bytes().decode(errors="replace"), secrets, path)
        if is_home or path.name in ("tokens.json", "audit.jsonl") or path.suffix == ".log":
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert searched > 20
    (segment,) = folder.glob("bucket/demo/events/*/*.jsonl")  # and so searched, too
    assert '"kind":"ended"' in segment.read_text()
    logs = [path for path in folder.rglob("*.log") if "HF_TOKEN=***" in path.read_text()]
    assert logs  # the engine did write its environment


def test_a_download_has_the_hubs_token_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**PLANTED, "ASYNCGRPO_JOIN": "agrpo1.planted"}.items():
        monkeypatch.setenv(name, value)
    python, seen = tmp_path / "python", tmp_path / "seen"
    python.write_text(f"#!/bin/sh\nenv > {seen}\ncat /proc/$$/cmdline >> {seen}\nexit 1\n")
    python.chmod(0o755)
    config = Config(
        role="replica",
        agent=Agent(state_dir=str(tmp_path / "state")),
        engine=Engine(python=str(python)),
        model=Model(id="acme/tiny"),
    )
    with pytest.raises(AgentError):
        trio.run(partial(have_model, config, "main", lambda _: None, tries=1))
    text = seen.read_text()
    assert HUB_TOKEN in text
    assert_none_in(text, {"bucket key": BUCKET_KEY, "tracker's key": TRACKER_KEY}, "a download")
    assert "ASYNCGRPO_JOIN" not in text
