"""The Hugging Face hub, asked politely: one file at a time, from the cache when offline, never waiting for ever."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub as client
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RevisionNotFoundError

from normswap.errors import SourceError, first_line, spelled
from normswap.models.weight_files import quiet

_PATIENCE = 2  # give up once a transfer has brought this many times the size of the file


class _Absent(Exception):  # noqa: N818 - an answer, no error
    """The repository is there, the file is not."""


def endpoint() -> str:
    """Return the address of the hub in use (HF_ENDPOINT)."""
    return str(constants.ENDPOINT)


def fetch(repo: str, filenames: Sequence[str], arch: str | None = None, remedy: str = "") -> Path:
    """Return the local path of the first of `filenames` that the repository has, downloaded unless the cache has it.

    Args:
        repo: `org/name` or `org/name@revision`.
        filenames: in order of preference.
        arch: the architecture, when known, for the advice in the error; remedy: another advice, where there is no
            connection.

    Raises:
        SourceError: no such repository or file, no connection and nothing cached, or a transfer that broke.
    """
    name, _, revision = repo.partition("@")
    with quiet():
        for filename in filenames:
            try:
                return _fetch_one(name, filename, revision or None, remedy or _ways(arch))
            except _Absent:
                continue
    raise SourceError(f"hub repository {repo} has no {' or '.join(filenames)}", f"asked {endpoint()}")


def _fetch_one(repo: str, filename: str, revision: str | None, ways: str) -> Path:
    # The client retries an unreachable hub for minutes. A first HEAD of our own, without retries, settles it quickly.
    try:
        url = client.hf_hub_url(repo, filename, revision=revision)
        client.get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # the client's exceptions differ by version (requests, httpx)
        cached = _cached(repo, filename, revision)
        if cached is not None:
            return cached
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise _Absent from None
        raise _explained(error, repo, ways) from None
    try:
        return Path(client.hf_hub_download(repo, filename, revision=revision, **_guard()))
    except Exception as error:
        remedy = "Nothing was kept; try again."
        raise SourceError(f"the transfer of {filename} from {url} broke", first_line(error), remedy) from None


def _cached(repo: str, filename: str, revision: str | None) -> Path | None:
    try:
        path = client.try_to_load_from_cache(repo, filename, revision=revision)
    except Exception:  # a malformed repository name: the request itself has failed with the better message
        return None
    return Path(path) if isinstance(path, str) else None


def _ways(arch: str | None) -> str:
    """Say how to go on without the hub."""
    bare, named = spelled("weights", "random"), spelled("arch", metavar=arch or "NAME")
    return (
        f"Three ways on: '{bare}' for the bare architecture; weights on this disk, as 'local-dir:DIR' or as "
        f"a file with '{named}'; or a hub that answers (set HF_ENDPOINT to a mirror, or fill the "
        "cache in HF_HOME while online)."
    )


def _explained(error: Exception, repo: str, ways: str) -> SourceError:
    if isinstance(error, RevisionNotFoundError):
        return SourceError(f"hub repository {repo} has no such revision", f"asked {endpoint()}")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404):
        why = f"{endpoint()} answers {status}"
        remedy = "Check the name; a private or gated repository needs a token (HF_TOKEN)."
        return SourceError(f"hub repository {repo} does not exist or is not open to you", why, remedy)
    if status is not None:
        return SourceError(f"the hub cannot serve {repo}", f"{endpoint()} answers {status}", "Try again later.")
    if isinstance(error, client.errors.HFValidationError):
        return SourceError(f"'{repo}' is not a hub repository", first_line(error))
    why = f"{endpoint()} cannot be reached ({first_line(error)}) and the cache has no copy"
    return SourceError(f"no weights for {repo}", why, ways)


def _guard() -> dict[str, Any]:
    """Return a progress bar that gives up: the client resumes for ever when a server breaks each transfer half way."""
    if "tqdm_class" not in inspect.signature(client.hf_hub_download).parameters:
        return {}  # older clients stop by themselves

    class Bar(client.utils.tqdm):  # type: ignore[misc]
        received = 0.0

        def update(self, n: float | None = 1) -> bool | None:
            self.received += max(n or 0, 0)
            if self.total and self.received > _PATIENCE * self.total:
                raise OSError("the server keeps closing the connection before the end")
            return super().update(n)

    return {"tqdm_class": Bar}
