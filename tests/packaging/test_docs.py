"""packaging/docs: what agents are said to say is in their source, and every command is one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from asyncgrpo_agent import cli

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "packaging" / "docs"
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "agent").rglob("*.py")))
JOINED = re.sub(r'"\s*\n\s*f?"', "", SOURCE)  # texts over several lines
ROWS = [
    line.split("|")[1]
    for line in (DOCS / "troubleshooting.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| it says")
]
COMMANDS = [
    line
    for path in sorted(DOCS.glob("*.md"))
    for block in re.findall(r"```sh\n(.*?)```", path.read_text(), re.DOTALL)
    for line in block.splitlines()
    if line.startswith("asyncgrpo-agent ")
]


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
    verbs = words[: 2 if words[0] in ("token", "run", "join", "rollouts") else 1]
    with pytest.raises(SystemExit) as ended:
        cli.main([*verbs, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert [flag for flag in flags if flag not in shown] == []
