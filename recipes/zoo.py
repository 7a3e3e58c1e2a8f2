# /// script
# requires-python = ">=3.10"
# dependencies = ["normswap[train] @ git+https://github.com/normswap/normswap", "datasets"]
# ///
"""Make, measure and publish every checkpoint of a manifest, by one command that can be killed.

    python recipes/zoo.py --manifest recipes/zoo.yaml --to OWNER --images imagenet=PATH -o zoo

Each row of the manifest is one source and one scheme. It is converted, proved against its source,
measured on the whole split, trained, and so is its source with BatchNorm by the same recipe. Then
it is pushed, and loaded from the hub in a fresh process, by timm alone where that can be. The file
`zoo.json` is sent last: a repository that has it, with the row's hash, is done. A failed row is a
row of `zoo.csv` with its reason; `--retry` tries it again. `--dry-run` names hours and gigabytes.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub as client
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from normswap import reading, shipped
from normswap.errors import NormswapError, OptionError, OutputError, SourceError, first_line

if TYPE_CHECKING:
    from torch import nn

    from normswap.storage.publishing import Published

MARK = "zoo.json"
TABLE = "zoo.csv"
# Relative L2 between what was pushed and what came back. Another order of sums gives 1e-6.
_MOST_APART = 1e-5
_GIBIBYTE = 2**30


class Part(BaseModel):
    """A part of a manifest: every key is known, and of its type."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Images(Part):
    """Labelled images.

    Args:
        place: Where they are, as `--data` takes it. Anybody may have them elsewhere.
        dataset: The repository of the dataset on the hub. None where there is none.
        split: The part on which top-1 is measured, all of it.
        count: The number of images in that part.
        train_count: The number of images to train on.
    """

    place: str
    dataset: str | None
    split: str
    count: int = Field(ge=1)
    train_count: int = Field(ge=1)


class SchemeOfRows(Part):
    """A conversion, its gate and its training.

    Args:
        to: The scheme.
        options: Its options that are no defaults.
        calibrate: The number of training images that values are fitted to; 0 fits nothing.
        seed: The seed by which these images are drawn.
        min_kept: The least share of images with the source's answer right after the conversion.
        recipe: The recipe of the training. None trains nothing.
        overrides: `KEY=VALUE` for the recipe.
        publish: The network that is pushed: the one after so many epochs.
    """

    to: str
    options: dict[str, Any] = {}
    calibrate: int = Field(0, ge=0)
    seed: int = 0
    min_kept: float = Field(ge=0, le=1)
    recipe: str | None = None
    overrides: list[str] = []
    publish: int = 0


class Source(Part):
    """A pretrained network.

    Args:
        sha256: The hash of its tensors, as zoo.csv has it. None where nobody has noted it yet.
        licence: The licence of its weights, by the hub's name.
        images: The name of the images.
        network: The name of its architecture in `networks`, from which costs are estimated.
        schemes: The names of the schemes. None takes all.
    """

    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    licence: str
    images: str
    network: str | None = None
    schemes: list[str] | None = None


class Network(Part):
    """The size of an architecture: parameters, multiply-adds, numbers in its maps, in millions."""

    parameters: float
    macs: float
    activations: float


class Speeds(Part):
    """Measured speeds from which costs are estimated.

    Args:
        network: The architecture that was measured.
        batch: The number of images in a batch, at which memory was measured.
        evaluate: Images a second of inference, by the name of the scheme in this manifest. A
            scheme that is missing is taken for batchnorm.
        train: Images a second of training, likewise.
        gibibytes: The peak of memory in training, likewise.
        decoded_per_core: Images a second that one CPU core decodes, crops and resizes.
        cores: The number of CPU cores beside each GPU.
    """

    network: str
    batch: int
    evaluate: dict[str, float]
    train: dict[str, float]
    gibibytes: dict[str, float]
    decoded_per_core: float
    cores: int


