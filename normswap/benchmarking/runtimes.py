"""The runtimes that a network can be timed in. Each opens a file (or a directory) and gives a session that runs it.

Runtimes are imported when a session starts, in the process that times it: one that is not used costs nothing there.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from normswap.errors import OptionError

if TYPE_CHECKING:
    import torch
    from torch import nn

DEVICES = ("cpu", "cuda", "mps")
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Settings:
    """The settings that all contenders share.

    Args:
        device: cpu, cuda or mps.
        dtype: of the weights and the arithmetic: fp32, fp16 or bf16.
        channels_last: the memory format of weights and images, in the runtimes of torch; the others choose their own.
        threads: the same number for every runtime.
        rounds: turns of each contender; seconds: how long each is timed for, all turns together.
    """

    device: str = "cpu"
    dtype: str = "fp32"
    channels_last: bool = False
    threads: int = 1
    rounds: int = 15
    seconds: float = 3.0


@dataclass(frozen=True)
class Session:
    """A network that is ready to run, on the images that it was opened with.

    Args:
        engine: the runtime's own object.
        run: one forward pass, which has ended when it returns, on an accelerator too.
        read: gives the outputs of the last pass, in float32.
    """

    engine: object
    run: Callable[[], object]
    read: Callable[[], np.ndarray]


class Start(Protocol):
    """Opens a file of one of the runtime's kinds, and puts the images (N, C, H, W), float32, where it reads them."""

    def __call__(self, file: Path, kind: str, mode: str, settings: Settings, images: np.ndarray) -> Session: ...


@dataclass(frozen=True)
class Runtime:
    """A way to run a network.

    Args:
        opens: the kinds of file it takes, the preferred one first: `directory` (that `checkpoint.save` wrote), `onnx`,
            `openvino`, `pt2`, `torchscript`, `ncnn`, `executorch` or `litert`.
        start: opens a file of such a kind.
        needs: packages beyond torch.
        modes: the words that may follow the name after a colon.
        devices: where it runs.
        once: does what is done once per machine rather than per network; takes the device.
    """

    opens: tuple[str, ...]
    start: Start
    needs: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    devices: tuple[str, ...] = DEVICES
    once: Callable[[str], None] = lambda device: None

    def takes(self, kinds: Collection[str]) -> bool:
        """Tell whether it opens a file of one of these kinds."""
        return any(kind in kinds for kind in self.opens)

    def prepare(self, device: str) -> None:
        """Do what is not timed: import the packages, build what is built once per machine."""
        for package in self.needs:
            importlib.import_module(package)
        self.once(device)


def missing(packages: Sequence[str]) -> list[str]:
    """List those of the packages that are not installed."""
    return [package for package in packages if importlib.util.find_spec(package) is None]


def find(name: str) -> tuple[Runtime, str]:
    """Find the runtime and the mode that a name means: `compile:max-autotune` is (compile, max-autotune).

    Raises:
        OptionError: there is no such runtime, or it has no such mode.
    """
    base, colon, mode = name.partition(":")
    if base not in RUNTIMES:
        raise OptionError(f"unknown runtime '{name}'", f"there are {', '.join(RUNTIMES)}")
    modes = RUNTIMES[base].modes
    if colon and mode not in modes:
        known = f"there are {', '.join(f'{base}:{one}' for one in modes)}" if modes else "it has none"
        raise OptionError(f"{base} has no mode '{mode}'", known)
    return RUNTIMES[base], mode


def own(kinds: Collection[str]) -> list[str]:
    """Name the first runtime that opens a file of one of these kinds; none for a network, which all of torch's open."""
    return [] if "directory" in kinds else [name for name, runtime in RUNTIMES.items() if runtime.takes(kinds)][:1]


def _torch(prepare: Callable[[nn.Module, str], Callable[[torch.Tensor], object]]) -> Start:
    """Make the start of a runtime of torch, from what it makes of a module in some mode."""

    def start(file: Path, kind: str, mode: str, settings: Settings, images: np.ndarray) -> Session:
        import torch

        from normswap.models.network_input import answer

        torch.set_num_threads(settings.threads)
        module, dtype = _module(file, kind, settings)
        x = torch.from_numpy(images).to(settings.device, getattr(torch, DTYPES[dtype]))
        x = x.contiguous(memory_format=torch.channels_last) if settings.channels_last else x
        model = prepare(module, mode)
        outputs: list[object] = []

        @torch.inference_mode()
        def run() -> None:
            outputs[:] = [model(x)]
            if settings.device != "cpu":
                getattr(torch, settings.device).synchronize()

        return Session(model, run, lambda: answer(outputs[0]).float().cpu().numpy())

    return start


def _module(file: Path, kind: str, settings: Settings) -> tuple[nn.Module, str]:
    """Read the network as torch runs it, and the dtype it is fed with: files take float32, whatever they compute in."""
    import torch

    if kind == "pt2":
        import torch.ao.quantization.fx._decomposed  # defines the operators of int8

        return torch.export.load(file).module().to(settings.device), "fp32"
    if kind == "torchscript":
        return torch.jit.load(file, map_location=settings.device), "fp32"
    from normswap.models.imaged import imaged
    from normswap.storage import checkpoint

    network = checkpoint.load(file, trust_factory=True)  # it was written a moment ago, by us
    model = network.to(settings.device, getattr(torch, DTYPES[settings.dtype])).requires_grad_(False)
    if settings.channels_last:
        model = torch.nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    return imaged(model), settings.dtype


def _fuse(model: nn.Module, mode: str) -> nn.Module:
    from torch.fx.experimental import optimization

    return optimization.fuse(model)


def _compile(model: nn.Module, mode: str) -> Callable[[torch.Tensor], object]:
    import torch

    return torch.compile(model, mode=mode or None)


