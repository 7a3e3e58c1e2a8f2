"""A directory on the Hugging Face hub, there and back, by huggingface_hub's own upload and cache.

What timm alone can build and load is published so that `timm.create_model("hf-hub:owner/name",
pretrained=True)` does; anything else loads with normswap. Only the files that `checkpoint.save`
wrote leave this machine, in one commit.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub as client
from torch import nn

from normswap import provenance
from normswap.errors import NormswapError, OptionError, OutputError, first_line, quiet, spelled
from normswap.models import hub, timm_models
from normswap.plan import Arch
from normswap.storage import checkpoint, model_card
from normswap.storage.network_folder import CARD, CONFIG, FILES, WEIGHTS
from normswap.surgery import comparison

# What timm's `norm_layer` calls the norms that a conversion may end in.
_NORM_LAYERS = ("groupnorm", "groupnorm1")
# Code that puts a folded network into timm's class.
_FOLDED = Path(__file__).with_name("folded_by_timm.txt")


@dataclass(frozen=True)
class Published:
    """The result of a push: the commit's url, the names of its files, and whether timm alone builds
    the network.
    """

    url: str
    repo: str
    files: tuple[str, ...]
    alone: bool


def push(
    directory: str | Path,
    repo: str,
    *,
    license: str | None = None,
    private: bool = False,
    message: str = "",
    trust_factory: bool = False,
) -> Published:
    """Publish a directory that `save` wrote as `owner/name`, made if it is not there. Returns what
    was published.

    Args:
        license: of the weights, by the hub's name (apache-2.0, mit, other); by default the
            source's.
        private: of a new repository.
        message: of the commit.

    Raises SourceError, OptionError, OutputError: the directory is damaged, the license unknown, the
    hub refuses it.
    """
    if repo.count("/") != 1:
        raise OptionError(f"'{repo}' is not a name on the hub", remedy="Write it as owner/name")
    folder = Path(directory)
    model = checkpoint.load(folder, trust_factory=trust_factory)
    record = provenance.of(model)
    # Random weights are nobody's.
    license = license or (record.pretrained_cfg.get("license") if record.sha256 else None)
    license = license or _license_on_card(model_card.base_model(record))
    if license is None:
        remedy = (
            f"Give {spelled('license', metavar='NAME')}, the source's: apache-2.0, mit, agpl-3.0,"
            " other ..."
        )
        raise OptionError(f"nobody knows the license of the weights in {folder}", remedy=remedy)
    arguments = _arguments(model, record.arch)
    contents: dict[str, Path | bytes] = {
        name: folder / name for name in FILES if (folder / name).is_file()
    }
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if arguments is not None:
        config["model_args"] = dict(arguments)
        code = f'import timm\n\nmodel = timm.create_model("hf-hub:{repo}", pretrained=True).eval()'
    else:
        by_normswap = model_card.loading_code(f"hf-hub:{repo}", record)
        code = _code_by_timm(model, record.arch, folder, repo) or by_normswap
    contents[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    report = checkpoint.read_header(folder).report
    contents[CARD] = model_card.render(record, report, code=code, license=license).encode()
    operations = [client.CommitOperationAdd(name, content) for name, content in contents.items()]
    api = client.HfApi()
    commit_message = message or f"{folder.name}, converted by normswap"
    try:
        with quiet():
            api.create_repo(repo, private=private, exist_ok=True)
            commit = api.create_commit(repo, operations, commit_message=commit_message)
    except client.errors.HFValidationError as error:
        raise OutputError(
            f"'{repo}' is not a name on the hub", first_line(error), "Write it as owner/name"
        ) from None
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        why = f"{hub.endpoint()} answers {status}"
        remedy = ""
        if status is None:
            why = f"{hub.endpoint()}: {first_line(error)}"
        elif status in (401, 403):
            remedy = "It needs a token that may write: `hf auth login`, or HF_TOKEN"
        raise OutputError(f"cannot push to {repo}", why, remedy) from None
    return Published(str(commit.commit_url), repo, tuple(contents), arguments is not None)


def _license_on_card(repo: str | None) -> str | None:
    with suppress(Exception):
        return repo and client.ModelCard.load(hub.fetch(repo, (CARD,))).data.license
    return None


def _arguments(model: nn.Module, arch: Arch | None) -> Mapping[str, object] | None:
    """Arguments with which timm builds this very network, if there are any: found by building it
    and running both.
    """
    if arch is None or arch.builder != "timm":
        return None
    for more in ({}, *({"norm_layer": name} for name in _NORM_LAYERS)):
        kwargs = {**arch.kwargs, **more}
        try:
            other = timm_models.create(Arch(arch.name, kwargs))
            other.load_state_dict(model.state_dict())
            if comparison.verify(model, other).passed:
                return kwargs
        # It has no such option, or other tensors, or does not run.
        except (NormswapError, RuntimeError):
            continue
    return None


def _code_by_timm(model: nn.Module, arch: Arch | None, folder: Path, repo: str) -> str | None:
    """Return code that loads a folded network into timm's own class, if it does: it is run here,
    and compared.
    """
    if arch is None or arch.builder != "timm":
        return None
    names: dict[str, Any] = {}
    code = partial(
        _FOLDED.read_text(encoding="utf-8").format, name=arch.name, kwargs=dict(arch.kwargs)
    )
    with suppress(Exception):
        exec(code(file=repr(str(folder / WEIGHTS))), names)
        if comparison.verify(model, names["model"]).passed:
            return code(file=f'hf_hub_download("{repo}", "{WEIGHTS}")')
    return None
