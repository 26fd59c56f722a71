"""Completion bodies: what the gateway reads of a request, and the `model` it swaps in and out.

Fields other than `model` are carried as the raw JSON they came in, byte for byte; numbers are never
re-rendered. An answer of megabytes is not parsed: vLLM writes `model` near its start.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import msgspec

from asyncgrpo_agent.core import prompts

CLASS_FIELD: Final = "agrpo_class"  # of an answer, as asyncgrpo_engine/ratios.py reads it
REMEMBERED_PROMPTS: Final = 32
REMEMBERED_BYTES: Final = 32 << 10  # of one, as JSON: all together are a few megabytes at most
_MODEL_WITHIN_BYTES: Final = 1024


class _Known(msgspec.Struct):
    """The fields that decide where a request goes. All others are vLLM's business."""

    model: str
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None


_known_decoder = msgspec.json.Decoder(_Known)
_prompt_decoder: Final[msgspec.json.Decoder[prompts.Prompt]] = msgspec.json.Decoder(prompts.Prompt)
_ids_decoder = msgspec.json.Decoder(list[int])  # TRL's prompts, at a third of the time
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class _Prompt:
    """A prompt that was read, and its blocks under the model that was last asked for."""

    tokens: list[int]  # of a single token-id prompt; empty for text and chat
    count: int
    model: str = ""
    blocks: list[int] = field(default_factory=list)

    def blocks_under(self, model: str) -> list[int]:
        if model != self.model:
            self.model, self.blocks = model, prompts.block_hashes(model, self.tokens)
        return self.blocks


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A completion or chat request. `max_tokens` is None where the client left it to vLLM."""

    model: str
    prompt: _Prompt
    prompt_tokens: int  # with those of chat messages
    max_tokens: int | None
    stream: bool
    body: bytes

    def body_for(self, model: str) -> bytes:
        """The request's body, naming `model`."""
        named = _field_naming(self.model).match(self.body, 1)  # where TRL's begins
        if named and self.body[:1] == b"{" and self.body.count(b'"model"') == 1:
            rest = memoryview(self.body)[named.end() :]
            return b"".join((b'{"model":', msgspec.json.encode(model), rest))
        return msgspec.json.encode({**_fields_decoder.decode(self.body), "model": model})

    def blocks_for(self, model: str) -> list[int]:
        """Block hashes of the prompt under `model`; not to be changed."""
        return self.prompt.blocks_under(model)


def parse(body: bytes) -> CompletionRequest:
    """Raises msgspec.MsgspecError for a body that is no completion request, or RecursionError for
    one that is nested without end."""
    known = _known_decoder.decode(body)
    raw = bytes(known.prompt)
    prompt = _remembered(raw) if len(raw) <= REMEMBERED_BYTES else _read_prompt(raw)
    max_tokens = known.max_completion_tokens
    return CompletionRequest(
        model=known.model,
        prompt=prompt,
        prompt_tokens=prompt.count + prompts.estimate_tokens(len(bytes(known.messages))),
        max_tokens=known.max_tokens if max_tokens is None else max_tokens,
        stream=bool(known.stream),
        body=body,
    )


def _read_prompt(raw: bytes) -> _Prompt:
    try:
        tokens = _ids_decoder.decode(raw)
        return _Prompt(tokens, len(tokens))
    except msgspec.ValidationError:
        prompt = _prompt_decoder.decode(raw)
        return _Prompt(prompts.token_ids(prompt), prompts.count_tokens(prompt))


# The rollouts of a group come one after the other, with one prompt.
_remembered = lru_cache(maxsize=REMEMBERED_PROMPTS)(_read_prompt)


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
