"""`plan`: simulate a fleet before it is rented.

It asks nobody, reads no configuration and writes nothing: all that it knows are its flags. The same
flags and the same seed give the same figures.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from asyncgrpo_agent.errors import UsageError
from asyncgrpo_agent.flags import Parser

if TYPE_CHECKING:
    from asyncgrpo_agent.plan.inputs import Inputs

_ABOUT: Final = """\
Simulate a fleet before it is rented: sync time, idle share, S3 requests, dollars, proxies needed.

The agent's own decisions are played in virtual time: who gets a rollout, when a sync has ended,
what a replica loads and when it looks at the bucket. Machines, S3 and vLLM are the numbers below;
give those that you have measured. Times take ms, s, m, h or d; sizes are in MB of 10^6 bytes.
"""
_NOTES: Final = """\
Example: plan --replicas 200 --adapter-mb 40 --sync-every 30s --spot-life 4h
The same flags and the same --seed give the same figures. See packaging/docs/planning.md.
"""
_TIME_RE: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?", re.ASCII)
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MAX_REPLICAS: Final = 1000
MIN_ADAPTER_MB, MAX_ADAPTER_MB = 0.1, 10_000.0


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: `path` is where its value goes in the inputs, as `bucket.latency_s`."""

    flag: str
    path: str
    kind: Callable[[str], Any]
    metavar: str
    help: str


def seconds(text: str) -> float:
    """`30s`, `250ms`, `4h`; a bare number is seconds."""
    match = _TIME_RE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 30s, 250ms or 4h")
    return float(match[1]) * _UNIT_S[match[2] or "s"]


