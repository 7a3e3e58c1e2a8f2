"""Where training ends after the norms were changed, in several ways: `after_training.md`.

    python tests/lab/benchmarks/after_training.py --workers 2 -o FILE
    python tests/lab/benchmarks/after_training.py --device cuda --workers 9 -o FILE

Every way is tuned alike: each learning rate (and clipping) of the task is tried with half of the
updates and one seed, scored on held-out training images; the best one trains with other seeds and
is scored on test images. SGD with momentum 0.9 (segmentation and policy: AdamW), a tenth of
warm-up, a cosine to 0. What is measured is kept, a line each, in after_training.jsonl beside this
script; a second call measures what is missing. Six hours of two cores, or eight minutes of a GPU,
where the runs of a way are branches of one CUDA graph. A table of whose rows none is kept is left
as it stands in FILE.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import circumstances
import torch
from after_training_tasks import BLOCKS, TASKS, Split, Task
from kept import Kept, Row, arguments, markdown_head, markdown_row, write_table
from learned_norms import constant_share, with_learned_eps, with_salu
from robot_policy import replaced
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import normswap
from normswap.errors import NormswapError

ROWS = Path(__file__).with_suffix(".jsonl")
COLUMNS = ("task", "way", "rate", "after a tenth", "at the end", "seeds")
MADE = "Measured at commit"
UNDATED = "Tables that name no commit"
TRIAL_SEED = 9
DECAY = 5e-4
DELTA = 1e-4


@dataclass(frozen=True)
class Way:
    """What becomes of the norms before training, and while it goes on.

    Args:
        to: the scheme; "": the source as it is; "fresh" and "copied": a GroupNorm for each
            BatchNorm.
        options: of the scheme.
        fitted: whether the conversion sees 500 training images.
        frozen: BatchNorms stay in eval mode.
        plain_after: the share of training after which eps is 1e-5; None: it stays.
        front_to_back: one norm after the other becomes plain, instead of all at the same pace.
        blocks: whether each residual block also learns the source's output.
        then: what is done to the converted network.
        rates: learning rates that are tried beside the task's.
        clips: norms to which gradients are clipped, in place of the task's.
        tasks: where it is measured; none: everywhere.
    """

    to: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    fitted: bool = False
    frozen: bool = False
    plain_after: float | None = None
    front_to_back: bool = False
    blocks: bool = False
    then: Callable[[nn.Module], nn.Module] | None = None
    rates: tuple[float, ...] = ()
    clips: tuple[float, ...] = ()
    tasks: tuple[str, ...] = ()

    def convert(self, task: Task, source: nn.Module, images: Tensor) -> nn.Module:
        """A network that is trained; raises NormswapError if the scheme refuses."""
        if self.to in ("fresh", "copied"):
            return not_in_place(replaced(source, keep=self.to == "copied"))
        if not self.to:
            return copy.deepcopy(source)

        options: dict[str, Any] = {
            **self.options,
            **task.options,
            "input_size": tuple(images.shape[1:]),
        }
        if self.fitted:
            options["calibrate"] = list(images[:500].split(100))

        converted = normswap.convert(source, self.to, **options).model
        return self.then(converted) if self.then else converted

    def settings(self, task: Task) -> list[tuple[float, float]]:
        """The learning rates and clippings that are tried."""
        rates = sorted({*task.rates, *self.rates})
        return [*itertools.product(rates, self.clips or task.clips)]


TAUGHT = ("teacher", "preact", "depthwise")
PLAIN = {"relative_eps": 0}
WAYS: dict[str, Way] = {
    "BatchNorm": Way(),
    "BatchNorm in eval mode": Way(frozen=True),
    "fresh GroupNorm, groups of 16": Way("fresh"),
    "GroupNorm, gamma and beta copied, groups of 16": Way("copied"),
    "`groupnorm`": Way("groupnorm"),
    "`groupnorm --group-size 16`": Way("groupnorm", {"group_size": 16}),
    "`groupnorm --groups 32`": Way("groupnorm", {"groups": 32}),
    "`groupnorm --relative-eps 0`": Way("groupnorm", PLAIN),
    "`groupnorm --relative-eps 0 --group-size 16`": Way("groupnorm", {**PLAIN, "group_size": 16}),
    "`skipinit`": Way("skipinit"),
    "`nf`, 500 images": Way("nf", fitted=True),
    "`frozen-bn`": Way("frozen-bn"),
    "`tune`": Way("tune"),
}
TO_PLAIN: dict[str, Way] = {
    "`groupnorm --relative-eps 0.00001`": Way(
        "groupnorm", {"relative_eps": 1e-5}, tasks=(*TAUGHT, "policy")
    ),
    "`groupnorm`, plain at once": Way("groupnorm", plain_after=0.0, tasks=TAUGHT),
    "`groupnorm`, plain after a half": Way("groupnorm", plain_after=0.5, tasks=TAUGHT),
    "`groupnorm`, plain after nine tenths": Way("groupnorm", plain_after=0.9, tasks=TAUGHT),
    "`groupnorm`, norm after norm, in a half": Way(
        "groupnorm", plain_after=0.5, front_to_back=True, tasks=TAUGHT
    ),
    "`groupnorm --relative-eps 0`, taught block by block": Way(
        "groupnorm", PLAIN, blocks=True, tasks=TAUGHT
    ),
    "`groupnorm`, plain after a half, taught block by block": Way(
        "groupnorm", plain_after=0.5, blocks=True, tasks=TAUGHT
    ),
}
LOWER = (0.0002, 0.0005, 0.001)
UNCLIPPED = ("labels", "teacher", "shifted", "preact", "depthwise")
NF: dict[str, Way] = {
    "`nf`, 500 images, as it is": Way(
        "nf", fitted=True, rates=LOWER, clips=(0.0,), tasks=UNCLIPPED
    ),
    "`nf`, 500 images, clipped": Way("nf", fitted=True, rates=LOWER, clips=(1.0,), tasks=UNCLIPPED),
}
LEARNING = ("labels", "two", "shifted", "segmentation")
LEARNED: dict[str, Way] = {
    "`groupnorm`, its eps learned": Way("groupnorm", then=with_learned_eps, tasks=LEARNING),
    "`affine`, then SALU": Way("affine", then=with_salu, tasks=LEARNING),
}
ALL = {**WAYS, **TO_PLAIN, **NF, **LEARNED}
# The tables of a task, and what stands above them.
TABLES: tuple[tuple[dict[str, Way], str], ...] = (
    (WAYS, ""),
    (
        TO_PLAIN,
        "The plain norm (eps 1e-5) at the end, the same updates; where eps falls, it does so after"
        " `at once`:",
    ),
    (NF, "`nf` with more rates, from 0.0002, its gradients as they are or clipped to 1:"),
    (LEARNED, "A layer that learns how far it normalizes, and begins as the conversion does:"),
)
STAGES = 20  # into which training is cut where eps falls: it is a constant of a stage


class Copied(nn.Module):
    """A copy of what comes: timm adds into what norms return, which Opacus forbids."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def not_in_place(model: nn.Module) -> nn.Module:
    """With every GroupNorm and activation out of place."""
    for path, module in [*model.named_modules()]:
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]
        if isinstance(module, nn.GroupNorm):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, nn.Sequential(module, Copied()))
    return model


