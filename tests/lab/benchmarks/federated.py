"""A trained network fine-tuned by clients with skewed classes: top-1 by round and by norm.

    pip install 'normswap[federated]'    # Flower's simulation
    python tests/lab/benchmarks/federated.py -o tests/lab/benchmarks/federated.md

`resnet18_narrow`, trained on CIFAR-10, moves to a domain that it has not seen: the same classes,
blurred, or turned by 90 degrees. The images are dealt to the clients class by class by a Dirichlet
distribution, so that each sees few classes. First every way is run for a few rounds with each
learning rate; the one with the best top-1 on held-out training images is then run for all rounds,
and measured on test images that nothing was chosen on. What is measured is kept, a line each, in
runs/federated.jsonl, and a second call measures what is missing.
"""

import functools
import itertools
from collections.abc import Iterable
from statistics import mean
from typing import Any

import circumstances
import federated_clients as clients
from federated_clients import BATCHNORM, CLIENTS, SHIFTS, WAYS, network
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from kept import Kept, Row, arguments
from schemes_table import ROOT
from tuning import Tuning

TRIAL = 2
ROUNDS = 6
SHOWN = (0, 1, 2, 4, 6)
TUNING = Tuning(rates=(0.01, 0.03, 0.1, 0.3), seeds=(0, 1), score="top1")
CASES = {f"{shift}, {way}": (shift, way) for shift, way in itertools.product(SHIFTS, WAYS)}
HOW = f"""
`{clients.NETWORK}` on CIFAR-10 images under a shift that it has not seen. {clients.TRAINED} \
training images over
{CLIENTS} clients, class by class by Dirichlet({clients.ALPHA:g}); all clients in every round, \
{clients.EPOCHS} epochs
each, {clients.BATCH} images a step, SGD without momentum, gradients clipped to norm \
{clients.CLIP:g}, weighted by
images. Learning rate: of {", ".join(f"{rate:g}" for rate in TUNING.rates)} the best for that way \
and shift after
{TRIAL} rounds, on {clients.HELD_OUT} held-out training images (deal {TUNING.seeds[0]}). Top-1 in \
percent, mean over
classes, on {clients.TESTED} test images under the same shift, mean of {len(TUNING.seeds)} deals \
(in brackets the last
round of each). Own classes: each class weighted as in the client's images, mean over clients. \
FedBN has no global
network: each client's own is measured, on a share of the test images.
"""


class Strict(FedAvg):
    """FedAvg that does not go on without a client that failed."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed or len(replies) != CLIENTS:
            raise RuntimeError(f"{len(replies)} of {CLIENTS} clients; {failed}")
        return super().aggregate_train(server_round, replies)


def one(grid: Grid, part: str, rounds: int, case: str, lr: float, seed: int) -> Row:
    """One federated training; top-1 and top-1 on own classes after it, and top-1 by round."""
    shift, way_name = CASES[case]
    asked = {
        "shift": shift,
        "lr": lr,
        "seed": seed,
        "part": part,
        "run": f"{case} {lr} {seed} {part}",
    }
    found: dict[int, MetricRecord] = {}
    arrays = ArrayRecord(clients.source().state_dict())

    done = 0
    for way, count in (
        (BATCHNORM, WAYS[way_name].after),
        (way_name, rounds - WAYS[way_name].after),
    ):
        if way == way_name:
            trained = network(BATCHNORM)
            trained.load_state_dict(arrays.to_torch_state_dict())
            arrays = ArrayRecord(WAYS[way_name].make(trained.eval()).state_dict())
        if count:
            arrays, seen = stage(grid, arrays, {**asked, "way": way, "done": done}, count, rounds)
            found = {**seen, **found}
            done = done + count

    last = found[max(found)]
    by_round = {str(number): row["top1"] for number, row in found.items()}
    return {"top1": last["top1"], "own": last["own"], "rounds": by_round}


def stage(
    grid: Grid, arrays: ArrayRecord, asked: dict[str, Any], count: int, rounds: int
) -> tuple[ArrayRecord, dict[int, MetricRecord]]:
    """Train in one way for some rounds: the global network after them, and its figures by round."""
    way = WAYS[asked["way"]]
    done = int(asked["done"])
    part = str(asked["part"])

    def measure(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        at = number + done
        if (way.local and number) or at not in (SHOWN if part == "test" else (0, rounds)):
            return None
        model = network(asked["way"])
        model.load_state_dict(arrays.to_torch_state_dict())
        found = clients.by_class(model.eval(), asked["shift"], part)
        return clients.figures(found, clients.shares(int(asked["seed"])))

    strategy = Strict(
        fraction_evaluate=float(way.local),
        min_train_nodes=CLIENTS,
        min_evaluate_nodes=CLIENTS,
        min_available_nodes=CLIENTS,
    )
    result = strategy.start(
        grid,
        arrays,
        count,
        train_config=ConfigRecord(dict(asked)),
        evaluate_config=ConfigRecord(dict(asked)),
        evaluate_fn=measure,
    )
    figures = {**result.evaluate_metrics_serverapp, **result.evaluate_metrics_clientapp}
    return result.arrays, {number + done: row for number, row in figures.items()}


def table(kept: Kept) -> list[str]:
    shown = " | ".join(f"round {number}" if number else "before" for number in SHOWN)
    lines = [f"| images | norms | lr | {shown} | own classes |", "|---" * (4 + len(SHOWN)) + "|"]

    all_runs = {case: TUNING.runs(kept, case) for case in CASES}
    for case, runs in all_runs.items():
        if runs:
            shift, way_name = CASES[case]
            by_round = [mean(row["rounds"][str(number)] for row in runs) for number in SHOWN]
            top1 = " | ".join(f"{value:.1f}" for value in by_round)
            each = TUNING.each(runs)
            own = mean(row["own"] for row in runs)
            lines.append(
                f"| {shift} | {way_name} | {runs[0]['lr']:g} | {top1} ({each}) | {own:.1f} |"
            )

    if not all(all_runs.values()):
        lines += ["", f"Not run: {'; '.join(case for case, runs in all_runs.items() if not runs)}."]
    tuned = TUNING.tried(kept, [case for case, runs in all_runs.items() if runs])

    return [*lines, *tuned]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--ways", nargs="*", default=list(WAYS), choices=list(WAYS), help="measure these now"
    )
    given = parser.parse_args()
    kept = Kept(ROOT / "runs" / "federated.jsonl", fresh=given.fresh)
    for shift in SHIFTS:
        clients.images(shift)  # before the clients' processes, which read them, too

    def write() -> None:
        made = circumstances.versions(("flwr", "ray"))
        kept.write(given.output, "Federated training with Flower", [HOW, *table(kept)], made)

    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        cases = [case for case, (_, way_name) in CASES.items() if way_name in given.ways]
        trial, final = (
            functools.partial(one, grid, *how) for how in (("held out", TRIAL), ("test", ROUNDS))
        )
        TUNING.measure(kept, cases, trial, final, write)

    resources = {
        "init_args": {"num_cpus": 1, "object_store_memory": 200_000_000, "log_to_driver": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server, clients.client, CLIENTS, backend_config=resources)  # type: ignore[arg-type]
    write()


if __name__ == "__main__":
    main()
