"""Publish a network's directory on the Hugging Face hub, by huggingface_hub's own upload.

A network that timm can build without normswap is published so that
`timm.create_model("hf-hub:owner/name", pretrained=True)` loads it. normswap loads any other.

Only the files that `checkpoint.save` writes leave this machine, in one commit. The two files of
tensors are sent as they were checked, but for the folders of this machine in a header. config.json
and the card are written anew from the record in the weights. A measured top-1 becomes one more
file, in `.eval_results/`. A directory with a link among these files is refused.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub as client
from torch import nn

from normswap import provenance
from normswap.errors import (
    NormswapError,
    OptionError,
    OutputError,
    SourceError,
    first_line,
    quiet,
    spelled,
)
from normswap.models import hub, timm_models
from normswap.plan import Arch
from normswap.storage import checkpoint, model_card
from normswap.storage.header import without_folders
from normswap.storage.network_folder import CARD, CONFIG, FILES, NORMS, WEIGHTS
from normswap.surgery.verification import verify

# What timm's `norm_layer` calls the norms that a conversion may end in.
_NORM_LAYERS = ("groupnorm", "groupnorm1")
_TOKEN = "It needs a token that may write: `hf auth login`, or HF_TOKEN"
# A template of code that loads a folded network into timm's own class.
_FOLDED = Path(__file__).with_name("folded_by_timm.txt")


@dataclass(frozen=True)
class Published:
    """What `push` has sent to the hub.

    Args:
        url: The address of the commit.
        repo: The repository, as owner/name.
        files: The names of the files that were sent.
        alone: Whether `timm.create_model` opens the network without normswap.
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
    accuracy: model_card.Accuracy | None = None,
) -> Published:
    """Publish a network that `save` wrote in a repository of the Hugging Face hub.

    The repository is made if it does not exist.

    Args:
        directory: The network's directory. None of its files may be a link.
        repo: The repository, as owner/name.
        license: The license of the weights by the hub's name (apache-2.0, mit, other). The default
            is the license of the network before its conversion.
        private: Whether nobody else may see the repository. If it exists already and is public,
            nothing is sent.
        message: The message of the commit. The default names the directory.
        trust_factory: Whether a factory (the user's own function that builds the network) may be
            imported, which runs its code.
        accuracy: Top-1 on labelled images, for the model card and for the hub's `.eval_results/`.
            None if it was not measured.

    Returns:
        The address of the commit, and which files were sent.

    Raises:
        SourceError: The directory is damaged, or one of its files is a link.
        OptionError: `repo` is not the name of a repository, or the license is not known.
        OutputError: There is no token, the hub refuses it, or the repository is public.
    """
    check(directory, repo, license=license, private=private)

    # Read the directory. Nobody may change its files between the checks and the sending.
    folder = Path(directory)
    files = _FilesOfSave(folder)
    model = checkpoint.load(folder, trust_factory=trust_factory)
    files.check_unchanged()
    header = checkpoint.read_header(folder)
    files.check_unchanged()
    record = provenance.of(model)
    license = license or _license_of_source(record, folder)

    # Find the code that opens the network: by timm alone if that is possible, or else by normswap.
    # Both the config and the card depend on it.
    weights, digest = without_folders(files.contents[WEIGHTS])
    config = checkpoint.config_of(model, record, digest)
    arguments = _arguments_for_timm(model, record.arch)
    if arguments is not None:
        config["model_args"] = dict(arguments)
        code = f'import timm\n\nmodel = timm.create_model("hf-hub:{repo}", pretrained=True).eval()'
    else:
        by_normswap = model_card.loading_code(f"hf-hub:{repo}", record)
        code = _code_by_timm(model, record.arch, folder, repo) or by_normswap
    card = model_card.render(record, header.report, code=code, license=license, accuracy=accuracy)

    # Send the files.
    contents = {
        WEIGHTS: weights,
        CONFIG: (json.dumps(config, indent=2) + "\n").encode(),
        CARD: card.encode(),
        **model_card.eval_results(accuracy),
    }
    # The replaced norms are sent only if the header has their hash, with which `load` has compared
    # them.
    if NORMS in files.contents and NORMS in header.hashes:
        contents[NORMS] = files.contents[NORMS]
    commit_message = message or f"{folder.resolve().name}, converted by normswap"
    url = _commit(repo, contents, commit_message, private=private)
    return Published(url=url, repo=repo, files=tuple(contents), alone=arguments is not None)


