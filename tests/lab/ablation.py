# mypy: ignore-errors
"""Each refinement switched off, alone, on small versions of the tables that it is there for.

    python tests/lab/ablation.py [PART ...] [--draws 2]       # parts: signs, share, int8, bf16

It ran on commit 658d213, the last before the deletions that followed from it, and switches off what was there: much of
that is gone, so that the script runs on that commit alone (`git worktree add ../ablation 658d213`, with this file).
The figures are in ablation.md.

A row is a network, a conversion, images, and what is off. "Same answer" is the share of test images with the source's
answer; "±" is the standard error of its difference to the row with everything on, on the same images (McNemar). Test
images: the 10,000 of CIFAR-10 for the networks of tests/data/zoo, 500 photographs for EfficientNet-Lite0.
"""

from __future__ import annotations

import argparse
import copy
import functools
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

import circumstances
import imagenet
from kept import Kept, Row
from kinds_images import ROOT, of_kind
from normswap.exporting.equalization import AS_FOLDED
from zoo_networks import trained

import normswap
from normswap.calibration import activation_cache, natural_noise, sequential_fit
from normswap.exporting import bias_correction, formats, quantizing, rounding, weight_rounding
from normswap.images.datasets import make_loader
from normswap.models import zoo
from normswap.schemes import groupnorm
from normswap.schemes.parts import (
    channels_seen,
    per_sample_rescaling,
    steady_signs,
    tails,
    zero_sum_filters,
)
from normswap.surgery import conversion

Switch = Callable[[], Any]
TABLE = Path(__file__).with_suffix(".md")
ROWS = "## Rows"  # what stands before it is written by hand, and kept
HEAD = (
    "| part | network | conversion | images | off | top-1 | same answer | change, points | ± | relative L2 | seconds |"
)


def off(owner: Any, name: str, replacement: Any) -> Switch:
    """Replace one function by another for a while."""
    return lambda: patch.object(owner, name, replacement)


def nothing(*_args: Any, **_kwargs: Any) -> dict[str, Any]:
    return {}


def both(*switches: Switch) -> Switch:
    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            for switch in switches:
                stack.enter_context(switch())
            yield

    return entered


NO_LEAVES = off(steady_signs, "choose", nothing)
NO_IMAGES = off(groupnorm, "choose_rescaling", nothing)
NO_SIGNS = off(steady_signs, "quietest", lambda quadratic: torch.ones(len(quadratic)).double().numpy())
NO_DESCENT = off(steady_signs.Site, "descended", lambda _site, scale: scale)
NO_FACTORS = both(NO_DESCENT, off(steady_signs.Site, "_level", lambda site: torch.ones_like(site.var)))
SIGNS = {
    "signs": NO_SIGNS,
    "factors": NO_FACTORS,
    "descent": NO_DESCENT,
    "signs and factors: eps alone": both(NO_LEAVES, NO_IMAGES),
    "made images": both(NO_LEAVES, off(per_sample_rescaling, "FILLED", 0)),
    "made images beside the user's": off(per_sample_rescaling, "FILLED", 0),
    "choosing on images": NO_IMAGES,
    "dead leaves: noise with their spectrum": off(channels_seen, "leaves", natural_noise.pink),
}
MADE_ONLY = ("made images", "made images beside the user's", "choosing on images")  # of no meaning without images
NOT_OF_LITE = (
    "made images beside the user's",
    "dead leaves: noise with their spectrum",
    "descent",
)  # photographs are slow


NO_MADE_TAILS = off(tails, "factors_on_leaves", nothing)
NO_TAILS_ON_IMAGES = off(tails, "choose_factors", nothing)
TAILS = {"tails on images": NO_TAILS_ON_IMAGES, "tails": both(NO_MADE_TAILS, NO_TAILS_ON_IMAGES)}


