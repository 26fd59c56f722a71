"""One training run: evaluate, train, evaluate, save. The heavy libraries are loaded here.

Invariant: everything that a user can get wrong was checked before anything here runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from transformers import PrinterCallback, ProgressCallback

from asyncgrpo_engine import attention, trl_names
from asyncgrpo_engine.checks import Findings
from asyncgrpo_engine.evaluation import (
    Evaluation,
    Sampling,
    base_model_name,
    wait_until_healthy,
)
from asyncgrpo_engine.events import Events, is_first_rank
from asyncgrpo_engine.job import Job
from asyncgrpo_engine.watching import EventCallback, ending_whole, refuse_other_syncs


def run(job: Job, found: Findings, events: Events) -> None:
    """Train as the job says; the adapter ends up in `output_dir`/final."""
    args = found.args
    device = attention.probe()
    kind, reason = attention.install(device)
    print(f"attention: {kind} ({reason})", flush=True)
    events.phase("waiting")
    wait_until_healthy(args.vllm_server_base_url, args.vllm_server_timeout)
    evaluation = _evaluation(job, found)
    if evaluation is not None and args.resume_from_checkpoint is None:
        _evaluate(evaluation, "before", base_model_name(evaluation.gateway), events)
    events.phase("loading")
    trainer = _make_trainer(job, found, events)
    with ending_whole(trainer, job.save_s):
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if job.eval.samples:
        trl_names.sync_now(trainer)
    if evaluation is not None:
        _evaluate(evaluation, "after", trl_names.policy_name(trainer), events)
    events.phase("saving")
    final = Path(job.output_dir) / "final"
    trl_names.save_adapter(trainer, final)
    print(f"saved {final}", flush=True)
    events.phase("done")


def _make_trainer(job: Job, found: Findings, events: Events) -> Any:
    watching = EventCallback(events)
    trainer = trl_names.trainer_class()(
        model=job.model,
        reward_funcs=found.reward_functions,
        args=found.args,
        train_dataset=found.dataset,
        processing_class=found.tokenizer,
        peft_config=found.peft_config,
        callbacks=[watching],
    )
    watching.watch(trainer)
    trl_names.end_rollouts_at_once(trainer)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    refuse_other_syncs(trainer)
    return trainer


def _evaluation(job: Job, found: Findings) -> Evaluation | None:
    if not job.eval.samples or not is_first_rank():
        return None
    return Evaluation(
        gateway=found.args.vllm_server_base_url,
        dataset=found.eval_dataset,
        tokenizer=found.tokenizer,
        reward=found.reward_functions[0],
        samples=job.eval.samples,
        sampling=Sampling.of(found.args, job.eval.max_tokens),
    )


def _evaluate(
    evaluation: Evaluation, when: Literal["before", "after"], name: str, events: Events
) -> None:
    events.phase("evaluating")
    result = evaluation.run(name)
    events.evaluation(
        when,
        accuracy=result.accuracy,
        samples=result.samples,
        prompts=result.prompts,
        name=name,
    )
    print(
        f"accuracy {when} training: {result.accuracy:.3f} "
        f"({result.samples} answers to {result.prompts} prompts, {name})",
        flush=True,
    )
