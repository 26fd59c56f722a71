"""Stands in for `asyncgrpo_engine.train`: TRL's calls to the gateway, without torch.

It does what TRL does, in TRL's order: ask for health, models and server info, load version 0, then
for each step sample some completions under the newest name, save a new adapter, pause, load it,
resume, and unload what is too old. It counts what TRL would die of, and answers that were not made
by the bytes it had committed under the name it asked for; FakeVllm signs its answers with those.

What it is told by the job's `grpo` table: `max_steps`, `fake_rollouts` a step, `fake_tokens` each,
`fake_step_s` that a step takes at least, `fake_lag` versions behind the newest, `fake_hidden` size
of an adapter, 64 bytes each, `save_steps` between checkpoints, `fake_save_bytes` of an optimizer's
state in them, `fake_exit` code, `fake_crash_at` a step of a life that began at step 0, `fake_until`
a file exists, with which training ends before `max_steps`. Its counts are in counts.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fakes.adapters import adapter_digest, write_adapter
from fakes.checkpoints import save_checkpoint

STALENESS = 4
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class FakeTrl:
    """One training run against one gateway."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.url = job["gateway"]
        self.options = job["grpo"]
        self.output_dir = Path(job["output_dir"])
        self.folder = Path(tempfile.mkdtemp(prefix="fake-trl-"))
        self.digests: dict[str, str] = {}
        self.counts = {"rollouts": 0, "failed": 0, "wrong_bytes": 0, "steps": 0}

    def run(self) -> None:
        self.phase("loading")
        self.call("GET", "/health")
        self.call("GET", "/v1/models")
        info = self.call("GET", "/server_info?config_format=json")["vllm_config"]
        assert info["lora_config"]["max_loras"] >= STALENESS + 2, info
        begin = self.resumed_step()
        self.publish(begin)
        self.phase("training")
        steps = int(self.options["max_steps"])
        with ThreadPoolExecutor(16) as pool:
            for step in range(begin + 1, steps + 1):
                earliest_end = time.monotonic() + float(self.options.get("fake_step_s", 0.0))
                name = f"trl-policy-v{max(begin, step - 1 - int(self.options.get('fake_lag', 0)))}"
                prompts = range(int(self.options.get("fake_rollouts", 8)))
                list(pool.map(lambda n, s=step, a=name: self.rollout(a, s, n), prompts))
                time.sleep(max(0.0, earliest_end - time.monotonic()))  # noqa: TID251 - no trio
                self.publish(step)
                self.counts["steps"] = step
                self.note(step)
                if step % int(self.options.get("save_steps", steps + 1)) == 0:
                    size_bytes = int(self.options.get("fake_save_bytes", 1000))
                    save_checkpoint(self.output_dir, step, size_bytes)
                if step == int(self.options.get("fake_crash_at", 0)) and not begin:
                    os._exit(70)
                values = {"reward": min(1.0, step / steps), "ratio": 1.0}
                self.event(kind="metrics", step=step, max_steps=steps, values=values)
                if os.path.exists(self.options.get("fake_until", "")):
                    break
        shutil.rmtree(self.output_dir / "final", ignore_errors=True)  # of a shorter run
        write_adapter(self.output_dir / "final", seed=steps)
        self.event(kind="saved", step=steps)
        self.phase("done")

    def resumed_step(self) -> int:
        """Of the checkpoint that the job names, which has to be whole."""
        folder = self.options.get("resume_from_checkpoint")
        if folder is None:
            return 0
        state = json.loads((Path(folder) / "trainer_state.json").read_text())
        assert (Path(folder) / "optimizer.pt").stat().st_size
        return int(state["global_step"])

    def note(self, step: int) -> None:
        """Steps in the order in which they were trained, by all starts together."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        with (self.output_dir / "steps.txt").open("a") as file:
            file.write(f"{step}\n")

    def seed_of(self, version: int) -> int:
        """What the bytes of a version follow from."""
        return version

    def publish(self, version: int) -> None:
        """TRL's sync: pause, save, rename, load, resume, unload."""
        name = f"trl-policy-v{version}"
        self.call("POST", "/pause?mode=keep")
        hidden = int(self.options.get("fake_hidden", 64))
        folder = write_adapter(
            self.folder / f".{name}.tmp", seed=self.seed_of(version), hidden=hidden
        )
        folder = folder.rename(self.folder / name)
        self.digests[name] = adapter_digest(folder)
        load = {"lora_name": name, "lora_path": str(folder), "load_inplace": False}
        self.call("POST", "/v1/load_lora_adapter", load)
        self.call("POST", "/resume")
        if version > STALENESS:
            old = f"trl-policy-v{version - STALENESS - 1}"
            self.call("POST", "/v1/unload_lora_adapter", {"lora_name": old})

    def rollout(self, name: str, step: int, number: int) -> None:
        prompt = [(step * 7 + number // 4 + i) % 300 for i in range(40)]
        request = {
            "model": name,
            "prompt": prompt,
            "max_tokens": int(self.options.get("fake_tokens", 8)),
            "return_token_ids": True,
            "logprobs": 0,
            "seed": step * 1000 + number,
        }
        self.counts["rollouts"] += 1
        try:
            answer = self.call("POST", "/v1/completions", request)
        except urllib.error.URLError as error:
            self.counts["failed"] += 1
            sys.stdout.write(f"rollout failed: {error}\n")
            return
        if answer["system_fingerprint"] != self.digests[name] or answer["model"] != name:
            self.counts["wrong_bytes"] += 1

    # --- HTTP ----------------------------------------------------------------------------------

    def call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        with LOCAL.open(request, timeout=120) as response:
            text = response.read()
        return json.loads(text) if text[:1] == b"{" else text.decode()

    def event(self, **event: Any) -> None:
        self.call("POST", "/.agrpo/event", event)

    def phase(self, phase: str) -> None:
        self.event(kind="phase", phase=phase)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    job = json.loads(options.config.read_text())
    refused = job["grpo"].get("fake_refusal", "")
    if refused:
        problem = {"what": refused, "where": "train.fake_refusal", "fix": "leave it out"}
        sys.stdout.write(json.dumps({"error": {"problems": [problem]}}) + "\n")
        return 78
    if options.check:
        return 0
    trl = FakeTrl(job)
    try:
        trl.run()
    finally:
        target = Path(job["output_dir"])
        target.mkdir(parents=True, exist_ok=True)
        (target / "counts.json").write_text(json.dumps(trl.counts))
    return int(trl.options.get("fake_exit", 0))


if __name__ == "__main__":
    raise SystemExit(main())