def one_pass() -> Any:
    """Every layer is fitted to what reaches it before any other is fitted: one pass over the images would do."""
    linear, norm = sequential_fit._fit_linear, sequential_fit._fit_norm
    fitted: list[tuple[nn.Module, dict[str, Tensor]]] = []

    def later(fit: Callable[..., None]) -> Callable[..., None]:
        def run(module: nn.Module, *args: Any) -> None:
            before = copy.deepcopy(module.state_dict())
            fit(module, *args)
            fitted.append((module, copy.deepcopy(module.state_dict())))
            module.load_state_dict(before)

        return run

    def keep(*args: Any) -> float:
        for module, values in fitted:
            module.load_state_dict(values)
        fitted.clear()
        return keep_share(*args)

    keep_share = sequential_fit.keep_share
    return patch.multiple(sequential_fit, _fit_linear=later(linear), _fit_norm=later(norm), keep_share=keep)


class InMemory(activation_cache.TensorFiles):
    """Values that stay where they are; nothing is ever freed."""

    def put(self, tensors: Any) -> Any:
        return activation_cache.CacheEntry([*(t.clone() for t in tensors)], (None,))

    def put_anything(self, value: Any) -> Any:
        return activation_cache.CacheEntry(copy.copy(value), None)

    def read(self, entry: Any) -> Any:
        return entry.file if entry.forms is None else [*entry.file]

    def free(self, entry: Any) -> None:
        pass


def memory() -> Any:
    from normswap.calibration import lockstep

    return patch.object(lockstep, "TensorFiles", InMemory)


SHARE = {
    "share of the fit: all of it": off(sequential_fit, "keep_share", lambda *_: 1.0),
    "lockstep: one pass": one_pass,
    "files of activations: memory": memory,
}


class Case:
    """A network, its test images with labels, and its calibration images; loaded once."""

    def __init__(self, name: str) -> None:
        self.name = name
        if name.startswith("efficientnet"):
            model = imagenet.packaged(name)
            assert model is not None
            self.model: nn.Module = model
            how = {**zoo.data_config(model), **imagenet.SIDE, "num_classes": 1000}
            data = {}
            for split in ("test", "calibration"):
                kept = ROOT / "runs" / f"ablation-{name}-{split}.pt"
                if not kept.is_file():
                    file = str(imagenet.PHOTOGRAPHS / f"{split}.tar")
                    loader = make_loader(how, file, batch_size=50, workers=0, labelled=split == "test")
                    torch.save(tuple(torch.cat(part) for part in zip(*loader, strict=True)), kept)
                data[split] = torch.load(kept)
            (self.images, self.labels), (self.calibration, _) = data["test"], data["calibration"]
        else:
            self.model = trained(name)
            (self.images, self.labels), (self.calibration, _) = of_kind(name, "test"), of_kind(name, "train")
        self.answers = self.outputs(self.model)

    @torch.inference_mode()
    def outputs(self, model: Any) -> Tensor:
        return torch.cat([model(part) for part in self.images.split(50)])

    def batches(self, images: str, draw: int) -> Any:
        if images in ("none", "synthetic", "noise"):
            return None if images == "none" else images
        if images == "leaves":
            size = self.calibration.shape[1:]
            return [natural_noise.leaves(64, size, 1000 + 2 * draw + i) for i in range(2)]
        count = int(images)
        order = torch.randperm(len(self.calibration), generator=torch.Generator().manual_seed(draw))[:count]
        return list(self.calibration[order].split(25))

    def row(self, after: Tensor, seconds: float) -> Row:
        found, answer = after.argmax(1), self.answers.argmax(1)
        l2 = float((after - self.answers).double().norm() / self.answers.double().norm())
        return {
            "top1": 100 * float((found == self.labels).double().mean()),
            "same": 100 * float((found == answer).double().mean()),
            "agrees": "".join("1" if same else "0" for same in (found == answer).tolist()),
            "l2": l2, "seconds": seconds,
        }  # fmt: skip


_CASES: dict[str, Case] = {}


def case(name: str) -> Case:
    if name not in _CASES:
        _CASES[name] = Case(name)
    return _CASES[name]


