"""Fold networks of other libraries than timm, with lived-in statistics, in float64, and write down what happened.

    python tests/coverage/wild.py                        # all libraries that are installed; resumes
    python tests/coverage/wild.py 'smp:*' --redo         # some of it, anew
    python tests/coverage/wild.py --table                # only write wild.md from what is there

Each network has a process of its own. Ultralytics is AGPL: it is measured here if it is there, and used nowhere else.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing as mp
import sys
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import libraries  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from normswap import schemes  # noqa: E402
from normswap.errors import NormswapError  # noqa: E402
from normswap.folding.verdict import Fate  # noqa: E402
from normswap.graph import inspection  # noqa: E402
from normswap.graph.widening import Widening  # noqa: E402
from normswap.layers.channelwise import ChannelAffine, ChannelBias  # noqa: E402
from normswap.models import calling, network_input  # noqa: E402
from normswap.models.calling import Example, named_tensors  # noqa: E402
from normswap.plan import Step  # noqa: E402
from normswap.surgery import applying  # noqa: E402

EXACT = 1e-8
FOLDED = schemes.get("folded")


def norms(model: nn.Module) -> list[str]:
    """Every module with running statistics, whatever its class."""
    return [path for path, m in model.named_modules() if getattr(m, "running_mean", None) is not None]


def live(model: nn.Module, example: Example) -> None:
    """Random gamma and beta, some negative or zero; statistics measured on the example, then perturbed."""
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
                norm.weight.copy_((noise(norm.weight) + 0.5) * torch.where(noise(norm.weight) < 0.2, -1.0, 1.0))
                norm.bias.copy_(0.3 * (noise(norm.bias) - 0.5))
            handles.append(norm.register_forward_pre_hook(measure))
        run(model, example)
    for handle in handles:
        handle.remove()


@torch.no_grad()
def run(model: nn.Module, example: Example) -> dict[str, Tensor]:
    with Widening():
        return dict(named_tensors(example.map(torch.clone).call(model)))


def error(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The worst relative L2 distance over all outputs."""
    if a.keys() != b.keys() or any(a[name].shape != b[name].shape for name in a):
        return float("inf")
    pairs = [(a[name].double(), b[name].double()) for name in a if a[name].numel()]
    found = [float((x - y).norm() / x.norm().clamp_min(1e-30)) for x, y in pairs]
    return max((value if value == value else float("inf") for value in found), default=float("inf"))


