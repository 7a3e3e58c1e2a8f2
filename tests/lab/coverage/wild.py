"""Fold lived-in networks of other libraries than timm, and convert them to GroupNorm.

    python tests/lab/coverage/wild.py                  # all libraries that are installed; resumes
    python tests/lab/coverage/wild.py 'smp:*' --redo   # some networks, anew
    python tests/lab/coverage/wild.py --table          # only write wild.md

In float64, each network in a process of its own, measured on an input that was not recorded.
`exact`: folded, relative L2 at most 1e-8 at every output, no norm left. `strays`: the source
itself, when its input changes in the last digits. `other`: wrong, incomplete, raised, crashed,
timed out. Approximate is `groupnorm --relative-eps 0`, without images: it runs if no BatchNorm is
left and every output is finite. Its relative L2 is on noise, with random weights: no accuracy.
Norms that no forward reaches are not counted as left. Rows are kept in runs/wild.jsonl with their
commit. Ultralytics is AGPL: measured where it is there, and used nowhere else.
"""

import argparse
import fnmatch
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(HERE.parent / "benchmarks"), str(ROOT / "tests")]

import libraries  # noqa: E402
import torch  # noqa: E402
from kept import Kept, Row, write_table  # noqa: E402
from libraries import TooLargeError, norms  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from walk import described, results  # noqa: E402
from wild_table import table  # noqa: E402

from normswap.errors import NormswapError  # noqa: E402
from normswap.folding.plan_builder import NEVER_CALLED  # noqa: E402
from normswap.graph import inspection  # noqa: E402
from normswap.graph.inspection import Anatomy  # noqa: E402
from normswap.graph.recorder import Widening  # noqa: E402
from normswap.layers.channelwise import ChannelAffine, ChannelBias  # noqa: E402
from normswap.models import calling  # noqa: E402
from normswap.models.calling import Example, named_tensors  # noqa: E402
from normswap.surgery import applying, conversion  # noqa: E402

EXACT = 1e-8
APPROXIMATE: tuple[str, dict[str, Any]] = ("groupnorm", {"relative_eps": 0})


def live(model: nn.Module, example: Example) -> None:
    """Random gamma and beta, some negative or zero; statistics measured on the example, then
    perturbed.
    """
    model.double().eval()
    generator = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=generator, dtype=torch.float64)

    def measure(norm: Any, args: tuple[Tensor, ...]) -> None:
        x = args[0].double().transpose(0, 1).flatten(1)
        variance = x.var(1, correction=0).clamp_min(1e-3)
        norm.running_mean.copy_(x.mean(1) + 0.2 * (noise(variance) - 0.5) * variance.sqrt())
        norm.running_var.copy_(variance * (0.75 + 0.5 * noise(variance)))

    handles = []
    with torch.no_grad():
        for path in norms(model):
            norm: Any = model.get_submodule(path)
            if norm.weight is not None:
                norm.weight.copy_(
                    (noise(norm.weight) + 0.5) * torch.where(noise(norm.weight) < 0.2, -1.0, 1.0)
                )
                norm.bias.copy_(0.3 * (noise(norm.bias) - 0.5))
            handles.append(norm.register_forward_pre_hook(measure))
        run(model, example)
    for handle in handles:
        handle.remove()


def nudged(x: Tensor) -> Tensor:
    """The same but for the last digits."""
    return x * (1 + 4 * torch.finfo(x.dtype).eps) if x.is_floating_point() else x


@torch.no_grad()
def run(model: nn.Module, example: Example) -> dict[str, Tensor]:
    with Widening():
        return dict(named_tensors(example.map(torch.clone).call(model)))


