from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakes import fleet
from fakes.fleet import Site

pytestmark = pytest.mark.slow

PROMPTLY_S = 10.0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        yield made


def never_loads(site: Site) -> Path:
    """Downloads stand still, as with a hub that has stopped in the midst of one."""
    python, stands = site.folder / "fake-python", site.folder / "stands-still"
    shell, rest = python.read_text().split("\n", 1)
    line = f'case "$2" in asyncgrpo_engine.download) exec tail -f {stands} ;; esac'
    python.write_text(f"{shell}\n{line}\n{rest}")
    stands.touch()
    return stands


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_is_loaded_ends_it_in_peace(
    site: Site, number: signal.Signals
) -> None:
    stands = never_loads(site)
    site.model = ("--model-id=acme/tiny", f"--set=model.revision={'5' * 40}")
    trainer = site.trainer(1)
    trainer.wait_for("loading acme/tiny")
    until(lambda: bool(fleet.processes_naming(f"tail -f {stands}")))
    assert trainer.end(number, patience_s=PROMPTLY_S) == 0, trainer.text()
    assert f"trainer.stopping signal={number.name}" in trainer.text()
    assert "Traceback" not in trainer.text()
    assert not fleet.processes_naming(f"tail -f {stands}")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PROMPTLY_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # noqa: TID251 - other processes have no virtual clock
