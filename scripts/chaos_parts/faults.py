"""How each kind of fault is done to a fleet, and undone.

A kind has a beginning, and an end that says whether it is over: one that waits for an agent to go
in good order is asked again. Nothing here decides when or where; the schedule did.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fleet_world import PROXY, TRAINERS, World
from plants import Plants
from schedule import Fault

from asyncgrpo_agent.core.join import decode
from asyncgrpo_agent.store.tokens import token_id
from fakes.fleet import ROOT, Agent
from fakes.relay import Relay

DRAIN_S: Final = 30.0
FILL_BYTES: Final = 1 << 20
SLOW_S: Final = 0.15

# Words of a command line by the kind of process; a launcher's has its program's as well.
WORDS: Final = {
    "vllm": "chaos_engine",
    "trl": "chaos_trl",
    "mount-worker": "mount-worker",
}


@dataclass(slots=True)
class Faults:
    """Done to `world`."""

    world: World
    plants: Plants
    trl_ends: list[float] = field(default_factory=list)
    """When TRL was made to die, as time.time says."""
    _ending_since: dict[int, float] = field(default_factory=dict)
    _going: dict[int, Agent] = field(default_factory=dict)
    _replaced: dict[int, str | None] = field(default_factory=dict)
    _tokens: int = 0
    _upgrades: int = 0

    def begin(self, fault: Fault) -> None:
        self._of(fault)[0](fault)

    def end(self, fault: Fault) -> bool:
        """Whether it is over."""
        return self._of(fault)[1](fault) is not False

    def _of(self, fault: Fault) -> tuple[Callable[[Fault], object], Callable[[Fault], object]]:
        what, _, rest = fault.kind.partition("-")
        if what == "kill" and rest in WORDS:
            return self._kill_process, _nothing
        if what == "kill":
            return self._kill_agent, self._return
        if what == "stop":
            return self._freeze, self._thaw
        name = fault.kind.replace("-", "_")
        return getattr(self, f"_{name}"), getattr(self, f"_end_{name}", _nothing)

    # --- processes ---------------------------------------------------------------------------

    def _pids(self, fault: Fault) -> list[int]:
        """Of the process that the fault is about, on its host."""
        rest = fault.kind.partition("-")[2]
        host = self.world.host_of(fault.host)
        if rest not in WORDS:
            return [self.world.agents[host].process.pid]
        return [
            pid
            for pid, line in self.world.hosts[host].processes().items()
            if any(WORDS[rest] in word for word in line[:6]) and "asyncgrpo-launcher" not in line
        ]

    def _kill_process(self, fault: Fault) -> None:
        if fault.kind == "kill-trl":
            self.trl_ends.append(time.time())
        _signal(self._pids(fault), signal.SIGKILL)

    def _kill_agent(self, fault: Fault) -> None:
        host = self.world.host_of(fault.host)
        self.world.keep_away(host)
        if host in TRAINERS:
            self.trl_ends.append(time.time())
        self.world.agents[host].process.kill()

    def _return(self, fault: Fault) -> None:
        self.world.come_back(self.world.host_of(fault.host))

    def _freeze(self, fault: Fault) -> None:
        _signal(self._pids(fault), signal.SIGSTOP)

    def _thaw(self, fault: Fault) -> None:
        _signal(self._pids(fault), signal.SIGCONT)

    # --- coming and going --------------------------------------------------------------------

    def _leave(self, fault: Fault) -> None:
        host = self.world.host_of(fault.host)
        self.world.keep_away(host)
        self._going[fault.number] = self.world.agents[host]
        self.world.agents[host].process.send_signal(signal.SIGTERM)

    def _end_leave(self, fault: Fault) -> bool:
        """Once it has gone in good order; it has its time."""
        agent = self._going[fault.number]
        since = self._ending_since.setdefault(fault.number, time.monotonic())
        if agent.process.poll() is None:
            if time.monotonic() < since + DRAIN_S:
                return False
            agent.process.kill()
        self.world.come_back(self.world.host_of(fault.host))
        return True

    _restart_proxy = _leave
    _end_restart_proxy = _end_leave

    def _move_proxy(self, fault: Fault) -> None:
        self.world.keep_away(PROXY)
        self.world.agents[PROXY].process.kill()

    def _end_move_proxy(self, _: Fault) -> None:
        world = self.world
        addresses, before = world.hosts[PROXY].addresses, world.proxy_address
        world.proxy_address = 1 - before
        world.hosts[PROXY].move(addresses[before], addresses[1 - before])
        world.come_back(PROXY)

    def _move_trainer(self, fault: Fault) -> None:
        """Its platform takes its host; it goes on elsewhere, with an empty disk."""
        self.trl_ends.append(time.time())
        self._leave(fault)

    def _end_move_trainer(self, fault: Fault) -> bool:
        world, before = self.world, self.world.trainer_host
        world.trainer_host = TRAINERS[1 - TRAINERS.index(before)]
        self._going[fault.number] = world.agents[before]
        since = self._ending_since.setdefault(fault.number, time.monotonic())
        if world.agents[before].process.poll() is None:
            if time.monotonic() < since + DRAIN_S:
                world.trainer_host = before
                return False
            world.agents[before].process.kill()
        shutil.rmtree(world.folder / world.trainer_host, ignore_errors=True)
        world.come_back(world.trainer_host)
        return True

    def _rotate_token(self, fault: Fault) -> None:
        """It starts again with a join line of its own; then the one before is revoked."""
        self._tokens += 1
        name = f"{fault.host}-{self._tokens}.join"
        self.world.site.join_file("replica", name)
        self._replaced[fault.number] = self.world.join.get(fault.host)
        self.world.join[fault.host] = name
        self._leave(fault)

    def _end_rotate_token(self, fault: Fault) -> bool:
        if not self._end_leave(fault):
            return False
        before = self._replaced[fault.number]
        if before is not None:  # else it had the one that others have as well
            token = decode((self.world.folder / before).read_text()).token
            state = f"--state-dir={self.world.folder}/proxy"
            self.world.site.hosts.command("token", "revoke", token_id(token), state)
        return True

    def _upgrade(self, fault: Fault) -> None:
        """Another version of the agent, in a place of its own, from its next start on."""
        self._upgrades += 1
        target = self.world.folder / f"agent-{self._upgrades}"
        shutil.copytree(ROOT / "agent", target, ignore=shutil.ignore_patterns("__pycache__"))
        (target / "asyncgrpo_agent/__init__.py").write_text(
            f'__version__ = "0.1.{100 + self._upgrades}"\n'
        )
        self.world.programs[fault.host] = target
        self._leave(fault)

    _end_upgrade = _end_leave

    # --- the network -------------------------------------------------------------------------

    def _deaf_up(self, fault: Fault) -> None:
        self.world.hosts[fault.host].deafen(up=True)

    def _deaf_down(self, fault: Fault) -> None:
        self.world.hosts[fault.host].deafen(down=True)

    def _deaf_trainer(self, _: Fault) -> None:
        self.world.hosts[self.world.trainer_host].deafen(up=True, down=True)

    def _hear(self, fault: Fault) -> None:
        self.world.hosts[self.world.host_of(fault.host)].hear()

    _end_deaf_up = _end_deaf_down = _end_deaf_trainer = _hear

    def _stalled_link(self, fault: Fault) -> None:
        self._relay(fault).hold(up=True, down=True)

    def _end_stalled_link(self, fault: Fault) -> None:
        self._relay(fault).release()

    def _slow_link(self, fault: Fault) -> None:
        self._relay(fault).delay(SLOW_S)

    def _end_slow_link(self, fault: Fault) -> None:
        self._relay(fault).delay(0.0)

    def _reset_link(self, fault: Fault) -> None:
        self._relay(fault).reset()

    _reset_trainer = _reset_link

    def _relay(self, fault: Fault) -> Relay:
        relay = self.world.hosts[self.world.host_of(fault.host)].relay
        assert relay is not None
        return relay

    # --- the bucket --------------------------------------------------------------------------

    def _bucket_outage(self, _: Fault) -> None:
        for mount in self.world.mounts.values():
            for op in ("lookup", "readdir", "create", "open", "read", "write"):
                mount.fail(op, errno.EIO)

    def _end_bucket_outage(self, _: Fault) -> None:
        for mount in self.world.mounts.values():
            mount.release()

    def _mount_eio(self, fault: Fault) -> None:
        for op in ("readdir", "open", "read"):
            self.world.mounts[fault.host].fail(op, errno.EIO)

    def _mount_hung(self, fault: Fault) -> None:
        for op in ("readdir", "read"):
            self.world.mounts[fault.host].hang(op)

    def _release_mount(self, fault: Fault) -> None:
        self.world.mounts[fault.host].release()

    _end_mount_eio = _end_mount_hung = _release_mount

    def _mount_dead(self, fault: Fault) -> None:
        self.world.mounts[fault.host].kill()

    def _end_mount_dead(self, fault: Fault) -> None:
        self.world.mounts[fault.host].remount()

    def _corrupt_object(self, _: Fault) -> None:
        self.plants.corrupt()

    def _forged_commit(self, _: Fault) -> None:
        self.plants.forge()

    # --- vLLM and the disk -------------------------------------------------------------------

    def _vllm_hangs(self, fault: Fault) -> None:
        self._turn(fault, hang=True)

    def _vllm_lies(self, fault: Fault) -> None:
        self._turn(fault, lie=True)

    def _vllm_forgets(self, fault: Fault) -> None:
        self._turn(fault, forget=True)

    def _well(self, fault: Fault) -> None:
        self._turn(fault)

    _end_vllm_hangs = _end_vllm_lies = _well

    def _turn(self, fault: Fault, **knobs: bool) -> None:
        """A vLLM that is not up just now has nothing to be told."""
        with suppress(OSError, http.client.HTTPException):
            post(self.world.knobs_of(fault.host), "/chaos", knobs)

    def _disk_full(self, fault: Fault) -> None:
        piece = bytes(FILL_BYTES)
        with suppress(OSError), self._filler(fault).open("wb", buffering=0) as file:
            while file.write(piece):
                pass

    def _end_disk_full(self, fault: Fault) -> None:
        self._filler(fault).unlink()

    def _filler(self, fault: Fault) -> Path:
        return self.world.state_of(fault.host) / "filler"


def _nothing(_: Fault) -> None:
    """It ends by itself."""


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def post(socket_path: Path, path: str, body: object) -> None:
    connection = http.client.HTTPConnection("chaos", timeout=2)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(2)
    try:
        connection.sock.connect(str(socket_path))
        connection.request("POST", path, json.dumps(body))
        connection.getresponse().read()
    finally:
        connection.close()