def error(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The worst relative L2 distance over all outputs."""
    if a.keys() != b.keys() or any(a[name].shape != b[name].shape for name in a):
        return float("inf")

    errors: list[float] = []
    for name, value in a.items():
        if value.numel():
            reference = value.double()
            difference = (reference - b[name].double()).norm()
            errors.append(float(difference / reference.norm().clamp_min(1e-30)))
    if any(math.isnan(value) for value in errors):
        return float("inf")
    return max(errors, default=float("inf"))


def check(name: str) -> Row:
    """What folding did to one network, and what the approximate target did."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)

    try:
        model, given = libraries.build(name)
    except TooLargeError as problem:
        return {"status": "too large", "why": str(problem)}
    except Exception as problem:  # our recipe, or the library's
        return {"status": "not built", "why": described(problem)}

    row: Row = {"norms": len(norms(model))}
    if not row["norms"]:
        return row | {"status": "none"}

    examples = [one.like(model.double()) for one in calling.batches(given)]
    live(model, examples[0])
    fresh = examples[0].map(lambda t: t.flip(-1) * 0.9 if t.is_floating_point() else t)
    reference = run(model, fresh)
    row["straying"] = error(reference, run(model, fresh.map(nudged)))
    begin = time.perf_counter()

    try:
        seen = inspection.inspect(model, examples)
        step, builder = conversion.plan_step(seen, "folded")
    except NormswapError as refusal:
        return row | {"status": "refused", "why": str(refusal)[:200]}

    result = applying.apply_step(model, step)
    row["seconds"] = round(time.perf_counter() - begin, 1)
    row["error"] = error(reference, run(result, fresh))
    unused = sum(outcome == NEVER_CALLED for outcome in builder.outcomes.values())
    row |= {"left": len(norms(result)) - unused, "unused": unused, "remarks": seen.traced.remarks}
    row["affines"] = sum(isinstance(m, ChannelAffine | ChannelBias) for m in result.modules())
    row["status"] = (
        "wrong" if not row["error"] <= EXACT else "incomplete" if row["left"] else "exact"
    )
    del result

    return row | {"approximate": approximate(model, seen, unused, fresh, reference)}


def approximate(
    model: nn.Module, seen: Anatomy, unused: int, fresh: Example, reference: dict[str, Tensor]
) -> Row:
    """What became of the network in the approximate target; `error` is None where shapes of outputs
    differ.
    """
    begin = time.perf_counter()
    try:
        to, options = APPROXIMATE
        step, _ = conversion.plan_step(seen, to, **options)
        result = applying.apply_step(model, step)
        row: Row = {"seconds": round(time.perf_counter() - begin, 1)}
        found = run(result, fresh)
    except NormswapError as refusal:
        return {"status": "refused", "why": str(refusal)[:200]}
    except Exception as problem:
        return {"status": "raised", "why": described(problem)}

    same = found.keys() == reference.keys() and all(
        found[at].shape == reference[at].shape for at in found
    )
    row["error"] = error(reference, found) if same else None
    finite = all(bool(t.isfinite().all()) for t in found.values())
    row["left"] = len(norms(result)) - unused
    row["status"] = "incomplete" if row["left"] else "runs" if finite else "not finite"

    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=["*"], help="globs over library:network")
    parser.add_argument(
        "--redo", action="store_true", help="also those that are in the file already"
    )
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--table", action="store_true", help="walk nothing, write the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept = Kept(ROOT / "runs" / "wild.jsonl")
    listed = list(libraries.names())
    chosen = [
        name for name in listed if any(fnmatch.fnmatchcase(name, glob) for glob in args.names)
    ]
    todo = [] if args.table else [name for name in chosen if args.redo or (name,) not in kept.rows]
    libraries.preload(todo)

    for name, figures in results(todo, check, workers=1, timeout=args.timeout):
        row = kept.add((name,), **figures)
        print(
            {key: value for key, value in row.items() if key not in ("remarks", "commit")},
            flush=True,
        )

    rows = [row for (name,), row in kept.rows.items() if name in listed]
    about = (__doc__ or "").partition("In float64")
    lines = table(rows, listed, "".join(about[1:]).strip())
    write_table(HERE / "wild.md", "Other libraries' networks, folded", "coverage/wild.py", lines)

    return any(row["status"] in ("wrong", "raised", "crashed") for row in rows)


if __name__ == "__main__":
    sys.exit(main())
