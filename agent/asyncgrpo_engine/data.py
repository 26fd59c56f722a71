"""The rows that training starts from: a local file, or a dataset of a model hub.

Every row has a conversational `prompt`; its other columns are the rewards' arguments. A CSV file,
whose cells are texts, has what the user says there, or a conversation as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncgrpo_engine.job import Source
from asyncgrpo_engine.problems import Problem, from_exception

READERS: Final = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_SHOWN: Final = 3


def load(source: Source, cache_dir: Path) -> tuple[Any, list[Problem]]:
    """The rows of `source`, and what is wrong with them. Local files need no network."""
    found, problems = _from_hub(source) if source.is_on_hub else _from_file(source, cache_dir)
    if found is not None:
        problems += _prompt_problems(found, source.where)
    return found, problems


def _from_file(source: Source, cache_dir: Path) -> tuple[Any, list[Problem]]:
    path = Path(source.path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        fix = "use .jsonl, .json, .csv or .parquet"
        return None, [Problem(what="unknown kind of file", where=source.where, fix=fix)]
    if not path.is_file():
        return None, [Problem(what="no such file", where=source.where, fix="correct the path")]
    if path.stat().st_size == 0:
        return None, [Problem(what="the file is empty", where=source.where, fix="add prompts")]
    import datasets

    datasets.disable_progress_bars()
    try:
        found = datasets.load_dataset(
            reader, data_files=source.path, split="train", cache_dir=str(cache_dir)
        )
        if reader == "csv" and "prompt" in found.column_names:
            found = found.map(_with_conversation)
        return found, []
    except Exception as error:  # Arrow, pandas and datasets raise their own types
        cause = error.__cause__ or error
        if "corresponds to no data" in str(cause):  # a file with a header alone
            return None, [Problem(what="no rows", where=source.where, fix="add prompts")]
        return None, [from_exception(cause, where=source.where, fix="correct the file")]


def _with_conversation(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a CSV file with its prompt as messages; an empty cell stays empty."""
    text = row["prompt"]
    if text is None:
        return {"prompt": None}
    try:
        prompt = json.loads(text)
    except (TypeError, ValueError):  # a number, or no JSON
        prompt = None
    is_one = _is_conversation(prompt)
    return {"prompt": prompt if is_one else [{"role": "user", "content": str(text)}]}


def _from_hub(source: Source) -> tuple[Any, list[Problem]]:
    import datasets

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(source.path, source.config or None, split=source.split), []
    except Exception as error:  # the hub's client has many
        fix = f"correct the name, {source.key}_config or {source.key}_split; HF_TOKEN opens private"
        return None, [from_exception(error, where=source.where, fix=f"{fix} ones")]


def _prompt_problems(dataset: Any, where: str) -> Iterator[Problem]:
    if "prompt" not in dataset.column_names:
        names = ", ".join(dataset.column_names)
        yield Problem(what="no column 'prompt'", where=where, fix=f"rename one of: {names}")
    elif len(dataset) == 0:
        yield Problem(what="no rows", where=where, fix="add prompts")
    else:
        for number, prompt in enumerate(dataset["prompt"]):
            if not _is_conversation(prompt):
                yield Problem(
                    what=f"'prompt' of row {number} is no list of messages",
                    where=where,
                    fix='write it as [{"role": "user", "content": "..."}]',
                )
                return


def _is_conversation(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(
            isinstance(message, Mapping) and isinstance(message.get("role"), str)
            for message in prompt
        )
    )


# --- length ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a model can read and write at once, in tokens."""

    model_tokens: int
    answer_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return self.model_tokens - self.answer_tokens


def length_problems(
    dataset: Any, where: str, context: Context, tokens_of: Callable[[Any], int]
) -> list[Problem]:
    """Prompts that leave no room for an answer; vLLM refuses every rollout of such a one.

    A token is at least a byte of text, so only long texts are tokenized.
    """
    if context.prompt_tokens < 1:
        what = f"{context.answer_tokens} tokens are more than the model's context allows"
        fix = f"stay well below vLLM's max_model_len {context.model_tokens}"
        return [Problem(what=what, where="train.max_completion_length", fix=fix)]
    too_long, number = [], 0
    try:
        overhead = tokens_of(dataset[0]["prompt"])  # of the template, and more
        for number, prompt in enumerate(dataset["prompt"]):
            size_bytes = len(json.dumps(prompt, ensure_ascii=False).encode())
            if size_bytes + overhead > context.prompt_tokens:
                tokens = tokens_of(prompt)
                if tokens > context.prompt_tokens:
                    too_long.append((number, tokens))
    except Exception as error:  # chat templates raise what they like
        fix = "correct its messages, or the model's chat template"
        return [from_exception(error, where=f"{where}, row {number}", fix=fix)]
    return [_too_long(too_long, where, context)] if too_long else []


def _too_long(found: list[tuple[int, int]], where: str, context: Context) -> Problem:
    shown = ", ".join(f"row {number} with {tokens}" for number, tokens in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return Problem(
        what=f"prompts of more than {context.prompt_tokens} tokens: {shown}{more}",
        where=where,
        fix=f"drop them, raise vLLM's --max-model-len ({context.model_tokens}), or lower "
        f"train.max_completion_length ({context.answer_tokens})",
    )
