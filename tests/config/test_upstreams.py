"""Servers that are reached by URL, and a proxy within the trainer, as they are configured."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from asyncgrpo_agent.config.example import example
from asyncgrpo_agent.config.host import check_host
from asyncgrpo_agent.config.sections import Config, Role
from asyncgrpo_agent.config.sources import Document, Setting, load, parse
from asyncgrpo_agent.config.upstream_rules import name_of, url_fault
from asyncgrpo_agent.errors import ConfigError

FOLDER = Path("/etc/agent")
EXAMPLES = Path(__file__).parents[2] / "packaging" / "examples"
ROW = {
    "url": "https://job.example.org:8000/a",
    "run": "demo",
    "token_file": "token",
    "bucket_path": "/mnt/bucket",
    "allow_unverified": True,
}
TRAINER = {
    "run.name": "demo",
    "bucket.path": "b",
    "model.path": "m",
    "train.dataset": "d.jsonl",
    "train.rewards": '["a:b"]',
    "trainer.embed_proxy": "true",
}


def configure(
    *rows: dict[str, object], role: Role = "proxy", folder: Path = FOLDER, **values: Any
) -> Config:
    text = tomli_w.dumps({"proxy": {"upstream": list(rows)}})
    given = {name.replace("__", "."): value for name, value in values.items()}
    given = (TRAINER | given) if role == "trainer" else given
    return parse(
        role=role,
        cwd=folder,
        document=Document(text=text, name="a.toml", folder=folder),
        settings=[Setting(path=path, value=value, origin="t") for path, value in given.items()],
    )


def problems(*rows: dict[str, object], role: Role = "proxy", **values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        configure(*rows, role=role, **values)
    return caught.value.what


def test_a_table_of_each_server() -> None:
    config = configure(ROW, {**ROW, "name": "b", "capacity": 8, "max_request_s": 100})
    first, second = config.proxy.upstream
    assert (name_of(first), name_of(second)) == ("job.example.org:8000", "b")
    assert (first.token_file, first.bucket_path) == ("/etc/agent/token", "/mnt/bucket")
    assert (second.capacity, second.max_request_s) == (8, 100)
    again = parse(
        role="proxy",
        cwd=FOLDER,
        document=Document(text=config.to_toml(), name="b.toml", folder=FOLDER),
    )
    assert again.proxy == config.proxy


def test_the_whole_array_may_come_from_the_environment() -> None:
    row = 'url = "http://127.0.0.1:1", run = "demo", bucket_path = "/b", allow_unverified = true'
    config = parse(role="proxy", cwd=FOLDER, environ={"ASYNCGRPO_PROXY_UPSTREAM": f"[{{{row}}}]"})
    assert config.proxy.upstream[0].url == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"capacity": 0}, "proxy.upstream[1].capacity (a.toml): expected a whole number, 1 or mo"),
        ({"tokenfile": "x"}, "proxy.upstream[1].tokenfile (a.toml): unknown key. Did you mean tok"),
        ({"allow_unverified": False}, "[1].allow_unverified (a.toml): adapters reach it by a moun"),
        ({"url": "http://job.example.org"}, "[1].url (a.toml): is http://, where everybody on the"),
        ({"url": "https://u:secret@host"}, "[1].url (a.toml): holds a user or a password"),
        ({"bucket_path": "mnt"}, "[1].bucket_path (a.toml): expected an absolute path, got 'mnt'"),
        ({"token_file": ""}, "[1].token_file (a.toml): missing"),
        ({"token_env": "T"}, "[1].token_env (a.toml): useless with token_file"),
        ({"run": ""}, "[1].run (a.toml): missing. Name the run that it serves"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_with_its_place(
    change: dict[str, object], problem: str
) -> None:
    text = problems({**ROW, **change})
    assert problem in text
    assert "secret" not in text


def test_two_of_one_name_are_refused() -> None:
    assert "2 upstreams are called 'job.example.org:8000'" in problems(ROW, ROW)


def test_it_must_be_tables() -> None:
    with pytest.raises(ConfigError, match="expected tables, each headed"):
        parse(role="proxy", cwd=FOLDER, environ={"ASYNCGRPO_PROXY_UPSTREAM": '["https://a"]'})


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("https://a", ""),
        ("https://[::1]:8/p/", ""),
        ("http://localhost:8000", ""),
        ("http://[::1]:8000", ""),
        ("", "missing"),
        ("https://", "not a URL with a host"),
        ("https://a:x", "not a URL"),
        ("https://a b", "not a URL with a host"),
        ("https://a/v1", "ends in /v1, which the proxy adds itself"),
        ("https://a/?x=1", "has a query or a fragment"),
        ("ftp://a", "is ftp://, where everybody on the way could read the token"),
    ],
)
def test_urls(url: str, fault: str) -> None:
    assert url_fault(url) == fault


# --- a proxy within the trainer --------------------------------------------------------------


def test_a_trainer_with_its_proxy_needs_no_join() -> None:
    config = configure({**ROW, "run": ""}, role="trainer")
    assert (config.has_proxy, config.link.join) == (True, "")
    assert config.proxy.listen == "0.0.0.0:7843"  # its own default: `roles.embedded`


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"run__name": ""}, "run.name (t): missing, and an embedded proxy needs it"),
        ({"link__join": "x"}, "link.join (t): useless with trainer.embed_proxy"),
        ({"link__proxy": "a:1"}, "link.proxy (t): useless with trainer.embed_proxy"),
        ({"run__name": "other"}, "[1].run (a.toml): is 'demo', but this trainer's run is 'other'"),
        ({"trainer__embed_proxy": "false"}, "proxy.upstream (a.toml): a trainer without a proxy"),
    ],
)
def test_what_does_not_go_with_an_embedded_proxy(values: dict[str, str], problem: str) -> None:
    assert problem in problems(ROW, role="trainer", **values)


def test_only_a_trainer_embeds() -> None:
    assert "role proxy cannot have a proxy within" in problems(
        ROW, role="proxy", trainer__embed_proxy="true"
    )


def test_the_packaged_example_is_valid() -> None:
    config = load(role="trainer", file=str(EXAMPLES / "upstreams.toml"), environ={"HOME": "/h"})
    assert len(config.proxy.upstream) == 2
    assert config.has_proxy


@pytest.mark.parametrize("role", ["proxy", "trainer"])
def test_the_written_example_has_the_table(role: Role) -> None:
    text = example(role)
    assert "#[[proxy.upstream]]" in text
    (row,) = tomllib.loads(text.replace("\n#", "\n").replace("\n ", "\n# "))["proxy"]["upstream"]
    assert row["capacity"] == 64


# --- the host --------------------------------------------------------------------------------


def faults(folder: Path, **change: object) -> str:
    config = configure({**ROW, **change}, folder=folder, agent__state_dir="state")
    try:
        check_host(config)
    except ConfigError as error:
        return error.what
    return ""


def test_its_files_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    assert f"proxy.upstream[1].token_file (a.toml): {token} does not exist" in faults(tmp_path)
    token.write_text("t")
    token.chmod(0o644)
    assert "can be read by others (mode 0644)" in faults(tmp_path)
    token.chmod(0o600)
    assert faults(tmp_path) == ""
    assert "proxy.upstream[1].ca_file" in faults(tmp_path, ca_file="ca.pem")
    assert "$NO_SUCH is not set" in faults(tmp_path, token_file="", token_env="NO_SUCH")
    monkeypatch.setenv("NO_SUCH", "t")
    assert faults(tmp_path, token_file="", token_env="NO_SUCH") == ""
