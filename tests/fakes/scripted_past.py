"""What happens in a scripted run, as numbers: metrics of its steps, phases of its syncs.

All of it follows from the run's script and the number of the step or version, so that a test can
say what a page has to show.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Literal

import msgspec

Bound = Literal["generation", "trainer", "sync"]

STRAGGLER_READ_S = 1.6  # against READ_S of the others
READ_S = 0.12
LOAD_S = 0.21
QUEUE = 512
IN_FLIGHT = 384


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Names of replicas are r01, r02, ...; each list names those that misbehave."""

    run: str
    replicas: int = 0
    bound: Bound = "generation"
    trl_version: str = "1.16.0"
    model: str = "Qwen/Qwen2.5-7B-Instruct"
    past_steps: int = 0
    past_syncs: int = 0  # the newest so many versions have a sync in the history
    max_steps: int = 10_000
    step_s: float = 1.0
    live_syncs: bool = True  # one a step
    finished: str = ""  # the reason, of a run that is over
    rollouts: int = 0  # in flight all the time
    rollout_s: float = 2.0
    speed: float = 1.0  # of everything that a replica does with an adapter, over what is usual
    straggler: str = ""
    refuses: list[str] = []  # adapters
    fails: list[str] = []  # rollouts
    joining: list[str] = []
    draining: list[str] = []
    lost: list[str] = []  # leaves without a word, and comes back
    skewed: list[str] = []  # clocks
    other_bytes: list[str] = []  # serves a version under another digest
    ratio: float = 1.0


def names_of(script: Script) -> list[str]:
    return [f"r{number:02d}" for number in range(1, script.replicas + 1)]


def digest_of(script: Script, version: int) -> str:
    return hashlib.sha256(f"{script.run} {version}".encode()).hexdigest()


def adapter_of(script: Script, attempt: str, version: int) -> str:
    return f"{script.run}.{attempt}.v{version:06d}.{digest_of(script, version)[:12]}"


def metrics_of(script: Script, step: int) -> dict[str, float]:
    """TRL's, by the names of its version."""
    wobble = math.sin(12.9898 * step) * 0.5 + math.sin(0.37 * step) * 0.5  # -1 to 1
    way = step / max(1, script.max_steps)
    wait = {"generation": 0.61, "trainer": 0.02, "sync": 0.05}[script.bound]
    sync = {"generation": 0.04, "trainer": 0.02, "sync": 0.42}[script.bound]
    queue = {"generation": 3.0, "trainer": 505.0, "sync": 120.0}[script.bound]
    flight = {"generation": 0.97, "trainer": 0.4, "sync": 0.7}[script.bound] * IN_FLIGHT
    step_s = 11.0 + wobble
    values = {
        "loss": 0.02 * wobble,
        "grad_norm": 0.3 + 0.1 * wobble,
        "learning_rate": 1e-5 * (1 - way),
        "reward": 0.2 + 0.6 * min(1.0, 3 * way) + 0.08 * wobble,
        "reward_std": 0.3 - 0.1 * way,
        "entropy": 1.2 - 0.5 * way + 0.02 * wobble,
        "kl": 0.01 + 0.02 * way,
        "ratio": script.ratio + 0.002 * wobble,
        "perf/step_s": step_s,
        "perf/fwd_bwd_s": step_s * (1 - wait - sync) * 0.9,
        "perf/rollout_wait_s": step_s * wait,
        "perf/weight_sync_s": step_s * sync,
        "perf/trained_tok_s_wall_clock": 9_000 + 500 * wobble,
        "sample/staleness_mean": 0.9 + 0.2 * wobble,
        "sample/staleness_max": 2.0,
        "sample/rollout_queue_size": queue,
        "sample/dropped_stale_total": 0.0,
        "batch/samples_per_step": 64.0,
        "rollout/inflight": flight,
        "rollout/generated_tok_s": 14_000 + 900 * wobble,
        "rollout/backpressure_s": 3.5 if script.bound == "trainer" else 0.0,
        "rollout/score_wait_s": 0.05,
        "completions/mean_length": 412.0 + 30 * wobble,
        "completions/clipped_ratio": 0.04,
    }
    if script.trl_version >= "1.18":
        values = {name.replace("sample/", "buffer/"): value for name, value in values.items()}
        values = {name.replace("perf/", "timing/"): value for name, value in values.items()}
    return values