def check(name: str) -> dict[str, Any]:
    """What folding did to one network."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    try:
        model, given = libraries.build(name)
    except Exception as problem:  # our recipe, or the library's
        return {"status": "not built", "why": f"{type(problem).__name__}: {problem}".split("\n")[0][:200]}
    row: dict[str, Any] = {"norms": len(norms(model))}
    if not row["norms"]:
        return row | {"status": "none"}
    examples = [one.like(model.double()) for one in calling.batches(given)] if given is not None else None
    if examples is None:
        examples = [network_input.noise(model.double(), network_input.size(model), batch=2)]
    live(model, examples[0])
    fresh = examples[0].map(lambda t: t.flip(-1) * 0.9 if t.is_floating_point() else t)
    reference = run(model, fresh)
    begin = time.perf_counter()
    try:
        seen = inspection.inspect(model, examples if given is not None else None)
        draft = FOLDED.plan(seen)
    except NormswapError as refusal:
        return row | {"status": "refused", "why": str(refusal)[:200]}
    if draft.refusals:
        path, why = next(iter(draft.refusals.items()))
        return row | {"status": "refused", "why": f"{path}: {why} ({len(draft.refusals)} norms)"[:200]}
    result = applying.apply_step(model, Step("folded", {}, draft.edits()))
    row["seconds"] = round(time.perf_counter() - begin, 1)
    row["error"] = error(reference, run(result, fresh))
    unused = sum(verdict.fate is Fate.NEVER_CALLED for verdict in draft.verdicts.values())
    row |= {"left": len(norms(result)) - unused, "unused": unused, "remarks": seen.traced.remarks}
    row["affines"] = sum(isinstance(m, ChannelAffine | ChannelBias) for m in result.modules())
    row["status"] = "wrong" if not row["error"] <= EXACT else "incomplete" if row["left"] else "exact"
    return row


def work(name: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        row = check(name)
    except Exception as problem:
        row = {"status": "raised", "why": f"{type(problem).__name__}: {problem}".split("\n")[0][:200]}
    pipe.send({"name": name, **row})


def apart(name: str, timeout: float) -> dict[str, Any]:
    mine, theirs = mp.get_context("fork").Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=work, args=(name, theirs))
    process.start()
    theirs.close()
    row = {"name": name, "status": "timeout"}
    if mine.poll(timeout):
        try:
            row = mine.recv()
        except EOFError:
            row["status"] = "crashed"
    process.kill()
    process.join()
    return row


def table(rows: list[dict[str, Any]], listed: list[str]) -> str:
    """By library; then every network that is not exact, and every one with affine layers left."""
    lines = ["# Other libraries' networks, folded", "", "Written by `wild.py`: lived-in statistics, float64, measured",
             "on an input that was not recorded. `exact`: relative L2 at most 1e-8 at every output, no norm left.", "",
             "`other`: wrong, incomplete, raised, timed out. Without BatchNorm: also what is too large to try.", "",
             "| library | listed | walked | not built | no BatchNorm | exact | largest error | affines left in "
             "| refused | other |", "|---|" + 9 * "---|"]  # fmt: skip
    for library in sorted({name.split(":")[0] for name in listed}):
        own = [row for row in rows if row["name"].split(":")[0] == library]
        count = sum(name.split(":")[0] == library for name in listed)
        with_norms = [row for row in own if row["status"] not in ("none", "not built")]
        unbuilt = sum(row["status"] == "not built" for row in own)
        exact = [row for row in with_norms if row["status"] == "exact"]
        refused = sum(row["status"] == "refused" for row in own)
        worst = max((row["error"] for row in exact), default=0.0)
        lines.append(
            f"| {library} | {count} | {len(own)} | {unbuilt} | {len(own) - unbuilt - len(with_norms)} | {len(exact)} | "
            f"{worst:.0e} | "
            f"{sum(bool(row['affines']) for row in exact)} | {refused} | {len(with_norms) - len(exact) - refused} |"
        )
    lines += ["", "| network | norms | status | error | affines left | seconds | why |", "|---|" + 6 * "---|"]
    for row in sorted(rows, key=lambda row: row["name"]):
        if row["status"] != "none":
            size = f"{row['error']:.0e}" if "error" in row else ""
            cells = (row["name"], row.get("norms", ""), row["status"], size, row.get("affines", ""),
                     row.get("seconds", ""), row.get("why", "").replace("|", "/"))  # fmt: skip
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["*"], help="globs over library:network")
    parser.add_argument("--out", type=Path, default=HERE / "wild.jsonl", help="one line per network; not committed")
    parser.add_argument("--redo", action="store_true", help="also those that are in the file already")
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--table", action="store_true", help="fold nothing, write the table")
    args = parser.parse_args()
    lines = args.out.read_text().splitlines() if args.out.is_file() else []
    known = {row["name"]: row for row in map(json.loads, lines)}
    names = [n for n in libraries.names() if any(fnmatch.fnmatchcase(n, glob) for glob in args.names)]
    for name in () if args.table else names:
        if name in known and not args.redo:
            continue
        known[name] = apart(name, args.timeout)
        with args.out.open("a") as file:
            print(json.dumps(known[name]), file=file)
        print({key: value for key, value in known[name].items() if key != "remarks"}, flush=True)
    (HERE / "wild.md").write_text(table(list(known.values()), list(libraries.names())))
    return any(row["status"] in ("wrong", "raised", "crashed") for row in known.values())


if __name__ == "__main__":
    sys.exit(main())