def convert(network: str, scheme: str, options: dict[str, Any], images: str, draw: int, switch: Switch | None) -> Row:
    one = case(network)
    batches, inputs = one.batches(images, draw), one.calibration[:8]
    with ExitStack() as stack:
        if switch is not None:
            stack.enter_context(switch())
        start = time.perf_counter()
        done = conversion.convert(one.model, scheme, calibrate=batches, inputs=inputs, seed=draw, **options)
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**one.row(one.outputs(done.model), seconds), "peak": peak}


NEAREST = off(
    weight_rounding, "weights",
    lambda network, _batches, layers, grid: {
        path: weight_rounding.Rounded(module.weight.detach().clone(), grid.rounded(module))
        for path, module in network.named_modules() if path in layers
    },
)  # fmt: skip
NO_BIAS = off(bias_correction, "correct", nothing)
AS_IS = off(quantizing, "equalizations", lambda **_: (AS_FOLDED,))
INT8 = {
    "rounding one after another": NEAREST,
    "bias correction": NO_BIAS,
    "rounding and bias correction": both(NEAREST, NO_BIAS),
    "equalization": AS_IS,
    "rounding, bias correction and equalization": both(NEAREST, NO_BIAS, AS_IS),
}


def int8(network: str, per_channel: bool, bits: int, switch: Switch | None) -> Row:
    one = case(network)
    calibration = one.calibration[:128].split(32)
    settings = normswap.Int8Settings(per_channel, bits)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if switch is not None:
            stack.enter_context(switch())
        file = Path(folder) / "net.onnx"
        start = time.perf_counter()
        normswap.export(one.model, file, dtype="int8", calibrate=calibration, images=one.calibration[128:160].split(32),
                        int8=settings, dynamic_batch=True)  # fmt: skip
        seconds = time.perf_counter() - start
        return one.row(one.outputs(formats.get("onnx").open(file)), seconds)


