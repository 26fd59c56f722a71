"""Client to one vLLM: over its Unix socket, or over what `net.upstream` makes for a URL.

vLLM does not stream here, so the first byte of an answer comes with its last token; cancelling a
call closes its connection, on which vLLM aborts the request. Every failure is an EngineError whose
`status` is vLLM's HTTP status, or 0 if no whole answer came.

All names of vLLM's routes, fields and metrics that the agent relies on are in this module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec
import trio

from asyncgrpo_agent.errors import EngineError
from asyncgrpo_agent.net.exchanges import (
    Answer,
    AnswerTooLargeError,
    ClosedEarlyError,
    Exchanger,
    HeaderLines,
    NoAnswerError,
)
from asyncgrpo_agent.net.unix_exchanger import UnixExchanger

COMPLETION_PATHS: Final = frozenset({"/v1/completions", "/v1/chat/completions"})
_CONTROL_S: Final = 30.0
_LOAD_S: Final = 120.0  # large adapters, and a scheduler that is busy
_SERVER_INFO_S: Final = 120.0  # vLLM runs `pip list` for it
_HEALTH_S: Final = 5.0
MEASURED_TOKENS: Final = 16
_REASON_CHARS: Final = 1000
_STALE_S: Final = 5.0  # after which a request that fails had reached somebody, and may have run

T = TypeVar("T")


class ServedModel(msgspec.Struct, frozen=True):
    """One row of vLLM's model list; `root` of an adapter is the path it was loaded from."""

    id: str
    root: str | None = None
    parent: str | None = None  # None for the base model
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[ServedModel]


class _LogProbs(msgspec.Struct):
    token_logprobs: list[float | None]


