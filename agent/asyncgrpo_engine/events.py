"""What the agent is told while training runs: posted to the gateway, never in training's way.

A thread posts from a bounded queue. A gateway that is away, slow or knows no events costs the
training nothing; events are dropped instead.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final, Literal

Phase = Literal["loading", "waiting", "training", "evaluating", "saving", "done"]
_PATH: Final = "/.agrpo/event"
_QUEUED: Final = 1000
_POST_TIMEOUT_S: Final = 5.0


def is_first_rank() -> bool:
    """Of the processes that train together, as accelerate's launcher numbers them."""
    return os.environ.get("RANK", "0") == "0"


class Events:
    """Posts events in order. `close` waits for the last ones, but not for long.

    Of several ranks the first one speaks for all.
    """

    def __init__(self, gateway: str) -> None:
        self._silent = not is_first_rank()
        self._url = gateway.rstrip("/") + _PATH
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=_QUEUED)
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def phase(self, phase: Phase) -> None:
        self._put({"kind": "phase", "phase": phase})

    def metrics(self, *, step: int, max_steps: int, values: Mapping[str, float]) -> None:
        self._put({"kind": "metrics", "step": step, "max_steps": max_steps, "values": dict(values)})

    def evaluation(
        self,
        when: Literal["before", "during", "after"],
        *,
        accuracy: float,
        samples: int,
        prompts: int,
        name: str,
        step: int,
    ) -> None:
        self._put(
            {
                "kind": "eval",
                "when": when,
                "accuracy": accuracy,
                "samples": samples,
                "prompts": prompts,
                "name": name,
                "step": step,
            }
        )

    def sample(self, rollout: Mapping[str, Any]) -> None:
        """A rollout to read, with what one reward function gave for it."""
        self._put({"kind": "sample", **rollout})

    def setup(self, facts: Mapping[str, Any]) -> None:
        """What the run is made with."""
        self._put({"kind": "setup", **facts})

    def saved(self, step: int) -> None:
        """The adapter of `step`, with which training has ended, is in `final/`."""
        self._put({"kind": "saved", "step": step})

    def limits(self, values: Mapping[str, float]) -> None:
        """What bounds the rollouts, as TRL has worked it out."""
        self._put({"kind": "limits", **values})

    def error(self, what: str, *, where: str = "", fix: str = "") -> None:
        self._put({"kind": "error", "what": what, "where": where, "fix": fix})

    def close(self, timeout_s: float = 5.0) -> None:
        """Post what is queued, for at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _put(self, event: dict[str, Any]) -> None:
        if self._silent:
            return
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(event)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            with contextlib.suppress(OSError, urllib.error.URLError, ValueError):
                self._post(event)

    def _post(self, event: dict[str, Any]) -> None:
        request = urllib.request.Request(
            self._url,
            data=json.dumps(event).encode(),
            headers={"Content-Type": "application/json"},
        )
        with _LOCAL.open(request, timeout=_POST_TIMEOUT_S) as response:
            response.read()


# The gateway is on this host: no proxy of the environment may come between.
_LOCAL: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among what TRL logs; JSON has no others."""
    return {
        key: float(value)
        for key, value in logs.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }
