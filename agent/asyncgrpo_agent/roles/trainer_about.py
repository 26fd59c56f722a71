"""What the trainer's agent records for later readers beside what happens: what the run is, and how
the fleet did at each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import trio

from asyncgrpo_agent import __version__
from asyncgrpo_agent.config.kinds import is_hub_name
from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.about_run import settings_shown
from asyncgrpo_agent.roles.registration import host_name
from asyncgrpo_agent.roles.trainer_fleet import FleetView

TRAFFIC_EVERY_S: Final = 1.0


def about(config: Config, run: str, digest: str, fleet: FleetView) -> dict[str, Any]:
    """Fields of the record that tells a reader what was run. No path, and nothing secret."""
    engine = fleet.now.engine if fleet.now is not None else None
    train, trainer = config.train, config.trainer
    ours = {
        "trainer.quorum": trainer.quorum,
        "trainer.sync_timeout_s": trainer.sync_timeout_s,
        "trainer.min_replicas": trainer.min_replicas,
        "train.processes": train.processes,
        "bucket.source": "s3" if config.bucket.url else "folder",
    }
    if is_hub_name(train.dataset):
        ours["train.dataset"] = train.dataset
    if config.model.id:
        ours |= {"model.id": config.model.id, "model.commit": config.model.revision}
    if train.rewards:
        ours["train.rewards"] = ", ".join(train.rewards)
    return {
        "run": run,
        "model": config.model_name,
        "model_digest": digest,
        "host": host_name(config),
        "agent_version": __version__,
        "vllm_version": engine.vllm_version if engine is not None else "",
        "dtype": engine.dtype if engine is not None else "",
        "quantization": engine.quantization if engine is not None else "",
        "max_model_len": engine.max_model_len if engine is not None else None,
        "settings": settings_shown(train.passthrough, train.lora, ours),
    }


@dataclass(slots=True)
class Traffic:
    """Samples of what the proxy counts, so that they can be read after it is gone."""

    fleet: FleetView
    _told_at: float = float("-inf")

    def sample(self) -> dict[str, Any] | None:
        """At a step; None if it is too early for another one, or nothing is known."""
        now, seen = trio.current_time(), self.fleet.now
        if seen is None or now - self._told_at < TRAFFIC_EVERY_S:
            return None
        self._told_at = now
        return {
            "ready": seen.ready,
            "registered": seen.registered,
            "waiting": seen.waiting,
            "held_s": round(seen.held_s, 3),
            "retried": seen.retried,
            "replica_hours": round(seen.replica_hours, 6),
            "unpriced_hours": round(seen.unpriced_hours, 6),
            "cost": round(seen.cost, 6),
        }
