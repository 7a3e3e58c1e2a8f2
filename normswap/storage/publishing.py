"""A directory on the Hugging Face hub, there and back, by huggingface_hub's own upload and cache.

What timm alone can build and load is published so that `timm.create_model("hf-hub:owner/name", pretrained=True)` does;
anything else loads with normswap. Only the files that `checkpoint.save` wrote leave this machine, in one commit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub as client
from torch import nn

from normswap import provenance
from normswap.errors import NormswapError, OptionError, OutputError, first_line, quiet
from normswap.models import hub, timm_models
from normswap.plan import Arch
from normswap.storage import checkpoint, model_card
from normswap.storage.network_folder import CARD, CONFIG, FILES
from normswap.surgery import comparison

# What timm's `norm_layer` calls the norms that a conversion may end in.
_NORM_LAYERS = ("groupnorm", "groupnorm1")


@dataclass(frozen=True)
class Published:
    """The result of a push.

    Args:
        url: of the commit.
        repo: owner/name.
        files: names of the files that were uploaded.
        alone: whether timm loads it without normswap.
    """

    url: str
    repo: str
    files: tuple[str, ...]
    alone: bool


def push(
    directory: str | Path, repo: str, *, private: bool = False, message: str = "", trust_factory: bool = False
) -> Published:
    """Publish a directory that `save` wrote as `owner/name`, which is made if it is not there.

    Args:
        private: of a new repository.
        message: of the commit.

    Returns:
        What was published, and where.

    Raises:
        OptionError: `repo` is no name of that form.
        SourceError: it is no such directory, or is damaged.
        OutputError: the hub does not take it.
    """
    if repo.count("/") != 1:
        raise OptionError(f"'{repo}' is not a name on the hub", remedy="Write it as owner/name")
    folder = Path(directory)
    model = checkpoint.load(folder, trust_factory=trust_factory)  # also sees that it is whole
    arguments = _arguments(model, provenance.of(model).arch)
    contents: dict[str, object] = {name: folder / name for name in FILES if (folder / name).is_file()}
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if arguments is not None:  # with these timm builds the result itself
        config["model_args"] = dict(arguments)
    contents[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    card = (folder / CARD).read_text(encoding="utf-8") if CARD in contents else ""
    contents[CARD] = model_card.published(card, repo, alone=arguments is not None).encode()
    operations = [
        client.CommitOperationAdd(name, value if isinstance(value, bytes) else str(value))
        for name, value in contents.items()
    ]
    api, commit_message = client.HfApi(), message or f"{folder.name}, converted by normswap"
    try:
        with quiet():
            api.create_repo(repo, private=private, exist_ok=True)
            commit = api.create_commit(repo, operations, commit_message=commit_message)
    except client.errors.HFValidationError as error:
        raise OutputError(f"'{repo}' is not a name on the hub", first_line(error), "Write it as owner/name") from None
    except Exception as error:  # the client's exceptions differ by version (requests, httpx)
        status = getattr(getattr(error, "response", None), "status_code", None)
        why = f"{hub.endpoint()} answers {status}" if status else f"{hub.endpoint()}: {first_line(error)}"
        remedy = "It needs a token that may write: `hf auth login`, or HF_TOKEN" if status in (401, 403) else ""
        raise OutputError(f"cannot push to {repo}", why, remedy) from None
    return Published(str(commit.commit_url), repo, tuple(contents), arguments is not None)


def _arguments(model: nn.Module, arch: Arch | None) -> Mapping[str, object] | None:
    """Arguments with which timm builds this very network, if there are any: found by building it and running both."""
    if arch is None or arch.builder != "timm":
        return None
    for more in ({}, *({"norm_layer": name} for name in _NORM_LAYERS)):
        kwargs = {**arch.kwargs, **more}
        try:
            other = timm_models.create(Arch(arch.name, kwargs))
            other.load_state_dict(model.state_dict())
            if comparison.verify(model, other).passed:
                return kwargs
        except (NormswapError, RuntimeError):  # it has no such option, or other tensors, or does not run
            continue
    return None
