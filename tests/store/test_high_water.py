from pathlib import Path

import pytest

from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.store.high_water import HighWater


def test_it_only_grows_and_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state" / "mark.json"
    mark = HighWater(path)
    assert mark.value == (0, -1)
    mark.raise_to(1, 7)
    mark.raise_to(1, 3)
    assert HighWater(path).value == (1, 7)
    mark.raise_to(2, 0)
    assert HighWater(path).value == (2, 0)


def test_a_broken_mark_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mark.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"mark\.json"):
        HighWater(path)
