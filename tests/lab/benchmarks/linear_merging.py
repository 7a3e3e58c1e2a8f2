"""What merging linear layers in a row would gain: operators and milliseconds of folded networks.

    python tests/lab/benchmarks/linear_merging.py -o tests/lab/benchmarks/linear_merging.md

`folded` already merges summed branches. This script merges more, in the exported ONNX file, where
no forward of a user's class stands in the way: a convolution followed by a 1 x 1 convolution with
nothing between becomes one convolution (W = W2 W1, b = W2 b1 + b2), and x + conv(x) becomes one
with 1 added at the centre. Neither changes what is computed: a 1 x 1 convolution has no border, and
any padding belongs to the first. `all` merges wherever that is exact; `cheaper` leaves out each
merge that multiplies more than the two layers did. `off by` is the largest relative L2 distance
of the merged file from the file of `folded`. Milliseconds of the processor's time in ONNX Runtime:
one image of 224 px, one thread, the three files in turn, the best of the rounds. A file without
merges is that of `folded`, so where there are 0 merges the difference in time is noise.
"""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import timm
import torch
from kept import Kept, Row, arguments, markdown_head, markdown_row
from onnx import numpy_helper
from schemes_table import ROOT
from support.lived_in_networks import living

import normswap
from normswap.exporting import formats
from normswap.exporting.exported_module import FileContents, Shipped

NETWORKS = (
    "repvgg_a0",
    "mobileone_s0",
    "mobilenetv2_100",
    "efficientnet_b0",
    "fastvit_t8",
)
ROUNDS = 7
SECONDS = 0.3  # of timing
COLUMNS = (
    "network",
    "operators, folded",
    "merges, all",
    "operators, all",
    "of them fewer, %",
    "merges, cheaper",
    "operators, cheaper",
    "of them fewer, %",
    "ms, folded",
    "ms, all",
    "ms, cheaper",
    "less with all, %",
    "less with cheaper, %",
    "off by",
)


