"""Completion bodies: what the gateway reads of a request, and the `model` it swaps in and out.

Fields other than `model` are carried as the raw JSON they came in, byte for byte; numbers are never
re-rendered. An answer of megabytes is not parsed: vLLM writes `model` near its start.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import msgspec

from asyncgrpo_agent.core import prompts

CLASS_FIELD: Final = "agrpo_class"  # of an answer, as asyncgrpo_engine/ratios.py reads it
_MODEL_WITHIN_BYTES: Final = 1024


class _Known(msgspec.Struct):
    """The fields that decide where a request goes. All others are vLLM's business."""

    model: str
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None


class _KnownIds(msgspec.Struct):
    """The same of a request whose prompt is token ids, such as TRL's: read in one go."""

    model: str
    prompt: list[int]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None


_known_decoder = msgspec.json.Decoder(_Known)
_ids_decoder = msgspec.json.Decoder(_KnownIds)
_prompt_decoder: Final[msgspec.json.Decoder[prompts.Prompt]] = msgspec.json.Decoder(prompts.Prompt)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A completion or chat request. `max_tokens` is None where the client left it to vLLM."""

    model: str
    tokens: list[int]  # of a single token-id prompt; empty for text and chat
    prompt_tokens: int
    max_tokens: int | None
    stream: bool
    fields: dict[str, msgspec.Raw]

    def body_for(self, model: str) -> bytes:
        """The request's body, naming `model`."""
        return msgspec.json.encode({**self.fields, "model": model})

    def blocks_for(self, model: str) -> list[int]:
        """Block hashes of the prompt under `model`."""
        return prompts.block_hashes(model, self.tokens)


def parse(body: bytes) -> CompletionRequest:
    """Raises msgspec.MsgspecError for a body that is no completion request, or RecursionError for
    one that is nested without end."""
    known: _Known | _KnownIds
    try:
        known = _ids_decoder.decode(body)
        tokens, prompt_tokens = known.prompt, len(known.prompt)
    except msgspec.ValidationError:
        known = _known_decoder.decode(body)
        tokens, prompt_tokens = _read_prompt(known)
    max_tokens = known.max_completion_tokens
    return CompletionRequest(
        model=known.model,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        max_tokens=known.max_tokens if max_tokens is None else max_tokens,
        stream=bool(known.stream),
        fields=_fields_decoder.decode(body),
    )


def _read_prompt(known: _Known) -> tuple[list[int], int]:
    """The token ids of a single prompt given as such, and how many tokens there are in all."""
    prompt = _prompt_decoder.decode(known.prompt)
    chat_tokens = prompts.estimate_tokens(len(bytes(known.messages)))
    return prompts.token_ids(prompt), prompts.count_tokens(prompt) + chat_tokens


def with_model(body: bytes, *, old: str, new: str, replica_class: str = "") -> bytes:
    """The answer `body`, naming `new` where it named `old`; unchanged where it does not.

    With a `replica_class` it names that too, beside the model.
    """
    named = {"model": new, CLASS_FIELD: replica_class} if replica_class else {"model": new}
    if match := _field_naming(old).search(body, 0, _MODEL_WITHIN_BYTES):
        rest = memoryview(body)[match.end() :]
        return b"".join((body[: match.start()], msgspec.json.encode(named)[1:-1], rest))
    return _with_model_parsed(body, old, named)


@lru_cache(maxsize=64)
def _field_naming(model: str) -> re.Pattern[bytes]:
    # Quotes inside JSON strings are escaped, so this can only match a key and its value.
    return re.compile(rb'"model"\s*:\s*' + re.escape(msgspec.json.encode(model)))


def _with_model_parsed(body: bytes, old: str, named: dict[str, str]) -> bytes:
    try:
        fields = _fields_decoder.decode(body)
        model = msgspec.json.decode(fields.get("model", b"null"))
    except (msgspec.MsgspecError, RecursionError):
        return body  # no JSON object: an error text of vLLM or of something before it
    return msgspec.json.encode({**fields, **named}) if model == old else body
