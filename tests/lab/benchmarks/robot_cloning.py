"""A policy cloned from an expert, with each kind of encoder: how often it succeeds where it has not been.

    python tests/lab/benchmarks/robot_cloning.py -o tests/lab/benchmarks/robot_cloning.md

The encoder is that of robot_policy.py, of `resnet18_narrow` as CIFAR-10 left it; the task is robot_task.py's. All arms
train alike: the same demonstrations, steps, optimizer, schedule and moving average (EMA) of the weights; the learning
rate of each is the best of three, by episodes that are not those of the table, with another seed. What is measured is
kept, a line each, in runs/robot_cloning.jsonl.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from kept import Kept, Row, arguments
from robot_policy import SIZE, encoder, replaced
from robot_task import SIDE, STEPS, Task, demonstrations
from schemes_table import NETWORKS, ROOT
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import normswap
from normswap.storage.checkpoint import open_model

NETWORK, FRAMES = "resnet18_narrow", 48
DEMOS, UPDATES, BATCH, RATES, SEEDS = 60, 250, 32, (3e-4, 1e-3, 3e-3), (0, 1, 2)
TRIED, EPISODES = 50, 100  # episodes that the rate is chosen on, and those of the table, for each seed
CHOOSING, DEMONSTRATED, MEASURED = 9, 1000, 2000  # seeds: of the runs that choose a rate, of episodes
Make = Callable[[nn.Sequential, Tensor], nn.Module]


def ours(to: str, **options: Any) -> Make:
    return lambda source, _: normswap.convert(source, to, input_size=(3, SIDE, SIDE), **options).model


def fitted(source: nn.Sequential, frames: Tensor) -> nn.Module:
    done = normswap.convert(source, "groupnorm", group_size=SIZE, input_size=(3, SIDE, SIDE), calibrate=[frames])
    return done.model


ARMS: dict[str, Make] = {
    "BatchNorm": lambda source, _: source,
    "fresh GroupNorm": lambda source, _: replaced(source),
    "GroupNorm, gamma and beta copied": lambda source, _: replaced(source, keep=True),
    "`groupnorm`": ours("groupnorm", group_size=SIZE),
    f"`groupnorm`, {FRAMES} frames": fitted,
    "`skipinit`": ours("skipinit"),
    "`frozen-bn`": ours("frozen-bn"),
}
AVERAGED, FROZEN = "EMA", "EMA, encoder frozen"
ROWS = [*((said,) for said in ARMS), *((said, FROZEN) for said in ARMS)]  # as they are called in the kept rows' keys
HOW = (
    f"The encoder of `{NETWORK}`, a head of two layers, {DEMOS} shaken demonstrations, {UPDATES} updates of {BATCH}",
    "frames, AdamW with a cosine to 0, mean squared error of the action. EMA by timm's `ModelEmaV3`, with the warmup",
    "of diffusion_policy (power 0.75); *statistics not averaged*: `exclude_buffers=True`; *diffusion_policy's*:",
    "weights of BatchNorms copied, their statistics left as they were, as its `EMAModel` does; *encoder frozen*: the",
    "head alone is trained.",
    f"Success: the hand was at the thing within {STEPS} steps, in percent of {EPISODES} fresh episodes for each of",
    f"{len(SEEDS)} seeds (of head, order and demonstrations). Distance: of the hand from the thing at the end, in",
    f"hundredths of the world's side. Rate: the best of {', '.join(f'{rate:g}' for rate in RATES)} after training with",
    f"another seed, by success of the EMA weights in {TRIED} other episodes. Seconds: of training, on the processor.",
    "",
)


class Policy(nn.Module):
    """Frames (N, 3, SIDE, SIDE), normalized, to actions (N, 2)."""

    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.features = features
        width = features(torch.zeros(1, 3, SIDE, SIDE)).numel()
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 2))

    def forward(self, frames: Tensor) -> Tensor:
        return self.head(self.features(frames))


class Eye:
    """Frames as the network takes them."""

    def __init__(self, network: nn.Module) -> None:
        known: Any = network.pretrained_cfg
        self.mean, self.std = (torch.tensor(known[key]).view(-1, 1, 1) for key in ("mean", "std"))

    def __call__(self, frames: Any) -> Tensor:
        return (torch.from_numpy(frames).float() / 255 - self.mean) / self.std


class OldStatistics(ModelEmaV3):
    """As diffusion_policy's EMAModel does it: BatchNorms' weights are copied, their statistics stay as they were."""

    @torch.no_grad()
    def update(self, model: nn.Module, step: int | None = None) -> None:
        statistics = [buffer.clone() for buffer in self.module.buffers()]
        super().update(model, step)
        for buffer, old in zip(self.module.buffers(), statistics, strict=True):
            buffer.copy_(old)
        for module, mine in zip(model.modules(), self.module.modules(), strict=True):
            if isinstance(module, _BatchNorm) and isinstance(mine, _BatchNorm):
                mine.weight.copy_(module.weight)
                mine.bias.copy_(module.bias)


def clone(policy: nn.Module, inputs: Tensor, actions: Tensor, lr: float) -> dict[str, nn.Module]:
    """Train in place; what comes of it, by how the weights are averaged."""
    warm = {"decay": 0.9999, "use_warmup": True, "warmup_power": 0.75}
    ways = {AVERAGED: ModelEmaV3(policy, **warm)}
    if any(isinstance(module, _BatchNorm) for module in policy.modules()):
        ways["EMA, statistics not averaged"] = ModelEmaV3(policy, exclude_buffers=True, **warm)
        ways["EMA as diffusion_policy's"] = OldStatistics(policy, exclude_buffers=True, **warm)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, UPDATES)
    policy.train()
    for update in range(UPDATES):
        rows = torch.randint(len(inputs), (BATCH,))
        F.mse_loss(policy(inputs[rows]), actions[rows]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        for way in ways.values():
            way.update(policy, update + 1)
    averaged: dict[str, nn.Module] = {said: way.module for said, way in ways.items()}
    return {**averaged, "without EMA": policy.eval()}


@torch.inference_mode()
def rolled_out(policy: nn.Module, eye: Eye, episodes: int, seed: int) -> Row:
    """Success in percent, and the distance that is left, in hundredths."""
    task = Task(episodes, seed)
    for _ in range(STEPS):
        task.step(policy(eye(task.frames())).double().numpy())
    return {"success": 100 * float(task.done.mean()), "distance": 100 * float(task.distance().mean())}


@torch.inference_mode()
def seen(features: nn.Module, frames: Tensor) -> Tensor:
    return torch.cat([features(part) for part in frames.split(100)])


def run(source: nn.Sequential, eye: Eye, make: Make, lr: float, seed: int, episodes: int, *, frozen: bool) -> Row:
    """Convert, train with one rate and seed, roll out; every way of averaging. `frozen`: train the head alone."""
    frames, actions = demonstrations(DEMOS, DEMONSTRATED + seed)
    x, y = eye(frames), torch.from_numpy(actions).float()
    torch.manual_seed(seed)
    draw = torch.randperm(len(x))[:FRAMES]
    torch.manual_seed(seed)
    policy = Policy(make(encoder(source), x[draw]).eval())
    start = time.process_time()
    if frozen:
        heads = clone(policy.head, seen(policy.features.eval(), x).clone(), y, lr)
        found: dict[str, nn.Module] = {FROZEN: nn.Sequential(policy.features, heads[AVERAGED])}
    else:
        found = clone(policy, x, y, lr)
    took = time.process_time() - start
    return {"lr": lr, "seconds": took,
            **{said: rolled_out(model, eye, episodes, MEASURED + seed) for said, model in found.items()}}  # fmt: skip


def measure(kept: Kept, write: Callable[[], None]) -> None:
    """Every arm, rate and seed that is not kept yet."""
    network = open_model(str(NETWORKS[NETWORK])).eval()
    eye = Eye(network)
    for arm in ROWS:
        once = functools.partial(run, network, eye, ARMS[arm[0]], frozen=FROZEN in arm)
        for lr in RATES:
            kept.get((*arm, "choose", str(lr)), functools.partial(once, lr, CHOOSING, TRIED))
        for seed in SEEDS:
            kept.get((*arm, "seed", str(seed)), functools.partial(once, chosen(kept, arm), seed, EPISODES))
        write()


def chosen(kept: Kept, arm: tuple[str, ...]) -> float:
    """The rate of an arm."""
    way = FROZEN if FROZEN in arm else AVERAGED
    tried = [kept.rows[(*arm, "choose", str(lr))] for lr in RATES]
    best = max(tried, key=lambda row: (row[way]["success"], -row[way]["distance"]))
    return float(best["lr"])


def table(kept: Kept) -> list[str]:
    lines = ["| encoder | weights | success | by seed | distance | rate | seconds |", "|---|---|---|---|---|---|---|"]
    for arm in sorted(ROWS, key=lambda arm: list(ARMS).index(arm[0])):
        rows = [row for seed in SEEDS if (row := kept.rows.get((*arm, "seed", str(seed))))]
        for way in [key for key, value in rows[0].items() if isinstance(value, dict)] if rows else []:
            each = [row[way]["success"] for row in rows]
            left, took = mean(row[way]["distance"] for row in rows), mean(row["seconds"] for row in rows)
            by_seed = ", ".join(f"{one:.0f}" for one in each)
            cells = (arm[0], way, f"{mean(each):.1f}", by_seed, f"{left:.1f}", f"{rows[0]['lr']:g}", f"{took:.0f}")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    given = arguments(__doc__).parse_args()
    kept = Kept(ROOT / "runs" / "robot_cloning.jsonl", fresh=given.fresh)

    def write() -> None:
        kept.write(given.output, "A cloned policy by its encoder", ["", *HOW, *table(kept)])

    measure(kept, write)
    write()


if __name__ == "__main__":
    main()
