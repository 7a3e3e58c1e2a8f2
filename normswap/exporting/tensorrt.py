"""TensorRT: the command line that builds its engine from an ONNX file. Nothing is run here: it needs an NVIDIA GPU.

NVIDIA, "TensorRT documentation": Explicit Quantization (zero points are 0); trtexec.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from normswap.exporting.exported_module import FileContents
from normswap.exporting.formats import NOT_RUN
from normswap.plan import Body

_MANY = (1, 8, 32)  # images at a time, where their number is free: the fewest, the usual, the most
_FLAGS = ("minShapes", "optShapes", "maxShapes")


def build(file: Path, contents: FileContents, dtype: str) -> Body:
    """The command line for `file`, to be run beside it, or why there is none."""
    if dtype == "int8":
        reason = "TensorRT takes no unsigned bytes and no zero points but 0, and ONNX Runtime's int8 has both"
        return {"command": None, "reason": reason}
    names = contents.network.signature.inputs
    shapes = [f"--{flag}={_shapes(names, contents.example, count)}" for flag, count in zip(_FLAGS, _MANY, strict=True)]
    words = ["trtexec", f"--onnx={file.name}", f"--saveEngine={file.with_suffix('.engine').name}"]
    # the precision is the file's own: TF32, which is TensorRT's usual fp32, has 10 bits
    words += ["--stronglyTyped", "--noTF32", *(shapes if contents.dynamic else ())]
    return {"command": shlex.join(words), "checked": NOT_RUN}


def _shapes(names: Sequence[str], example: Sequence[Tensor], count: int) -> str:
    """`images:8x3x224x224`."""
    return ",".join(
        f"{name}:{'x'.join(map(str, (count, *x.shape[1:])))}" for name, x in zip(names, example, strict=True)
    )
