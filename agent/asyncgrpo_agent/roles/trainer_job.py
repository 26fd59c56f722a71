"""The engine-side child of the trainer: what it is told, and one run of it to its end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from asyncgrpo_agent.config.kinds import is_hub_name
from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.slots import DEFAULT_MAX_STALENESS, UNKNOWN_STALENESS
from asyncgrpo_agent.errors import ChildExitedError
from asyncgrpo_agent.procs import child, trl
from asyncgrpo_agent.store import private_files

STOP_TRL_S: Final = 15.0  # beside what it may take to save a checkpoint
TRL_PATIENCE_S: Final = 15  # TRL must not give up on a rollout before the fleet does


def run_folder(state_dir: Path, run_name: str) -> Path:
    """Where the trainer keeps what belongs to one run: job, logs, history."""
    return state_dir / "trainer" / run_name


def history_file(state_dir: Path, run_name: str) -> Path:
    return run_folder(state_dir, run_name) / "history.jsonl"


def job_log(config: Config, run_name: str, name: str) -> Path:
    """Where the engine-side child `name` writes: beside its job, unless a folder is given."""
    if config.agent.log_dir:
        return config.log_dir / f"{name}-{run_name}.log"
    return run_folder(config.state_dir, run_name) / f"{name}.log"


def max_staleness(config: Config) -> int:
    """How many versions behind a rollout may be; unknown if TRL is about to refuse it."""
    value = config.train.passthrough.get("max_staleness", DEFAULT_MAX_STALENESS)
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_number else UNKNOWN_STALENESS


def write_job(
    config: Config,
    run_name: str,
    gateway_url: str,
    checkpoint: Path | None = None,
    origin: Path | None = None,
) -> Path:
    """All that the engine-side child needs, as a file. A run's own checkpoint goes before one that
    `train.resume_from_checkpoint` names: that is where the run began. `origin` is the adapter that
    a new run begins with."""
    train = config.train
    resume = {} if checkpoint is None else {"resume_from_checkpoint": str(checkpoint)}
    job = {
        "script": train.script,
        "script_args": train.script_args,
        "model": config.model.path,
        "trust_remote_code": config.model.trust_remote_code,
        "sample_rollouts": config.trainer.sample_rollouts > 0,
        "save_s": config.trainer.save_s,
        "dataset": train.dataset,
        "dataset_config": train.dataset_config,
        "dataset_split": train.dataset_split,
        "rewards": train.rewards,
        "reward_weights": train.reward_weights,
        "tools": train.tools,
        "environment_factory": train.environment_factory,
        "environments": train.environments,
        "python_path": train.python_path,
        "output_dir": str(config.output_dir / run_name),
        "gateway": gateway_url,
        "grpo": {
            **train.passthrough,
            "request_timeout": config.trainer.request_timeout_s + TRL_PATIENCE_S,
            **resume,
        },
        "lora": train.lora,
        "init_from": "" if origin is None else str(origin),
        "eval": msgspec.to_builtins(train.eval),
    }
    path = run_folder(config.state_dir, run_name) / "job.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    private_files.write(path, json.dumps(job, indent=1).encode())  # the URL holds a token
    return path


async def run_job(config: Config, job: Path, *, check: bool, secrets: Sequence[str] = ()) -> None:
    """Check the job, or train; what it says is kept without `secrets`.

    Raises ConfigError or ChildExitedError.
    """
    name = "check" if check else "train"
    argv, additions = trl.train_command(
        config.engine.python,
        job,
        check=check,
        python_path=config.train.python_path,
        scratch=job.parent,
        offline=not any(map(is_hub_name, (config.train.dataset, config.train.eval.dataset))),
        launch=trl.Launch(
            processes=config.train.processes, accelerate_config=config.train.accelerate_config
        ),
    )
    log_file = job_log(config, job.parent.name, name)
    inherited = child.inherited({}, caches=str(config.cache_dir))
    for upstream in config.proxy.upstream:  # the proxy within may have tokens of servers
        inherited.pop(upstream.token_env, None)
    async with child.started(
        name,
        argv,
        env={**inherited, **additions, **config.engine.env},
        log_file=log_file,
        secrets=secrets,
        grace_s=STOP_TRL_S + config.trainer.save_s,
    ) as process:
        code = await process.wait()
    if code == 0:
        return
    problem = trl.config_error(code, process.tail())
    if problem is not None:
        raise problem
    raise ChildExitedError(
        f"the engine-side child {name} ended with exit code {code}",
        returncode=code,
        tail=process.tail(),
        where=str(log_file),
        fix=f"Its last lines:\n{process.tail()}",
    )
