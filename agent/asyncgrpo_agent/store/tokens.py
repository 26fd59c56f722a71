"""Tokens: what lets an agent or a viewer in, kept in `<state>/proxy/tokens.json`.

A token is a random 256-bit value of which only the sha256 is stored. A slow hash would add nothing:
it protects secrets that can be guessed, and these cannot. Its id, the hash's first characters, is
no secret. Any number may be valid at once, so that a new one can be handed out before the old one
is revoked. A token that has ended stays in the file for a week, so that its owner is told why; it
never counts again. Rows go when the file is written for another reason, so it stays small.

A replica's and a trainer's token is one run's. A viewer's is one run's or all runs'; it looks on,
and sees sampled rollouts only if it was made for that.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.store import private_files
from asyncgrpo_agent.store.audit import AuditLog

TOKEN_BYTES: Final = 32
ID_CHARACTERS: Final = 8
KEEP_ENDED_S: Final = 7 * 86400.0
MAX_ENDED: Final = 200
ALL_RUNS: Final = "*"  # is no run's name, so that nothing else takes it for one
_USED_EVERY_S: Final = 60.0  # a fleet that redials must not rewrite the file for each link


class TokenFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a token allows, and until when. Times are seconds since 1970."""

    sha256: str
    role: str
    run: str
    created_unix_s: float
    expires_unix_s: float | None = None
    uses: int | None = None  # processes that it lets in; None for any number
    instances: list[str] = []  # those that have come in, kept only when `uses` is limited
    last_used_unix_s: float | None = None
    revoked_unix_s: float | None = None
    rollouts: bool = False  # of a viewer: whether it sees prompts and completions

    @property
    def id(self) -> str:
        return self.sha256[:ID_CHARACTERS]

    @property
    def uses_left(self) -> int | None:
        return None if self.uses is None else max(0, self.uses - len(self.instances))

    @property
    def scopes(self) -> list[str]:
        """What a viewer may see; nothing for others, who are no viewers."""
        if self.role != "viewer":
            return []
        return ["view", "rollouts"] if self.rollouts else ["view"]

    def shows(self, run: str) -> bool:
        """Whether a viewer sees anything of this run; it must not be told of any other."""
        return self.role == "viewer" and self.run in (ALL_RUNS, run)

    def ended_unix_s(self, now_unix_s: float) -> float | None:
        """Since when nobody may stay on this token; None while they may."""
        ends = [self.revoked_unix_s] if self.revoked_unix_s is not None else []
        if self.expires_unix_s is not None and now_unix_s >= self.expires_unix_s:
            ends.append(self.expires_unix_s)
        return min(ends, default=None)

    def ended(self, now_unix_s: float) -> str:
        """Why nobody may stay on this token; "" while they may."""
        if self.revoked_unix_s is not None:
            return "the token was revoked"
        if self.expires_unix_s is not None and now_unix_s >= self.expires_unix_s:
            return "the token has expired"
        return ""

    def refusal(self, instance: str, now_unix_s: float) -> str:
        """Why this process may not come in; "" if it may. One that was in may always return."""
        if fault := self.ended(now_unix_s):
            return fault
        if self.uses_left == 0 and instance not in self.instances:
            return "the token has no uses left"
        return ""


def tokens_file(state_dir: Path) -> Path:
    return state_dir / "proxy" / "tokens.json"


def token_id(token: str) -> str:
    """The id of a token, known or not; it tells nothing of the token."""
    return _hash(token)[:ID_CHARACTERS]


def create_token(
    state_dir: Path,
    *,
    role: str,
    run: str,
    now_unix_s: float,
    life_s: float | None = None,
    uses: int | None = None,
    rollouts: bool = False,
) -> str:
    """Make a token and store its hash; the result is the only copy."""
    path = tokens_file(state_dir)
    with private_files.locked(private_files.private_folder(path.parent)):
        known = list_tokens(state_dir)
        token = _unused({facts.id for facts in known})
        facts = TokenFacts(
            sha256=_hash(token),
            role=role,
            run=run,
            created_unix_s=now_unix_s,
            expires_unix_s=None if life_s is None else now_unix_s + life_s,
            uses=uses,
            rollouts=rollouts,
        )
        _write(path, [*known, facts], now_unix_s)
    limits = {"expires_unix_s": facts.expires_unix_s, "uses": uses, "rollouts": rollouts}
    _record(state_dir, "token.created", facts, now_unix_s, **limits)
    return token


