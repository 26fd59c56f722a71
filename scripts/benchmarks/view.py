"""What the dashboard of a long run costs: its first paint, the proxy's CPU and memory, bytes.

A scripted fleet (see tests/fakes/scripted_fleet.py) tells a real proxy the history of a run as a
trainer's agent does, and goes on. `paint_s`: from the start of navigation until the verdict, the
charts and all replicas are drawn, in Chromium with an empty cache and with its own (`again`).
`cpu_share`: of one core, with and without a page that is open. `rss_mb`: with the history, and with
the same fleet without one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from proxy_fleet import HERE, cpu_s, rss_mb

from fakes.fleet import Agent
from fakes.scripted_fleet import ScriptedSite, scripted_site
from fakes.scripted_past import Script

RUN = "long"
SETTLE_S = 5.0
PATIENCE_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench view", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--steps", type=int, default=10_000, help="(%(default)s)")
    parser.add_argument("--replicas", type=int, default=50, help="(%(default)s)")
    parser.add_argument("--syncs", type=int, default=2_000, help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a window (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of the paint (%(default)s)")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    result = measure(options)
    for name, value in result.items():
        print(f"{name:18} {value}")
    print(f"load {load:.1f} before and {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} CPUs")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with _running(_script(options, past=False)) as (_, proxy):
        time.sleep(SETTLE_S)
        bare_mb = rss_mb(proxy.process.pid)
    with _running(_script(options, past=True)) as (site, proxy):
        _until_told(proxy)
        filled_mb, closed = rss_mb(proxy.process.pid), _cpu_share(proxy, options.seconds)
        shares: list[float] = []
        seen = _browse(site, options, lambda: shares.append(_cpu_share(proxy, options.seconds)))
        return {
            "paint_s": seen["paint_s"],
            "paint_again_s": seen["paint_again_s"],
            "cpu_share_closed": round(closed, 4),
            "cpu_share_open": round(shares[0], 4),
            "rss_mb_bare": round(bare_mb, 1),
            "rss_mb": round(filled_mb, 1),
            "rss_mb_viewed": round(rss_mb(proxy.process.pid), 1),
            "answers_bytes": seen["answers_bytes"],
            "live_bytes_per_s": seen["live_bytes_per_s"],
        }


def _script(options: argparse.Namespace, *, past: bool) -> Script:
    return Script(
        run=RUN,
        replicas=options.replicas,
        past_steps=options.steps if past else 0,
        past_syncs=options.syncs if past else 0,
        max_steps=2 * options.steps,
        live_syncs=False,
        straggler="r17",
    )


@contextmanager
def _running(script: Script) -> Iterator[tuple[ScriptedSite, Agent]]:
    with (
        tempfile.TemporaryDirectory(prefix="bench-view-") as folder,
        scripted_site(Path(folder), [script]) as site,
    ):
        proxy = site.proxy()
        proxy.wait_for("trainer.joined")
        yield site, proxy


def _until_told(proxy: Agent) -> None:
    """Until the proxy is idle: the history is there."""
    deadline = time.monotonic() + PATIENCE_S
    time.sleep(SETTLE_S)
    while _cpu_share(proxy, 2.0) > 0.3:
        if time.monotonic() > deadline:
            raise SystemExit("the history took too long")


def _cpu_share(proxy: Agent, seconds: float) -> float:
    began, spent_s = time.monotonic(), cpu_s(proxy.process.pid)
    time.sleep(seconds)
    return (cpu_s(proxy.process.pid) - spent_s) / (time.monotonic() - began)


def _browse(site: ScriptedSite, options: argparse.Namespace, opened: Any) -> dict[str, Any]:
    """What the browser measured; `opened` is called while a page is open."""
    node, chromium = shutil.which("node"), shutil.which("chromium")
    if node is None or chromium is None:
        raise SystemExit("node or chromium is missing")
    join = site.hosts.folder / "viewer.join"
    join.write_text(site.viewer() + "\n")
    words = [chromium, f"https://{site.address}/", str(join), RUN]
    oldest = options.steps - options.syncs + 1
    counts = [str(number) for number in (options.replicas, options.rounds, oldest)]
    command = [node, str(HERE / "view.mjs"), *words, *counts]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as browser:
        assert browser.stdin is not None
        assert browser.stdout is not None
        try:
            for line in browser.stdout:
                told: dict[str, Any] = json.loads(line)
                if "ask" not in told:
                    return told
                opened()
                browser.stdin.write("done\n")
                browser.stdin.flush()
        finally:
            browser.kill()
    raise SystemExit("the browser ended early")


if __name__ == "__main__":
    sys.exit(main())
