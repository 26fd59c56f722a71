from __future__ import annotations

from pathlib import Path

import pytest

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.config.sources import parse
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import EXIT_CONFIG, EXIT_FAILURE, RegistrationRefusedError
from asyncgrpo_agent.roles.registration import (
    MAX_ANNOUNCED,
    NEW_JOIN,
    ProxyAddresses,
    refusal_error,
)
from asyncgrpo_agent.wire.messages import Refused

JOIN = Join(
    addresses=("a:1", "b:2"),
    ca_der=b"",
    token="t",
    role="replica",
    run="demo",
    run_public_key=bytes(32),
)


def agent_config(folder: Path, proxy: str = "") -> Config:
    environ = {"ASYNCGRPO_STATE_DIR": str(folder), "ASYNCGRPO_LINK_PROXY": proxy}
    return parse(role="proxy", cwd=folder, environ=environ)


def test_announced_addresses_come_after_those_of_the_join_and_stay(tmp_path: Path) -> None:
    config = agent_config(tmp_path / "state")
    addresses = ProxyAddresses(config, JOIN)
    assert addresses.choices() == ["a:1", "b:2"]
    addresses.remember(["b:2", "c:3"])
    assert addresses.choices() == ["a:1", "b:2", "c:3"]
    addresses.remember([])  # a proxy without public addresses takes nothing back
    assert ProxyAddresses(config, JOIN).choices() == ["a:1", "b:2", "c:3"]
    addresses.remember(["[::1]:4"])
    assert ProxyAddresses(config, JOIN).choices() == ["a:1", "b:2", "[::1]:4"]
    assert (tmp_path / "state" / "addresses-demo.json").exists()


def test_a_configured_proxy_is_the_only_one(tmp_path: Path) -> None:
    ProxyAddresses(agent_config(tmp_path), JOIN).remember(["c:3"])
    assert ProxyAddresses(agent_config(tmp_path, "mine:9"), JOIN).choices() == ["mine:9"]


def test_what_cannot_be_dialled_is_left_out(tmp_path: Path) -> None:
    addresses = ProxyAddresses(agent_config(tmp_path), JOIN)
    addresses.remember(["nowhere", "c:0", "::1:7", "c:3", *(f"d:{n}" for n in range(1, 99))])
    assert addresses.choices()[2] == "c:3"
    assert len(addresses.choices()) == 2 + MAX_ANNOUNCED


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '["nowhere"]'])
def test_a_damaged_file_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "addresses-demo.json").write_text(text)
    assert ProxyAddresses(agent_config(tmp_path), JOIN).choices() == ["a:1", "b:2"]


def test_a_state_folder_that_cannot_be_written_does_not_matter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("a file")
    addresses = ProxyAddresses(agent_config(tmp_path / "state"), JOIN)
    addresses.remember(["c:3"])
    assert addresses.choices() == ["a:1", "b:2", "c:3"]
    assert "addresses.unsaved" in caplog.text


@pytest.mark.parametrize(
    ("refused", "permanent", "fix"),
    [
        (Refused("permanent", "no"), True, NEW_JOIN),
        (Refused("permanent", "no", fix="Delete the key"), True, "Delete the key"),
        (Refused("version", "no"), True, ""),
        (Refused("duplicate", "no", 300.0), False, ""),
        (Refused("retry", "no", 10.0), False, ""),
    ],
)
def test_a_refusal_says_what_to_do_and_whether_to_dial_again(
    refused: Refused, permanent: bool, fix: str
) -> None:
    error = refusal_error(refused, "proxy:1")
    assert isinstance(error, RegistrationRefusedError)
    assert (error.permanent, error.fix) == (permanent, fix)
    assert error.exit_code == (EXIT_CONFIG if permanent else EXIT_FAILURE)
    assert error.retry_after_s == refused.retry_after_s
