"""One `stat` of a path that may be on a mount that hangs, as a process of its own.

For a check at start, which then does not wait for the process longer than it wants to. Imports next
to nothing, so that it is quick.
"""

from __future__ import annotations

import errno
import os
import sys


def main(path: str) -> int:
    """Print the mode of what is there, or the negative errno."""
    try:
        seen = os.stat(path).st_mode
    except OSError as error:
        seen = -(error.errno or errno.EIO)
    sys.stdout.write(f"{seen}\n")
    return 0
