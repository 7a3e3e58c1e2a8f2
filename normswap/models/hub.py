"""The Hugging Face hub: one file at a time, from the cache when offline, and never waiting for ever."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub as client
from huggingface_hub import constants, errors

from normswap.errors import SourceError, first_line, spelled
from normswap.models.weight_files import quiet

_MOST = 2  # a transfer is given up once it has brought this many times the size of the file


def endpoint() -> str:
    """Return the address of the hub in use (HF_ENDPOINT)."""
    return str(constants.ENDPOINT)


def fetch(repo: str, filenames: Sequence[str]) -> Path:
    """Return the local path of the first of `filenames` that the repository has, downloaded unless the cache has it.

    Args:
        repo: `org/name` or `org/name@revision`.
        filenames: in order of preference.

    Raises:
        SourceError: no such repository or file, no connection and nothing cached, or a transfer that broke.
    """
    name, _, revision = repo.partition("@")
    with quiet():
        for filename in filenames:
            file = _fetch_one(name, filename, revision or None)
            if file is not None:
                return file
    raise SourceError(f"hub repository {repo} has no {' or '.join(filenames)}", f"asked {endpoint()}")


def _fetch_one(repo: str, filename: str, revision: str | None) -> Path | None:
    """Return the file; None where the repository is there and has none of that name."""
    # The client retries an unreachable hub for minutes. A first HEAD of our own, without retries, settles it quickly.
    try:
        url = client.hf_hub_url(repo, filename, revision=revision)
        client.get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # the client's exceptions differ by version (requests, httpx)
        if isinstance(error, errors.HFValidationError):
            raise SourceError(f"'{repo}' is not a hub repository", first_line(error)) from None
        cached = client.try_to_load_from_cache(repo, filename, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
            return None
        raise _explained(error, repo) from None
    try:
        return Path(client.hf_hub_download(repo, filename, revision=revision, **_guard()))
    except Exception as error:
        what = f"the transfer of {filename} from {url} broke"
        raise SourceError(what, first_line(error), "Nothing was kept; try again.") from None


def _explained(error: Exception, repo: str) -> SourceError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        remedy = "Check the name and the revision; a private or gated repository needs a token (HF_TOKEN)."
        return SourceError(f"hub repository {repo} cannot be had", f"{endpoint()} answers {status}", remedy)
    why = f"{endpoint()} cannot be reached ({first_line(error)}) and the cache has no copy"
    remedy = (
        f"Ways on: '{spelled('weights', 'random')}'; weights on this disk, as 'local-dir:DIR', 'hf:DIR' or a file with "
        f"'{spelled('arch', metavar='NAME')}'; or a hub that answers (HF_ENDPOINT, or a cache filled in HF_HOME)."
    )
    return SourceError(f"no weights for {repo}", why, remedy)


def _guard() -> dict[str, Any]:
    """Return a progress bar that gives up: the client resumes for ever when a server breaks each transfer half way."""
    if "tqdm_class" not in inspect.signature(client.hf_hub_download).parameters:
        return {}  # older clients stop by themselves

    class Bar(client.utils.tqdm):  # type: ignore[misc]
        received = 0.0

        def update(self, n: float | None = 1) -> bool | None:
            self.received += max(n or 0, 0)
            if self.total and self.received > _MOST * self.total:
                raise OSError("the server keeps closing the connection before the end")
            return super().update(n)

    return {"tqdm_class": Bar}