@dataclass
class Graph:
    """An ONNX graph in which convolutions are merged.

    Args:
        model: The file's contents, with the shape of each value. They are changed in place.
        cheaper: Whether merges that multiply more than the two layers did are left out.
        merges: How many merges were made.
    """

    model: onnx.ModelProto
    cheaper: bool
    merges: int = 0
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tensor in self.model.graph.initializer:
            self.arrays[tensor.name] = numpy_helper.to_array(tensor)

    def merge(self) -> None:
        """Merge until nothing more can be merged."""
        while self._merge_once():
            self.merges += 1

    def _merge_once(self) -> bool:
        """Make the first merge that is possible, and say whether there was one."""
        graph = self.model.graph
        makers = {name: node for node in graph.node for name in node.output}
        readers = Counter(name for node in graph.node for name in node.input)
        readers.update(output.name for output in graph.output)

        for node in graph.node:
            for name in node.input:
                maker = makers.get(name)
                if maker is None or maker.op_type != "Conv" or readers[name] != 1:
                    continue
                if node.op_type == "Conv" and self._merge_pair(maker, node):
                    return True
                if node.op_type == "Add" and self._merge_skip(maker, node):
                    return True
        return False

    def _merge_pair(self, first: onnx.NodeProto, second: onnx.NodeProto) -> bool:
        """Put two convolutions in the place of the first, if the second is a plain 1 x 1."""
        one, other = self.arrays[first.input[1]], self.arrays[second.input[1]]
        settings = attributes(second)
        is_pointwise = other.shape[2:] == (1, 1) and settings.get("group", 1) == 1
        if not is_pointwise or any(settings.get("pads", [0])):
            return False

        dense = as_dense(one, attributes(first).get("group", 1))
        kernel = np.einsum("oc,c...->o...", other[:, :, 0, 0], dense)
        cost = one.size * self._positions(first) + other.size * self._positions(second)
        if self.cheaper and kernel.size * self._positions(second) > cost:
            return False

        bias = other[:, :, 0, 0] @ self._bias(first) + self._bias(second)
        strides = zip(
            attributes(first).get("strides", [1, 1]), settings.get("strides", [1, 1]), strict=True
        )
        self._write(first, kernel, bias, group=1, strides=[math.prod(pair) for pair in strides])
        self._replace(first, second)
        return True

    def _merge_skip(self, conv: onnx.NodeProto, total: onnx.NodeProto) -> bool:
        """Let a convolution compute x + conv(x), if the other term of the sum is its input."""
        settings = attributes(conv)
        weight = self.arrays[conv.input[1]].copy()
        skip = [name for name in total.input if name != conv.output[0]]
        sizes = weight.shape[2:]
        centred = [(size - 1) // 2 for size in sizes]
        keeps_size = settings.get("pads", [0, 0, 0, 0]) == centred * 2
        group = settings.get("group", 1)
        is_square = len(weight) == weight.shape[1] * group and all(size % 2 for size in sizes)
        is_plain = all(step == 1 for step in (*settings.get("strides", []), *settings["dilations"]))
        if skip != [conv.input[0]] or not (keeps_size and is_square and is_plain):
            return False

        channels = np.arange(len(weight))
        weight[(channels, channels % weight.shape[1], *centred)] += 1
        self._write(conv, weight, self._bias(conv))
        self._replace(conv, total)
        return True

    def _positions(self, node: onnx.NodeProto) -> int:
        """Return how many positions a convolution writes."""
        for value in self.model.graph.value_info:
            if value.name == node.output[0]:
                return math.prod(side.dim_value for side in value.type.tensor_type.shape.dim[2:])
        raise LookupError(node.output[0])

    def _bias(self, conv: onnx.NodeProto) -> np.ndarray:
        """Return the bias of a convolution, zeros if it has none."""
        if len(conv.input) > 2:
            return self.arrays[conv.input[2]]
        return np.zeros(len(self.arrays[conv.input[1]]), np.float32)

    def _write(
        self, conv: onnx.NodeProto, weight: np.ndarray, bias: np.ndarray, **settings: object
    ) -> None:
        """Give a convolution tensors of its own, and other settings."""
        names = [f"{conv.output[0]}.weight{self.merges}", f"{conv.output[0]}.bias{self.merges}"]
        for name, array in zip(names, (weight, bias), strict=True):
            self.arrays[name] = array
            self.model.graph.initializer.append(numpy_helper.from_array(array, name))
        conv.input[1:] = names

        kept = [item for item in conv.attribute if item.name not in settings]
        new = [onnx.helper.make_attribute(name, value) for name, value in settings.items()]
        del conv.attribute[:]
        conv.attribute.extend([*kept, *new])

    def _replace(self, conv: onnx.NodeProto, gone: onnx.NodeProto) -> None:
        """Let a convolution write what a node behind it wrote, and remove that node."""
        # The other term of a sum may be made between the two, so the convolution moves down.
        nodes = [node for node in self.model.graph.node if node is not conv]
        conv.output[0] = gone.output[0]
        merged = [conv if node is gone else node for node in nodes]
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in merged]
        del self.model.graph.node[:]
        self.model.graph.node.extend(copies)


def attributes(node: onnx.NodeProto) -> dict[str, object]:
    """Return the settings of a node by name."""
    return {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}