class Plain:
    """Takes the large eps of GroupNorms down to 1e-5, each output's scale kept for a map of average
    variance.
    """

    def __init__(self, model: nn.Module, way: Way) -> None:
        self.way = way
        self.norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm) and m.eps > 1e-4]
        self.variances = [norm.eps / 9 for norm in self.norms]

    @torch.no_grad()
    def enter(self, progress: float) -> None:
        """eps of this moment of training; the constant share of variance + eps falls linearly from
        0.9.
        """
        assert self.way.plain_after is not None
        part = 1.0 if self.way.plain_after == 0 else min(progress / self.way.plain_after, 1.0)
        for place, (norm, variance) in enumerate(zip(self.norms, self.variances, strict=True)):
            mine = part
            if self.way.front_to_back:
                mine = min(max(part * len(self.norms) - place, 0.0), 1.0)
            share = 0.9 * (1 - mine)
            eps = max(variance * share / (1 - share), 1e-5)
            norm.weight.mul_(math.sqrt((variance + eps) / (variance + norm.eps)))
            norm.eps = eps


class Blocks:
    """The distance of each residual block's output from the source's: mean relative L2, squared."""

    def __init__(self, learner: nn.Module, source: nn.Module) -> None:
        self.maps: tuple[list[Tensor], list[Tensor]] = [], []
        for model, maps in zip((learner, source), self.maps, strict=True):
            for path, module in model.named_modules():
                if BLOCKS.fullmatch(path):
                    module.register_forward_hook(
                        lambda _, __, output, maps=maps: maps.append(output)
                    )

    def distance(self) -> Tensor:
        pairs = [*zip(*self.maps, strict=True)]
        distances = [
            (ours - theirs.detach()).square().sum() / theirs.square().sum()
            for ours, theirs in pairs
        ]
        return torch.stack(distances).mean()

    def forget(self) -> None:
        """What was recorded so far."""
        for maps in self.maps:
            maps.clear()


