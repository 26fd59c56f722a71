"""What trainer and replica share when they dial: the join, the addresses, the dial itself."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.backoff import Backoff
from asyncgrpo_agent.core.join import Join, decode
from asyncgrpo_agent.errors import AgentError, ConfigError, RegistrationRefusedError
from asyncgrpo_agent.net import tls
from asyncgrpo_agent.net.dial import dial, keep_dialled
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.wire import messages as m


def load_join(config: Config, role: str) -> Join:
    """The join of this agent, from $ASYNCGRPO_JOIN or its file. Raises ConfigError."""
    line = config.join_line
    if not line:
        path = Path(config.link.join)
        try:
            line = path.read_text()
        except OSError as error:
            raise ConfigError(
                f"the join file cannot be read: {error.strerror}",
                where=str(path),
                fix="Make one on the proxy: asyncgrpo-agent token create",
            ) from error
    join = decode(line.strip())
    if join.role != role:
        raise ConfigError(
            f"the join is for a {join.role}, not for a {role}",
            where="link.join",
            fix=f"Make one on the proxy: asyncgrpo-agent token create --role {role}",
        )
    if config.run.name and config.run.name != join.run:
        raise ConfigError(
            f"is {config.run.name!r}, but the join is for run {join.run!r}", where="run.name"
        )
    return join


def host_name(config: Config) -> str:
    return config.replica.name or socket.gethostname().split(".")[0]


def new_instance() -> str:
    """Random for each process, so that two of the same name are told apart."""
    return secrets.token_hex(8)


async def stay_registered(
    config: Config, join: Join, *, role: str, serve: Callable[[Link], Awaitable[None]], rng: Random
) -> None:
    """Keep one link to the proxy for ever; raises only what dialling again cannot mend."""
    alpn = m.ALPN_REVERSED if role == "replica" else m.ALPN_FORWARD
    connect = partial(
        dial,
        context=tls.client_context(join.ca_der, alpn),
        server_name=tls.SERVER_NAME,
        alpn=alpn,
        client=role == "trainer",
        environ=dict(os.environ),
    )
    addresses = [config.link.proxy] if config.link.proxy else list(join.addresses)
    await keep_dialled(lambda: addresses, connect, serve, backoff=Backoff(rng))


def refusal_error(refused: m.Refused, peer: str) -> AgentError:
    """A refusal as the error that the dial loop understands."""
    return RegistrationRefusedError(
        f"the proxy refused this agent: {refused.reason}",
        permanent=refused.kind in ("permanent", "version"),
        retry_after_s=refused.retry_after_s,
        where=peer,
        fix="Ask the proxy's owner for a new join line" if refused.kind == "permanent" else "",
    )
