"""Where a directory of ours lies when it comes from the Hugging Face hub."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from normswap.errors import SourceError
from normswap.models import hub
from normswap.storage.network_folder import CONFIG, NORMS, WEIGHTS

_PREFIXES = ("hf-hub:", "hf_hub:")


def fetch(source: str) -> Path | None:
    """Fetch a `hf-hub:owner/name` that `push` wrote, into the hub's cache; None for a source of another kind.

    Raises:
        SourceError: the repository cannot be read.
    """
    if not source.startswith(_PREFIXES):
        return None
    repo = source.partition(":")[2]
    config = hub.fetch(repo, (CONFIG,))
    try:
        schemes = json.loads(config.read_text(encoding="utf-8"))["normswap"]["schemes"]
    except (ValueError, KeyError, TypeError):  # timm's reader says what is wrong with it
        return None
    if not schemes:
        return None
    folder = hub.fetch(repo, (WEIGHTS,)).parent
    with contextlib.suppress(SourceError):  # not every network had norms
        hub.fetch(repo, (NORMS,))
    return folder