def _build_compiler(device: str) -> None:
    """Compile a small function: torch then tries out the C++ compiler, and builds its headers."""
    import torch

    torch.compile(lambda x: x.sin() + 1)(torch.zeros(64, device=device))
    torch.compiler.reset()


def _optimize(model: nn.Module, mode: str) -> nn.Module:
    import torch

    assert isinstance(model, torch.jit.ScriptModule)
    return torch.jit.optimize_for_inference(model)


def _onnxruntime(file: Path, kind: str, mode: str, settings: Settings, images: np.ndarray) -> Session:
    """Open it in ONNX Runtime; on a GPU images and answers stay there while it is timed."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = settings.threads, 1
    options.log_severity_level = 4
    provider = "CUDAExecutionProvider" if settings.device == "cuda" else "CPUExecutionProvider"
    if provider not in ort.get_available_providers():
        raise OptionError(f"this onnxruntime has no {provider}", remedy="pip install onnxruntime-gpu")
    session = ort.InferenceSession(file, options, providers=[provider])
    binding = session.io_binding()
    value = ort.OrtValue.ortvalue_from_numpy(images, settings.device, 0)
    binding.bind_ortvalue_input(session.get_inputs()[0].name, value)
    binding.bind_output(session.get_outputs()[0].name, settings.device)

    def run() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    return Session(session, run, lambda: np.asarray(binding.copy_outputs_to_cpu()[0], np.float32))


def _openvino(file: Path, kind: str, mode: str, settings: Settings, images: np.ndarray) -> Session:
    """Open it in OpenVINO, with the shape of the images.

    It would compute in bfloat16 where the processor can: it is told not to, unless that is asked for.
    """
    import openvino

    core = openvino.Core()
    model = core.read_model(file)
    model.reshape(openvino.PartialShape(list(images.shape)))
    config = {
        "INFERENCE_NUM_THREADS": settings.threads,
        "INFERENCE_PRECISION_HINT": settings.dtype.replace("fp", "f"),  # f32, f16, bf16
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,  # others run here, too
    }
    compiled = core.compile_model(model, "CPU", config)
    request = compiled.create_infer_request()
    request.set_input_tensor(openvino.Tensor(images))
    return Session(compiled, request.infer, lambda: np.array(request.get_output_tensor(0).data, np.float32))


def _require_one(images: np.ndarray, taker: str) -> None:
    if len(images) != 1:
        raise OptionError(f"{taker} takes one image at a time", remedy="Time it with a batch of 1")


def _ncnn(file: Path, kind: str, mode: str, settings: Settings, images: np.ndarray) -> Session:
    """Open it in ncnn, which takes one image at a time."""
    import ncnn

    _require_one(images, "ncnn")
    net = ncnn.Net()
    net.opt.num_threads = settings.threads
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = settings.dtype == "fp16"
    if net.load_param(str(file)) or net.load_model(str(file.with_suffix(".bin"))):
        raise OptionError(f"ncnn cannot read {file}")
    taken, given = net.input_names()[0], net.output_names()[0]
    image = ncnn.Mat(np.ascontiguousarray(images[0])).clone()
    outputs: list[np.ndarray] = []

    def run() -> None:
        extractor = net.create_extractor()
        extractor.input(taken, image)
        outputs[:] = [np.array(extractor.extract(given)[1], np.float32)[None]]

    return Session(net, run, lambda: outputs[0])


def _executorch(file: Path, kind: str, mode: str, settings: Settings, images: np.ndarray) -> Session:
    """Open it in ExecuTorch."""
    import torch
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime as Engine

    _require_one(images, "an ExecuTorch file")
    portable_lib._unsafe_reset_threadpool(settings.threads)
    forward = Engine.get().load_program(file).load_method("forward")
    x, outputs = torch.from_numpy(images), list[torch.Tensor]()

    def run() -> None:
        outputs[:] = forward.execute([x])

    return Session(forward, run, lambda: outputs[0].float().numpy().copy())


def _litert(file: Path, kind: str, mode: str, settings: Settings, images: np.ndarray) -> Session:
    """Open it in LiteRT, whose files take one image at a time."""
    from ai_edge_litert.interpreter import Interpreter

    _require_one(images, "a LiteRT file")
    engine = Interpreter(str(file), num_threads=settings.threads)
    engine.allocate_tensors()
    engine.set_tensor(engine.get_input_details()[0]["index"], images)
    answer = engine.get_output_details()[0]["index"]
    return Session(engine, engine.invoke, lambda: engine.get_tensor(answer).astype(np.float32))


_MODES = ("default", "reduce-overhead", "max-autotune")  # torch.compile's; the latter two use CUDA graphs
RUNTIMES = {
    "eager": Runtime(("directory", "pt2"), _torch(lambda model, mode: model)),
    "fuse": Runtime(("directory",), _torch(_fuse)),
    "compile": Runtime(("directory", "pt2"), _torch(_compile), modes=_MODES, once=_build_compiler),
    "torchscript": Runtime(("torchscript",), _torch(_optimize), devices=("cpu", "cuda")),
    "onnxruntime": Runtime(("onnx",), _onnxruntime, needs=("onnxruntime",), devices=("cpu", "cuda")),
    "openvino": Runtime(("openvino", "onnx"), _openvino, needs=("openvino",), devices=("cpu",)),
    "executorch": Runtime(("executorch",), _executorch, needs=("executorch",), devices=("cpu",)),
    "ncnn": Runtime(("ncnn",), _ncnn, needs=("ncnn",), devices=("cpu",)),
    "litert": Runtime(("litert",), _litert, needs=("ai_edge_litert",), devices=("cpu",)),
}
