"""README: its commands have flags that exist, and its example configuration is one."""

import re
import shlex
from pathlib import Path

import pytest

from asyncgrpo_agent.config import sources
from asyncgrpo_agent.flags import Parser, add_config_flags

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line
    for kind, block in BLOCKS
    if kind == "sh"
    for line in block.splitlines()
    if line.startswith("asyncgrpo-agent --role")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_roles_parse(command: str) -> None:
    words = shlex.split(command)[1:]
    parser = Parser("readme", "readme", "")
    add_config_flags(parser)
    parser.parse_args(words[: words.index("--")] if "--" in words else words)


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
