"""Objects that somebody else put into the bucket of a run: damaged ones, and forged ones.

Both stand where the trainer is about to write, so it has to find another name. A corrupt one is
signed by the run, its weights have one bit flipped; a forged one is whole and signed by nobody.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fleet_world import World

from asyncgrpo_agent.core.adapters import parse_attempt
from asyncgrpo_agent.core.join import decode
from asyncgrpo_agent.store.bucket import publish
from asyncgrpo_agent.store.models import model_digest
from fakes.adapters import WEIGHTS, write_adapter

AHEAD: Final = 2  # versions beyond the newest


@dataclass(slots=True)
class Plants:
    world: World
    keys: set[str] = field(default_factory=set)
    """Of commits that are not the trainer's, below the run's folder."""

    def corrupt(self) -> None:
        join = decode((self.world.folder / "trainer.join").read_text())
        assert join.run_private_key is not None
        self._plant(join.run_private_key, flip=True)

    def forge(self) -> None:
        self._plant(bytes(range(32)), flip=False)

    def _plant(self, private_key: bytes, *, flip: bool) -> None:
        world = self.world
        run = world.folder / "s3/bucket/objects/demo"
        attempt = max((path.name for path in (run / "commits").iterdir()), key=parse_attempt)
        newest = max(
            int(path.stem.partition("-")[0][1:]) for path in (run / "commits" / attempt).rglob("v*")
        )
        with tempfile.TemporaryDirectory(dir=world.folder) as folder:
            made = Path(folder)
            publish(
                write_adapter(made / "adapter", seed=time.time_ns()),
                made / "demo",
                run="demo",
                attempt=attempt,
                version=newest + AHEAD,
                base_model="tiny",
                base_model_digest=model_digest(world.folder / "tiny"),
                private_key=private_key,
                live=[],
                now_unix_s=time.time(),
                max_rank=8,
            )
            (weights,) = (made / "demo/adapters").rglob(WEIGHTS)
            if flip:
                data = bytearray(weights.read_bytes())
                data[-1] ^= 1
                weights.write_bytes(data)
            (commit,) = (made / "demo/commits").rglob("*.toml")
            self.keys.add(str(commit.relative_to(made / "demo")))
            for part in ("adapters", "commits"):  # what a commit names is there before it
                shutil.copytree(made / "demo" / part, run / part, dirs_exist_ok=True)
