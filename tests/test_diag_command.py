"""`diag` of a fleet that runs: everything is in the archive, no secret is, failures are said."""

from __future__ import annotations

import json
import os
import signal
import zipfile
from pathlib import Path

import pytest

from asyncgrpo_agent import cli
from fakes import fleet


def archive(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name).decode() for name in file.namelist()}


def result(found: dict[str, str]) -> dict[str, tuple[bool, str]]:
    return {row["name"]: (row["ok"], row["reason"]) for row in json.loads(found["result.json"])}


@pytest.mark.slow
def test_of_a_proxy_that_runs_and_of_one_that_stands_still(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    with fleet.site(tmp_path / "site") as site:
        proxy = site.proxy()
        state = site.folder / "proxy"
        words = ["diag", "--role=proxy", f"--state-dir={state}"]
        assert cli.main([*words, f"--output={tmp_path / 'one.zip'}"]) == 0
        found = archive(tmp_path / "one.zip")
        assert [name for name, (ok, _) in result(found).items() if not ok] == []
        (dump,) = [
            text for name, text in found.items() if name.endswith(f"{proxy.process.pid}.txt")
        ]
        assert "asyncgrpo_agent.roles.proxy._main" in dump
        assert "proxy.listening" in dump
        assert "asyncgrpo_build_info" in dump.partition("=== metrics")[2]
        assert "=== runs" in dump
        assert "listen = " in found["config.toml"]
        assert json.loads(found["doctor.json"])
        assert "proxy/tokens.json" in found["state.txt"]
        everything = "".join(found.values())
        for join in site.folder.glob("*.join"):
            assert join.read_text().strip() not in everything
        os.kill(proxy.process.pid, signal.SIGSTOP)
        try:
            assert cli.main([*words, f"--output={tmp_path / 'two.zip'}"]) == 0
        finally:
            os.kill(proxy.process.pid, signal.SIGCONT)
        found = archive(tmp_path / "two.zip")
        ok, reason = result(found)["agents"]
        assert not ok
        assert f"no dump within 5 s: proxy (pid {proxy.process.pid})" in reason
        assert result(found)["doctor"] == (True, "")


def test_a_configuration_that_is_wrong_is_said_and_the_rest_collected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "proxy.toml").write_text("[proxy]\nlisten = 7\n")
    words = ["--role=proxy", f"--config={tmp_path / 'proxy.toml'}", f"--state-dir={tmp_path}"]
    output = tmp_path / "out.zip"
    assert cli.main(["diag", *words, f"--output={output}"]) == 0
    found = archive(output)
    ok, reason = result(found)["config"]
    assert not ok
    assert "proxy.listen" in reason
    assert result(found)["versions"] == (True, "")
    assert output.stat().st_mode & 0o777 == 0o600
    assert cli.main(["diag", *words, f"--output={output}"]) == 1  # it is never overwritten
    assert "File exists" in capsys.readouterr().err
