"""TRL of `scripts/chaos`: FakeTrl with rollouts always in flight, as TRL's rollout worker has them.

Each of `fake_rollouts` threads samples under the newest name, one completion after the other, into
a bounded queue; the trainer takes `fake_batch` of them a step, drops those that are too stale, and
syncs. Adapters differ from life to life, so that an answer of another attempt is seen to be one.
What TRL gets is told to whoever looks on, a JSON line in `fake_record` for each answer and step.
SIGTERM saves a checkpoint after the step that has begun.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import secrets
import signal
import sys
import threading
import time
import urllib.error
from pathlib import Path
from typing import Any

from fakes.adapters import write_adapter
from fakes.checkpoints import save_checkpoint
from fakes.trl import STALENESS, FakeTrl

QUEUE = 64
GROUP = 8  # completions of one prompt
AGAIN_S = 1.0  # TRL's first pause before it sends a request again
STOPPED = 128 + signal.SIGTERM


class ChaosTrl(FakeTrl):
    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.life = secrets.token_hex(4)
        self.salt = int(self.life, 16)
        self.record = open(self.options["fake_record"], "a", buffering=1)  # noqa: SIM115
        self.newest = 0
        self.samples: queue.Queue[int] = queue.Queue(QUEUE)
        self.over = threading.Event()
        self.stopped = False
        self._lock = threading.Lock()

    def run(self) -> None:
        self.phase("loading")
        self.call("GET", "/health")
        self.call("GET", "/v1/models")
        begin = self.newest = self.resumed_step()
        self.publish(begin)
        self.tell(began=begin)
        self.phase("training")
        workers = [
            threading.Thread(target=self.sample, args=[number], daemon=True)
            for number in range(int(self.options["fake_rollouts"]))
        ]
        for worker in workers:
            worker.start()
        step = begin
        while not (self.stopped or os.path.exists(self.options["fake_until"])):
            step += 1
            self.train(step)
        self.over.set()
        for worker in workers:  # what is in flight counts, too
            worker.join()
        if self.stopped:
            save_checkpoint(self.output_dir, step)
            raise SystemExit(STOPPED)
        write_adapter(self.output_dir / "final", seed=step)
        self.event(kind="saved", step=step)
        self.phase("done")

    def train(self, step: int) -> None:
        earliest_end = time.monotonic() + float(self.options["fake_step_s"])
        taken = 0
        while taken < int(self.options["fake_batch"]):
            taken += self.newest - self.samples.get() <= STALENESS
        time.sleep(max(0.0, earliest_end - time.monotonic()))
        self.publish(step)
        self.newest = step
        self.tell(step=step)
        self.event(kind="metrics", step=step, max_steps=10**6, values={"reward": 0.0})
        if step % int(self.options["save_steps"]) == 0:
            save_checkpoint(self.output_dir, step)

    def seed_of(self, version: int) -> int:
        return self.salt * 10**6 + version

    def sample(self, number: int) -> None:
        """Until the run is over: one completion after the other."""
        turn = 0
        while not self.over.is_set():
            version, turn = self.newest, turn + 1
            if self.complete(f"trl-policy-v{version}", number, turn):
                self.offer(version)
            else:
                time.sleep(AGAIN_S)

    def offer(self, version: int) -> None:
        while not self.over.is_set():
            try:
                self.samples.put(version, timeout=0.1)
            except queue.Full:
                continue
            return

    def complete(self, name: str, number: int, turn: int) -> bool:
        body = {
            "model": name,
            "prompt": [(number // GROUP * 37 + turn * 11 + i) % 300 for i in range(40)],
            "max_tokens": int(self.options["fake_tokens"]),
            "return_token_ids": True,
            "logprobs": 0,
            "seed": turn * 1000 + number,
        }
        asked = time.time()
        try:
            answer = self.call("POST", "/v1/completions", body)
        except (OSError, ValueError) as error:  # URLError and timeouts among them
            said = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
            self.tell(name=name, asked=asked, failed=f"{error} {said}"[:500])
            return False
        digest = answer["system_fingerprint"]
        own = self.digests[name]
        self.tell(name=name, asked=asked, model=answer["model"], digest=digest, own=own)
        return True

    def tell(self, **fields: Any) -> None:
        line = json.dumps({"t": time.time(), "life": self.life, **fields}) + "\n"
        with self._lock:
            self.record.write(line)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        return 0
    trl = ChaosTrl(json.loads(options.config.read_text()))
    signal.signal(signal.SIGTERM, lambda *_: setattr(trl, "stopped", True))
    trl.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
