"""A trainer with its proxy in the same process, for a run that one command starts.

Nothing here is a short cut: the trainer dials the proxy over TLS with a join of its own, so that
replicas may dial in beside it, and that the two can be taken apart later. Keys, token and attempts
are kept in the state folder and serve the next start, too.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio
from msgspec import structs

from asyncgrpo_agent import __version__
from asyncgrpo_agent.config.sections import Config, host_port
from asyncgrpo_agent.core.join import decode
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.sockets import join_address
from asyncgrpo_agent.roles import trainer
from asyncgrpo_agent.roles.proxy import Proxy
from asyncgrpo_agent.store import identity, private_files, tokens

log = Log(__name__)

LOOPBACK: Final = "127.0.0.1:0"
JOIN_FILE: Final = "embedded.join"
LEAVE_S: Final = 5.0


def run(config: Config) -> int:
    """Serve and train until the run ends or a signal comes. The result is the exit code."""
    return trio.run(_main, config)


async def _main(config: Config) -> int:
    if "proxy.listen" not in config.origins:
        heard = structs.replace(config.proxy, listen=LOOPBACK)
        config = dataclasses.replace(config, proxy=heard)
    identity.ensure_run(config.state_dir, config.run.name)
    proxy = Proxy(config)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(proxy.serve)
        log.info("proxy.listening", address=address, version=__version__)
        try:
            code = await trainer.train(_joined(config, address), proxy.site.metrics.source)
        finally:
            with trio.move_on_after(LEAVE_S, shield=True):
                await proxy.leave()
        nursery.cancel_scope.cancel()
    return code


def _joined(config: Config, address: str) -> Config:
    """With the join of this very proxy. Raises ConfigError."""
    dialled = _dialled(address)
    # The site's HTTP proxy is for upstreams and knows nothing of this host's own ports.
    excepted = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    os.environ["no_proxy"] = ",".join(filter(None, [excepted, dialled]))
    link = structs.replace(config.link, proxy=dialled)
    line = _join_line(config.state_dir, config.run.name, dialled)
    return dataclasses.replace(config, link=link, join_line=line)


def _dialled(address: str) -> str:
    """How this host reaches what listens at `address`."""
    host, port = host_port(address)
    with suppress(ValueError):  # a name is dialled as it is
        ip = ipaddress.ip_address(host)
        if ip.is_unspecified:
            host = "127.0.0.1" if ip.version == 4 else "::1"
    return join_address(host, port)


def _join_line(state_dir: Path, run: str, address: str) -> str:
    """That of an earlier start as long as its token is good, else a new one."""
    file = state_dir / JOIN_FILE
    now_unix_s = time.time()  # noqa: TID251 - a role reads the clock
    with suppress(FileNotFoundError, ConfigError):  # ConfigError: cut when a start was killed
        line = private_files.read_secret(file).decode("ascii", "replace").strip()
        join = decode(line)
        known = tokens.find_token(state_dir, join.token)
        if join.run == run and known is not None and not known.ended(now_unix_s):
            return line
    line = identity.create_join(
        state_dir, role="trainer", run=run, addresses=[address], now_unix_s=now_unix_s
    )
    private_files.write(file, line.encode() + b"\n")
    return line