class Run:
    """One network in training, with its rate, clipping and seed."""

    def __init__(
        self,
        task: Task,
        way: Way,
        converted: nn.Module,
        data: dict[str, Split],
        rate: float,
        clip: float,
        seed: int,
    ) -> None:
        self.task = task
        self.way = way
        self.rate = rate
        self.clip = clip
        self.inputs, self.targets = data["train"]
        device = self.inputs.device
        self.model = task.learner(converted, seed).to(device)
        self.train_mode()
        self.source = task.source().to(device).requires_grad_(False)
        self.blocks = Blocks(self.model, self.source) if way.blocks else None
        self.plain = Plain(self.model, way) if way.plain_after is not None else None
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in self.parameters if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in self.parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.lr = torch.zeros((), device=device)

        if task.optimizer == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                groups, lr=self.lr, fused=True, capturable=device.type == "cuda"
            )
        else:
            self.optimizer = torch.optim.SGD(groups, lr=self.lr, momentum=0.9, fused=True)

        random = torch.Generator().manual_seed(seed)
        rounds = math.ceil(task.batch * task.updates / len(self.inputs))
        order = torch.cat(
            [torch.randperm(len(self.inputs), generator=random) for _ in range(rounds)]
        )
        self.order = order[: task.batch * task.updates].view(task.updates, task.batch).to(device)
        self.flips = (torch.rand(self.order.shape, generator=random) < 0.5 * task.flips).to(device)
        self.index = self.order[0].clone()
        self.flip = self.flips[0].clone()
        self.stream: Any = None

    def prepare(self, update: int, updates: int) -> None:
        """Choose the images and the learning rate of an update.

        The rate warms up for a tenth of the updates, then follows a cosine to zero.
        """
        progress = update / updates
        warm = min((update + 1) / max(0.1 * updates, 1), 1.0)
        self.lr.fill_(self.rate * warm * 0.5 * (1 + math.cos(math.pi * progress)))
        self.index.copy_(self.order[update])
        self.flip.copy_(self.flips[update])

    def step(self) -> None:
        """One update on the images that were chosen."""
        inputs = self.inputs[self.index]
        targets = self.targets[self.index]
        if self.task.flips:
            inputs = torch.where(self.flip.view(-1, 1, 1, 1), inputs.flip(-1), inputs)
        self.optimizer.zero_grad(set_to_none=True)
        if self.blocks:
            self.blocks.forget()
        loss = self.task.loss(self.model, inputs, targets, self.source)
        if self.blocks:
            loss = loss + self.blocks.distance()
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.clip, foreach=True)
        self.optimizer.step()

    def train_mode(self) -> None:
        """All but what the way freezes."""
        self.model.train()
        for module in self.model.get_submodule(self.task.part).modules() if self.way.frozen else ():
            if isinstance(module, _BatchNorm):
                module.eval()

    def score(self, split: Split) -> float:
        """In eval mode."""
        score = self.task.score(self.model.eval(), split)
        self.train_mode()
        return score

    def elsewhere(self, split: Split) -> dict[str, float]:
        """In eval mode, where images differ from those of training."""
        scores = self.task.elsewhere(self.model.eval(), split)
        self.train_mode()
        return scores

    def warm_up(self) -> None:
        """Three updates that are taken back: a graph needs them before it records."""
        self.stream = self.stream or torch.cuda.Stream()
        model = copy.deepcopy(self.model.state_dict())
        moments = [
            {name: value.clone() for name, value in slot.items()}
            for slot in self.optimizer.state.values()
        ]
        torch.cuda.synchronize()

        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self.step()

        torch.cuda.synchronize()
        self.model.load_state_dict(model)

        for place, slot in enumerate(self.optimizer.state.values()):
            for name, value in slot.items():
                value.copy_(moments[place][name] if moments else torch.zeros_like(value))


