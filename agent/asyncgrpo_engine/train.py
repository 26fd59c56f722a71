"""`python -m asyncgrpo_engine.train --config JOB.json [--check]`: TRL for one job.

The job is checked before anything heavy loads; `--check` ends there. With problems the last line
of standard output is {"error": {"problems": [...]}} and the exit code 78. After SIGTERM it is 143.

TRL's rollout process imports this module again, so nothing here may run on import but the request
to die with the trainer.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncgrpo_engine import failures, lifetime, trl_names
from asyncgrpo_engine.job import Job, read_job
from asyncgrpo_engine.problems import EXIT_CONFIG, Problem, RefusedError, report

if TYPE_CHECKING:
    from asyncgrpo_engine.checks import Findings
    from asyncgrpo_engine.events import Events

if __name__ == "__mp_main__":  # multiprocessing imports this module so, in a process it spawned
    lifetime.die_with_parent()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m asyncgrpo_engine.train")
    parser.add_argument("--config", type=Path, required=True, help="the job, as JSON")
    parser.add_argument("--check", action="store_true", help="only check the job")
    options = parser.parse_args(argv)
    lifetime.stop_on_sigterm()
    try:
        job = read_job(options.config)
    except RefusedError as error:
        report(error.problems)
        return EXIT_CONFIG
    return _run(job, check=options.check)


def _run(job: Job, *, check: bool) -> int:
    """The exit code; what went wrong is reported."""
    try:
        if check:
            _check_only(job)
        else:
            _train(job)
    except RefusedError as error:
        report(error.problems)
        return EXIT_CONFIG
    except Exception as error:
        traceback.print_exc()
        report([failures.explain(error, job)])
        return 1
    return 0


def _check_only(job: Job) -> None:
    _require_version()
    facts: dict[str, Any] = {"trl": trl_names.installed_version()}
    if job.script:
        _check_script(job)
    else:
        found = _checked(job, trl_names.config_class_alone())
        rows = 0 if found.dataset is None else len(found.dataset)
        facts |= {"prompts": rows, "warnings": found.warnings}
    from asyncgrpo_engine import attention

    facts["attention"], facts["attention_reason"] = attention.choose(attention.probe())
    print(json.dumps({"ok": facts}), flush=True)


def _check_script(job: Job) -> None:
    from asyncgrpo_engine import script

    if problems := script.check(job):
        raise RefusedError(problems)


def _train(job: Job) -> None:
    from asyncgrpo_engine.events import Events

    events = Events(job.gateway)
    events.phase("loading")
    try:
        _require_version()
        if job.script:
            _run_script(job, events)
        else:
            _run_job(job, events)
    except RefusedError as error:
        for problem in error.problems:
            events.error(problem.what, where=problem.where, fix=problem.fix)
        raise
    except Exception as error:
        problem = failures.explain(error, job)
        events.error(problem.what, where=problem.where, fix=problem.fix)
        raise
    finally:
        lifetime.kill_children()
        events.close()


def _run_script(job: Job, events: Events) -> None:
    from asyncgrpo_engine import script

    script.export(job)
    script.run(job, events)


def _run_job(job: Job, events: Events) -> None:
    found = _checked(job, trl_names.config_class())
    for warning in found.warnings:
        print(warning, flush=True)
    from asyncgrpo_engine import training

    training.run(job, found, events)


def _require_version() -> None:
    verdict, reason = trl_names.judge_version(trl_names.installed_version())
    if verdict == "refuse":
        fix = "install trl==1.16.0 into the engine's Python"
        raise RefusedError([Problem(what=reason, where=sys.executable, fix=fix)])


def _checked(job: Job, config_class: Any) -> Findings:
    """What the checks have loaded, or `RefusedError` with every problem."""
    from asyncgrpo_engine import checks

    found = checks.check(job, config_class)
    if found.problems:
        raise RefusedError(found.problems)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
