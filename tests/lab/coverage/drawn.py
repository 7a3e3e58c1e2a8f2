"""Convert architectures drawn anew, as a user would, and write down every verdict.

    python tests/lab/coverage/drawn.py --seed 2026-11-28T07   # 60 of timm, 10 others; resumes
    python tests/lab/coverage/drawn.py --redo 'ghostnet*'     # some networks, anew
    python tests/lab/coverage/drawn.py --table                # only write drawn.md

The networks of timm have BatchNorms and at most 40 million parameters. They are drawn family by
family, so that each family is there before one is there twice; the others library by library.
Weights are random, statistics lived-in, and everything runs in float32. Each network is converted
by `normswap.convert` to `folded`, and to one more exact scheme that is drawn for it, each in a
process of its own. REFUSED: nothing was converted, and the reason is the program's own sentence.
Rows are kept in runs/drawn.jsonl with their commit.
"""

import argparse
import fnmatch
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(HERE.parent / "benchmarks"), str(ROOT / "tests")]

import circumstances  # noqa: E402
import libraries  # noqa: E402
import network  # noqa: E402
import timm  # noqa: E402
import torch  # noqa: E402
from kept import Kept, Row, markdown_head, markdown_row, write_table  # noqa: E402
from support.scheme_rows import EXACT  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from walk import described, results  # noqa: E402
from wild import live  # noqa: E402
from wild_table import DISTRIBUTIONS, library  # noqa: E402

import normswap  # noqa: E402
from normswap.errors import NormswapError, VerificationError, WrongResultError  # noqa: E402
from normswap.models import calling  # noqa: E402
from normswap.models.calling import Example  # noqa: E402

SEED = "2026-11-28T07"
OF_TIMM = 60
OTHERS = 10
LARGEST = 40e6
SCHEMES = {str(row): row for row in EXACT}
COLUMNS = ("network", "scheme", "verdict", "float64", "float32", "seconds", "reason or remark")


def in_turns(names: Iterable[str], groups: Iterable[str]) -> list[str]:
    """Return the names, the first of every group before the second of any.

    Args:
        names: The names, in the order in which they were drawn.
        groups: The group of each name.
    """
    turns: Counter[str] = Counter()
    numbered: list[tuple[int, str]] = []
    for name, group in zip(names, groups, strict=True):
        turns[group] += 1
        numbered.append((turns[group], name))
    numbered.sort(key=lambda pair: pair[0])
    return [name for _, name in numbered]


def has_right_size(name: str) -> bool:
    """Whether an architecture of timm has BatchNorms, and few enough parameters."""
    parameters, norms = network.count(name)
    return norms > 0 and parameters <= LARGEST


def drawn(seed: str) -> Iterator[str]:
    """Yield "network to scheme" for every conversion that the seed draws."""
    lots = random.Random(seed)
    of_timm = lots.sample(timm.list_models(), k=len(timm.list_models()))
    of_timm = in_turns(of_timm, map(network.family, of_timm))

    found = list(libraries.names())
    others = lots.sample(found, k=len(found))
    others = in_turns(others, map(library, others))

    names = [f"timm:{name}" for name in islice(filter(has_right_size, of_timm), OF_TIMM)]
    names += islice(filter(other_is_there, others), OTHERS)
    for name in names:
        yield f"{name} to folded"
        yield f"{name} to {lots.choice([scheme for scheme in SCHEMES if scheme != 'folded'])}"


def other_is_there(name: str) -> bool:
    """Whether a network of another library can be built here, and has BatchNorms and that size."""
    try:
        model, _ = libraries.build(name)
    # A library may raise anything about its own networks.
    except Exception as error:
        print(f"{name}: {described(error)}", flush=True)
        return False
    size = sum(parameter.numel() for parameter in model.parameters())
    return bool(libraries.norms(model)) and size <= LARGEST


def built(name: str) -> tuple[nn.Module, list[Example] | Tensor]:
    """Return a network in float32 with lived-in statistics, and inputs for it."""
    torch.manual_seed(0)
    if name.startswith("timm:"):
        model, images, _ = network.living(name.removeprefix("timm:"))
        return model.float(), images.float()

    model, given = libraries.build(name)
    examples = [example.like(model.double()) for example in calling.batches(given)]
    live(model, examples[0])
    return model.float(), [example.map_floats(Tensor.float) for example in examples]


