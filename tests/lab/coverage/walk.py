"""Fold every timm architecture with BatchNorms, lived in and in float64, and write down the result.

    python tests/lab/coverage/walk.py                    # at most 100 M parameters; resumes
    python tests/lab/coverage/walk.py 'regnet*' --redo   # some networks, anew
    python tests/lab/coverage/walk.py --mutants          # is a 1 % shift of one channel noticed?
    python tests/lab/coverage/walk.py --table            # only write summary.md

Each network has a process of its own: one that crashes, hangs or eats the memory is one row of the
table.
"""

import argparse
import fnmatch
import functools
import json
import multiprocessing as mp
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "benchmarks"), str(HERE.parents[1])]

import mutants  # noqa: E402
import network  # noqa: E402
import summary  # noqa: E402
import timm  # noqa: E402
import torch  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402

SAMPLE = 40
Check = Callable[[str], dict[str, Any]]  # a network by name; its row


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=["*"], help="globs over architectures")
    parser.add_argument("--family", default="*", help="glob over families (timm's file names)")
    parser.add_argument("--max-params", type=float, default=100, help="in millions")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one network")
    parser.add_argument("--memory", type=float, default=8, help="GiB for all workers together")
    parser.add_argument(
        "--out", type=Path, default=HERE / "walk.jsonl", help="one line per network; not committed"
    )
    parser.add_argument(
        "--redo", action="store_true", help="also those that are in the file already"
    )
    parser.add_argument("--only", help="only those whose last status is this (implies --redo)")
    parser.add_argument(
        "--mutants", action="store_true", help=f"test the checker, on {SAMPLE} networks"
    )
    parser.add_argument("--table", action="store_true", help="walk nothing, write the summary")

    return parser.parse_args()


def read(file: Path) -> dict[str, dict[str, Any]]:
    """The last row of each network."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def chosen(args: argparse.Namespace, known: dict[str, dict[str, Any]]) -> list[str]:
    names = [
        n for n in timm.list_models() if any(fnmatch.fnmatchcase(n, glob) for glob in args.names)
    ]
    names = [n for n in names if fnmatch.fnmatchcase(network.family(n), args.family)]
    if args.only:
        return [n for n in names if known.get(n, {}).get("status") == args.only]
    return names if args.redo else [n for n in names if n not in known]


def sample(known: dict[str, dict[str, Any]], names: list[str]) -> list[str]:
    """Networks from all families in turn, the quickest of each first."""
    able = sorted(
        (n for n in names if known.get(n, {}).get("status") == "exact"),
        key=lambda n: known[n]["seconds"],
    )
    turn: Counter[str] = Counter()

    order = []
    for name in able:
        kind = network.family(name)
        turn[kind] += 1
        order.append((turn[kind], name))

    return [name for _, name in sorted(order)[:SAMPLE]]


def work(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """In the network's own process."""
    share = int(args.memory * 2**30 / args.workers)
    resource.setrlimit(resource.RLIMIT_DATA, (share, share))
    row: dict[str, Any] = {}
    start = time.perf_counter()

    try:
        params, norms = network.count(name)
        row |= {"params": params, "norms": norms}
        if not norms:
            row["status"] = "none"
        elif params > args.max_params * 1e6:
            row["status"] = "large"
        else:
            row |= (mutants if args.mutants else network).check(name)
    except Exception as error:
        row |= {"status": "raised", "why": described(error)}

    row["seconds"] = round(time.perf_counter() - start, 1)
    return row | {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}


def send(check: Check, name: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(check(name))
    except Exception as problem:
        pipe.send({"status": "raised", "why": described(problem)})


def described(problem: Exception) -> str:
    """Its class and the first line of its message, cut to 200 characters."""
    return f"{type(problem).__name__}: {problem}".split("\n")[0][:200]


def results(
    names: list[str], check: Check, workers: int, timeout: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and rows as they come, each from a process of its own, of which at most `workers` run
    at a time.
    """
    context = mp.get_context("fork")
    queue = list(names)

    running = {}
    while queue or running:
        while queue and len(running) < workers:
            name = queue.pop(0)
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=send, args=(check, name, theirs))
            process.start()
            theirs.close()
            running[mine] = (name, process, time.monotonic() + timeout)

        ready = wait(list(running), timeout=1)
        for pipe, (name, process, deadline) in list(running.items()):
            if pipe not in ready and time.monotonic() < deadline:
                continue

            row: dict[str, Any] = {"status": "timeout", "why": f"more than {timeout:.0f} s"}
            if pipe in ready:
                try:
                    row = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    process.join()
                    row = {"status": "crashed", "why": f"exit code {process.exitcode}"}

            process.kill()
            process.join()
            del running[pipe]
            yield name, row


def main() -> int:
    args = options()
    known = read(args.out)
    if not args.table:
        names = sample(known, list(known)) if args.mutants else chosen(args, known)
        file = args.out.with_name("mutants.jsonl") if args.mutants else args.out
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )

        with Progress(*columns) as progress, file.open("w" if args.mutants else "a") as lines:
            task = progress.add_task("", total=len(names))
            for name, row in results(
                names, functools.partial(work, args), args.workers, args.timeout
            ):
                print(
                    json.dumps({"name": name, "family": network.family(name), **row}),
                    file=lines,
                    flush=True,
                )
                progress.update(task, advance=1, description=f"{name}: {row['status']}")

    rows = read(args.out)
    text = summary.table(rows.values(), read(args.out.with_name("mutants.jsonl")).values())
    args.out.with_name(
        "summary.md" if args.out == HERE / "walk.jsonl" else f"{args.out.stem}.md"
    ).write_text(text, encoding="utf-8")
    print(text)

    return any(row["status"] in ("wrong", "raised", "crashed") for row in rows.values())


if __name__ == "__main__":
    sys.exit(main())
