"""`python -m asyncgrpo_agent`, and the entry point of the frozen executable.

The agent also starts itself as the mount's worker, and systemd starts it to mount; neither is a
command for people and both must start quickly, so they do not go through the command line.
"""

from __future__ import annotations

import gc
import sys
from typing import Final

# A rollout in flight is some fifty objects, nearly all of them freed without the collector. By its
# own thresholds it walks them again and again, at a tenth of what a rollout costs an agent.
_COLLECT_AFTER_OBJECTS: Final = 10_000


def main() -> int:
    """Run as what the arguments say. The result is the exit code."""
    match sys.argv[1:]:
        case ["mount-worker"]:
            from asyncgrpo_agent.store import mount_worker

            return mount_worker.main()
        case ["mount-look", path]:
            from asyncgrpo_agent.store import mount_look

            return mount_look.main(path)
        case ["mount-device", folder, *options]:
            from asyncgrpo_agent.procs import fuse_device

            return fuse_device.main(folder, options)
        case _:
            from asyncgrpo_agent.procs.init import stand_apart_if_first

            stand_apart_if_first()  # before anything has a thread or a child
            from asyncgrpo_agent import cli
            from asyncgrpo_agent.procs.outer import follow_outer_process

            follow_outer_process()
            gc.set_threshold(_COLLECT_AFTER_OBJECTS, 20, 20)
            return cli.main()


if __name__ == "__main__":
    sys.exit(main())