def check(conversion: str) -> Row:
    """Return what `normswap.convert` says of one conversion."""
    warnings.simplefilter("ignore")
    name, _, scheme = conversion.partition(" to ")
    model, inputs = built(name)
    begin = time.perf_counter()
    row: Row = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    try:
        chosen = SCHEMES[scheme]
        done = normswap.convert(model, chosen.scheme, inputs=inputs, **chosen.options)
    except NormswapError as error:
        row |= {"verdict": verdict_of(error), "why": " ".join(str(error).split())}
    else:
        errors: dict[str, float] = {}
        for error in done.report.logits:
            errors[error.precision] = max(errors.get(error.precision, 0.0), error.relative_l2)
        row |= {"verdict": done.report.verdict, "errors": errors}
        row["why"] = "; ".join(done.report.remarks)

    row["seconds"] = round(time.perf_counter() - begin, 1)
    return row


def verdict_of(error: NormswapError) -> str:
    """Return the word for a conversion that raised an error."""
    if isinstance(error, WrongResultError):
        return "WRONG"
    return "NOT PROVED" if isinstance(error, VerificationError) else "REFUSED"


def table(rows: list[tuple[str, Row]]) -> list[str]:
    """Return the lines of the table: how many had each verdict, then every conversion."""
    verdicts = Counter(row.get("verdict", row.get("status")) for _, row in rows)
    commits = ", ".join(dict.fromkeys(str(row["commit"]) for _, row in rows))
    names = dict.fromkeys(conversion.partition(" to ")[0] for conversion, _ in rows)
    libraries_seen = [library(name) for name in names]
    counted = ", ".join(f"{count} of {name}" for name, count in Counter(libraries_seen).items())
    versions = circumstances.versions(DISTRIBUTIONS.get(name, name) for name in libraries_seen)
    versions = ", ".join(dict.fromkeys(versions.split(", ")))

    said = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    lines = [
        f"{len(names)} networks ({counted}), {len(rows)} conversions: **{said}**.",
        "",
        f"Measured at commit {commits}. {versions}.",
        "",
        markdown_head(*COLUMNS),
    ]
    for conversion, row in rows:
        name, _, scheme = conversion.partition(" to ")
        errors = row.get("errors", {})
        figures: list[str] = []
        for precision in ("float64", "float32"):
            figures.append(f"{errors[precision]:.0e}" if precision in errors else "")
        reason = row.get("why", "").replace("|", "/")
        word = row.get("verdict", row.get("status"))
        lines.append(markdown_row(name, scheme, word, *figures, row.get("seconds", ""), reason))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", default=SEED, help="of the draw: a date and an hour")
    parser.add_argument("--redo", metavar="GLOB", help="conversions that are measured again")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one conversion")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so many")
    parser.add_argument("--table", action="store_true", help="convert nothing, write the table")
    args = parser.parse_args()
    torch.set_num_threads(1)

    end = time.monotonic() + args.seconds
    kept = Kept(ROOT / "runs" / "drawn.jsonl")
    key = (args.seed, "drawn")
    listed = kept.get(key, lambda: {"conversions": list(drawn(args.seed))})["conversions"]
    todo: list[str] = []
    for conversion in listed:
        is_asked = args.redo is not None and fnmatch.fnmatchcase(conversion, args.redo)
        if not args.table and (is_asked or (args.seed, conversion) not in kept.rows):
            todo.append(conversion)
    # All networks are folded before the first of them is converted to anything else.
    todo.sort(key=lambda conversion: not conversion.endswith(" to folded"))
    libraries.preload(name for name in todo if not name.startswith("timm:"))

    for conversion, row in results(todo, check, workers=1, timeout=args.timeout):
        kept.add((args.seed, conversion), **row)
        print(conversion, row, flush=True)
        if time.monotonic() > end:
            break

    rows = [
        (conversion, kept.rows[args.seed, conversion])
        for conversion in listed
        if (args.seed, conversion) in kept.rows
    ]
    command = f"coverage/drawn.py --seed {args.seed}"
    about = (__doc__ or "").partition("The networks of timm")
    lines = ["".join(about[1:]).strip(), "", *table(rows)]
    write_table(HERE / "drawn.md", "Architectures drawn anew, converted", command, lines)
    return any(row.get("verdict") != "PROVED" for _, row in rows)


if __name__ == "__main__":
    sys.exit(main())