def as_dense(kernel: np.ndarray, groups: int) -> np.ndarray:
    """Return a kernel (O, I / groups, ...) as one of a convolution without groups, (O, I, ...)."""
    outputs, inputs = kernel.shape[:2]
    dense = np.zeros((outputs, inputs * groups, *kernel.shape[2:]), kernel.dtype)
    for group in range(groups):
        rows = slice(group * outputs // groups, (group + 1) * outputs // groups)
        dense[rows, group * inputs : (group + 1) * inputs] = kernel[rows]
    return dense


def exported(name: str, folder: Path) -> onnx.ModelProto:
    """Return the ONNX file of a folded network of timm, with the shape of each value."""
    size = (3, 224, 224)
    network, images = living(timm.create_model(name), *size)
    folded = normswap.convert(network, "folded", inputs=images)
    contents = FileContents(Shipped(folded.model), (images[:1],))
    formats.get("onnx").write(contents, folder / "net.onnx")
    return onnx.shape_inference.infer_shapes(onnx.load(folder / "net.onnx"))


def merged(model: onnx.ModelProto, *, cheaper: bool) -> Graph:
    """Return a merged copy of a file's contents."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    graph = Graph(copy, cheaper)
    graph.merge()
    return graph


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def milliseconds(sessions: list[onnxruntime.InferenceSession], image: np.ndarray) -> list[float]:
    """Return the time of a pass for each session: the best of rounds in which all take turns."""
    best = [math.inf] * len(sessions)
    for _ in range(ROUNDS):
        for index, runs in enumerate(sessions):
            feed = {runs.get_inputs()[0].name: image}
            start = time.process_time()
            count = 0
            while time.process_time() - start < SECONDS:
                runs.run(None, feed)
                count += 1
            best[index] = min(best[index], 1000 * (time.process_time() - start) / count)
    return best


def operators(model: onnx.ModelProto) -> int:
    """Return the number of nodes of a file without constants."""
    return sum(node.op_type != "Constant" for node in model.graph.node)


def measure(name: str) -> Row:
    """Return the operators, merges and milliseconds of a network."""
    with tempfile.TemporaryDirectory() as folder:
        plain = exported(name, Path(folder))
    everything = merged(plain, cheaper=False)
    cheaper = merged(plain, cheaper=True)

    files = [plain, everything.model, cheaper.model]
    sessions = [session(file) for file in files]
    generator = np.random.default_rng(0)
    image = generator.standard_normal((1, 3, 224, 224), np.float32)
    answers = [runs.run(None, {runs.get_inputs()[0].name: image})[0] for runs in sessions]
    norm = float(np.linalg.norm(answers[0]))
    return {
        "operators": [operators(file) for file in files],
        "merges": [everything.merges, cheaper.merges],
        "ms": milliseconds(sessions, image),
        "off": max(float(np.linalg.norm(other - answers[0])) / norm for other in answers),
    }


def fewer(before: float, after: float) -> str:
    """Return by how many per cent a figure fell."""
    return f"{100 * (before - after) / before:.1f}"


def line(name: str, found: Row) -> str:
    """Return the row of a network."""
    plain, everything, cheaper = found["operators"]
    ms, ms_everything, ms_cheaper = found["ms"]
    merges, cheaper_merges = found["merges"]
    return markdown_row(
        f"`{name}`",
        plain,
        merges,
        everything,
        fewer(plain, everything),
        cheaper_merges,
        cheaper,
        fewer(plain, cheaper),
        f"{ms:.2f}",
        f"{ms_everything:.2f}",
        f"{ms_cheaper:.2f}",
        fewer(ms, ms_everything),
        fewer(ms, ms_cheaper),
        f"{found['off']:.0e}",
    )


def main() -> None:
    args = arguments(__doc__).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kept = Kept(ROOT / "runs" / "linear_merging.jsonl", fresh=args.fresh)

    lines = []
    for name in NETWORKS:
        lines.append(line(name, kept.get((name,), lambda name=name: measure(name))))
        print(lines[-1], flush=True)

    about = " ".join((__doc__ or "").split("\n\n")[2].split())
    kept.write(
        args.output,
        "Merging linear layers in a row: what it would gain",
        ["", about, "", markdown_head(*COLUMNS), *lines],
        f"onnxruntime {onnxruntime.__version__}",
    )


if __name__ == "__main__":
    main()
