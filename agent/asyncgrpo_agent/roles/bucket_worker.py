"""One conversation with one worker of the bucket: numbered questions, and a limit on its silence.

Any word from it proves life, also one about an earlier call that nobody waits for any more. Whoever
gives up waiting leaves the worker; see `roles.bucket_host` for what becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Final

import trio

from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.procs import worker as workers
from asyncgrpo_agent.procs.worker import Worker
from asyncgrpo_agent.store.mount_calls import (
    Alive,
    Answer,
    Call,
    Changed,
    Failure,
    Request,
    Result,
    answers,
    frame,
)

log = Log(__name__)

_LAST_LOOK_S: Final = 0.05


class SilentError(Exception):
    """It gave no sign of life for too long."""


class EndedError(Exception):
    """It has ended: crashed, or killed by somebody else."""


class BucketWorker:
    """Made by `start`; `run` must be running for `ask` to get answers."""

    def __init__(self, worker: Worker, changed: Callable[[], None], silence_s: float) -> None:
        self.pid = worker.pid
        self.watched = ""
        """The attempt that it watches."""
        self.is_open = False
        self.is_usable = True
        self._worker = worker
        self._changed = changed
        self._silence_s = silence_s
        self._frames = answers()
        self._numbers = count(1)
        self._awaited = 0
        self._answer: Result | Failure | None = None
        self._quiet_until = 0.0
        self._news = trio.Event()
        self._scope = trio.CancelScope()

    @property
    def is_idle(self) -> bool:
        """Whether it has answered whatever it was asked."""
        return self._awaited == 0 or self._answer is not None

    @property
    def returncode(self) -> int | None:
        return self._worker.returncode

    async def run(self) -> None:
        """Listen until it ends or is left."""
        with self._scope:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._worker.relay_errors)
                    while data := await self._worker.receive():
                        for answer in self._frames.feed(data):
                            self._hear(answer)
                    self._note_end(await self._worker.ended())
            except* trio.ClosedResourceError:
                pass  # it was left just as its pipes became readable
        self.is_usable = False
        self._tell()

    def _note_end(self, code: int | None) -> None:
        """Nobody has told it to end with an error; the next call gets another one."""
        if code != 0:
            fix = "Another one is started; for -9 see the kernel's log, it may be out of memory"
            log.warning("bucket.worker_ended", pid=self.pid, returncode=code, fix=fix)

    async def ask(self, call: Call) -> Result | Failure:
        """One at a time. A caller that is cancelled may leave the call to run, but not to be heard.

        Raises SilentError or EndedError.
        """
        self._awaited, self._answer = next(self._numbers), None
        self._heard(0.0)
        await self._send(frame(Request(number=self._awaited, call=call)))
        while self._answer is None:
            if not self.is_usable:
                raise EndedError
            if trio.current_time() >= self._quiet_until and not await self._has_spoken():
                raise SilentError
            with trio.move_on_at(self._quiet_until):
                await self._news.wait()
        return self._answer

    async def _has_spoken(self) -> bool:
        """One more look, for this process itself may have stood still for longer than allowed."""
        await trio.sleep(_LAST_LOOK_S)
        return self._answer is not None or trio.current_time() < self._quiet_until

    def leave(self) -> None:
        """Kill it and listen no more."""
        self.is_usable = False
        self._scope.cancel()
        self._worker.kill()

    async def ended(self) -> int | None:
        return await self._worker.ended()

    async def _send(self, data: bytes) -> None:
        try:
            with trio.move_on_at(self._quiet_until):
                await self._worker.send(data)
                return
        except trio.BrokenResourceError as error:
            raise EndedError from error
        except trio.Cancelled:
            self.is_usable = False  # half a request may be in the pipe
            raise
        raise SilentError

    def _hear(self, answer: Answer) -> None:
        match answer:
            case Alive(pause_s=pause_s):
                self._heard(pause_s)
            case Changed():
                self._changed()
            case Result(number=number) | Failure(number=number):
                self._heard(0.0)
                if number == self._awaited:
                    self._answer = answer
        self._tell()

    def _heard(self, pause_s: float) -> None:
        self._quiet_until = trio.current_time() + self._silence_s + pause_s

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()


async def start(changed: Callable[[], None], silence_s: float) -> BucketWorker:
    return BucketWorker(await workers.start("mount-worker"), changed, silence_s)
