"""The job of the engine-side child."""

from __future__ import annotations

import json
from pathlib import Path

from asyncgrpo_agent.config.sections import Agent, Config
from asyncgrpo_agent.roles.trainer_job import write_job


def test_the_job_is_for_its_owner_alone(tmp_path: Path) -> None:
    """It has the gateway's URL, and that a token."""
    config = Config(role="trainer", agent=Agent(state_dir=str(tmp_path)))
    url = "http://127.0.0.1:1/secret"
    for _ in range(2):
        path = write_job(config, "demo", url)
        assert path.stat().st_mode & 0o777 == 0o600
        assert json.loads(path.read_text())["gateway"] == url