def check(
    directory: str | Path, repo: str, *, license: str | None = None, private: bool = False
) -> None:
    """Raise the error that `push` would end in for its arguments, before anything takes long.

    The network is not built, and its tensors are not compared with their hashes.

    Args:
        directory: The network's directory.
        repo: The repository, as owner/name.
        license: The license of the weights. None if it is that of the network's source.
        private: Whether the repository must be private.

    Raises:
        SourceError: The directory holds no network, or one of its files is a link.
        OptionError: `repo` is not the name of a repository, or the license is not known.
        OutputError: There is no token, or the repository is public.
    """
    remedy = "Write it as owner/name"
    if repo.count("/") != 1:
        raise OptionError(f"'{repo}' is not a name on the hub", remedy=remedy)
    try:
        client.utils.validate_repo_id(repo)
    except client.errors.HFValidationError as error:
        raise OptionError(f"'{repo}' is not a name on the hub", first_line(error), remedy) from None

    folder = Path(directory)
    _FilesOfSave(folder)
    header = checkpoint.read_header(folder)
    if license is None:
        source = provenance.Provenance(header.arch, header.source, header.sha256, header.images)
        _license_of_source(source, folder)

    if client.get_token() is None:
        raise OutputError(f"cannot push to {repo}", "this machine has no token", _TOKEN)
    if private:
        _check_not_public(repo)