def trainer_phases(script: Script, version: int) -> dict[str, float]:
    """Of what the trainer's agent does before it announces a version, in seconds."""
    spread = 1 + 0.1 * math.sin(version)
    phases = {"check": 0.05, "copy": 0.32 * spread, "commit": 0.03}
    return {name: value * script.speed for name, value in phases.items()}


def ack_phases(script: Script, name: str, version: int) -> dict[str, float]:
    """Of one replica and one version, as agents tell them."""
    spread = 1 + 0.3 * math.sin(version * 7.1 + int(name[1:]) * 3.3)
    read_s = STRAGGLER_READ_S if name == script.straggler else READ_S
    parts = {"read": read_s * spread, "check": 0.03, "sync": 0.02}
    visible, staged = 0.04 * spread, 0.04 * spread + sum(parts.values())
    phases = {**parts, "visible": visible, "staged": staged, "loaded": LOAD_S * spread}
    phases |= {"total": staged + LOAD_S * spread, "acked": staged + LOAD_S * spread + 0.01}
    return {key: value * script.speed for key, value in phases.items()}


def past_of(script: Script, attempt: str, now_unix_s: float) -> list[dict[str, Any]]:
    """The history that a trainer's agent has written before now."""
    began = now_unix_s - script.past_steps * script.step_s
    limits = {"queue_maxsize": QUEUE, "max_inflight_tasks": IN_FLIGHT, "weight_sync_steps": 1}
    versions = {"trl": script.trl_version, "vllm": "0.31.0"}
    records: list[dict[str, Any]] = [
        {"t": began, "kind": "setup", "versions": versions},
        {"t": began, "kind": "limits", **limits},
        {"t": began, "kind": "started", "attempt": attempt, "max_steps": script.max_steps},
        {"t": began, "kind": "phase", "phase": "training"},
    ]
    for step in range(1, script.past_steps + 1):
        at = began + step * script.step_s
        if step > script.past_steps - script.past_syncs:
            records += _past_sync(script, attempt, step, at)
        values = metrics_of(script, step)
        most = script.max_steps
        records.append(
            {"t": at, "kind": "metrics", "step": step, "max_steps": most, "values": values}
        )
    if script.finished:
        records.append({"t": now_unix_s, "kind": "ended", "ok": True, "reason": script.finished})
    return records


def _past_sync(script: Script, attempt: str, version: int, at: float) -> list[dict[str, Any]]:
    adapter = adapter_of(script, attempt, version)
    rows: list[dict[str, Any]] = []
    for name in names_of(script):
        if name in script.joining or name in script.draining:
            continue
        ok, phases_s = name not in script.refuses, ack_phases(script, name, version)
        rows.append(
            {
                "t": at,
                "kind": "ack",
                "adapter": adapter,
                "replica": name,
                "ok": ok,
                "reason": "" if ok else REFUSAL,
                "phases_s": phases_s if ok else {},
                "seconds": phases_s["acked"] + 0.02 if ok else 0.2,
            }
        )
    took_s = sorted(row["seconds"] for row in rows)[len(rows) // 2] if rows else 0.0
    phases_s = trainer_phases(script, version)
    report = {"timed_out": False, "elapsed_s": took_s}
    sync = {"adapter": adapter, "version": version, "bytes": SIZE_BYTES, "phases_s": phases_s}
    seconds = sum(phases_s.values()) + took_s
    return [*rows, {"t": at, "kind": "sync", **sync, "seconds": seconds, "report": report}]


SIZE_BYTES = 41_900_000
REFUSAL = "the sha256 of adapter_model.safetensors is not the commit's"
