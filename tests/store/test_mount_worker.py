import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen  # noqa: TID251 - as the agent does it, without a loop
from time import monotonic
from typing import TypeVar

import pytest

from asyncgrpo_agent.procs.program import worker_command, worker_environment
from asyncgrpo_agent.store import mount_calls as calls
from asyncgrpo_agent.store.bucket import PublishedAdapter
from asyncgrpo_agent.store.mounts import KnownMount
from asyncgrpo_agent.store.staging import StagedAdapter, clean
from fakes.bucket import ATTEMPT, PRIVATE_KEY, FakeTrainer
from fakes.processes import peak_rss_mib

PATIENCE_S = 10.0
T = TypeVar("T")


class Agent:
    """The other end of the pipes."""

    def __init__(self, process: Popen[bytes]) -> None:
        self.process = process
        self._frames = calls.answers()
        self._heard: list[calls.Answer] = []
        self._number = 0
        self.alive: list[calls.Alive] = []

    def tell(self, call: calls.Call) -> int:
        self._number += 1
        assert self.process.stdin is not None
        self.process.stdin.write(calls.frame(calls.Request(number=self._number, call=call)))
        self.process.stdin.flush()
        return self._number

    def hear(self) -> calls.Answer:
        assert self.process.stdout is not None
        while not self._heard:
            data = os.read(self.process.stdout.fileno(), 65536)
            assert data, "it has ended"
            self._heard.extend(self._frames.feed(data))
        return self._heard.pop(0)

    def ask(self, call: calls.Call) -> calls.Result | calls.Failure:
        number = self.tell(call)
        while not isinstance(answer := self.hear(), calls.Result | calls.Failure):
            if isinstance(answer, calls.Alive):
                self.alive.append(answer)
        assert answer.number == number
        return answer

    def open(self, run_dir: Path, known: KnownMount | None = None) -> KnownMount:
        call = calls.Open(run_dir=run_dir, known=known, log_json=False, log_level="DEBUG")
        return self.value(call, KnownMount)

    def value(self, call: calls.Call, kind: type[T]) -> T:
        answer = self.ask(call)
        assert isinstance(answer, calls.Result), answer
        return calls.value_of(answer, kind)


@contextmanager
def worker() -> Iterator[Agent]:
    process = Popen(
        worker_command("mount-worker"),
        env=worker_environment(),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
    )
    try:
        yield Agent(process)
    finally:
        process.kill()
        process.communicate()


def publish(local_dir: Path, run_dir: Path, version: int = 1) -> calls.Publish:
    return calls.Publish(
        local_dir=local_dir,
        run=run_dir.name,
        attempt=ATTEMPT,
        version=version,
        base_model="base",
        base_model_digest="ab" * 32,
        private_key=PRIVATE_KEY,
        live=[],
        now_unix_s=1.7e9,
        max_rank=8,
    )


@pytest.fixture
def trainer(tmp_path: Path) -> FakeTrainer:
    (tmp_path / "bucket").mkdir()
    return FakeTrainer(tmp_path / "local", tmp_path / "bucket" / "run")


def test_it_starts_quickly_and_stays_small(trainer: FakeTrainer) -> None:
    began = monotonic()
    with worker() as agent:
        known = agent.open(trainer.run_dir)
        assert monotonic() - began < 3.0  # 0.15 s on an idle machine
        assert known.path == str(trainer.run_dir.parent)
        assert peak_rss_mib(agent.process.pid) < 35


def test_it_ends_with_its_input_in_the_middle_of_a_call(trainer: FakeTrainer) -> None:
    trainer.publish(1)
    key = f"commits/{ATTEMPT}/000000/v000002.toml"
    os.mkfifo(trainer.run_dir / key)  # opening it hangs, as on a mount whose daemon hangs
    with worker() as agent:
        agent.open(trainer.run_dir)
        agent.tell(calls.ReadCommit(key=key, run="run", public_key=b""))
        assert agent.process.stdin is not None
        agent.process.stdin.close()
        assert agent.process.wait(PATIENCE_S) == 0
        agent.process.stdin = None


def test_the_signals_of_its_group_do_not_end_it(trainer: FakeTrainer) -> None:
    with worker() as agent:
        agent.open(trainer.run_dir)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            agent.process.send_signal(number)
        assert agent.ask(calls.ListAttempts())


def test_a_bug_is_told_and_logged_and_does_not_end_it(trainer: FakeTrainer) -> None:
    with worker() as agent:
        agent.open(trainer.run_dir)
        call = publish(trainer.save(1), trainer.run_dir)
        answer = agent.ask(
            calls.Publish(
                **{f: getattr(call, f) for f in call.__struct_fields__} | {"attempt": "none"}
            )
        )
        assert isinstance(answer, calls.Failure)
        assert (answer.kind, answer.what) == ("bug", "ValueError: 'none' is not an attempt")
        assert agent.ask(calls.ListAttempts())
        assert agent.process.stderr is not None
        assert agent.process.stderr.readline() == b"ERROR mount_worker.bug call=Publish\n"


def test_secrets_are_in_neither_its_arguments_nor_its_environment(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCGRPO_JOIN", "s3cr3t")
    monkeypatch.setenv("HF_TOKEN", "s3cr3t")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t")
    with worker() as agent:
        agent.open(trainer.run_dir)
        agent.value(publish(trainer.save(1), trainer.run_dir), PublishedAdapter)
        shown = b"".join(
            Path(f"/proc/{agent.process.pid}/{name}").read_bytes()
            for name in ("cmdline", "environ")
        )
    for secret in (b"s3cr3t", PRIVATE_KEY, PRIVATE_KEY.hex().encode()):
        assert secret not in shown


def test_new_commits_of_the_watched_attempt_are_told(trainer: FakeTrainer) -> None:
    with worker() as agent:
        agent.open(trainer.run_dir)
        agent.value(calls.Watch(attempt=ATTEMPT), type(None))
        assert agent.hear() == calls.Changed()  # it has begun to watch
        trainer.publish(1)
        assert agent.hear() == calls.Changed()


@pytest.mark.slow
def test_a_large_adapter_takes_little_memory_and_is_heard_of(
    trainer: FakeTrainer, tmp_path: Path
) -> None:
    local = trainer.save(1, hidden=200_000_000 // 64)
    clean(tmp_path / "staged")
    with worker() as agent:
        agent.open(trainer.run_dir)
        published = agent.value(publish(local, trainer.run_dir), PublishedAdapter)
        assert published.total_bytes > 200_000_000
        commit = trainer.read(published.commit_key).commit
        call = calls.Stage(commit=commit, staging_dir=tmp_path / "staged", max_rank=8)
        before, began = len(agent.alive), monotonic()
        staged = agent.value(call, StagedAdapter)
        assert staged.digest == published.adapter.digest
        assert len(agent.alive) - before <= 6 + 4 * (monotonic() - began)
        assert agent.alive[-1].done_bytes == published.total_bytes
        assert max(alive.pause_s for alive in agent.alive) > 20.0
        assert peak_rss_mib(agent.process.pid) < 40