def list_tokens(state_dir: Path) -> list[TokenFacts]:
    """All that are in the file, oldest first. Raises ConfigError if the file is damaged."""
    path = tokens_file(state_dir)
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[TokenFacts])
    except FileNotFoundError:
        return []
    except msgspec.MsgspecError as error:
        raise private_files.damaged(path, error) from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from error


def find_token(state_dir: Path, token: str) -> TokenFacts | None:
    """What is known of this token. Reads the file anew, so that changes count at once."""
    wanted = _hash(token)
    found: TokenFacts | None = None
    for facts in list_tokens(state_dir):
        if hmac.compare_digest(facts.sha256.encode(), wanted.encode()):
            found = facts
    return found


def note_use(state_dir: Path, token_id: str, instance: str, now_unix_s: float) -> None:
    """The process `instance` was let in on this token. One that comes again costs no other use."""
    path = tokens_file(state_dir)
    with private_files.locked(path.parent):
        known = list_tokens(state_dir)
        after = [
            _used(facts, instance, now_unix_s) if facts.id == token_id else facts for facts in known
        ]
        if after != known:
            _write(path, after, now_unix_s)


def revoke_token(state_dir: Path, token_id: str, *, now_unix_s: float) -> TokenFacts:
    """From now on nobody may come in, or stay, on this token. Raises ConfigError."""
    path = tokens_file(state_dir)
    known = list_tokens(state_dir)
    if not any(facts.id == token_id for facts in known):
        raise ConfigError(
            f"there is no token {token_id!r}",
            where=str(path),
            fix="`asyncgrpo-agent token list` shows the ids",
        )
    with private_files.locked(path.parent):
        known = list_tokens(state_dir)
        after = [
            msgspec.structs.replace(facts, revoked_unix_s=now_unix_s)
            if facts.id == token_id and facts.revoked_unix_s is None
            else facts
            for facts in known
        ]
        _write(path, after, now_unix_s)
    revoked = next(facts for facts in after if facts.id == token_id)
    _record(state_dir, "token.revoked", revoked, now_unix_s)
    return revoked


def discard_token(state_dir: Path, token: str, *, now_unix_s: float) -> None:
    """Take this token, which nobody holds any more, out of the file; unknown ones are ignored."""
    path = tokens_file(state_dir)
    if (found := find_token(state_dir, token)) is None:
        return
    with private_files.locked(path.parent):
        known = list_tokens(state_dir)
        _write(path, [facts for facts in known if facts.sha256 != found.sha256], now_unix_s)
    _record(state_dir, "token.discarded", found, now_unix_s)


def _used(facts: TokenFacts, instance: str, now_unix_s: float) -> TokenFacts:
    instances = facts.instances
    if facts.uses is not None and instance not in instances:
        instances = [*instances, instance]
    last = facts.last_used_unix_s
    if instances is facts.instances and last is not None and now_unix_s - last < _USED_EVERY_S:
        return facts
    return msgspec.structs.replace(facts, instances=instances, last_used_unix_s=now_unix_s)


def _unused(ids: set[str]) -> str:
    while True:
        token = secrets.token_urlsafe(TOKEN_BYTES)
        if _hash(token)[:ID_CHARACTERS] not in ids:
            return token


def _write(path: Path, known: Iterable[TokenFacts], now_unix_s: float) -> None:
    kept = _kept(list(known), now_unix_s)
    private_files.write_json(path, [msgspec.to_builtins(facts) for facts in kept])


def _kept(known: list[TokenFacts], now_unix_s: float) -> list[TokenFacts]:
    """All that may still let somebody in, and those that ended last."""
    ends = {facts.id: facts.ended_unix_s(now_unix_s) for facts in known}
    recent = sorted(
        (end, token_id)
        for token_id, end in ends.items()
        if end is not None and now_unix_s - end <= KEEP_ENDED_S
    )
    told = {token_id for _, token_id in recent[-MAX_ENDED:]}
    return [facts for facts in known if ends[facts.id] is None or facts.id in told]


def _record(
    state_dir: Path, event: str, facts: TokenFacts, now_unix_s: float, **fields: object
) -> None:
    AuditLog(state_dir).record(
        event, now_unix_s, token=facts.id, role=facts.role, run=facts.run, **fields
    )


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()
