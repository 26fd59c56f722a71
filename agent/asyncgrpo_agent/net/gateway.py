"""What TRL takes for one vLLM server: TRL's HTTP contract on localhost, over a `Backend`.

The gateway alone parses requests. It swaps TRL's adapter names (`trl-policy-v7`, which mean other
bytes after a restart) for physical ones and back, and puts what routing needs into an envelope.

Invariants: a name that is no adapter of the run is refused, never answered by the base model, and a
request without a name likewise, for vLLM would answer it from the base model. A load call is
answered 200 or 500, never 404, which TRL reports as a switched-off feature. Only loopback hosts and
no browser may ask, and, where there is a token, only with it as the first part of the path: TRL
sends no headers of ours, but appends its paths to the URL that it was given. Without it any user of
this host could have a folder of theirs signed and published.

Every error says which hop made it and whether the request may have run (`net.rollouts`).

It must not decide anything about the fleet or the bucket: that is the backend's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from hmac import compare_digest
from itertools import count
from typing import Any, Final, Protocol, TypeVar

import msgspec
import trio
from msgspec import structs

from asyncgrpo_agent.core import completions
from asyncgrpo_agent.core.contract import LOGPROBS_MODE
from asyncgrpo_agent.errors import AgentError, StoreError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net import http1, rollouts
from asyncgrpo_agent.net.foreign_requests import foreign_fault
from asyncgrpo_agent.net.http1 import Request, Response
from asyncgrpo_agent.net.rollouts import TRAINER_AGENT, CompletedRollout
from asyncgrpo_agent.wire import messages

EVENT_PATH: Final = "/.agrpo/event"
PRIORITY_HEADER: Final = "x-agrpo-priority"  # "low": an evaluation's, for which nobody waits
MAX_BODY_BYTES: Final = 16 << 20
# Retired and late versions load on demand beside TRL's own; TRL checks against what is left.
_RESERVED_LORAS: Final = 2

T = TypeVar("T")
log = Log(__name__)


class Backend(Protocol):
    """The run behind the gateway; the trainer role implements it."""

    def fleet(self) -> messages.Fleet | None:
        """None until the proxy has told."""

    def base_model(self) -> str:
        """The name that the fleet serves the base model under."""

    async def publish(self, trl_name: str, local_path: str) -> None:
        """Returns when TRL may go on. StoreError only if the commit cannot be written."""

    async def retire(self, trl_name: str) -> None:
        """TRL no longer names this adapter in new requests; unknown names are no error."""

    def physical_name(self, trl_name: str) -> str | None:
        """The physical name of a TRL name that is live or still nameable."""

    async def complete(self, rollout: messages.Rollout, body: bytes) -> CompletedRollout:
        """Have the fleet answer `body`, which names `rollout.model`."""

    def observe(self, event: dict[str, Any]) -> None:
        """An event that the engine-side child reported."""


class _LoadRequest(msgspec.Struct):
    lora_name: str
    lora_path: str


class _UnloadRequest(msgspec.Struct):
    lora_name: str


class _RefusedRequestError(Exception):
    """The body is not what its route takes, or names what does not exist. Nothing was done."""

    def __init__(self, reason: str, *, status: int = 400, kind: str = "BadRequestError") -> None:
        super().__init__(reason)
        self.status = status
        self.kind = kind


class Gateway:
    """TRL's vLLM. `instance` makes rollout ids unique among all starts of all trainers."""

    def __init__(
        self, backend: Backend, *, instance: str, request_timeout_s: float, token: str = ""
    ) -> None:
        self._backend = backend
        self._prefix = f"/{token}" if token else ""
        self._instance = instance
        self._request_timeout_s = request_timeout_s
        self._numbers = count(1)
        self._listed: dict[str, str] = {}  # TRL name -> path, as vLLM's model list would show
        self._routes: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/get_world_size"): self._world_size,
            ("POST", "/pause"): self._nothing_to_do,
            ("POST", "/resume"): self._nothing_to_do,
            ("POST", "/v1/load_lora_adapter"): self._load,
            ("POST", "/v1/unload_lora_adapter"): self._unload,
            ("POST", "/v1/completions"): self._complete,
            ("POST", "/v1/chat/completions"): self._complete,
            ("POST", EVENT_PATH): self._event,
        }

    async def run(
        self,
        listeners: Sequence[trio.abc.Listener[trio.SocketStream]],
        *,
        task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve on `listeners`, which must be loopback or Unix sockets, until cancelled."""
        await http1.serve(listeners, self.handle, hop=TRAINER_AGENT, task_status=task_status)

    async def handle(self, request: Request) -> Response:
        if fault := foreign_fault(request):
            return _error(403, fault, "ForbiddenError")
        if self._prefix:
            first, _, rest = request.path.removeprefix("/").partition("/")
            if not compare_digest(f"/{first}".encode(), self._prefix.encode()):
                what = "the path must begin with the gateway's token (see trainer.gateway_token)"
                return _error(403, what, "ForbiddenError")
            request = structs.replace(request, path=f"/{rest}")
        route = self._routes.get((request.method, request.path))
        if route is None:
            return _error(404, f"no route {request.method} {request.path}", "NotFoundError")
        try:
            return await route(request)
        except _RefusedRequestError as error:
            log.warning(
                "request.refused",
                path=request.path,
                hop=TRAINER_AGENT,
                may_have_run=False,
                status=error.status,
                reason=str(error),
            )
            return _error(error.status, str(error), error.kind)

    # --- what TRL asks before it starts ------------------------------------------------------

    async def _health(self, _: Request) -> Response:
        fleet = self._backend.fleet()
        if fleet is None:
            return _unready("the proxy has not been reached yet")
        if fleet.ready < 1:
            return _unready(f"none of {fleet.registered} registered replicas is ready")
        return http1.json_response(200, {"ready": fleet.ready})

    async def _models(self, _: Request) -> Response:
        engine = self._engine()
        if engine is None:
            return _unready("no replica has told what it serves yet")
        base = self._backend.base_model()
        rows = [_model_row(base, root=base, parent=None, max_model_len=engine.max_model_len)]
        rows += [
            _model_row(name, root=path, parent=base, max_model_len=None)
            for name, path in self._listed.items()
        ]
        return http1.json_response(200, {"object": "list", "data": rows})

    async def _server_info(self, _: Request) -> Response:
        engine = self._engine()
        if engine is None:
            return _unready("no replica has told what it serves yet")
        lora = {
            "max_loras": engine.max_loras - _RESERVED_LORAS,
            "max_lora_rank": engine.max_lora_rank,
        }
        config = {
            "model_config": {
                "dtype": engine.dtype,
                "max_model_len": engine.max_model_len,
                "logprobs_mode": LOGPROBS_MODE,
            },
            "lora_config": lora,
            "parallel_config": {"data_parallel_size": 1},
        }
        return http1.json_response(200, {"vllm_config": config})

    async def _world_size(self, _: Request) -> Response:
        return http1.json_response(200, {"world_size": 1})

    # --- syncs -------------------------------------------------------------------------------

    async def _nothing_to_do(self, _: Request) -> Response:
        """Versioned adapters need no pause: replicas keep decoding."""
        return http1.json_response(200, {})

    async def _load(self, request: Request) -> Response:
        load = _decode(request.body, _LoadRequest)
        if not load.lora_name or not load.lora_path:
            raise _RefusedRequestError("Both 'lora_name' and 'lora_path' must be provided.")
        try:
            await self._backend.publish(load.lora_name, load.lora_path)
        except StoreError as error:
            log.error("adapter.publish_failed", adapter=load.lora_name, error=error)
            return _error(500, str(error), type(error).__name__)
        self._listed[load.lora_name] = load.lora_path
        return _text(f"Success: LoRA adapter '{load.lora_name}' added successfully.")

    async def _unload(self, request: Request) -> Response:
        name = _decode(request.body, _UnloadRequest).lora_name
        await self._backend.retire(name)
        self._listed.pop(name, None)
        return _text(f"Success: LoRA adapter '{name}' removed successfully.")

    # --- rollouts ----------------------------------------------------------------------------

    async def _complete(self, request: Request) -> Response:
        try:
            call = completions.parse(request.body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _RefusedRequestError(str(error)) from error
        if call.stream:
            raise _RefusedRequestError('streaming is not supported: leave out "stream": true')
        model = self._model_for(call.model)
        if model is None:
            message = f"The model `{call.model}` does not exist: it is no adapter of this run."
            raise _RefusedRequestError(message, status=404, kind="NotFoundError")
        body = call.body_for(model)
        if len(body) > MAX_BODY_BYTES:  # its physical name is longer than TRL's
            raise _RefusedRequestError(f"the body is over the limit of {MAX_BODY_BYTES} bytes")
        rollout = self._envelope(request, model, call)
        try:
            answer = await self._backend.complete(rollout, body)
        except AgentError as error:
            status = 503 if error.retryable else 500
            answer = CompletedRollout(status=status, hop="gateway", reason=str(error))
        if answer.status >= 400:
            return rollouts.error_response(rollout.id, answer)
        return Response(
            status=answer.status,
            content_type=answer.content_type,
            body=completions.with_model(
                answer.body, old=model, new=call.model, replica_class=answer.replica_class
            ),
        )

    def _model_for(self, name: str) -> str | None:
        if name == self._backend.base_model():
            return name
        return self._backend.physical_name(name)

    def _envelope(
        self, request: Request, model: str, call: completions.CompletionRequest
    ) -> messages.Rollout:
        engine = self._engine()
        room = (engine.max_model_len if engine else 0) - call.prompt_tokens
        return messages.Rollout(
            id=f"{self._instance}-{next(self._numbers)}",
            path=request.path,
            model=model,
            blocks=call.blocks_for(model),
            prompt_tokens=call.prompt_tokens,
            max_tokens=max(room, 1) if call.max_tokens is None else call.max_tokens,
            deadline_s=self._request_timeout_s,
            is_low=request.headers.get(PRIORITY_HEADER) == "low",
        )

    # --- the engine-side child ---------------------------------------------------------------

    async def _event(self, request: Request) -> Response:
        self._backend.observe(_decode(request.body, dict[str, Any]))
        return http1.json_response(200, {})

    def _engine(self) -> messages.EngineFacts | None:
        fleet = self._backend.fleet()
        return None if fleet is None else fleet.engine


def _model_row(
    name: str, *, root: str, parent: str | None, max_model_len: int | None
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "asyncgrpo-agent",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
    }


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _RefusedRequestError(str(error)) from error


def _text(text: str) -> Response:
    return Response(status=200, content_type="text/plain; charset=utf-8", body=text.encode())


def _error(status: int, message: str, kind: str) -> Response:
    return http1.error_response(status, message, kind=kind, hop=TRAINER_AGENT)


def _unready(reason: str) -> Response:
    return _error(503, reason, "ServiceUnavailableError")
