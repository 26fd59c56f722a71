"""Which name a replica joins under, and whose ghost it may push out.

The first join under a name binds it to that host's key. A host whose key has the name gets it at
once, and the link that holds it is a ghost that goes. Everybody else joins at once as well, under
the name with a suffix. Pure; the caller performs and logs what is decided.

Invariants: a name passes from a live link only to the key that holds it. Nobody is refused because
of a ghost: refused is only a process that already lost the name to another one of the same key,
for else the two would push each other out for ever. So each process loses a name at most once
while its successors last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

REPLACED_KEPT: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who is live under a name. `key` is empty for a replica that showed none."""

    key: str
    instance: str
    replaced: tuple[str, ...] = ()  # processes that lost the name to this one, oldest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Join as `name`. `replaced` is what the new holder has to remember."""

    name: str
    evict: bool  # the link that is live under the name ends
    bind: bool  # the name belongs to the key from now on
    reason: str  # why it is another name than the wanted one, or why a link is evicted; else empty
    replaced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """Do not join now: this process lost the name, and the one that has it is live."""

    name: str
    reason: str


def admit_name(
    wanted: str,
    key: str,
    instance: str,
    bindings: Mapping[str, str],
    live: Mapping[str, Holder],
) -> Seat | Duplicate:
    """Decide for a process that showed `key`, "" for none; `bindings` maps names to keys."""
    owners = {**bindings, **{name: holder.key for name, holder in live.items()}}
    name = _choose(wanted, key, owners)
    bind = bool(key) and name not in bindings
    holder = live.get(name)
    if holder is None:
        reason = "" if name == wanted else _why_renamed(wanted, key, owners)
        return Seat(name=name, evict=False, bind=bind, reason=reason)
    if instance in holder.replaced:
        return Duplicate(name=name, reason=duplicate_reason(name))
    if instance == holder.instance:
        reason, replaced = "the same process has dialled again", holder.replaced
    else:
        reason = "another process with the same host key has joined"
        replaced = (*holder.replaced, holder.instance)[-REPLACED_KEPT:]
    return Seat(name=name, evict=True, bind=bind, reason=reason, replaced=replaced)


def duplicate_reason(name: str) -> str:
    """What a process is told that lost its name to a newer one, or comes back for it."""
    return (
        f"two processes have the host key of {name!r}, and the newer one has the name; stop one,"
        " or give it another replica.name or another state folder"
    )


def _choose(wanted: str, key: str, owners: Mapping[str, str]) -> str:
    """The wanted name, else the host's own suffixed one, else the first that is free."""
    if wanted not in owners or _is_own(wanted, key, owners):
        return wanted
    last = len(owners) + 2  # one of so many is free
    suffixed = [f"{wanted}-{number}" for number in range(2, last + 1)]
    own = [name for name in suffixed if _is_own(name, key, owners)]
    return own[0] if own else next(name for name in suffixed if name not in owners)


def _is_own(name: str, key: str, owners: Mapping[str, str]) -> bool:
    return bool(key) and owners.get(name) == key


def _why_renamed(wanted: str, key: str, owners: Mapping[str, str]) -> str:
    if not owners[wanted]:
        return f"{wanted!r} is in use by a replica without a host key"
    return f"{wanted!r} belongs to {'another' if key else 'a'} host key"
