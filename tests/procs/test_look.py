import errno
import os
import stat
from pathlib import Path
from time import monotonic

import pytest

from asyncgrpo_agent.procs import look
from asyncgrpo_agent.procs.look import mode_of
from fakes.strict_mount import StrictBucket


def test_a_look_is_a_stat(tmp_path: Path) -> None:
    assert stat.S_ISDIR(mode_of(str(tmp_path), 10.0) or 0)
    with pytest.raises(FileNotFoundError):
        mode_of(str(tmp_path / "no"), 10.0)


def test_a_dead_and_a_hung_mount_are_told_apart(tmp_path: Path) -> None:
    bucket = StrictBucket(tmp_path)
    with bucket.mount("host") as host:
        host.hang("lookup")
        began = monotonic()
        assert mode_of(str(host.path / "run"), 0.3) is None
        assert monotonic() - began < 2.0
        held = {os.readlink(fd) for fd in Path(f"/proc/{look._stuck[-1].pid}/fd").iterdir()}
        assert len(held) == 2  # one pipe to here, nothing that somebody else waits for
        assert "/dev/null" in held
        host.release()
        look._stuck.pop().communicate()  # it ends as soon as the mount answers
        host.kill()
        with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)) as caught:
            mode_of(str(host.path), 10.0)
        assert caught.value.errno == errno.ENOTCONN