class Manifest(Part):
    """All rows: each source in each of its schemes."""

    collection: str | None = None
    epochs: list[int]
    images: dict[str, Images]
    schemes: dict[str, SchemeOfRows]
    sources: dict[str, Source]
    networks: dict[str, Network] = {}
    speeds: Speeds | None = None

    @model_validator(mode="after")
    def _names_are_known(self) -> Manifest:
        for name, source in self.sources.items():
            _require(source.images in self.images, f"sources.{name}.images: {source.images!r}")
            for scheme in source.schemes or []:
                _require(scheme in self.schemes, f"sources.{name}.schemes: {scheme!r}")
            if source.network is not None:
                _require(source.network in self.networks, f"sources.{name}.network")
        for name, scheme in self.schemes.items():
            known = [0, *self.epochs] if scheme.recipe else [0]
            _require(scheme.publish in known, f"schemes.{name}.publish: {scheme.publish}")
        return self


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"{what} is not in the manifest")


@dataclass(frozen=True)
class Row:
    """One checkpoint of the zoo.

    Args:
        id: The name of the row, and of its repository.
        source: The MODEL that is converted.
        of: What the manifest says of the source.
        scheme_name: The name of the conversion in the manifest.
        scheme: What the manifest says of the conversion.
        images: The images.
        epochs: The epochs after which the network is measured.
    """

    id: str
    source: str
    of: Source
    scheme_name: str
    scheme: SchemeOfRows
    images: Images
    epochs: tuple[int, ...]

    @property
    def hash(self) -> str:
        """The hash of all that decides the row; the place of the images does not."""
        parts = [self.of, self.scheme, self.images]
        said = [part.model_dump(exclude={"place", "network", "schemes"}) for part in parts]
        return _hash([self.id, self.source, self.epochs, *said])

    @property
    def baseline(self) -> str:
        """The hash of all that decides how the source is trained, equally for all its rows."""
        said = [self.images.model_dump(exclude={"place"}), self.of.sha256]
        return _hash([self.source, self.scheme.recipe, self.scheme.overrides, *said])

    @property
    def trained_epochs(self) -> tuple[int, ...]:
        return self.epochs if self.scheme.recipe else ()


