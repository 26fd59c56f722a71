"""The gateway's place on this host: its port, its URL, and the token that the URL holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from secrets import token_urlsafe
from typing import Final

import trio

from asyncgrpo_agent import logs
from asyncgrpo_agent.config.sections import Trainer, host_port
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.net.gateway import Backend, Gateway

TOKEN_BYTES: Final = 24


@dataclass(slots=True)
class GatewayDoor:
    """Of one start of a trainer."""

    config: Trainer
    backend: Backend
    instance: str
    token: str = ""  # of this start; "" if none is wanted
    _listeners: list[trio.SocketListener] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token = token_urlsafe(TOKEN_BYTES) if self.config.gateway_token else ""
        logs.hide(self.token)

    async def listen(self) -> str:
        """The URL for TRL, which may be asked from now on. Raises ConfigError."""
        host, port = host_port(self.config.gateway)
        try:
            self._listeners = list(await trio.open_tcp_listeners(port, host=host))
        except OSError as error:
            raise ConfigError(
                f"cannot listen: {error.strerror or error}",
                where=f"trainer.gateway {host}:{port}",
                fix="Stop the program that holds the port, or use port 0",
            ) from error
        bound = self._listeners[0].socket.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{bound}" + (f"/{self.token}" if self.token else "")

    async def serve(self, task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer TRL until cancelled."""
        timeout_s = self.config.request_timeout_s
        gateway = Gateway(
            self.backend, instance=self.instance, request_timeout_s=timeout_s, token=self.token
        )
        await gateway.run(self._listeners, task_status=task_status)
