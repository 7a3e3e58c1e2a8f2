"""safetensors: the folded weights in one file, whose header says how to build the network around them.

Its runtime is normswap: `normswap.load(file)`, or FILE as MODEL of any command. There are no operators in it, so the
features before the classifier stay what they were.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from normswap.errors import NormswapError, VerificationError
from normswap.exporting import rounding
from normswap.exporting.exported_module import FileContents
from normswap.exporting.formats import FP16, Runs
from normswap.exporting.signature import Signature
from normswap.storage import checkpoint

NAME = "safetensors"
NEEDS = ()
GRAPH = False
PARTS = ()
NOTES = {"fp16": FP16}


def write(contents: FileContents, file: Path) -> None:
    """See `formats.Format.write`. The metadata are in the header."""
    network = contents.network.network
    if contents.network.stored != contents.network.dtype:
        network = copy.deepcopy(network)
        for parameter in network.parameters():
            if rounding.is_bfloat16(parameter):
                parameter.data = parameter.data.bfloat16()
    try:
        checkpoint.write_file(file, network, contents.metadata)
    except SafetensorError as error:  # the disk is full
        raise OSError(str(error)) from None


def open(file: Path) -> Runs:
    """See `formats.Format.open`."""
    try:
        network = checkpoint.load(file, trust_factory=True)  # we wrote it a moment ago
    except NormswapError as error:
        raise VerificationError("normswap.load does not take it", str(error)) from None
    dtype = next(network.parameters()).dtype
    signature = Signature.of_images(network, "logits")
    return torch.no_grad()(lambda x: signature.call(network, (x.to(dtype),))[0].float())


def nodes(file: Path) -> dict[str, int]:
    """See `formats.Format.nodes`: it has none."""
    return {}


def metadata(file: Path) -> dict[str, str]:
    """See `formats.Format.metadata`."""
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata() or {})
