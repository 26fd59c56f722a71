"""Removes versions from the bucket. Which ones is decided in `core.retention`.

The commits go first: from then on the version does not exist, so a reader in between finds a listed
commit with missing data, or nothing, and never half an adapter that passes for one. What a failed
or cut publication of the same version left behind goes along; a removal that was cut leaves data
without a commit, which is listed as torn. Folders vanish by themselves on a mounted bucket; on a
plain folder they are removed when they are empty. Plain blocking calls.
"""

from __future__ import annotations

from asyncgrpo_agent.core.adapters import (
    CommitKey,
    commit_folder,
    parse_adapter_folder,
    parse_commit_key,
)
from asyncgrpo_agent.store.bucket import list_attempts
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.store.objects import remove, remove_if_empty


def list_versions(listing: Listing) -> dict[str, list[int]]:
    """Every attempt that left anything, with the versions that have a commit, ascending."""
    found: dict[str, list[int]] = {}
    for attempt in map(str, list_attempts(listing.run_dir, listing=listing)):
        versions: set[int] = set()
        for folder in listing.names(f"commits/{attempt}"):
            keys = _commit_keys(listing, f"commits/{attempt}/{folder}")
            versions.update(parts.version for parts in keys.values())
        found[attempt] = sorted(versions)
    return found


def list_torn(listing: Listing) -> dict[str, list[int]]:
    """Versions with data and no commit: being written, cut short, or removed in part."""
    torn: dict[str, list[int]] = {}
    for attempt, whole in list_versions(listing).items():
        folders = map(parse_adapter_folder, listing.names(f"adapters/{attempt}"))
        found = {version for version in folders if version is not None}
        torn[attempt] = sorted(found - set(whole))
    return torn


def prune(listing: Listing, attempt: str, version: int) -> int:
    """Remove one version; gives the number of objects removed.

    DeletionForbiddenError: nothing was removed, nor will be. BucketUnavailableError: going on later
    is safe, for what is left is listed again.
    """
    commits = commit_folder(attempt, version)
    keys = _commit_keys(listing, commits)
    removed = sum(remove(listing, key) for key, part in keys.items() if part.version == version)
    remove_if_empty(listing, commits)
    adapters = f"adapters/{attempt}"
    for name in sorted(listing.names(adapters)):
        if parse_adapter_folder(name) == version:
            folder = f"{adapters}/{name}"
            files = sorted(listing.names(folder))
            removed += sum(remove(listing, f"{folder}/{file}") for file in files)
            remove_if_empty(listing, folder)
    return removed


def _commit_keys(listing: Listing, folder: str) -> dict[str, CommitKey]:
    keys = (f"{folder}/{name}" for name in sorted(listing.names(folder)))
    return {key: parts for key in keys if (parts := parse_commit_key(key)) is not None}
