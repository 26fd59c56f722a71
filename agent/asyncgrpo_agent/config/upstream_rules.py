"""Rules of a proxy that is within a trainer, and of upstreams. Pure, as `config.rules`."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import SplitResult, urlsplit

from asyncgrpo_agent.config.keys import Problem
from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.config.upstreams import Upstream

_UNVERIFIED: Final = (
    "adapters reach it by a mount of its own, and nobody there checks them: that must be allowed"
)


def name_of(upstream: Upstream) -> str:
    """As the fleet knows it."""
    return upstream.name or urlsplit(upstream.url).netloc


def embedded_problems(config: Config) -> Iterator[Problem]:
    """A proxy within a trainer makes the trainer's join itself."""
    if config.trainer.embed_proxy and config.role != "trainer":
        what = f"role {config.role} cannot have a proxy within"
        yield _at(config, "trainer.embed_proxy", what, "Use it with --role trainer")
    if config.role != "trainer" or not config.trainer.embed_proxy:
        return
    if not config.run.name:
        fix = "Name the run: --run NAME; its folder in the bucket has that name"
        yield _at(config, "run.name", "missing, and an embedded proxy needs it", fix)
    for path in ("link.join", "link.proxy"):
        if config.value(path):
            fix = "Leave it out, or leave --embed-proxy out to join a proxy elsewhere"
            yield _at(config, path, "useless with trainer.embed_proxy", fix)


def upstream_problems(config: Config) -> Iterator[Problem]:
    """All that is wrong with the tables [[proxy.upstream]]."""
    upstreams = config.proxy.upstream
    if upstreams and config.role == "trainer" and not config.trainer.embed_proxy:
        what = "a trainer without a proxy of its own reaches no servers"
        yield _at(config, "proxy.upstream", what, "Add --embed-proxy, or move it to the proxy")
        return
    for number, upstream in enumerate(upstreams, 1):
        for rule in _RULES:
            for key, what, fix in rule(config, upstream):
                path = f"proxy.upstream[{number}].{key}"
                origin = config.origins.get("proxy.upstream", "")
                yield Problem(path=path, what=what, fix=fix, origin=origin)
    named = Counter((upstream.run, name_of(upstream)) for upstream in upstreams if upstream.url)
    for (_, name), count in named.items():
        if count > 1:
            what, fix = f"{count} upstreams are called {name!r}", "Give each a name of its own"
            yield _at(config, "proxy.upstream", what, fix)


def _at(config: Config, path: str, what: str, fix: str = "") -> Problem:
    return Problem(path=path, what=what, fix=fix, origin=config.origins.get(path, ""))


_Fault = tuple[str, str, str]  # key, what, fix


def _url(_: Config, upstream: Upstream) -> Iterator[_Fault]:
    if what := url_fault(upstream.url):
        yield "url", what, "Write https://HOST[:PORT][/PATH]"


def url_fault(url: str) -> str:
    """Why this is no URL of an upstream; "" if it is one. A password in it is not repeated."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "not a URL"
    if not url or not host or port == 0 or any(c.isspace() for c in url):
        return "missing" if not url else "not a URL with a host"
    if parts.username is not None:
        return "holds a user or a password; a token belongs into token_file"
    if parts.query or parts.fragment:
        return "has a query or a fragment"
    if parts.path.rstrip("/").endswith("/v1"):
        return "ends in /v1, which the proxy adds itself"
    if parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(parts)):
        return ""
    return f"is {parts.scheme or 'no scheme'}://, where everybody on the way could read the token"


def _is_loopback(parts: SplitResult) -> bool:
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return parts.hostname == "localhost"


def _token(_: Config, upstream: Upstream) -> Iterator[_Fault]:
    if upstream.token_file and upstream.token_env:
        yield "token_env", "useless with token_file", "Leave one of the two out"
    elif not (upstream.token_file or upstream.token_env) and upstream.url.startswith("https"):
        yield "token_file", "missing", "Name a file with the bearer token, or set token_env"


def _bucket_path(_: Config, upstream: Upstream) -> Iterator[_Fault]:
    if not PurePosixPath(upstream.bucket_path).is_absolute():
        what = f"expected an absolute path, got {upstream.bucket_path!r}"
        yield "bucket_path", what, "Say where the bucket is mounted on that server"


def _trust(_: Config, upstream: Upstream) -> Iterator[_Fault]:
    if not upstream.allow_unverified:
        yield "allow_unverified", _UNVERIFIED, "Set it to true, or run an agent there"


def _run(config: Config, upstream: Upstream) -> Iterator[_Fault]:
    if config.role == "proxy" and not upstream.run:
        yield "run", "missing", "Name the run that it serves"
    if config.role == "trainer" and upstream.run not in ("", config.run.name):
        what = f"is {upstream.run!r}, but this trainer's run is {config.run.name!r}"
        yield "run", what, "Leave it out"


_RULES: Final[tuple[Callable[[Config, Upstream], Iterator[_Fault]], ...]] = (
    _url,
    _token,
    _bucket_path,
    _trust,
    _run,
)
