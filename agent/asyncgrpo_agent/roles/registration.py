"""What trainer and replica share when they dial: the join, the addresses, the dial itself.

Addresses are hints: whatever is dialled must show a certificate of the join's CA, so no address,
announced or configured, can lead an agent to a stranger.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from random import Random
from typing import Final

import msgspec

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.backoff import Backoff
from asyncgrpo_agent.core.join import Join, decode
from asyncgrpo_agent.errors import AgentError, ConfigError, RegistrationRefusedError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net import tls
from asyncgrpo_agent.net.dial import dial, keep_dialled
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.net.sockets import parse_address
from asyncgrpo_agent.store import private_files
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)

MAX_ANNOUNCED: Final = 16
MAX_NAME_CHARS: Final = 64  # of config.kinds.HostName
NEW_JOIN: Final = "Ask the proxy's owner for a new join line"
MAX_PAUSE_S: Final = 8.0  # a proxy that is back has its whole fleet again within ten seconds


def load_join(config: Config, role: str) -> Join:
    """The join of this agent. Raises ConfigError."""
    join = decode(config.join_line)
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
    """The name by which this agent registers. Engines of one host differ in their GPUs."""
    name = config.replica.name or socket.gethostname().split(".")[0]
    if config.role != "replica" or not config.replica.gpus:
        return name
    named = f"{name}-{re.sub('[^A-Za-z0-9._]', '-', config.replica.gpus)}"
    if len(named) <= MAX_NAME_CHARS:
        return named
    return f"{named[:55]}-{hashlib.sha256(named.encode()).hexdigest()[:8]}"


def new_instance() -> str:
    """Random for each process, so that two of the same name are told apart."""
    return secrets.token_hex(8)


class ProxyAddresses:
    """Where this run's proxy may be dialled.

    `link.proxy` alone if it is set; else those of the join, then those that the proxy announced
    when this host last met it, which are kept in the state folder.
    """

    def __init__(self, config: Config, join: Join) -> None:
        self._path = config.state_dir / f"addresses-{join.run}.json"
        self._configured = [config.link.proxy] if config.link.proxy else []
        self._of_join = list(join.addresses)
        self._announced = self._read()

    def choices(self) -> list[str]:
        return self._configured or list(dict.fromkeys([*self._of_join, *self._announced]))

    def remember(self, announced: Iterable[str]) -> None:
        """Replace what was announced before; a proxy that announces nothing changes nothing."""
        usable = _usable(announced)
        if not usable or usable == self._announced:
            return
        self._announced = usable
        try:
            private_files.private_folder(self._path.parent)
            private_files.write_json(self._path, usable)
        except OSError as error:  # the next start has those of the join only
            log.warning("addresses.unsaved", file=str(self._path), reason=str(error))

    def _read(self) -> list[str]:
        try:
            return _usable(msgspec.json.decode(self._path.read_bytes(), type=list[str]))
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("addresses.unreadable", file=str(self._path), reason=str(error))
            return []


def _usable(addresses: Iterable[str]) -> list[str]:
    usable = []
    for address in addresses:
        try:
            parse_address(address)
        except ConfigError:
            log.warning("address.ignored", address=address)
        else:
            usable.append(address)
    return usable[:MAX_ANNOUNCED]


async def stay_registered(
    addresses: ProxyAddresses,
    join: Join,
    *,
    role: str,
    serve: Callable[[Link], Awaitable[None]],
    rng: Random,
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
    backoff = Backoff(rng, cap_s=MAX_PAUSE_S)
    await keep_dialled(addresses.choices, connect, serve, backoff=backoff)


def refusal_error(refused: m.Refused, peer: str) -> AgentError:
    """A refusal as the error that the dial loop understands."""
    return RegistrationRefusedError(
        f"the proxy refused this agent: {refused.reason}",
        permanent=refused.kind in ("permanent", "version"),
        retry_after_s=refused.retry_after_s,
        where=peer,
        fix=refused.fix or (NEW_JOIN if refused.kind == "permanent" else ""),
    )