def _hash(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def read_manifest(file: Path, places: dict[str, str]) -> Manifest:
    """Return a manifest, checked key by key.

    Args:
        file: The manifest.
        places: The places of images by their name, where they are not those of the manifest.

    Raises:
        OptionError: The manifest cannot be read, or has other images than `places` names.
    """
    try:
        tree = reading.parse_yaml(reading.file_text(file, reading.MOST_BYTES_OF_YAML))
        manifest = reading.validated(TypeAdapter(Manifest), json.dumps(tree))
    except reading.UnreadableError as error:
        raise OptionError(f"{file} is no manifest of a zoo", str(error)) from None

    images = dict(manifest.images)
    for name, place in places.items():
        if name not in images:
            raise OptionError(f"--images {name}=...", f"{file} has {', '.join(images)}")
        images[name] = images[name].model_copy(update={"place": place})
    return manifest.model_copy(update={"images": images})


def rows_of(manifest: Manifest) -> list[Row]:
    """List the rows: each source in each of its schemes."""
    rows: list[Row] = []
    for source, of in manifest.sources.items():
        tail = re.sub(r"[^A-Za-z0-9._-]+", "-", source.rpartition(":")[2].rpartition("/")[2])
        for name in of.schemes or manifest.schemes:
            row = Row(
                id=f"{tail}-{name}",
                source=source,
                of=of,
                scheme_name=name,
                scheme=manifest.schemes[name],
                images=manifest.images[of.images],
                epochs=tuple(manifest.epochs),
            )
            rows.append(row)
    return rows


@dataclass(frozen=True)
class Cost:
    """What a row costs on paper.

    Args:
        gpu_hours: Hours in which the GPU computes.
        hours: Hours that pass: those of the CPU's cores, where they cannot feed the GPU.
        memory: Gibibytes of the GPU's memory at the peak.
        disk: Gibibytes that are written.
    """

    gpu_hours: float
    hours: float
    memory: float
    disk: float


def cost_of(row: Row, manifest: Manifest, *, first: bool) -> Cost | None:
    """Return what a row costs, or None where the manifest has no speeds for it.

    Times grow with multiply-adds or with maps, whichever grow more; memory grows with maps. A
    teacher is counted as one more inference.

    Args:
        row: The row.
        manifest: The manifest, with its speeds.
        first: Whether it is the source's first row, which also pays for BatchNorm's training.
    """
    speeds = manifest.speeds
    if speeds is None or row.of.network is None:
        return None
    network = manifest.networks[row.of.network]
    measured = manifest.networks[speeds.network]
    activations = network.activations / measured.activations
    slower = max(network.macs / measured.macs, activations)

    name = row.scheme_name
    passes = [(name, len(row.trained_epochs) + 1)]
    trainings = [(name, sum(row.trained_epochs))]
    if first:
        passes.append(("batchnorm", len(row.trained_epochs) + 1))
        trainings.append(("batchnorm", sum(row.trained_epochs)))

    seconds = 0.0
    images = 0.0
    for scheme, count in passes:
        evaluated = count * row.images.count
        seconds += evaluated * slower / speeds.evaluate.get(scheme, speeds.evaluate["batchnorm"])
        images += evaluated
    for scheme, epochs in trainings:
        seen = epochs * row.images.train_count
        rate = speeds.train.get(scheme, speeds.train["batchnorm"])
        seconds += seen * slower * (1 / rate + 1 / speeds.evaluate["batchnorm"])
        images += seen

    decoding = images / (speeds.decoded_per_core * speeds.cores)
    # A run's folder has best/, last/ and a state of weights, momentum and average.
    networks = 1 + 5 * len(row.trained_epochs) * (2 if first else 1)
    return Cost(
        gpu_hours=seconds / 3600,
        hours=max(seconds, decoding) / 3600,
        memory=speeds.gibibytes.get(name, speeds.gibibytes["batchnorm"]) * activations,
        disk=networks * network.parameters * 1e6 * 4 / _GIBIBYTE,
    )


def show_costs(rows: list[Row], manifest: Manifest) -> None:
    """Print hours and gigabytes of every row, and their sums."""
    known: set[str] = set()
    total = [0.0, 0.0, 0.0]
    memory = f"GiB at {manifest.speeds.batch}" if manifest.speeds else "GiB"
    print(f"{'row':44} {'GPU hours':>9} {'hours':>7} {memory:>11} {'disk GiB':>8}")
    for row in rows:
        cost = cost_of(row, manifest, first=row.baseline not in known)
        if row.trained_epochs:
            known.add(row.baseline)
        if cost is None:
            print(f"{row.id:44} {'no speed in the manifest':>35}")
            continue
        figures = f"{cost.gpu_hours:9.2f} {cost.hours:7.2f} {cost.memory:11.1f} {cost.disk:8.2f}"
        print(f"{row.id:44} {figures}")
        total = [total[0] + cost.gpu_hours, total[1] + cost.hours, total[2] + cost.disk]
    print(f"{'all':44} {total[0]:9.2f} {total[1]:7.2f} {'':11} {total[2]:8.2f}")


class StoppedError(Exception):
    """A training was asked to stop, and has saved its state."""


class Zoo:
    """The folder in which rows are made.

    Args:
        folder: The folder.
        owner: The owner of the repositories on the hub.
        device: The device, as `--device` elsewhere.
        workers: The number of processes that read images.
    """

    def __init__(self, folder: Path, owner: str, device: str, workers: int) -> None:
        self.folder = folder
        self.owner = owner
        self.device = device
        self.workers = workers

    def place(self, row: Row) -> Path:
        return self.folder / "rows" / f"{row.id}-{row.hash}"

    def done(self, row: Row) -> dict[str, Any] | None:
        """Return the line of a row that is on the hub with this very hash, or None."""
        try:
            file = client.hf_hub_download(f"{self.owner}/{row.id}", MARK)
        except (client.errors.RepositoryNotFoundError, client.errors.EntryNotFoundError):
            return None
        line: dict[str, Any] = reading.parse_object(reading.file_text(Path(file)))
        return line if line.get("hash") == row.hash else None

    def failed(self, row: Row) -> dict[str, Any] | None:
        """Return the line of a row that has failed in this folder, or None."""
        file = self.place(row) / "failed.json"
        return reading.parse_object(reading.file_text(file)) if file.is_file() else None

    def make(self, row: Row) -> dict[str, Any]:
        """Make, measure and publish a row; return its line of zoo.csv.

        Raises:
            NormswapError: The row fails. The message says why.
            StoppedError: A training was asked to stop.
        """
        from normswap.storage import checkpoint

        place = self.place(row)
        source = checkpoint.open_model(row.source)
        sha256 = self._checked_hash(row, source)
        converted = self._converted(row, source)
        report = self._proved(row, source, converted)

        before = self._measured(row, source, self._baseline(row) / "source.json")
        after = self._measured(row, converted, place / "converted.json")
        same = sum(map(int.__eq__, before["answers"], after["answers"]))
        kept = same / len(before["answers"])
        if kept < row.scheme.min_kept:
            why = f"it keeps {100 * kept:.2f} % of the source's answers on {len(before['answers'])}"
            raise SourceError(
                "the gate is shut", f"{why} images; min_kept is {100 * row.scheme.min_kept:g} %"
            )

        line: dict[str, Any] = {
            **described(row),
            "sha256": sha256,
            "verdict": report.verdict,
            "kept": kept,
            "source_top1": before["top1"],
            "top1_0": after["top1"],
        }
        networks = {0: place / "converted"}
        figures = {0: after["top1"]}
        for epochs in row.trained_epochs:
            baseline = self._trained(row, source, epochs, self._baseline(row))
            _, line[f"batchnorm_{epochs}"] = baseline
            networks[epochs], figures[epochs] = self._trained(row, converted, epochs, place)
            line[f"top1_{epochs}"] = figures[epochs]

        line["top1"] = figures[row.scheme.publish]
        published = self._push(row, networks[row.scheme.publish], line)
        line |= self._loaded_again(row, networks[row.scheme.publish], published)
        line |= {"state": "published", "url": published.url}
        self._mark(row, line)
        return line

    def _baseline(self, row: Row) -> Path:
        """The folder of the source's own measurements, which its rows share."""
        return self.folder / "sources" / row.baseline

    def _checked_hash(self, row: Row, source: nn.Module) -> str | None:
        from normswap import provenance

        found = provenance.of(source).sha256
        if row.of.sha256 not in (None, found):
            raise SourceError(
                f"{row.source} has other tensors", f"{found}, the manifest says {row.of.sha256}"
            )
        return found

    def _converted(self, row: Row, source: nn.Module) -> nn.Module:
        """Return the converted network, from the folder if it is there already."""
        import normswap
        from normswap.images import datasets
        from normswap.storage import checkpoint

        place = self.place(row) / "converted"
        if not place.is_dir():
            images = None
            if row.scheme.calibrate:
                images = datasets.make_loader(
                    source,
                    row.images.place,
                    split="train",
                    samples=row.scheme.calibrate,
                    seed=row.scheme.seed,
                    workers=self.workers,
                    labelled=False,
                )
            result = normswap.convert(source, row.scheme.to, calibrate=images, **row.scheme.options)
            place.parent.mkdir(parents=True, exist_ok=True)
            normswap.save(result, place)
        return checkpoint.load(place)

    def _proved(self, row: Row, source: nn.Module, result: nn.Module) -> Any:
        """Compare the network that lies on the disk with its source, as `normswap verify` does."""
        from normswap.surgery import reverification
        from normswap.surgery.network import Network

        report = reverification.again(Network.of(source), result)
        if not report.passed:
            raise SourceError(f"{row.id} is {report.verdict}", report.unproved)
        return report

    def _measured(self, row: Row, model: nn.Module, file: Path) -> dict[str, Any]:
        """Return top-1 and the answers on the whole split, from a file if they are there."""
        if file.is_file():
            return reading.parse_object(reading.file_text(file))
        from normswap.images import datasets
        from normswap.images.accuracy import classify
        from normswap.models import devices
        from normswap.storage import atomic_write

        loader = datasets.make_loader(
            model, row.images.place, split=row.images.split, workers=self.workers
        )
        evaluation, answers = classify(devices.place(model, self.device), loader)
        model.to("cpu")
        if evaluation.count != row.images.count:
            raise SourceError(
                f"{row.images.place} has {evaluation.count} images in {row.images.split}",
                f"the manifest says {row.images.count}",
            )
        body = {"top1": evaluation.top1, "answers": answers.tolist()}
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write.text(file, json.dumps(body))
        return body

    def _trained(self, row: Row, model: nn.Module, epochs: int, folder: Path) -> tuple[Path, float]:
        """Train a network by the row's recipe; return its directory and its top-1.

        It is the network after the last update, which no validation image has chosen.
        """
        import normswap
        from normswap.storage import checkpoint

        images = row.images.place
        if images == shipped.NAME:
            images = str(shipped.IMAGES)
        recipe = normswap.load_recipe(
            str(row.scheme.recipe),
            [
                "convert=null",
                f"data.root={images}",
                f"data.workers={self.workers}",
                f"train.epochs={epochs}",
                *row.scheme.overrides,
            ],
        )
        run = folder / f"epochs-{epochs}"
        result = normswap.finetune(
            model, recipe, run, resume="auto", device=self.device, track="none"
        )
        if not result.finished:
            raise StoppedError(f"{run} is stopped at update {result.updates}")
        trained = checkpoint.load(result.last)
        return result.last, self._measured(row, trained, folder / f"epochs-{epochs}.json")["top1"]

    def _push(self, row: Row, directory: Path, line: dict[str, Any]) -> Published:
        import normswap
        from normswap.storage.model_card import Accuracy

        accuracy = Accuracy(
            top1=line["top1"],
            count=row.images.count,
            images=row.images.dataset or Path(row.images.place).name,
            split=row.images.split,
            dataset=row.images.dataset,
            source_top1=line["source_top1"],
        )
        return normswap.push(
            directory,
            f"{self.owner}/{row.id}",
            license=row.of.licence,
            message=f"{row.id} of the zoo, {row.hash}",
            accuracy=accuracy,
        )

    def _loaded_again(self, row: Row, directory: Path, published: Published) -> dict[str, Any]:
        """Load the network from the hub by its card, in a fresh process, and compare answers.

        normswap cannot be imported there if the card's code does without it.
        """
        import torch
        from safetensors.torch import load_file, save_file

        from normswap.storage import checkpoint

        card = client.ModelCard.load(published.repo)
        (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
        by_normswap = card.data.library_name == "normswap"
        model = checkpoint.load(directory)
        with tempfile.TemporaryDirectory() as temporary:
            file = Path(temporary) / "answers.safetensors"
            size = model.pretrained_cfg["input_size"]
            x = torch.randn(4, *size, generator=torch.Generator().manual_seed(0))
            with torch.inference_mode():
                save_file({"x": x, "y": model(x)}, file)
            program = _STRANGER.format(
                hidden="" if by_normswap else "sys.modules['normswap'] = None", code=code
            )
            done = subprocess.run(
                [sys.executable, "-c", program, str(file)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                lines = done.stderr.strip().splitlines() or [str(done.returncode)]
                raise SourceError(f"{published.repo} cannot be loaded by its card", lines[-1])
            answers = load_file(file)

        apart = float((answers["z"] - answers["y"]).norm() / answers["y"].norm())
        if not apart <= _MOST_APART:
            raise SourceError(
                f"{published.repo} answers otherwise than what was pushed",
                f"relative L2 {apart:.1e}, {_MOST_APART:.0e} is allowed",
            )
        loads_with = "timm" if published.alone else "the card's code"
        return {"loads_with": "normswap" if by_normswap else loads_with, "apart": apart}

    def _mark(self, row: Row, line: dict[str, Any]) -> None:
        """Send the mark by which the row is known to be done."""
        content = (json.dumps(line, indent=2) + "\n").encode()
        client.HfApi().upload_file(
            path_or_fileobj=content,
            path_in_repo=MARK,
            repo_id=f"{self.owner}/{row.id}",
            commit_message=f"The figures of {row.id}",
        )

    def write(self, lines: list[dict[str, Any]], epochs: list[int]) -> None:
        """Write zoo.csv."""
        from normswap.storage import atomic_write

        trained: list[str] = []
        for count in epochs:
            trained += [f"batchnorm_{count}", f"top1_{count}"]
        columns = ["id", "state", "top1", "source_top1", "kept", "top1_0", *trained, "verdict"]
        columns += ["loads_with", "apart", "repo", "reason", *DESCRIBED, "sha256", "url", "hash"]
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_write.table(self.folder / TABLE, columns, lines)


# A process of somebody who has the card alone.
_STRANGER = """
import sys
{hidden}
import torch
from safetensors.torch import load_file, save_file

{code}
tensors = load_file(sys.argv[1])
with torch.inference_mode():
    tensors["z"] = model.eval()(tensors["x"])
save_file(tensors, sys.argv[1])
"""
DESCRIBED = ("source", "licence", "scheme", "options", "calibrate", "images", "split", "count")
DESCRIBED = (*DESCRIBED, "recipe", "published_epochs")


def described(row: Row) -> dict[str, Any]:
    """Return what the manifest says of a row, as columns."""
    return {
        "id": row.id,
        "hash": row.hash,
        "source": row.source,
        "licence": row.of.licence,
        "scheme": row.scheme.to,
        "options": json.dumps(row.scheme.options) if row.scheme.options else None,
        "calibrate": row.scheme.calibrate,
        "images": row.images.dataset or Path(row.images.place).name,
        "split": row.images.split,
        "count": row.images.count,
        "recipe": row.scheme.recipe,
        "published_epochs": row.scheme.publish,
    }


def collect(owner: str, title: str, repos: list[str]) -> None:
    """Put repositories into a collection on the hub, which is made if it is not there."""
    api = client.HfApi()
    collection = api.create_collection(title, namespace=owner, exists_ok=True)
    for repo in repos:
        api.add_collection_item(collection.slug, repo, "model", exists_ok=True)


def make_all(zoo: Zoo, manifest: Manifest, rows: list[Row], *, retry: bool) -> int:
    """Make every row that is not done; return the exit code, 1 if a row has failed."""
    lines: list[dict[str, Any]] = []
    new: list[str] = []
    for row in rows:
        repo = f"{zoo.owner}/{row.id}"
        line = zoo.done(row) or (None if retry else zoo.failed(row))
        if line is None:
            print(f"{row.id}: made", file=sys.stderr, flush=True)
            try:
                line = {**zoo.make(row), "repo": repo}
                new.append(repo)
            except OutputError as error:
                # The network is made; the next call pushes it.
                line = {**described(row), "state": "not pushed", "reason": str(error)}
            except NormswapError as error:
                line = {**described(row), "state": "failed", "reason": str(error)}
                _note_failure(zoo.place(row), line)
        print(f"{row.id}: {line['state']} {line.get('reason') or ''}", file=sys.stderr, flush=True)
        lines.append(line)
        zoo.write(lines, manifest.epochs)

    if new and manifest.collection:
        collect(zoo.owner, manifest.collection, new)
    states = [line["state"] for line in lines]
    print(f"{zoo.folder / TABLE}: {states.count('published')} of {len(rows)} rows published")
    return int(any(state != "published" for state in states))


def _note_failure(place: Path, line: dict[str, Any]) -> None:
    from normswap.storage import atomic_write

    place.mkdir(parents=True, exist_ok=True)
    atomic_write.text(place / "failed.json", json.dumps(line, indent=2))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--manifest", type=Path, default=shipped.recipes() / "zoo.yaml")
    parser.add_argument("--to", metavar="OWNER", help="the owner of the repositories on the hub")
    parser.add_argument("-o", "--output", type=Path, default=Path("zoo"))
    help_of_images = "where images of the manifest are here: a folder, a tar, hfds/OWNER/NAME"
    parser.add_argument(
        "--images", metavar="NAME=PLACE", action="append", default=[], help=help_of_images
    )
    parser.add_argument("--rows", metavar="GLOB", default="*", help="the rows with such an id")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--retry", action="store_true", help="try rows again that have failed")
    parser.add_argument("--dry-run", action="store_true", help="print what each row costs")
    given = parser.parse_args(words)

    try:
        places = dict(place.split("=", 1) for place in given.images)
        manifest = read_manifest(given.manifest, places)
        rows = [row for row in rows_of(manifest) if fnmatch.fnmatch(row.id, given.rows)]
        if given.dry_run:
            show_costs(rows, manifest)
            return 0
        if not given.to:
            raise OptionError("--to OWNER is missing", "the rows are published there")
        zoo = Zoo(given.output, given.to, given.device, given.workers)
        return make_all(zoo, manifest, rows, retry=given.retry)
    except StoppedError as error:
        print(f"{error}; the same command goes on", file=sys.stderr)
        return 0
    except (NormswapError, client.errors.HfHubHTTPError) as error:
        print(f"zoo: {first_line(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
