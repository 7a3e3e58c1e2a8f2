"""Run an exported file in a fresh process that can import only the file's own runtime."""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from normswap.exporting import formats
from support import needs

_OURS = ["normswap", "timm", "torchvision", "safetensors"]
# The packages that cannot be imported there.
_BLOCKED = {
    "onnx": [*_OURS, "torch", "onnx", "onnxscript"],
    "openvino": [*_OURS, "torch", "onnx", "onnxscript", "onnxruntime", "nncf"],
    "pt2": [*_OURS, "onnx", "onnxruntime"],
    "pt2 in int8": [*_OURS, "onnx", "onnxruntime", "torchao"],
    "executorch": [*_OURS, "onnx", "onnxruntime"],
    "litert": [*_OURS, "torch", "onnx", "onnxruntime", "litert_torch", "jax"],
    "ncnn": [*_OURS, "torch", "onnx", "onnxruntime", "pnnx"],
}
_PT2 = (
    "m = torch.export.load(file).module()\nrun = lambda x: m(torch.from_numpy(x)).detach().numpy()"
)
_ONNX = """import onnxruntime as ort
session = ort.InferenceSession(file, providers=['CPUExecutionProvider'])
run = lambda x: session.run(['{output}'], {{'images': x}})[0]"""
# A program that defines `run`, from an array of images to an array of answers.
_RUN = {
    "onnx": _ONNX,
    "openvino": (
        "import openvino as ov\n"
        "m = ov.Core().compile_model(file, 'CPU', {{'INFERENCE_PRECISION_HINT': 'f32'}})\n"
        "run = lambda x: m(x)['{output}'].copy()"
    ),
    "pt2": f"import torch\n{_PT2}",
    "pt2 in int8": f"import torch\nimport torch.ao.quantization.fx._decomposed\n{_PT2}",
    "executorch": (
        "import torch\nfrom executorch.runtime import Runtime\n"
        "m = Runtime.get().load_program(file).load_method('forward')\n"
        "run = lambda x: m.execute([torch.from_numpy(x)])[0].numpy().copy()"
    ),
    "litert": (
        "from ai_edge_litert.interpreter import Interpreter\nm = Interpreter(file,"
        " num_threads=1).get_signature_runner()\nrun = lambda x: m(images=x)['{output}']"
    ),
    "ncnn": (
        "import ncnn\nnet = ncnn.Net()\nnet.opt.use_fp16_packed = net.opt.use_fp16_storage ="
        " net.opt.use_fp16_arithmetic = False\nassert net.load_param(file) == 0 and"
        " net.load_model(file[:-6] + '.bin') == 0\ndef run(x):\n    e = net.create_extractor()\n   "
        " e.input('images', ncnn.Mat(x[0]).clone())\n    return"
        " np.array(e.extract('{output}')[1])[None]"
    ),
}
_PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
from importlib.machinery import ModuleSpec
class Absent:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.split(".")[0] in {blocked} else None
    def create_module(self, spec):
        raise ImportError(spec.name + " is not here")
sys.meta_path.insert(0, Absent())
import numpy as np
file, given, wanted = sys.argv[1:]
{run}
x = np.load(given)
np.save(wanted, np.concatenate([run(x[i : i + {batch}]) for i in range(0, len(x), {batch})]))
present = sorted({blocked} & set(module.split(".")[0] for module in sys.modules))
sys.exit(f"{{present}} were imported" if present else 0)
"""


def skip_without(form: str) -> None:
    """Leave the test out where a package that the format needs is not installed."""
    for package in formats._FORMATS[form].needs:
        needs.package(package)


def run_alone(
    file: Path, form: str, x: Tensor, *, batch: int = 1, output: str = "logits"
) -> Tensor:
    """The answers of an exported file.

    Args:
        file: The file.
        form: The name of its format.
        x: Images (N, C, H, W).
        batch: How many images are sent at a time.
        output: The name of the file's output.

    Raises:
        AssertionError: The file does not load, or needs a package that is blocked.
    """
    program = _PROGRAM.format(
        blocked=set(_BLOCKED[form]), run=_RUN[form].format(output=output), batch=batch
    )

    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "x.npy"
        wanted = Path(folder) / "y.npy"
        np.save(given, x.numpy())
        command = [sys.executable, "-c", program, str(file), str(given), str(wanted)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        assert done.returncode == 0, done.stderr
        return torch.from_numpy(np.load(wanted))
