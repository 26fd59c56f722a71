"""TRL that hangs: it says nothing for too long, while everything that it needs is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from asyncgrpo_agent.errors import ChildNotReadyError

LOOK_S: Final = 1.0
TAIL_BYTES: Final = 8192
TAIL_LINES: Final = 20


@dataclass(slots=True)
class StallWatch:
    """`is_held_up` tells whether TRL waits for others, whose time does not count."""

    limit_s: float  # 0: for ever
    run: str
    is_held_up: Callable[[], bool]
    log_file: Path | None = None
    step: int = 0
    _heard_at: float = 0.0

    def heard(self) -> None:
        """TRL has begun, or has done something."""
        self._heard_at = trio.current_time()

    async def watch(self) -> None:
        """As long as TRL runs. Raises ChildNotReadyError."""
        was_held_up = False
        while self.limit_s:
            await trio.sleep(min(self.limit_s / 2, LOOK_S))
            is_held_up = self.is_held_up()
            if is_held_up or was_held_up:  # what it waited for may have come just now
                self.heard()
            was_held_up = is_held_up
            quiet_s = trio.current_time() - self._heard_at
            if quiet_s >= self.limit_s:
                raise ChildNotReadyError(
                    f"no training step for {quiet_s:.0f} s at step {self.step}",
                    where=f"run {self.run}",
                    fix=f"trainer.stall_s sets the limit. Its last lines:\n{self._last_lines()}",
                )

    def _last_lines(self) -> str:
        """Of what TRL wrote."""
        try:
            text = self.log_file.read_bytes()[-TAIL_BYTES:] if self.log_file else b""
        except OSError:
            return "none"
        return "\n".join(text.decode("utf-8", "replace").splitlines()[-TAIL_LINES:])