class _PromptLogProb(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _LogProbs
    prompt_logprobs: list[dict[str, _PromptLogProb] | None] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _FailureDetail(msgspec.Struct):
    message: str


class _Failure(msgspec.Struct):
    error: _FailureDetail


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """vLLM's own counters. `generated_tokens` counts since vLLM started; `kv_used` is 0 to 1."""

    running: int
    waiting: int
    generated_tokens: int
    kv_used: float


class EngineClient:
    """One vLLM. Connections are opened when needed, so it may come and go under this client."""

    def __init__(
        self,
        where: str,
        exchanger: Exchanger | None = None,
        *,
        headers: HeaderLines = (("host", "vllm"),),
    ) -> None:
        """`where` is the path of its socket, or what errors name if there is an `exchanger`."""
        self.headers = headers  # of every request
        self._where = where
        self._exchanger = exchanger or UnixExchanger(where)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._exchanger.aclose()

    # --- rollouts ----------------------------------------------------------------------------

    async def complete(self, path: str, body: bytes, timeout_s: float) -> tuple[int, str, bytes]:
        """vLLM's status, content type and body, whatever they are."""
        if path not in COMPLETION_PATHS:
            what = f"{path} is not a route that rollouts may use"
            raise self._error(what, status=404, may_have_run=False)
        answer = await self._call("POST", path, body, timeout_s=timeout_s)
        return answer.status, answer.content_type, answer.body

    async def probe(self, model: str, *, timeout_s: float = 60.0) -> None:
        """One seeded token with its log-probability, which is what readiness means.

        vLLM answers /health while its sampler is still compiling, or can never compile.
        """
        request = {
            "model": model,
            "prompt": [0, 1, 2],
            "max_tokens": 1,
            "seed": 0,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = await self._control("POST", "/v1/completions", request, timeout_s=timeout_s)
        choice = self._decode(answer, _Completion).choices[0]
        if len(choice.token_ids) != 1 or choice.logprobs.token_logprobs[0] is None:
            raise self._error("the probe's answer lacks its token or log-probability", status=200)

    async def score(self, model: str, tokens: list[int], *, timeout_s: float = 60.0) -> list[float]:
        """The log-probability of each token but the first, given those before it."""
        request = {
            "model": model,
            "prompt": tokens,
            "max_tokens": 1,
            "seed": 0,
            "logprobs": 0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        }
        answer = await self._control("POST", "/v1/completions", request, timeout_s=timeout_s)
        rows = self._decode(answer, _Completion).choices[0].prompt_logprobs or []
        scores = [
            row[str(token)].logprob
            for token, row in zip(tokens, rows, strict=False)
            if row and str(token) in row
        ]
        if len(scores) != len(tokens) - 1:
            raise self._error("its answer lacks log-probabilities of the prompt", status=200)
        return scores

    async def measure(self, model: str, *, timeout_s: float = 60.0) -> float:
        """Tokens a second of one short completion, alone; 0 if it takes too long to tell."""
        request = {
            "model": model,
            "prompt": [0, 1, 2],
            "max_tokens": MEASURED_TOKENS,
            "ignore_eos": True,
            "seed": 0,
            "logprobs": 0,
            "return_token_ids": True,
        }
        began = trio.current_time()
        with trio.move_on_after(timeout_s):
            answer = await self._control("POST", "/v1/completions", request, timeout_s=math.inf)
            tokens = len(self._decode(answer, _Completion).choices[0].token_ids)
            return tokens / max(trio.current_time() - began, 1e-3)
        return 0.0

    # --- adapters ----------------------------------------------------------------------------

    async def models(self) -> list[ServedModel]:
        """The base model, then the adapters that vLLM holds."""
        return self._decode(await self._control("GET", "/v1/models"), _ModelList).data

    async def load_adapter(self, name: str, path: str) -> None:
        """`path` must be absolute: vLLM takes an unknown relative one for a model hub's id.

        `status` of the error: 400 for a name that is loaded already, 404 for a path without an
        adapter, 500 for one that does not parse.
        """
        if not path.startswith("/"):
            raise ValueError(f"adapter path {path!r} is not absolute")
        request = {"lora_name": name, "lora_path": path, "load_inplace": False}
        await self._control("POST", "/v1/load_lora_adapter", request, timeout_s=_LOAD_S)

    async def unload_adapter(self, name: str) -> None:
        """`status` of the error is 404 for a name that is not loaded."""
        await self._control("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    # --- state -------------------------------------------------------------------------------

    async def health(self) -> bool:
        """Whether vLLM says that it is alive; see `probe` for whether it works."""
        try:
            answer = await self._call("GET", "/health", b"", timeout_s=_HEALTH_S)
        except EngineError:
            return False
        return answer.status == 200

    async def version(self) -> str:
        answer = await self._control("GET", "/version")
        return self._decode(answer, dict[str, str]).get("version", "")

    async def server_info(self) -> dict[str, Any]:
        """vLLM's resolved configuration, a tree of JSON."""
        path = "/server_info?config_format=json"
        answer = await self._control("GET", path, timeout_s=_SERVER_INFO_S)
        return self._decode(answer, dict[str, Any])

    async def is_paused(self) -> bool:
        """Whether somebody has paused generation; agents never do."""
        answer = await self._control("GET", "/is_paused")
        return self._decode(answer, dict[str, bool])["is_paused"]

    async def counters(self) -> Counters:
        text = (await self._control("GET", "/metrics")).body.decode()
        return Counters(
            running=int(sum(self._samples(text, "vllm:num_requests_running"))),
            waiting=int(sum(self._samples(text, "vllm:num_requests_waiting"))),
            generated_tokens=int(sum(self._samples(text, "vllm:generation_tokens_total"))),
            kv_used=max(self._samples(text, "vllm:kv_cache_usage_perc")),
        )

    # --- HTTP --------------------------------------------------------------------------------

    async def _control(
        self,
        method: str,
        path: str,
        request: dict[str, Any] | None = None,
        *,
        timeout_s: float = _CONTROL_S,
    ) -> Answer:
        """A call that must be answered 200."""
        body = b"" if request is None else msgspec.json.encode(request)
        answer = await self._call(method, path, body, timeout_s=timeout_s)
        if answer.status != 200:
            reason = failure_message(answer.body)
            raise self._error(f"{path} answered {answer.status}: {reason}", status=answer.status)
        return answer

    async def _call(self, method: str, path: str, body: bytes, *, timeout_s: float) -> Answer:
        """One exchange, repeated once if a kept connection turns out to have been closed."""
        headers = [*self.headers, ("content-type", "application/json")]
        began = trio.current_time()
        try:
            with trio.fail_after(timeout_s):
                try:
                    return await self._exchanger.exchange(method, path, headers, body)
                except ClosedEarlyError as error:
                    if error.fresh or trio.current_time() - began > _STALE_S:
                        raise
                    return await self._exchanger.exchange(method, path, headers, body)
        except trio.TooSlowError as error:
            raise self._error(f"{path} was not answered within {timeout_s:g} s") from error
        except AnswerTooLargeError as error:
            raise self._error(error.reason) from error
        except NoAnswerError as error:
            what = f"{path} failed: {error.reason}"
            raise self._error(what, may_have_run=error.sent) from error

    # --- answers -----------------------------------------------------------------------------

    def _decode(self, answer: Answer, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self._error(
                f"an answer that is not vLLM's: {error}", status=answer.status
            ) from error

    def _samples(self, text: str, name: str) -> list[float]:
        """All values of one metric, over its labels."""
        lines = [
            line
            for line in text.splitlines()
            if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " ")
        ]
        try:
            # A label's value may hold spaces, so the number is looked for behind the labels.
            values = [float(line[len(name) :].rpartition("}")[2].split()[0]) for line in lines]
        except (ValueError, IndexError) as error:
            raise self._error(f"metric {name} does not parse", status=200) from error
        if not values:
            fix = "Is this a version of vLLM that the agent knows, with its statistics on?"
            raise EngineError(f"/metrics lacks {name}", status=200, where=self._where, fix=fix)
        return values

    def _error(self, what: str, *, status: int = 0, may_have_run: bool = True) -> EngineError:
        return EngineError(what, status=status, may_have_run=may_have_run, where=self._where)


def failure_message(body: bytes) -> str:
    """The start of vLLM's words in an error body, or of whatever came.

    vLLM may repeat a whole prompt in them, which fits no message and belongs in no log.
    """
    try:
        return msgspec.json.decode(body, type=_Failure).error.message[:_REASON_CHARS]
    except (msgspec.MsgspecError, RecursionError):
        return body[:_REASON_CHARS].decode("utf-8", "replace")
