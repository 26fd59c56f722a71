"""The agent's own program with shorter times, so that a test sees in seconds what takes minutes.

    python -m fakes.hasty core.retention.NAMED_S=2 -- PYTHON -m asyncgrpo_agent ARGUMENTS

`within` makes it a prefix for `fleet.Hosts.start`. Core's times come first: roles import them.
"""

from __future__ import annotations

import importlib
import sys

from fakes.fleet import ROOT


def within(*times: str) -> list[str]:
    path = f"PYTHONPATH={ROOT}/agent:{ROOT}/tests"
    return ["env", path, sys.executable, "-m", "fakes.hasty", *times, "--"]


def main() -> int:
    split = sys.argv.index("--")
    for time in sys.argv[1:split]:
        dotted, _, value = time.partition("=")
        module, _, name = dotted.rpartition(".")
        place = importlib.import_module(f"asyncgrpo_agent.{module}")
        assert isinstance(getattr(place, name), float), dotted
        setattr(place, name, float(value))
    sys.argv[1:] = sys.argv[split + 4 :]
    cli = importlib.import_module("asyncgrpo_agent.cli")
    return int(cli.main())


if __name__ == "__main__":
    sys.exit(main())
