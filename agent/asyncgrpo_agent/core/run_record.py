"""What a run is, in the trainer's words: the base model, and what a replica needs to serve it.

The trainer seals it with the run's key, the proxy keeps it and gives it to the run's agents, so
that every replica loads the same commit of a model whose branch may have moved meanwhile, and a
host needs no more than its join line. A proxy that changes it is found out by its seal.

Pure.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from asyncgrpo_agent.core import seals

FORMAT: Final = 1
MAX_RECORD_BYTES: Final = 8192  # part of a hello
DEFAULT_REVISION: Final = "main"
_CONTEXT: Final = b"asyncgrpo-agent run record\n"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`id` is empty where the trainer was given a folder. `revision` is what was asked for,
    `commit` what that was. Limits of 0 are not known."""

    format: int = FORMAT
    run: str
    model_name: str  # that rollouts name the base model by
    id: str = ""
    revision: str = ""
    commit: str = ""
    max_loras: int = 0  # that the run's staleness needs
    lora_rank: int = 0


def sealed(record: RunRecord, private_key: bytes) -> bytes:
    return seals.seal(record, private_key, context=_CONTEXT)


def unsealed(data: bytes, run: str, public_key: bytes) -> RunRecord:
    """Raises AdapterRefusedError for what the run's trainer has not said."""
    record = seals.unseal(
        data, RunRecord, public_key=public_key, context=_CONTEXT, newest_format=FORMAT
    )
    if record.run != run:
        raise seals.refused(f"is that of run {record.run!r}", "See who else keeps this proxy")
    return record


def is_commit(revision: str) -> bool:
    return _COMMIT.fullmatch(revision) is not None


def known_commit(model: str, revision: str, record: RunRecord | None) -> str:
    """The commit that `revision` of the model means in this run; "" where only the hub knows."""
    wanted = revision or DEFAULT_REVISION
    if is_commit(wanted):
        return wanted
    if record is None or record.id != model:
        return ""
    is_same = not revision or wanted == (record.revision or DEFAULT_REVISION)
    return record.commit if is_same else ""
