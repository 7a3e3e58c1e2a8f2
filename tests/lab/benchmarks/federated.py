"""A trained network fine-tuned by clients with skewed classes, in Flower's simulation: top-1 by round, by norm.

    python tests/lab/benchmarks/federated.py -o tests/lab/benchmarks/federated.md      # needs normswap[federated]

`resnet18_narrow`, trained on CIFAR-10, moves to a domain that it has not seen: the same classes, blurred, or turned by
90 degrees. The images are dealt to the clients class by class by a Dirichlet distribution, so that each sees few
classes. First every way is run for a few rounds with each learning rate; the one with the best top-1 on held-out
training images is then run for all rounds, and measured on test images that nothing was chosen on. What is measured is
kept, a line each, in runs/federated.jsonl, and a second call measures what is missing.
"""

import functools
import importlib.metadata
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from federated_clients import (
    ALPHA,
    BATCH,
    BATCHNORM,
    CLIENTS,
    CLIP,
    EPOCHS,
    HELD_OUT,
    NETWORK,
    SHIFTS,
    TESTED,
    TRAINED,
    WAYS,
    by_class,
    client,
    figures,
    network,
    prepare,
    shares,
    source,
)  # fmt: skip
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from kept import Kept, Row, arguments
from schemes_table import ROOT

SEEDS, RATES, TRIAL, ROUNDS, SHOWN = (0, 1), (0.01, 0.03, 0.1, 0.3), 2, 6, (0, 1, 2, 4, 6)
HOW = f"""
`{NETWORK}` on CIFAR-10 images under a shift that it has not seen. {TRAINED} training images over {CLIENTS} clients,
class by class by Dirichlet({ALPHA:g}); all clients in every round, {EPOCHS} epochs each, {BATCH} images a step, SGD
without momentum, gradients clipped to norm {CLIP:g}, weighted by images. Learning rate: of
{", ".join(f"{rate:g}" for rate in RATES)} the best for that way and shift after {TRIAL} rounds, on {HELD_OUT} held-out
training images (deal {SEEDS[0]}). Top-1 in percent, mean over classes, on {TESTED} test images under the same shift,
mean of {len(SEEDS)} deals (in brackets the last round of each). Own classes: each class weighted as in the client's
images, mean over clients. FedBN has no global network: each client's own is measured, on a share of the test images.
"""