def nearest(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.detach().to(dtype).double()


BF16 = {
    "rounding that cancels": off(rounding, "diffused", nearest),
    "fp32 of stem, projections, classifier": off(rounding, "main_path", lambda *_: set()),
}


def bf16(network: str, switch: Switch | None) -> Row:
    from normswap.graph import inspection
    from normswap.models import calling

    one = case(network)
    folded = conversion.convert(one.model, "folded", inputs=one.calibration[:4]).model
    twin = copy.deepcopy(folded)
    with ExitStack() as stack:
        if switch is not None:
            stack.enter_context(switch())
        start = time.perf_counter()
        rounding.to_bfloat16_(twin, lambda: inspection.inspect(folded, calling.batches(one.calibration[:2])))
        seconds = time.perf_counter() - start
    return one.row(one.outputs(twin), seconds)


Job = tuple[tuple[str, ...], Callable[[], Row]]
LITE, SMALL = "efficientnet_lite0", ("depthwise", "efficient", "plain", "dense")
GROUPNORMS = ("groupnorm", "groupnorm --group-size 16")


def conversions(part: str, network: str, way: str, images: str, switches: dict[str, Any], draws: int) -> Iterator[Job]:
    scheme, _, option = way.partition(" ")
    options = {"group_size": 16} if option else {}
    for name, switch in {"": None, **switches}.items():
        for draw in range(1 if images == "none" or network == LITE else draws):
            key = (part, network, way, images, name, str(draw))
            yield key, functools.partial(convert, network, scheme, options, images, draw, switch)


def signs(draws: int) -> Iterator[Job]:
    for network in (*SMALL, LITE):
        left_out = NOT_OF_LITE if network == LITE else ()
        switches = {name: switch for name, switch in SIGNS.items() if name not in left_out}
        without_images = {name: switch for name, switch in switches.items() if name not in MADE_ONLY}
        for way in GROUPNORMS:
            yield from conversions("signs", network, way, "none", without_images, draws)
            yield from conversions("signs", network, way, "100", switches, draws)
        yield from conversions("signs", network, "dyt", "none", {"tails on made images": NO_MADE_TAILS}, 1)
        yield from conversions("signs", network, "dyt", "100", TAILS, draws)
        yield from conversions(
            "signs", network, "nf", "100", {"rescaling of channels": off(zero_sum_filters, "rescale", nothing)}, draws
        )
        for way in ("nf", "dyt"):
            for images in ("synthetic", "leaves", "noise"):
                yield from conversions("signs", network, way, images, {}, 1)


def share(draws: int) -> Iterator[Job]:
    for images in ("25", "100"):
        for network in ("depthwise", "efficient", LITE, "plain", "dense"):
            switches = {name: switch for name, switch in SHARE.items() if images == "100" or switch is not memory}
            for way in (*GROUPNORMS, "dyt"):
                yield from conversions("share", network, way, images, switches, draws)


def int8s(_draws: int) -> Iterator[Job]:
    for network in ("depthwise", "efficient", LITE):
        for step, bits in (("channel", 7), ("tensor", 7), ("channel", 8)):
            for name, switch in {"": None, **INT8}.items():
                key = ("int8", network, f"onnx int8, step per {step}, {bits} bits", "128", name, "0")
                yield key, functools.partial(int8, network, step == "channel", bits, switch)


def bf16s(_draws: int) -> Iterator[Job]:
    for network in (LITE, "depthwise", "efficient", "dense", "plain"):
        for name, switch in {"": None, **BF16}.items():
            key = ("bf16", network, "bf16 weights", "none", name, "0")
            yield key, functools.partial(bf16, network, switch)


PARTS: dict[str, Callable[[int], Iterator[Job]]] = {"signs": signs, "share": share, "int8": int8s, "bf16": bf16s}


def table(kept: Kept) -> list[str]:
    """Rows over all draws: means, and the paired difference to everything on."""
    grouped: dict[tuple[str, ...], list[Row]] = {}
    for key, row in kept.rows.items():
        grouped.setdefault(key[:5], []).append(row)
    lines = [HEAD, "|---" * 5 + "|" + "---:|" * 6]
    for key, rows in grouped.items():
        usual = grouped.get((*key[:4], ""), rows)
        pairs = [*zip(rows, usual, strict=False)]
        gained = torch.cat([
            torch.tensor([int(a) - int(b) for a, b in zip(r["agrees"], u["agrees"], strict=True)]) for r, u in pairs
        ]).double()  # fmt: skip
        top, same, l2, seconds = (sum(row[n] for row in rows) / len(rows) for n in ("top1", "same", "l2", "seconds"))
        error = 100 * float(gained.std()) / len(rows[0]["agrees"]) ** 0.5
        change = f"{100 * float(gained.mean()):+.2f} | {error:.2f}" if key[4] else " | "
        part, network, way, images, name = key
        lines.append(f"| {part} | {network} | `{way}` | {images} | {name or 'nothing'} | {top:.1f} | {same:.1f} % | "
                     f"{change} | {l2:.3f} | {seconds:.1f} |")  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--draws", type=int, default=2, help="of calibration images; of Lite0 one")
    parser.add_argument("--networks", nargs="*", help="of these alone")
    parser.add_argument("--ways", nargs="*", help="of these alone")
    given = parser.parse_args()
    kept = Kept(ROOT / "runs" / "ablation.jsonl")
    for part in given.parts:
        for key, measure in PARTS[part](given.draws):
            if key[1] not in (given.networks or [key[1]]) or key[2] not in (given.ways or [key[2]]):
                continue
            row = kept.get(key, measure)
            print(key, {name: round(row[name], 3) for name in ("top1", "same", "l2", "seconds")}, flush=True)
    head = TABLE.read_text().partition(ROWS)[0] if TABLE.is_file() else ""
    TABLE.write_text("\n".join([head + ROWS, "", *circumstances.lines("python tests/lab/ablation.py", "cpu"),
                                *table(kept)]) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
