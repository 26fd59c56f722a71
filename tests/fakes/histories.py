"""Histories of runs as a trainer's agent records them, with all that TRL logs, from a seed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Any

START_UNIX_S = 1_760_000_000.0
STEP_S = 6.2
SETTINGS = {
    "learning_rate": 1e-5,
    "lora.r": 16,
    "lora.target_modules": "all-linear",
    "max_staleness": 4,
    "max_steps": 600,
    "num_generations": 8,
    "trainer.quorum": 0.5,
    "trainer.sync_timeout_s": 30.0,
    "weight_sync_steps": 1,
}
ABOUT = {
    "run": "demo",
    "model": "Qwen2.5-1.5B-Instruct",
    "model_digest": "5e" * 32,
    "agent_version": "0.1.0",
    "vllm_version": "0.11.0",
    "dtype": "torch.bfloat16",
    "quantization": "",
    "max_model_len": 4096,
    "settings": SETTINGS,
}
VERSIONS = {"trl": "1.16.0", "transformers": "4.57.1", "peft": "0.18.0", "torch": "2.9.0"}
REPLICAS = ("r1", "r2", "r3")


def simulated(
    steps: int = 300, *, resume_at: int | None = 180, seed: int = 1
) -> Iterator[dict[str, Any]]:
    """One that is lost at `resume_at`, after five steps more, and goes on there on another host."""
    rng, now = Random(seed), START_UNIX_S
    until = steps if resume_at is None else resume_at + 5
    yield from _attempt(rng, now, "a0001-5d9b", "trainer-1", 1, until, steps)
    if resume_at is None:
        yield _record(now + until * STEP_S + 60, "ended", ok=True, reason="training finished")
        return
    now += until * STEP_S + 900
    yield _record(now - 60, "resumed", step=resume_at, source="bucket", finished=False)
    yield from _attempt(rng, now, "a0002-11c0", "trainer-2", resume_at + 1, steps, steps)
    end = now + (steps - resume_at) * STEP_S + 40
    yield _totals(end)
    yield _record(end + 20, "ended", ok=True, reason="training finished")


def _record(t: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"t": round(t, 3), "kind": kind, **fields}


def _attempt(
    rng: Random, began: float, attempt: str, host: str, first: int, last: int, max_steps: int
) -> Iterator[dict[str, Any]]:
    for name in REPLICAS:
        yield _record(began - 50, "replica", name=name, state="READY", reason="engine is up")
    yield _record(began - 40, "about", host=host, **ABOUT)
    yield _record(began - 40, "started", attempt=attempt, run="demo", max_steps=max_steps)
    yield _record(began - 30, "setup", versions=VERSIONS)
    yield _record(began - 20, "limits", queue_maxsize=512, max_inflight_tasks=128)
    for step in range(first, last + 1):
        now = began + (step - first + 1) * STEP_S
        if step == 90:
            yield _record(now, "replica", name="r3", state="GONE", reason="its link ended")
        if step == 130:
            yield _record(now, "replica", name="r3", state="READY", reason="engine is up")
        values = _values(rng, step, max_steps, slow=90 <= step < 130)
        fields = {"step": step, "max_steps": max_steps, "values": values}
        yield _record(now, "metrics", **fields)
        yield _traffic(now, step)
        yield from _sync(rng, now, attempt, step)
        if step % 50 == 0:
            accuracy = 0.21 + 0.5 * (1 - math.exp(-step / 150))
            yield _record(
                now, "eval", when="during", step=step, name="held-out", accuracy=accuracy,
                samples=512, prompts=128,
            )  # fmt: skip


def _values(rng: Random, step: int, max_steps: int, *, slow: bool) -> dict[str, float]:
    wait_s = rng.uniform(1.6, 2.2) if slow else rng.uniform(0.0, 0.3)
    return {
        "reward": 0.78 * (1 - math.exp(-step / 120)) + rng.gauss(0, 0.05),
        "reward_std": 0.3,
        "ratio": 1 + rng.gauss(0, 0.0011),
        "loss": rng.gauss(0, 0.01),
        "grad_norm": abs(rng.gauss(0.4, 0.08)),
        "entropy": 0.9 * math.exp(-step / 300) + rng.gauss(0, 0.01),
        "kl": 0.0004 * step**0.5 + abs(rng.gauss(0, 0.0004)),
        "learning_rate": 1e-5 * (1 - step / (max_steps + 1)),
        "completions/mean_length": 700 - 0.4 * step + rng.gauss(0, 20),
        "perf/step_s": STEP_S + wait_s + rng.gauss(0, 0.1),
        "perf/fwd_bwd_s": 4.9 + rng.gauss(0, 0.08),
        "perf/rollout_wait_s": wait_s,
        "perf/weight_sync_s": 0.4 + rng.random() * 0.2,
        "sample/rollout_queue_size": 8.0 if slow else rng.uniform(180, 420),
        "sample/staleness_mean": rng.uniform(0.7, 1.9),
        "sample/staleness_max": float(rng.choice((2, 3, 3, 4))),
        "rollout/inflight": 128.0 if slow else rng.uniform(100, 128),
        "rollout/generated_tok_s": (3900 if slow else 5800) + rng.gauss(0, 150),
    }


def _traffic(now: float, step: int) -> dict[str, Any]:
    lost = 90 <= step < 130
    fields = {
        "step": step,
        "ready": 2 if lost else 3,
        "registered": 2 if lost else 3,
        "waiting": 0,
        "held_s": 0.0,
        "retried": 17 if step >= 90 else 0,
        "replica_hours": round(3 * step * STEP_S / 3600, 4),
        "unpriced_hours": 0.0,
        "cost": round(3 * step * STEP_S / 3600 * 1.9, 4),
    }
    return _record(now + 0.1, "traffic", **fields)


def _sync(rng: Random, now: float, attempt: str, version: int) -> Iterator[dict[str, Any]]:
    adapter = f"demo.{attempt}.v{version:06d}.{version:012x}"
    quorum_s = 0.0
    for number, name in enumerate(REPLICAS):
        seconds = 0.5 + 0.15 * number + rng.expovariate(6)
        phases = {
            "read": 0.2, "check": 0.01, "sync": 0.02, "visible": 0.1, "staged": 0.33,
            "loaded": seconds - 0.4, "total": seconds - 0.03, "acked": seconds - 0.02,
        }  # fmt: skip
        quorum_s = max(quorum_s, seconds) if number < 2 else quorum_s
        yield _record(
            now + seconds, "ack", replica=name, adapter=adapter, ok=True, reason="",
            phases_s=phases, seconds=seconds,
        )  # fmt: skip
    late = version % 97 == 0
    yield _record(
        now + quorum_s + 0.2, "sync", adapter=adapter, version=version, bytes=36_000_000,
        phases_s={"check": 0.05, "copy": 0.3, "commit": 0.04}, seconds=quorum_s + 0.4,
        report={"timed_out": late, "elapsed_s": quorum_s + (4 if late else 0)},
    )  # fmt: skip


def _totals(now: float) -> dict[str, Any]:
    rows = [
        {"name": name, "requests": requests, "failures": failures, "paused_s": 0.0}
        for name, requests, failures in (("r1", 8204, 0), ("r2", 7911, 0), ("r3", 6120, 17))
    ]
    return _record(
        now, "totals", rollouts=22_218, rollouts_failed=0, resent=3, retried=17, duplicates=2,
        delayed=0, replica_hours=1.52, unpriced_hours=0.0, cost=2.89, routed={}, held_s=0.0,
        replicas=rows,
    )  # fmt: skip