class Strict(FedAvg):
    """FedAvg that does not go on without a client that failed."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed or len(replies) != CLIENTS:
            raise RuntimeError(f"{len(replies)} of {CLIENTS} clients; {failed}")
        return super().aggregate_train(server_round, replies)


def one(grid: Grid, shift: str, said: str, lr: float, seed: int, part: str, rounds: int) -> Row:
    """One federated training; top-1 and top-1 on own classes by round."""
    asked = {"shift": shift, "lr": lr, "seed": seed, "part": part, "run": f"{shift} {said} {lr} {seed} {part}"}
    found: dict[int, MetricRecord] = {}
    arrays, done = ArrayRecord(source().state_dict()), 0
    for way, count in ((BATCHNORM, WAYS[said].after), (said, rounds - WAYS[said].after)):
        if way == said:
            trained = network(BATCHNORM)
            trained.load_state_dict(arrays.to_torch_state_dict())
            arrays = ArrayRecord(WAYS[said].make(trained.eval()).state_dict())
        if count:
            arrays, seen = stage(grid, arrays, {**asked, "way": way, "done": done}, count, rounds)
            found, done = {**seen, **found}, done + count
    return {"lr": lr, **{what: {number: row[what] for number, row in found.items()} for what in ("top1", "own")}}


def stage(
    grid: Grid, arrays: ArrayRecord, asked: dict[str, Any], count: int, rounds: int
) -> tuple[ArrayRecord, dict[int, MetricRecord]]:
    """So many rounds of one way: the global network after them, and what it was worth after each."""
    way, done, part = WAYS[asked["way"]], int(asked["done"]), str(asked["part"])

    def measure(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        at = number + done
        if (way.local and number) or at not in (SHOWN if part == "test" else (0, rounds)):
            return None
        model = network(asked["way"])
        model.load_state_dict(arrays.to_torch_state_dict())
        return figures(by_class(model.eval(), asked["shift"], part), shares(int(asked["seed"])))

    everyone = dict.fromkeys(("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), CLIENTS)
    strategy = Strict(fraction_evaluate=float(way.local), **everyone)
    result = strategy.start(grid, arrays, count, train_config=ConfigRecord(dict(asked)),
                            evaluate_config=ConfigRecord(dict(asked)), evaluate_fn=measure)  # fmt: skip
    seen = {**result.evaluate_metrics_serverapp, **result.evaluate_metrics_clientapp}
    return result.arrays, {number + done: row for number, row in seen.items()}


def last(row: Row, what: str = "top1") -> float:
    return float(row[what][max(row[what], key=int)])


def trials(kept: Kept, shift: str, said: str) -> list[Row]:
    return [row for lr in RATES if (row := kept.rows.get((shift, said, "trial", str(lr))))]


def best(tried: list[Row]) -> float:
    """The learning rate that the held-out images choose."""
    return float(max(tried, key=last)["lr"])


def measure_all(grid: Grid, kept: Kept, ways: list[str], write: Callable[[], None]) -> None:
    """Every trial and every run that is not kept yet."""
    for shift in SHIFTS:
        for said in ways:
            run = functools.partial(one, grid, shift, said)
            for lr in RATES:
                kept.get((shift, said, "trial", str(lr)), functools.partial(run, lr, SEEDS[0], "held out", TRIAL))
            lr = best(trials(kept, shift, said))
            for seed in SEEDS:
                kept.get((shift, said, "test", str(lr), str(seed)), functools.partial(run, lr, seed, "test", ROUNDS))
                write()


def table(kept: Kept) -> list[str]:
    lines = ["| images | norms | lr | " + " | ".join(f"round {n}" if n else "before" for n in SHOWN)]
    lines[0] += " | own classes |"
    lines.append("|---" * (4 + len(SHOWN)) + "|")
    tuned, lacking = [], []
    for shift, said in itertools.product(SHIFTS, WAYS):
        tried = trials(kept, shift, said)
        keys = ((shift, said, "test", str(best(tried)), str(seed)) for seed in SEEDS if len(tried) == len(RATES))
        runs = [kept.rows[key] for key in keys if key in kept.rows]
        if len(runs) < len(SEEDS):
            lacking.append(f"{shift}, {said}")
            continue
        tuned.append(f"- {shift}, {said}: " + ", ".join(f"{last(row):.1f} (lr {row['lr']:g})" for row in tried))
        by_round = [{int(number): value for number, value in row["top1"].items()} for row in runs]
        cells = [f"{np.mean([row[number] for row in by_round]):.1f}" for number in SHOWN]
        each = ", ".join(f"{last(row):.1f}" for row in runs)
        own = np.mean([last(row, "own") for row in runs])
        lines.append(f"| {shift} | {said} | {runs[0]['lr']:g} | {' | '.join(cells)} ({each}) | {own:.1f} |")
    lines += ["", f"Not run: {'; '.join(lacking)}."] if lacking else []
    return [*lines, "", "Held-out top-1 of each learning rate, from which it was chosen:", "", *tuned]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), help="measure these now")
    given = parser.parse_args()
    kept = Kept(ROOT / "runs" / "federated.jsonl", fresh=given.fresh)
    for shift in SHIFTS:
        prepare(shift)

    def write() -> None:
        made = " and ".join(f"{name} {importlib.metadata.version(name)}" for name in ("flwr", "ray"))
        kept.write(given.output, "Federated training with Flower", [HOW, *table(kept)], made)

    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        measure_all(grid, kept, given.ways, write)

    resources = {"init_args": {"num_cpus": 1, "object_store_memory": 200_000_000, "log_to_driver": False},
                 "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}  # fmt: skip
    run_simulation(server, client, CLIENTS, backend_config=resources)  # type: ignore[arg-type]
    write()


if __name__ == "__main__":
    main()
