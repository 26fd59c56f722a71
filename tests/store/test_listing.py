"""A listing stays small and right, however many folders it has shown."""

from pathlib import Path

import pytest

from asyncgrpo_agent.store import listing
from asyncgrpo_agent.store.listing import Listing


def test_what_it_has_forgotten_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "MAX_SHOWN", 10)
    shown = Listing(tmp_path / "run")
    for number in range(50):
        folder = tmp_path / "run" / "adapters" / f"v{number}"
        folder.mkdir(parents=True)
        (folder / "file").touch()
        assert shown.names(f"adapters/v{number}") == {"file"}
        assert len(shown._shown) <= 10
    assert shown.names("adapters/v0") == {"file"}
    assert shown.names("adapters/never") == set()
