"""The trainer's processes end together."""

from __future__ import annotations

import os
import select
import signal
import subprocess  # noqa: TID251 - this is about processes
import sys
import textwrap
from pathlib import Path

import pytest

AGENT = Path(__file__).parents[2] / "agent"
PARENT = """
    import multiprocessing, os, sys, time
    from asyncgrpo_engine import lifetime

    if __name__ == "__mp_main__":
        lifetime.die_with_parent()

    def child(fd):
        print("child", os.getpid(), flush=True)
        time.sleep(600)

    if __name__ == "__main__":
        lifetime.stop_on_sigterm()
        multiprocessing.get_context("spawn").Process(target=child, args=(1,), daemon=True).start()
        try:
            time.sleep(600)
        finally:
            print("unwound", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "last"),
    [(signal.SIGTERM, 143, b"unwound\n"), (signal.SIGKILL, -signal.SIGKILL, b"")],
)
def test_a_stopped_trainer_leaves_nobody(
    tmp_path: Path, number: signal.Signals, code: int, last: bytes
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(AGENT)},
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline().startswith(b"child ")
        trainer.send_signal(number)
        # The pipe closes only when the child is gone too.
        assert select.select([trainer.stdout], [], [], 30)[0]
        assert trainer.stdout.read() == last
        assert trainer.wait(30) == code


STEPPING = """
    import os, signal, sys
    from asyncgrpo_engine import lifetime

    lifetime.stop_on_sigterm()
    lifetime.hold()
    os.kill(os.getpid(), signal.SIGTERM)
    print("whole", flush=True)
    lifetime.release()
    print("never", flush=True)
"""


def test_a_step_that_has_begun_is_ended_first() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STEPPING)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(AGENT)},
        check=False,
    )
    assert (done.returncode, done.stdout) == (143, b"whole\n")
