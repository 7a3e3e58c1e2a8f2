"""The Hugging Face hub: one file at a time, from the cache when offline, and at once where there is no hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import huggingface_hub as client
from huggingface_hub import constants, errors

from normswap.errors import SourceError, first_line, quiet, spelled


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


def local(folder: Path, filenames: Sequence[str]) -> Path:
    """Return the first of `filenames` that a directory has; raises SourceError where it has none."""
    file = next((folder / name for name in filenames if (folder / name).is_file()), None)
    if file is None:
        remedy = "A model directory has config.json and weights; for weights alone name the file."
        what = f"{folder} has no {' or '.join(filenames)}" if folder.is_dir() else f"{folder} is no directory"
        raise SourceError(what, remedy=remedy)
    return file


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
        return Path(client.hf_hub_download(repo, filename, revision=revision))
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
