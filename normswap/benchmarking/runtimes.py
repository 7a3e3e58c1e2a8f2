"""The runtimes a network can be timed in. Each opens a file (or a directory) and gives a session to feed and to run.

Torch and the other runtimes are imported when a session starts, in the process that times it, so that what is not used
costs neither memory nor time there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from normswap.errors import OptionError

DEVICES = ("cpu", "cuda", "mps")
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Settings:
    """What all contenders have in common.

    Args:
        device: cpu, cuda or mps.
        dtype: of the weights and the arithmetic: fp32, fp16 or bf16.
        channels_last: the memory format of weights and images, in the runtimes of torch; the others choose their own.
        threads: the same number for every runtime.
    """

    device: str = "cpu"
    dtype: str = "fp32"
    channels_last: bool = False
    threads: int = 1


class Session(Protocol):
    """A network, ready in its runtime."""

    def feed(self, images: np.ndarray) -> None:
        """Put images (N, C, H, W), float32, where the network reads them: not part of what is timed."""

    def run(self) -> None:
        """One forward pass; returns when it is done, on an accelerator too."""

    def read(self) -> np.ndarray:
        """What the last run computed, in float32."""


@dataclass(frozen=True)
class Runtime:
    """A way to run a network.

    Args:
        name: what the user calls it.
        opens: the kinds of file it takes, the preferred one first: `directory` (that `checkpoint.save` wrote), `onnx`,
            `openvino`, `pt2` or `torchscript`.
        start: opens a file of such a kind; takes the mode, too.
        needs: packages beyond torch.
        modes: what may follow the name after a colon.
        devices: where it runs.
        once: what it does once per machine rather than per network, before the clock starts.
    """

    name: str
    opens: tuple[str, ...]
    start: Callable[[Path, str, Settings, str], Session]
    needs: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    devices: tuple[str, ...] = DEVICES
    once: Callable[[Settings], None] = lambda settings: None


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def find(name: str) -> tuple[Runtime, str]:
    """The runtime and the mode that `name` means: `compile:max-autotune` is (compile, max-autotune).

    Raises:
        OptionError: there is no such runtime, or it has no such mode.
    """
    base, colon, mode = name.partition(":")
    if base not in RUNTIMES:
        raise OptionError(f"unknown runtime '{name}'", f"there are {', '.join(RUNTIMES)}")
    runtime = RUNTIMES[base]
    if colon and mode not in runtime.modes:
        there = f"there are {', '.join(f'{base}:{one}' for one in runtime.modes)}" if runtime.modes else "it has none"
        raise OptionError(f"{base} has no mode '{mode}'", there)
    return runtime, mode


# --- torch ------------------------------------------------------------------------------------------------------------


class TorchSession:
    """Anything that is called with a tensor."""

    def __init__(self, model: Callable[[Any], object], settings: Settings, dtype: str) -> None:
        self.model, self.settings, self.dtype = model, settings, dtype

    def feed(self, images: np.ndarray) -> None:
        import torch

        x = torch.from_numpy(images).to(self.settings.device, getattr(torch, DTYPES[self.dtype]))
        self.x = x.contiguous(memory_format=torch.channels_last) if self.settings.channels_last else x

    def run(self) -> None:
        import torch

        with torch.inference_mode():
            self.y = self.model(self.x)
        if self.settings.device != "cpu":
            getattr(torch, self.settings.device).synchronize()

    def read(self) -> np.ndarray:
        from normswap.models.network_input import answer

        return answer(self.y).float().cpu().numpy()


def _module(file: Path, kind: str, settings: Settings) -> tuple[Any, str]:
    """The network as torch runs it, and the dtype it is fed with: files take float32, whatever they compute in."""
    import torch

    torch.set_num_threads(settings.threads)
    if kind == "pt2":
        import torch.ao.quantization.fx._decomposed  # defines the operators of int8

        return torch.export.load(file).module().to(settings.device), "fp32"
    if kind == "torchscript":
        return torch.jit.load(file, map_location=settings.device), "fp32"
    from normswap.models.imaged import imaged
    from normswap.storage import checkpoint

    network = checkpoint.load(file, trust_factory=True)  # we wrote it a moment ago
    model = network.to(settings.device, getattr(torch, DTYPES[settings.dtype])).requires_grad_(False)
    if settings.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return imaged(model), settings.dtype


def _eager(file: Path, kind: str, settings: Settings, mode: str) -> Session:
    model, dtype = _module(file, kind, settings)
    return TorchSession(model, settings, dtype)


def _fuse(file: Path, kind: str, settings: Settings, mode: str) -> Session:
    """What torch offers for folding."""
    from torch.fx.experimental import optimization

    model, dtype = _module(file, kind, settings)
    return TorchSession(optimization.fuse(model), settings, dtype)


def _compile(file: Path, kind: str, settings: Settings, mode: str) -> Session:
    import torch

    model, dtype = _module(file, kind, settings)
    return TorchSession(torch.compile(model, mode=mode or None), settings, dtype)


def _build_compiler(settings: Settings) -> None:
    """Compile a function of no account: torch then tries out the C++ compiler, and builds its headers."""
    import torch

    torch.compile(lambda x: x.sin() + 1)(torch.zeros(64, device=settings.device))
    torch.compiler.reset()


def _torchscript(file: Path, kind: str, settings: Settings, mode: str) -> Session:
    import torch

    model, dtype = _module(file, kind, settings)
    return TorchSession(torch.jit.optimize_for_inference(model), settings, dtype)


# --- ONNX Runtime -----------------------------------------------------------------------------------------------------


class OnnxSession:
    """ONNX Runtime; on a GPU images and answers stay there while it is timed."""

    def __init__(self, file: Path, kind: str, settings: Settings, mode: str) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = settings.threads, 1
        options.log_severity_level = 4
        provider = "CUDAExecutionProvider" if settings.device == "cuda" else "CPUExecutionProvider"
        if provider not in ort.get_available_providers():
            raise OptionError(f"this onnxruntime has no {provider}", remedy="pip install onnxruntime-gpu")
        self.session = ort.InferenceSession(file, options, providers=[provider])
        self.device, self.value = settings.device, ort.OrtValue.ortvalue_from_numpy
        self.inputs, self.outputs = self.session.get_inputs(), self.session.get_outputs()

    def feed(self, images: np.ndarray) -> None:
        self.binding = self.session.io_binding()
        self.binding.bind_ortvalue_input(self.inputs[0].name, self.value(images, self.device, 0))
        self.binding.bind_output(self.outputs[0].name, self.device)

    def run(self) -> None:
        self.session.run_with_iobinding(self.binding)
        self.binding.synchronize_outputs()

    def read(self) -> np.ndarray:
        return np.asarray(self.binding.copy_outputs_to_cpu()[0], np.float32)


# --- OpenVINO ---------------------------------------------------------------------------------------------------------


class OpenvinoSession:
    """OpenVINO, on the CPU, with shapes fixed to those of the images.

    It would compute in bfloat16 where the processor can: it is told not to, unless that is what is asked for.
    """

    PRECISIONS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}

    def __init__(self, file: Path, kind: str, settings: Settings, mode: str) -> None:
        import openvino  # type: ignore[import-untyped]

        self.core = openvino.Core()
        self.model = self.core.read_model(file)
        self.config = {
            "INFERENCE_NUM_THREADS": settings.threads,
            "INFERENCE_PRECISION_HINT": self.PRECISIONS[settings.dtype],
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,  # others run here, too
        }

    def feed(self, images: np.ndarray) -> None:
        import openvino

        self.model.reshape(openvino.PartialShape(list(images.shape)))
        compiled = self.core.compile_model(self.model, "CPU", self.config)
        self.request = compiled.create_infer_request()
        self.request.set_input_tensor(openvino.Tensor(images, shared_memory=True))
        self.images = images  # the tensor does not own it

    def run(self) -> None:
        self.request.infer()

    def read(self) -> np.ndarray:
        return np.array(self.request.get_output_tensor(0).data, np.float32)


_MODES = ("default", "reduce-overhead", "max-autotune")  # torch.compile's; the latter two use CUDA graphs
_ALL = (
    Runtime("eager", ("directory", "pt2"), _eager),
    Runtime("fuse", ("directory",), _fuse),
    Runtime("compile", ("directory", "pt2"), _compile, modes=_MODES, once=_build_compiler),
    Runtime("torchscript", ("torchscript",), _torchscript, devices=("cpu", "cuda")),
    Runtime("onnxruntime", ("onnx",), OnnxSession, needs=("onnxruntime",), devices=("cpu", "cuda")),
    Runtime("openvino", ("openvino", "onnx"), OpenvinoSession, needs=("openvino",), devices=("cpu",)),
)
RUNTIMES = {runtime.name: runtime for runtime in _ALL}
DEFAULT: Sequence[str] = ("eager", "compile", "onnxruntime", "openvino")
