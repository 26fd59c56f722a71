"""One training run: evaluate, train, evaluate, save. The heavy libraries are loaded here.

Invariant: everything that a user can get wrong was checked before anything here runs.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback

from asyncgrpo_engine import attention, data, origin, ratios, sampling, setup, trl_names
from asyncgrpo_engine.checks import Findings
from asyncgrpo_engine.evaluating import Evaluations
from asyncgrpo_engine.evaluation import (
    Evaluation,
    Sampling,
    served_model,
    wait_until_healthy,
)
from asyncgrpo_engine.events import Events, is_first_rank
from asyncgrpo_engine.job import Job
from asyncgrpo_engine.problems import RefusedError
from asyncgrpo_engine.watching import EventCallback, ending_whole, refuse_other_syncs


def run(job: Job, found: Findings, events: Events) -> None:
    """Train as the job says; the adapter ends up in `output_dir`/final."""
    args = found.args
    kind, reason = attention.install(attention.probe())
    _tell_setup(job, found, f"{kind} ({reason})", events)
    events.phase("waiting")
    wait_until_healthy(args.vllm_server_base_url, args.vllm_server_timeout)
    _check_lengths(job, found)
    evaluations = _evaluations(job, found, events)
    if evaluations is not None and args.resume_from_checkpoint is None and not job.init_from:
        evaluations.before()  # of the base model, which is no start of a run that has an adapter
    events.phase("loading")
    trainer = _make_trainer(job, found, events, evaluations)
    if job.init_from:
        origin.load(trainer, Path(job.init_from))
    with ending_whole(trainer, job.save_s):
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if job.eval.samples:
        trl_names.sync_now(trainer)
    if evaluations is not None:
        evaluations.after(trainer)
    events.phase("saving")
    final = Path(job.output_dir) / "final"
    trl_names.save_adapter(trainer, final)
    events.saved(int(trainer.state.global_step))
    print(f"saved {final}", flush=True)
    events.phase("done")


def _tell_setup(job: Job, found: Findings, attention_path: str, events: Events) -> None:
    """Versions, ways and seeds, before anything that takes long."""
    checkpoint = found.args.resume_from_checkpoint
    facts = setup.facts(
        found.args,
        attention=attention_path,
        begins_with=job.init_from or checkpoint or "",
        first_step=trl_names.step_of(checkpoint),
        eval_samples=job.eval.samples,
    )
    setup.tell(facts, events)


def _check_lengths(job: Job, found: Findings) -> None:
    """Raises RefusedError for prompts that the server could not answer."""
    if found.dataset is None or not is_first_rank():
        return
    context = data.Context(
        model_tokens=served_model(found.args.vllm_server_base_url).max_tokens,
        answer_tokens=found.args.max_completion_length,
    )
    problems = data.length_problems(
        found.dataset, job.training_data.where, context, partial(_tokens, found)
    )
    if problems:
        raise RefusedError(problems)


def _tokens(found: Findings, prompt: list[Any]) -> int:
    """Of a prompt as TRL asks it, but for what an environment's `reset` adds."""
    ids = found.tokenizer.apply_chat_template(
        prompt,
        return_dict=False,
        add_generation_prompt=True,
        tools=found.tooling.shown or None,
        **(found.args.chat_template_kwargs or {}),
    )
    return len(ids)


def _make_trainer(
    job: Job, found: Findings, events: Events, evaluations: Evaluations | None
) -> Any:
    callbacks: list[Any] = [EventCallback(events)]
    if evaluations is not None:
        callbacks.append(evaluations.callback())
    trainer = trl_names.trainer_class()(
        model=job.model,
        reward_funcs=_sampled(job, found.reward_functions),
        args=found.args,
        train_dataset=found.dataset,
        processing_class=found.tokenizer,
        peft_config=found.peft_config,
        tools=found.tooling.tools or None,
        environment_factory=found.tooling.environment_factory,
        callbacks=callbacks,
    )
    for callback in callbacks:
        callback.watch(trainer)
    trl_names.begin_rollouts_with(setup.begin_rollouts, ratios.noting)
    ratios.split(trainer)
    trl_names.end_rollouts_at_once(trainer)
    trl_names.notice_dead_rollouts(trainer)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    refuse_other_syncs(trainer)
    return trainer


def _sampled(job: Job, functions: list[Any]) -> list[Any]:
    sampled: list[Any] = sampling.wrapped(functions, job.gateway)
    return sampled if job.sample_rollouts else functions


def _evaluations(job: Job, found: Findings, events: Events) -> Evaluations | None:
    """Only the first rank has any."""
    if not job.eval.samples or not is_first_rank():
        return None
    evaluation = Evaluation(
        gateway=found.args.vllm_server_base_url,
        dataset=found.eval_dataset,
        tokenizer=found.tokenizer,
        reward=found.reward_functions[0].unweighted(),
        samples=job.eval.samples,
        sampling=Sampling.of(found.args, job.eval.max_tokens),
    )
    return Evaluations(evaluation, events, job.eval.every_steps)
