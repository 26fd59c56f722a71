"""The GPUs of this host, counted without any library of theirs. Not run on a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Final

_DEVICES: Final = Path("/dev")
_NAME: Final = re.compile(r"\d+|(GPU|MIG)-.+")
_NVIDIA: Final = re.compile(r"nvidia(\d+)")


def gpus_of_host(environ: Mapping[str, str] = os.environ, devices: Path = _DEVICES) -> list[str]:
    """What may be used here: $CUDA_VISIBLE_DEVICES if it is set, else all of NVIDIA's devices.

    Those are counted, not listed: CUDA numbers what it can open from 0, whatever the device files
    of a container are called. GPUs of other makers have to be named by the user.
    """
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        words = [word.strip() for word in given.split(",")]
        return list(takewhile(_NAME.fullmatch, words))  # CUDA, too, stops at the first of no GPU
    try:
        names = [entry.name for entry in devices.iterdir()]
    except OSError:
        return []
    return [str(number) for number in range(sum(bool(_NVIDIA.fullmatch(name)) for name in names))]
