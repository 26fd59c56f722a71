"""`python -m asyncgrpo_agent`, and the entry point of the frozen executable."""

from __future__ import annotations

import sys

from asyncgrpo_agent.cli import main

if __name__ == "__main__":
    sys.exit(main())