class _FilesOfSave:
    """The files of a directory that `save` wrote. Each must be a regular file, not a link.

    The contents of the weights and of the norms are read when the object is made, before the
    network is loaded. `check_unchanged` raises an error if a file was changed afterwards, so that
    the files that are checked are those that are sent.

    Raises:
        SourceError: There is no such directory, or a file is a link, a pipe or a directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents: dict[str, bytes] = {}
        self._identities: dict[str, tuple[int, ...] | None] = {}
        if not folder.is_dir():
            remedy = "Name a directory that normswap wrote"
            raise SourceError(f"{folder} has no {WEIGHTS}", remedy=remedy)

        # An identity is a tuple of numbers that change if a file is changed or replaced. Later it
        # shows whether somebody has changed a file. Only the weights and the replaced norms are
        # sent to the hub as they are, so only these are read.
        for name in FILES:
            self._identities[name] = self._identity(name)
            if name in (WEIGHTS, NORMS) and self._identities[name] is not None:
                self.contents[name] = self._read(name)

    def check_unchanged(self) -> None:
        """Raise SourceError if a file of the network was changed since this object was made."""
        for name in FILES:
            if self._identity(name) != self._identities[name]:
                raise SourceError(
                    f"{self.folder / name} was changed while it was read", remedy="Push again"
                )

    def _identity(self, name: str) -> tuple[int, ...] | None:
        """Return numbers that change if a file is changed or replaced. None if there is no file.

        Args:
            name: The name of the file in the network's directory.
        """
        file = self.folder / name
        try:
            status = file.lstat()
        except FileNotFoundError:
            return None
        self._check_regular(file, status)
        return _identity_of(status)

    def _read(self, name: str) -> bytes:
        """Return the bytes of a file in the network's directory.

        Args:
            name: The name of the file.

        Raises:
            SourceError: The file cannot be read, or is another one than when it was first looked
                at.
        """
        # A link that took the file's place meanwhile is not followed, and a pipe is not waited for.
        # Windows has no flags for this.
        file = self.folder / name
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            with open(os.open(file, flags), "rb") as opened:
                status = os.fstat(opened.fileno())
                self._check_regular(file, status)
                if _identity_of(status) != self._identities[name]:
                    raise SourceError(f"{file} was changed while it was read", remedy="Push again")
                return opened.read()
        except OSError as error:
            raise SourceError(
                f"{file} cannot be read", error.strerror or first_line(error)
            ) from None

    def _check_regular(self, file: Path, status: os.stat_result) -> None:
        """Raise SourceError if a link, a pipe or a directory is in the place of a file.

        Args:
            file: The path of the file.
            status: The result of `os.stat` or `os.lstat` for this path.
        """
        if stat.S_ISREG(status.st_mode):
            return
        why = "it is no regular file"
        if stat.S_ISLNK(status.st_mode):
            why = "it is a link, and only files of the directory itself are published"
        remedy = f"Put a copy in its place: cp -rL {self.folder} COPY"
        raise SourceError(f"{file} is not published", why, remedy)


def _identity_of(status: os.stat_result) -> tuple[int, ...]:
    """Return numbers that change if a file is changed or replaced, such as its size and time.

    Args:
        status: The result of `os.stat` for the file.
    """
    # Anybody can set st_mtime back after a change, but not st_ctime.
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def _commit(repo: str, contents: Mapping[str, bytes], message: str, *, private: bool) -> str:
    """Send files to a repository of the hub in one commit, and return the commit's address.

    Args:
        repo: The repository, as owner/name. It is made if it does not exist.
        contents: The contents of the files, by their names.
        message: The message of the commit.
        private: Whether the repository is private if it is made.

    Raises:
        OutputError: The hub refuses the commit.
    """
    operations = [client.CommitOperationAdd(name, content) for name, content in contents.items()]
    api = client.HfApi()
    with _explained(repo):
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.create_commit(repo, operations, commit_message=message)
    return str(commit.commit_url)


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """In a `with` block that asks the hub, raise OutputError for any error, with the remedy.

    Args:
        repo: The repository that is asked for, as owner/name.
    """
    try:
        with quiet():
            yield
    # The client raises its own errors, or its HTTP library's, or the system's.
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        why = f"{hub.endpoint()} answers {status}"
        remedy = ""
        if status is None:
            why = f"{hub.endpoint()}: {first_line(error)}"
        elif status in (401, 403):
            remedy = _TOKEN
        raise OutputError(f"cannot push to {repo}", why, remedy) from None


def _check_not_public(repo: str) -> None:
    """Raise OutputError if a repository exists and is public, because it would stay public.

    Args:
        repo: The repository, as owner/name.

    Raises:
        OutputError: It is public, or the hub does not answer.
    """
    with _explained(repo):
        try:
            is_public = not client.HfApi().repo_info(repo).private
        except client.errors.RepositoryNotFoundError:
            is_public = False
    if is_public:
        remedy = f"Make it private on {hub.endpoint()}, or give another name"
        raise OutputError(f"{repo} is there already, and public", remedy=remedy)


def _license_of_source(record: provenance.Provenance, folder: Path) -> str:
    """Return the license of the weights that were converted, from the record or from the hub.

    Args:
        record: The provenance of the network.
        folder: The directory of the network, for the error.

    Raises:
        OptionError: The license is not known.
    """
    # The license on record is that of trained weights, not of random ones.
    stated = record.pretrained_cfg.get("license") if record.sha256 else None
    license = stated or _license_on_card(model_card.base_model(record))
    if isinstance(license, str):
        return license
    remedy = (
        f"Give {spelled('license', metavar='NAME')}, the source's: apache-2.0, mit, agpl-3.0,"
        " other ..."
    )
    raise OptionError(f"nobody knows the license of the weights in {folder}", remedy=remedy)


def _license_on_card(repo: str | None) -> str | None:
    """Return the license that the model card of a repository on the hub states, or None.

    Args:
        repo: The repository, as owner/name. None if the weights are from no repository.
    """
    if repo is None:
        return None
    # If the card cannot be fetched or read, for whatever reason, the license is not known.
    with suppress(Exception):
        card = client.ModelCard.load(hub.fetch(repo, (CARD,)))
        license: object = card.data.license
        return license if isinstance(license, str) else None
    return None


def _arguments_for_timm(model: nn.Module, arch: Arch | None) -> Mapping[str, object] | None:
    """Return the arguments with which timm builds this very network without normswap, or None.

    A network is built with each possible set of arguments, and its outputs are compared with those
    of `model`.

    Args:
        model: The converted network.
        arch: How the network was built before its conversion. None if that is not known.
    """
    if arch is None or arch.builder != "timm":
        return None

    # The architecture is tried as it is, and then with each norm that a conversion may end in.
    variants: list[dict[str, object]] = [{}]
    variants += [{"norm_layer": name} for name in _NORM_LAYERS]
    for variant in variants:
        kwargs = {**arch.kwargs, **variant}
        try:
            other = timm_models.create(Arch(arch.name, kwargs))
            other.load_state_dict(model.state_dict())
            if verify(model, other).passed:
                return kwargs
        # The architecture has no such option, or has other tensors, or does not run.
        except (NormswapError, RuntimeError):
            continue
    return None


def _code_by_timm(model: nn.Module, arch: Arch | None, folder: Path, repo: str) -> str | None:
    """Return Python code that loads a folded network into timm's own class, or None.

    The code is run here with the file in the directory, and its network is compared with `model`.
    The result is None if the two differ, or if the code fails.

    Args:
        model: The converted network.
        arch: How the network was built before its conversion. None if that is not known.
        folder: The directory of the network.
        repo: The repository, as owner/name. The code that is returned loads the weights from there.
    """
    if arch is None or arch.builder != "timm":
        return None
    # The place of the weights is filled in last: the file here, then the file on the hub.
    template = _FOLDED.read_text(encoding="utf-8")
    code = partial(template.format, name=arch.name, kwargs=dict(arch.kwargs))
    names: dict[str, Any] = {}
    # timm's constructors may raise anything. If one does, this is no folded network of timm's.
    with suppress(Exception):
        exec(code(file=repr(str(folder / WEIGHTS))), names)
        if verify(model, names["model"]).passed:
            return code(file=f'hf_hub_download("{repo}", "{WEIGHTS}")')
    return None
