"""A model is a folder or one of a hub; a replica may leave both to its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncgrpo_agent.config.sections import Config, Role
from asyncgrpo_agent.config.sources import Setting, parse
from asyncgrpo_agent.errors import ConfigError

TASK = {
    "train.dataset": "d.jsonl",
    "train.rewards": '["r:f"]',
    "link.join": "j",
    "bucket.path": "b",
}


def configure(role: Role, **keys: str) -> Config:
    given = {**TASK, **{f"model.{name}": value for name, value in keys.items()}}
    if role == "local":
        del given["link.join"]
    settings = [Setting(path=path, value=value, origin="t") for path, value in given.items()]
    return parse(role=role, settings=settings, cwd=Path("/home/me"))


@pytest.mark.parametrize("role", ["trainer", "local"])
def test_whoever_trains_says_what(role: Role) -> None:
    assert configure(role, id="acme/tiny").model_name == "tiny"
    assert configure(role, path="m/base").model_name == "base"
    with pytest.raises(ConfigError, match=r"model\.path: missing"):
        configure(role)


def test_a_replica_may_say_nothing() -> None:
    assert configure("replica").model.id == ""


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"id": "acme/tiny", "path": "m"}, r"model\.id \(t\): useless beside model\.path"),
        ({"path": "m", "revision": "v1"}, r"model\.revision \(t\): useless without model\.id"),
        ({"id": "acme/tiny", "revision": "--x"}, r"is no branch, tag or commit"),
        ({"id": "tiny"}, r"model\.id \(t\): expected OWNER/NAME of a model hub"),
        ({"id": "../tiny"}, r"model\.id \(t\): expected OWNER/NAME"),
        ({"id": "-x/tiny"}, r"model\.id \(t\): expected OWNER/NAME"),
    ],
)
def test_what_does_not_go_together(keys: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configure("trainer", **keys)
