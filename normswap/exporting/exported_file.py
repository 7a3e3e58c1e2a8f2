"""An exported file in place of a network, for the commands that take a MODEL.

The file is found by its ending and opened in its runtime. It can be called as a network is, and
compared with a network.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from normswap import copying, provenance
from normswap.errors import NormswapError, OptionError, SourceError, first_line
from normswap.exporting import checks, exporter, formats, sidecar
from normswap.exporting.checks import Figures
from normswap.exporting.formats import Format, Runs
from normswap.exporting.request import Batches, ExportRequest
from normswap.exporting.settings import FileSettings
from normswap.exporting.signature import alone, together
from normswap.models import kinds
from normswap.models.hub import Cfg
from normswap.models.preprocessing import for_inputs, for_size
from normswap.plan import Body
from normswap.provenance import Provenance


@dataclass(frozen=True)
class ExportedFile:
    """An exported file, with its format, its metadata and its sidecar.

    A sidecar is the JSON file beside an exported file. It says what goes in and what comes out.

    Args:
        file: The path of the file.
        form: The format of the file.
        metadata: The texts that the exporter wrote into the file, by name.
        body: The content of the sidecar. Empty if normswap did not write the file.
    """

    file: Path
    form: Format
    metadata: Mapping[str, str]
    body: Body

    @classmethod
    def find(cls, name: str) -> ExportedFile | None:
        """Return the exported file that a command's argument MODEL names.

        The result is None if MODEL is no path of an exported file, but names a network.

        Args:
            name: MODEL, as the user typed it.

        Raises:
            OptionError: A package that reads the format is not installed.
            SourceError: The file is unreadable, or holds something that could run code.
        """
        file = Path(name)
        if file.suffix.lower() not in kinds.EXPORTED:
            return None
        # The file must exist. In some formats, it must be a directory.
        if not kinds.exported(file):
            return None

        form = formats.choose(file, None)
        try:
            texts = form.functions.metadata(file)
            metadata = {str(name): str(value) for name, value in texts.items()}
        except NormswapError:
            raise
        # A runtime's reader may raise anything for a damaged file.
        except Exception as error:
            raise SourceError(
                f"{file} is no readable {form.name} file", first_line(error)
            ) from None

        return cls(file, form, metadata, sidecar.body_of(file, metadata))

    @property
    def precision(self) -> str:
        """The precision of the weights, such as fp16. It is fp32 if the file does not say it."""
        return self.metadata.get("dtype", "fp32")

    @property
    def takes_images(self) -> bool:
        """Whether the file takes images, and its sidecar says how they are prepared."""
        return "normalize" in self.body

    def described(self) -> Body:
        """Return a dict that describes the file, for `normswap inspect`.

        It has the format, the size in bytes, the number of operators by kind, the metadata and the
        content of the sidecar. The file is not run.
        """
        form = self.form
        nodes = self.form.functions.nodes(self.file)
        figures = {"format": form.name, "bytes": form.size(self.file), "nodes": nodes}
        return {
            "source": str(self.file),
            **figures,
            "metadata": dict(self.metadata),
            "sidecar": self.body,
        }

    def network(self) -> nn.Module:
        """Return the file as a module, with a record of how its images are prepared.

        Raises:
            SourceError: The file does not say how its images are prepared, or takes more than
                images.
            OptionError: The file cannot be run. See `opened`.
            VerificationError: The file does not run. See `opened`.
        """
        self._require_images()

        image_input = self.body["input"]
        labels = self.body["output"]["labels"]
        assumed = self.body["assumed"]
        preprocessing: Cfg = {**self.body["resize"], **(self.body["normalize"] or {})}
        # The record is timm's. It has no key "to", and leaves out what the source network did not
        # state.
        record: Cfg = {
            key: value for key, value in preprocessing.items() if key != "to" and key not in assumed
        }
        # A file that normalizes images itself takes pixels in 0..1, so they are left as they are,
        # even if the numbers inside of the file were assumed.
        if self.body["normalize"] is None:
            record |= {"mean": [0.0], "std": [1.0]}
        record["input_size"] = tuple(image_input["size"])
        if labels is not None:
            record |= {"num_classes": len(labels), "label_names": labels}

        probabilities = self.body["output"]["name"] == "probabilities"
        network = FileNetwork(
            self.opened(), image_input["batch"], probabilities=probabilities
        ).eval()
        return provenance.attach(network, Provenance(source=str(self.file), pretrained_cfg=record))

    def opened(self) -> Runs:
        """Open the file in its runtime, and return a function from inputs to outputs.

        Raises:
            OptionError: This system has no such runtime.
            VerificationError: The runtime rejects the file.
        """
        if not self.form.runs_here:
            raise OptionError(
                f"{self.file} does not run here",
                f"{self.form.name} has no runtime on {sys.platform}",
            )
        return self.form.open(self.file)

    @property
    def shape(self) -> tuple[int | None, tuple[int, ...]]:
        """A pair: the number of images that the file takes at a time, and their size (C, H, W).

        The number is None if the file takes any number.

        Raises:
            SourceError: The file does not say its number of images and their size.
        """
        if not self.takes_images:
            self._require_images()
        # The sidecar of a file with one answer has "input". If all outputs of the network come out,
        # it has "inputs", and the images are the first of them.
        if "input" in self.body:
            return self.body["input"]["batch"], tuple(self.body["input"]["size"])
        batch, *size = self.body["inputs"][0]["shape"]
        return batch, tuple(size)

    def request(self, model: nn.Module) -> ExportRequest:
        """Return the request with which `export` would write a network with this file's options.

        By it the network is run as the file is, so that both can be compared.

        Args:
            model: The network that the file should compute. It stays as it is.

        Raises:
            SourceError: The file does not say how it was made.
            OptionError: The network takes inputs of another shape than the file.
        """
        # The sizes and names of the file's inputs are written into the record of a copy, in place
        # of what the network itself states.
        model = copying.twin(model)
        dtype = self.precision

        # Inputs that are no images are stated by name, each with its shape without the batch.
        inputs = self.body.get("inputs")
        if inputs and not self.takes_images:
            stated = {entry["name"]: (entry["shape"][1:], entry["dtype"]) for entry in inputs}
            settings = FileSettings(
                self.form.name, dtype, dynamic_batch=inputs[0]["shape"][0] is None
            )
            return ExportRequest.of(for_inputs(model, stated), self.file, self.form, None, settings)

        # A file whose record states no normalization normalizes images itself.
        batch, size = self.shape
        settings = FileSettings(
            format=self.form.name,
            dtype=dtype,
            dynamic_batch=batch is None,
            input_size=size,
            normalize=self.body["normalize"] is None,
            softmax=self.body.get("output", {}).get("name") == "probabilities",
        )

        return ExportRequest.of(for_size(model, size), self.file, self.form, None, settings)

    def _require_images(self) -> None:
        """Raise SourceError unless images go in, one answer comes out, and the file says how.

        How means how an image is prepared, and what the numbers of the answer are.
        """
        if not {"input", "normalize", "output"} <= self.body.keys():
            what = "does not say how images are prepared for it"
            why = "`normswap export` did not write it"
            remedy = "Run it in its own runtime, or export the network again"
            if self.body:
                what = "takes more than images"
                why = "it was exported with inputs by name"
                remedy = f"`normswap verify {self.file} --against MODEL` runs it beside its network"
            raise SourceError(f"{self.file} {what}", why, remedy)


def verify(exported: ExportedFile, model: nn.Module, images: Batches | None = None) -> Figures:
    """Compare a file with a network on the same images, as `export` does.

    Args:
        exported: The file.
        model: The network that the file should compute.
        images: Batches to compare on. Smooth noise if there are none.

    Returns:
        The distance between them. `Figures.passed` says whether it is the network's file.

    Raises:
        SourceError: The file does not say how it was made.
        OptionError: The network does not run on the images, or the file not on this system.
        VerificationError: The file does not run on the images.
    """
    return verify_request(exported, exported.request(model), images)


def verify_request(
    exported: ExportedFile, request: ExportRequest, images: Batches | None = None
) -> Figures:
    """Compare a file with the network of a request, as `verify` does.

    Args:
        exported: The file.
        request: The request with which `export` would write the network as this file
            (`ExportedFile.request`).
        images: Batches to compare on. Smooth noise if there are none.

    Raises:
        OptionError: The network does not run on the images, or the file not on this system.
        VerificationError: The file does not run on the images.
    """
    runs = exported.opened()
    request, _ = request.answered()
    dtype = request.settings.dtype

    # In half precision, the file may be off by what rounding costs the folded network.
    rounded = None
    if dtype in exporter.HALVES:
        rounded = exporter.folded(request).rounded(exporter.HALVES[dtype])

    batches, described = request.batches(images)
    reference = replace(request.reference(rounded), unfolded=partial(exporter.unfolded, request))
    inside = exporter.inside(request, exported.file, rounded)
    return checks.check(
        reference, runs, batches, dtype=dtype, described=described, refuse=False, inside=inside
    )


class FileNetwork(nn.Module):
    """A module that runs an exported file. Images (N, C, H, W) go in, its answer comes out.

    Args:
        runs: A function that runs the file in its runtime.
        batch: The number of images that the file takes at a time. None if it is free.
        probabilities: Whether the file gives probabilities. The module then gives their logarithms,
            which are scores as a network gives them.
    """

    def __init__(self, runs: Runs, batch: int | None, *, probabilities: bool) -> None:
        super().__init__()
        self.batch = batch
        self.probabilities = probabilities
        # torch.export's module has no eval(), so it must not be a child of this one.
        self.runs = (runs,)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the file on as many images at a time as it takes, and return the outputs for all.

        Args:
            images: Images (N, C, H, W), as the file takes them.
        """
        outputs_of_batches = [
            together(self.runs[0](batch.clone()))
            for batch in images.split(self.batch or len(images))
        ]
        answers = tuple(
            torch.cat(values_of_output)
            for values_of_output in zip(*outputs_of_batches, strict=True)
        )
        # The logarithm of a probability that the file rounded to 0 would be infinite, so the
        # smallest positive number takes its place.
        if self.probabilities:
            return answers[0].clamp_min(torch.finfo(torch.float32).tiny).log()
        return alone(answers)
