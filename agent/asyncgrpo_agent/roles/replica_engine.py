"""The replica's vLLM: started, watched until it answers a completion, restarted with backoff.

Ready means that one completion with log-probabilities came back, because vLLM says that it is
healthy long before. While it is not ready nothing is sent to it. A vLLM that never came up ends the
agent with the reason: a restart would not help.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.children import Exit, GiveUp, next_restart
from asyncgrpo_agent.errors import ChildExitedError, ChildNotReadyError, EngineError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.engine_client import EngineClient
from asyncgrpo_agent.procs import child, vllm
from asyncgrpo_agent.procs.output import KEPT_LINES
from asyncgrpo_agent.roles.registration import host_name
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)

PROBE_EVERY_S: Final = 0.5
STOP_VLLM_S: Final = 10.0


@dataclass
class EngineHost:
    """Supervises one vLLM. `facts` is None while it is not ready; `on_change` is called then."""

    config: Config
    spec: vllm.EngineSpec
    model_digest: str
    on_change: Callable[[], None]
    prepare: Callable[[Callable[[str], None]], Awaitable[tuple[vllm.EngineSpec, str]]] | None = None
    """Gives the model and its digest where they are not known yet, telling why it takes so long."""
    facts: m.EngineFacts | None = None
    reason: str = "vLLM is starting"
    generation: int = 0  # counts starts, so that others notice a restart
    _exits: list[Exit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = EngineClient(str(self.spec.socket_path))

    async def run(self) -> None:
        """For ever; raises ChildExitedError or ChildNotReadyError when vLLM cannot be had, and what
        `prepare` raises."""
        if self.prepare is not None:
            self.spec, self.model_digest = await self.prepare(self._wait)
        while True:
            began = trio.current_time()
            was_ready, error = await self._run_once()
            now = trio.current_time()
            self._exits.append(Exit(code=error.returncode, ready=was_ready, lived_s=now - began))
            self._set(None, f"vLLM ended: {error.what}")
            decision = next_restart(self._exits)
            if isinstance(decision, GiveUp):
                log.error("engine.given_up", reason=decision.reason)
                raise error
            log.warning("engine.restarting", in_s=decision.delay_s, reason=decision.reason)
            await trio.sleep(decision.delay_s)

    async def _run_once(self) -> tuple[bool, ChildExitedError]:
        """One life of vLLM; whether it ever was ready, and why it ended."""
        self._set(None, "vLLM is starting")
        self.generation += 1
        await trio.Path(self.spec.socket_path).unlink(missing_ok=True)
        argv, additions = vllm.engine_command(self.spec)
        log_file = self.config.log_dir / f"vllm-{host_name(self.config)}.log"
        async with child.started(
            "vllm",
            argv,
            env=child.inherited(
                additions,
                "server",
                gpus=self.config.replica.gpus,
                caches=str(self.config.cache_dir),
            ),
            log_file=log_file,
            grace_s=STOP_VLLM_S,
        ) as process:
            ready = await self._until_ready(process, log_file)
            if ready:
                await process.wait()
            code = process.returncode
            tail = process.tail(KEPT_LINES)
        assert code is not None
        return ready, ChildExitedError(
            f"vLLM ended with exit code {code}",
            returncode=code,
            tail=tail,
            where=str(log_file),
            fix=vllm.explain_failure(tail),
        )

    async def _until_ready(self, process: child.Child, log_file: Path) -> bool:
        """True once vLLM answers; False when it has ended before."""
        limit_s = self.config.engine.start_timeout_s
        ready = False
        with trio.move_on_after(limit_s) as scope:
            async with trio.open_nursery() as nursery:

                async def until_ended() -> None:
                    await process.wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(until_ended)
                facts = await self._probe()
                ready = True
                self._set(facts, "vLLM is up")
                nursery.cancel_scope.cancel()
        if scope.cancelled_caught and not ready and process.returncode is None:
            raise ChildNotReadyError(
                f"vLLM did not answer a completion within {limit_s:g} s",
                where=str(log_file),
                fix=f"Raise engine.start_timeout_s, or see its last lines:\n{process.tail()}",
            )
        return ready

    async def _probe(self) -> m.EngineFacts:
        name = self.spec.served_name
        while True:
            try:
                await self.client.models()  # quick and quiet while vLLM is still loading
                await self.client.probe(name)
                rate = await self.client.measure(name)
                info, version = await self.client.server_info(), await self.client.version()
                return msgspec.structs.replace(self._facts(info, version), tokens_per_s=rate)
            except EngineError as error:
                reason = f"vLLM is starting: {error.what[:200]}"
                if error.status and reason != self.reason:  # without one, nothing listens yet
                    self._set(None, reason)
            await trio.sleep(PROBE_EVERY_S)

    def _facts(self, info: dict[str, Any], version: str) -> m.EngineFacts:
        return engine_facts(
            info, version, base_model=self.spec.served_name, model_digest=self.model_digest
        )

    def _wait(self, reason: str) -> None:
        if reason != self.reason:
            self._set(None, reason)

    def _set(self, facts: m.EngineFacts | None, reason: str) -> None:
        self.facts, self.reason = facts, reason
        log.info("engine.state", ready=facts is not None, reason=reason)
        self.on_change()


def engine_facts(
    info: dict[str, Any], version: str, *, base_model: str, model_digest: str
) -> m.EngineFacts:
    """Read vLLM's /server_info. KeyError, TypeError, ValueError for one that is not as ours."""
    config = info["vllm_config"]
    parallel = config["parallel_config"]
    return m.EngineFacts(
        base_model=base_model,
        model_digest=model_digest,
        dtype=str(config["model_config"]["dtype"]),
        max_model_len=int(config["model_config"]["max_model_len"]),
        max_loras=int(config["lora_config"]["max_loras"]),
        max_lora_rank=int(config["lora_config"]["max_lora_rank"]),
        vllm_version=version,
        world_size=int(parallel.get("world_size", 1)),
        max_cpu_loras=int(config["lora_config"].get("max_cpu_loras") or 0),
        logprobs_mode=str(config["model_config"].get("logprobs_mode") or ""),
        quantization=str(config["model_config"].get("quantization") or ""),
        kv_cache_dtype=str(config.get("cache_config", {}).get("cache_dtype") or ""),
        data_parallel_size=int(parallel.get("data_parallel_size", 1)),
        api_servers=int(parallel.get("_api_process_count", 1)),
    )