def number(text: str) -> float:
    """Not negative."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0")
    return value


def above_zero(text: str) -> float:
    if (value := number(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def whole(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


def time_above_zero(text: str) -> float:
    if (value := seconds(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time above 0")
    return value


_GROUPS: Final[dict[str, tuple[Flag, ...]]] = {
    "the fleet and its run": (
        Flag("--replicas", "replicas", count, "N", "replicas"),
        Flag("--adapter-mb", "adapter_mb", above_zero, "MB", "size of an adapter"),
        Flag("--sync-every", "sync_every_s", time_above_zero, "TIME", "between two syncs"),
        Flag("--quorum", "quorum", number, "SHARE", "trainer.quorum"),
        Flag("--sync-timeout", "sync_timeout_s", time_above_zero, "TIME", "trainer.sync_timeout_s"),
        Flag("--max-staleness", "max_staleness", count, "N", "TRL's, in versions"),
        Flag("--spot-life", "spot_life_s", seconds, "TIME", "mean life of a replica; 0: for ever"),
        Flag("--boot", "boot_s", seconds, "TIME", "from its first paid second to a loaded model"),
    ),
    "bucket and network": (
        Flag("--s3-latency", "bucket.latency_s", seconds, "TIME", "to the first byte, median"),
        Flag("--host-mb-per-s", "bucket.host_mb_per_s", above_zero, "MB", "of one host, each way"),
        Flag(
            "--s3-requests-per-s",
            "bucket.requests_per_s",
            above_zero,
            "N",
            "that one prefix answers; more wait",
        ),
        Flag(
            "--visible-after",
            "bucket.visible_after_s",
            seconds,
            "TIME",
            "until other hosts see a new file; S3: 0",
        ),
        Flag("--rtt", "rtt_s", seconds, "TIME", "of a link to the proxy and back"),
        Flag("--hash-mb-per-s", "hash_mb_per_s", above_zero, "MB", "sha256 on one core"),
        Flag(
            "--proxy-rollouts-per-s",
            "proxy_rollouts_per_s",
            above_zero,
            "N",
            "that one proxy carries",
        ),
    ),
    "engines and load": (
        Flag("--slots", "engine.slots", count, "N", "rollouts that a replica runs at once"),
        Flag(
            "--tokens-per-s",
            "engine.tokens_per_s",
            above_zero,
            "N",
            "of a replica with all slots taken",
        ),
        Flag(
            "--tokens-per-s-alone",
            "engine.tokens_per_s_alone",
            above_zero,
            "N",
            "of one rollout alone",
        ),
        Flag("--load", "engine.load_s", seconds, "TIME", "vLLM loads an adapter of no size ..."),
        Flag("--load-mb-per-s", "engine.load_mb_per_s", above_zero, "MB", "... and then so fast"),
        Flag(
            "--completion-tokens", "load.completion_tokens", above_zero, "N", "of one rollout, mean"
        ),
        Flag("--max-tokens", "load.max_tokens", count, "N", "of one rollout at most"),
        Flag("--prompt-tokens", "load.prompt_tokens", whole, "N", "of one prompt"),
        Flag("--group", "load.group", count, "N", "num_generations, rollouts of one prompt"),
        Flag("--in-flight", "load.in_flight", whole, "N", "rollouts at most; 0: as many as slots"),
        Flag(
            "--samples-per-s",
            "load.samples_per_s",
            number,
            "N",
            "the trainer takes; 0: all of them",
        ),
    ),
    "list prices, dollars": (
        Flag("--price-put-list", "prices.put_list_per_1000", number, "USD", "1,000 PUT or LIST"),
        Flag("--price-get-head", "prices.get_head_per_1000", number, "USD", "1,000 GET or HEAD"),
        Flag("--price-egress", "prices.egress_per_gb", number, "USD", "a GB from the bucket"),
        Flag("--price-replica", "prices.replica_per_h", number, "USD", "a replica's hour"),
        Flag("--price-fixed", "prices.fixed_per_h", number, "USD", "an hour of trainer and proxy"),
    ),
    "the simulation": (
        Flag("--simulate", "simulate_s", seconds, "TIME", "virtual time; 0: twelve syncs or so"),
        Flag(
            "--placed-replicas",
            "placed_replicas",
            count,
            "N",
            "whose rollouts are simulated one by one; all of them sync",
        ),
        Flag("--seed", "seed", whole, "N", "of all that is drawn"),
    ),
}


def run(words: Sequence[str]) -> str:
    """The text to show. Raises UsageError."""
    from asyncgrpo_agent.plan.inputs import Inputs

    defaults = Inputs()
    usage = "plan [--replicas N] [--adapter-mb MB] [--sync-every TIME] [flags] [--json]"
    parser = Parser("plan", usage, _ABOUT, _NOTES)
    for title, flags in _GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            default = _at(defaults, flag.path)
            group.add_argument(
                flag.flag,
                dest=flag.path,
                type=flag.kind,
                metavar=flag.metavar,
                default=default,
                help=f"{flag.help} ({_shown(default, flag)})",
            )
    parser.add_argument("--json", action="store_true", help="the figures as a JSON object")
    options = parser.parse_args(list(words))
    inputs = _inputs(vars(options))
    check(inputs)
    from asyncgrpo_agent.plan.advice import hints, limits, verdict
    from asyncgrpo_agent.plan.figures import simulate
    from asyncgrpo_agent.plan.text import text

    found = simulate(inputs)
    if not options.json:
        return text(found)
    from dataclasses import asdict

    told = {
        "verdict": verdict(found),
        "limits": [asdict(one) for one in limits(found)],
        "hints": hints(found),
    }
    return json.dumps(found.as_json() | told, indent=2) + "\n"


def _shown(value: float, flag: Flag) -> str:
    """A default as it would be given."""
    if flag.metavar != "TIME" or not value:
        return f"{value:g}"
    return f"{value * 1000:g}ms" if value < 1 else f"{value:g}s"


def _at(inputs: Inputs, path: str) -> Any:
    value: Any = inputs
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _inputs(values: dict[str, Any]) -> Inputs:
    from asyncgrpo_agent.plan.inputs import Bucket, Engine, Inputs, Load, Prices

    parts: dict[str, dict[str, Any]] = {}
    for path in (flag.path for flags in _GROUPS.values() for flag in flags):
        section, _, key = path.rpartition(".")
        parts.setdefault(section, {})[key] = values[path]
    return Inputs(
        bucket=Bucket(**parts["bucket"]),
        engine=Engine(**parts["engine"]),
        load=Load(**parts["load"]),
        prices=Prices(**parts["prices"]),
        **parts[""],
    )


def check(inputs: Inputs) -> None:
    """Whether such a fleet can be. Raises UsageError."""
    engine, load = inputs.engine, inputs.load
    most = engine.slots * engine.tokens_per_s_alone
    faults = {
        f"--replicas {inputs.replicas}: up to {MAX_REPLICAS}": inputs.replicas > MAX_REPLICAS,
        f"--adapter-mb {inputs.adapter_mb:g}: from {MIN_ADAPTER_MB:g} to {MAX_ADAPTER_MB:g}": not (
            MIN_ADAPTER_MB <= inputs.adapter_mb <= MAX_ADAPTER_MB
        ),
        f"--quorum {inputs.quorum:g}: from 0 to 1": inputs.quorum > 1,
        f"--tokens-per-s {engine.tokens_per_s:g}: {engine.slots} slots make no more than"
        f" {most:g} at --tokens-per-s-alone {engine.tokens_per_s_alone:g}": (
            engine.tokens_per_s > most
        ),
        f"--tokens-per-s {engine.tokens_per_s:g}: all slots together make no less than one alone,"
        f" {engine.tokens_per_s_alone:g}": engine.tokens_per_s < engine.tokens_per_s_alone,
        f"--completion-tokens {load.completion_tokens:g}: below --max-tokens {load.max_tokens}": (
            load.completion_tokens >= load.max_tokens
        ),
    }
    for fault, is_met in faults.items():
        if is_met:
            raise UsageError(fault, fix="Try `asyncgrpo-agent plan --help`")