def together(runs: list[Run], device: str) -> Callable[[], None]:
    """A function that takes a step of every run; on a GPU one graph, whose branches run side by
    side.
    """

    def one_by_one() -> None:
        for run in runs:
            run.step()

    if device == "cpu":
        return one_by_one
    for run in runs:
        run.warm_up()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        begin = torch.cuda.current_stream()
        for run in runs:
            run.stream.wait_stream(begin)
            with torch.cuda.stream(run.stream):
                run.step()
        for run in runs:
            begin.wait_stream(run.stream)
    return graph.replay


def train(runs: list[Run], updates: int, device: str, split: Split) -> list[Row]:
    """Train the runs side by side; their scores at the end, and before and after a tenth where the
    task has such scores.
    """
    early = runs[0].task.scored_early
    rows: list[Row] = [{"before": run.score(split)} if early else {} for run in runs]
    stages = STAGES if runs[0].plain else 1

    done = 0
    for stage in range(stages):
        for run in runs:
            if run.plain:
                run.plain.enter((stage + (stage > 0)) / stages)

        step = together(runs, device)
        while done < updates * (stage + 1) // stages:
            for run in runs:
                run.prepare(done, updates)
            step()
            done += 1
            if early and done == max(updates // 10, 1):
                for run, row in zip(runs, rows, strict=True):
                    row["tenth"] = run.score(split)

    for run, row in zip(runs, rows, strict=True):
        row["end"] = run.score(split)
    return rows


def train_privately(runs: list[Run], epochs: int, device: str, split: Split) -> list[Row]:
    """The same by Opacus, one run after the other, all with the same noise; nothing is measured
    after a tenth.
    """
    from opacus import PrivacyEngine  # type: ignore[import-untyped]
    from opacus.validators import ModuleValidator  # type: ignore[import-untyped]
    from torch.utils.data import DataLoader, TensorDataset

    rows = []
    for run in runs:
        errors = ModuleValidator.validate(run.model, strict=False)
        if errors:
            raise NormswapError("refused by Opacus", f"{len(errors)} layers")
        before = run.score(split)
        torch.manual_seed(TRIAL_SEED)
        images = TensorDataset(run.inputs, run.targets)
        private, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
            module=run.model,
            optimizer=torch.optim.SGD(run.parameters, lr=run.rate),
            epochs=epochs,
            data_loader=DataLoader(images, batch_size=run.task.batch),
            target_delta=DELTA,
            target_epsilon=run.task.epsilon,
            max_grad_norm=1.0,
        )
        for _ in range(epochs):
            for inputs, targets in loader:
                torch.nn.functional.cross_entropy(private(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        rows.append({"before": before, "end": run.score(split)})
    return rows


def batched(places: list[int], at_a_time: int) -> Iterator[list[int]]:
    """Yield the places in their order, at most `at_a_time` together."""
    for start in range(0, len(places), at_a_time):
        yield places[start : start + at_a_time]


def measure(job: tuple[str, str], file: Path, device: str) -> str:
    """Make every run of a task and a way that is not kept yet; returns a line to print, or ""."""
    name, way_name = job
    task = TASKS[name]
    way = ALL[way_name]
    kept = Kept(file)
    settings = way.settings(task)
    trials: list[tuple[str, ...]] = [
        (name, way_name, "trial", f"{rate:g}", f"{clip:g}") for rate, clip in settings
    ]
    finals: list[tuple[str, ...]] = [(name, way_name, "seed", str(seed)) for seed in task.seeds]
    if (name, way_name) in kept.rows or all(key in kept.rows for key in (*trials, *finals)):
        return ""

    start = time.perf_counter()
    data = {part: (x.to(device), y.to(device)) for part, (x, y) in task.data().items()}
    try:
        converted = way.convert(task, task.source(), data["train"][0].cpu())
        many, go = (task.updates, train_privately) if task.epsilon else (task.updates // 2, train)
        # On a GPU the runs of a way go side by side. On a CPU each is kept as it ends: a call that
        # is cut loses no more than one.
        at_a_time = len(trials) + len(finals) if device == "cuda" else 1

        lacking = [place for place, key in enumerate(trials) if key not in kept.rows]
        for places in batched(lacking, at_a_time):
            chosen = [settings[place] for place in places]
            runs = [Run(task, way, converted, data, *setting, TRIAL_SEED) for setting in chosen]
            rows = go(runs, many, device, data["held-out"])
            for place, (rate, clip), row in zip(places, chosen, rows, strict=True):
                kept.add(trials[place], rate=rate, clip=clip, **row)

        best = max((kept.rows[key] for key in trials), key=lambda row: float(row["end"]))
        rate, clip = best["rate"], best["clip"]
        lacking = [place for place, key in enumerate(finals) if key not in kept.rows]
        for places in batched(lacking, at_a_time):
            seeds = [task.seeds[place] for place in places]
            runs = [Run(task, way, converted, data, rate, clip, seed) for seed in seeds]
            rows = go(runs, task.updates, device, data["test"])
            for place, run, row in zip(places, runs, rows, strict=True):
                row.update(run.elsewhere(data["test"]), **constant_share(run.model))
                kept.add(finals[place], rate=rate, clip=clip, device=machine(device), **row)
    except NormswapError as error:
        kept.add((name, way_name), refused=str(error).splitlines()[0])
    except (RuntimeError, ValueError) as error:
        return f"{name}: {way_name}: failed: {type(error).__name__}: {error}"

    return f"{name}: {way_name}: {time.perf_counter() - start:.0f} s"


def machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else circumstances.processor()
    return f"{name}, torch {torch.__version__}"


def cells(kept: Kept, name: str, way_name: str) -> str:
    """A row of the table; empty if there is nothing yet."""
    if (name, way_name) in kept.rows:
        reason, _, _ = kept.rows[name, way_name]["refused"].partition(";")
        return markdown_row(name, way_name, reason, "", "", "", "")

    rows = [
        row
        for seed in TASKS[name].seeds
        if (row := kept.rows.get((name, way_name, "seed", str(seed))))
    ]
    if len(rows) < min(3, len(TASKS[name].seeds)):
        return ""

    rate = f"{rows[0]['rate']:g}" + (f", clipped to {rows[0]['clip']:g}" if rows[0]["clip"] else "")
    before, tenth, end = (
        [row[when] for row in rows if when in row] for when in ("before", "tenth", "end")
    )
    at_once = f"{mean(before):.1f}" if before else ""
    later = f"{mean(tenth):.1f}" if tenth else ""
    spread = f" ± {stdev(end):.1f}" if end[1:] else ""

    return markdown_row(name, way_name, rate, at_once, later, f"{mean(end):.1f}{spread}", len(end))


def made(kept: Kept, name: str, ways: Mapping[str, Way]) -> Iterator[str]:
    """A line that says where and at which commits a table's rows were measured."""
    rows = [row for key, row in kept.rows.items() if key[0] == name and key[1] in ways]
    commits = dict.fromkeys(row["commit"] for row in rows)
    machines = dict.fromkeys(row["device"] for row in rows if "device" in row)
    yield f"{MADE} {', '.join(commits)}, on {'; '.join(machines)}."

    shares = [row["constant"] for row in rows if "constant" in row]
    if shares:
        yield (
            "The learned eps was 90 % of variance + eps at first, and at the end"
            f" {100 * min(shares):.0f} to {100 * max(shares):.0f} % (mean over the norms)."
        )


def as_it_stands(file: Path) -> dict[tuple[str, str], list[str]]:
    """The tables of a written file, by heading and title, each with the lines below it; at ("", "")
    what the file says of tables that do not say where they were measured.
    """
    titles = {title for _, title in TABLES}
    found: dict[tuple[str, str], list[str]] = {}
    heading = title = ""
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        if line.startswith("## "):
            heading, title = line.removeprefix("## "), ""
        elif line in titles and line:
            title = line
        elif line.startswith(UNDATED):
            found["", ""] = [line]
        elif line.startswith(("|", MADE, "The learned eps")):
            found.setdefault((heading, title), []).append(line)
    return found


def lines(kept: Kept, written: Mapping[tuple[str, str], list[str]]) -> Iterator[str]:
    """The lines of the file.

    Args:
        kept: What was measured.
        written: The tables as they were written before (`as_it_stands`).
    """
    yield from ("", *(__doc__ or "").splitlines()[5:], "")
    yield "Percent, mean and standard deviation."
    yield from written.get(("", ""), [])

    for name, task in TASKS.items():
        grid, clips = (
            ", ".join(f"{number:g}" for number in numbers) for numbers in (task.rates, task.clips)
        )
        yield from ("", f"## {task.about}", "")
        length = f"{task.updates} {'epochs' if task.epsilon else 'updates'}"
        yield f"`{task.network}`, {length}; rates {grid}; gradients clipped to {clips} (0: not)."

        for ways, title in TABLES:
            rows = [row for way_name in ways if (row := cells(kept, name, way_name))]
            head = markdown_head(*COLUMNS[:3], f"{task.measure}: at once", *COLUMNS[3:])
            table = [*head.splitlines(), *rows, "", *made(kept, name, ways)] if rows else []
            table = table or written.get((task.about, title), [])
            if table:
                yield from ("", title, "", *table) if title else ("", *table)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--ways", nargs="*", default=list(ALL), choices=list(ALL))
    parser.add_argument("--rows", type=Path, default=ROWS)
    given = parser.parse_args()
    if given.fresh:
        given.rows.unlink(missing_ok=True)
    pairs = itertools.product(given.tasks, given.ways)
    jobs = [(name, way_name) for name, way_name in pairs if name in (ALL[way_name].tasks or TASKS)]

    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        pool.map(prepare, given.tasks, chunksize=1)
        work = functools.partial(measure, file=given.rows, device=given.device)
        for report in pool.imap_unordered(work, jobs, chunksize=1):
            if report:
                print(report, flush=True)

    command = f"benchmarks/{Path(__file__).name} -o {given.output}"
    table = lines(Kept(given.rows), as_it_stands(given.output))
    write_table(given.output, "After training", command, table)


def prepare(name: str) -> None:
    """Read a task's data once, for all processes."""
    TASKS[name].data()


if __name__ == "__main__":
    main()
