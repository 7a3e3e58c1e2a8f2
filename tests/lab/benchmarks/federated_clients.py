"""The clients of `federated.py`: how the norms go through the rounds, each client's images, its
training.

A file of its own, as Ray's processes import it.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

# Ray runs its workers at the lowest priority, which beside other work is a third of their speed
os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_worker_niceness": "0",
}
import numpy as np
import recalibrate
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from schemes_table import NETWORKS, cached, copied, shuffled
from torch import Tensor, nn

import normswap
from normswap.sites import affine
from normswap.storage.checkpoint import open_model

NETWORK = "resnet18_narrow"
BATCHNORM = "FedAvg, BatchNorm"
TURNED = "turned by 90 degrees"
SHIFTS = ("blurred, 5 x 5", TURNED)
CLIENTS = 8
ALPHA = 0.1
TRAINED = 1200
HELD_OUT = 500
TESTED = 2000
BATCH = 25
EPOCHS = 2
CLIP = 1.0


@dataclass(frozen=True)
class Way:
    """How the norms go through the rounds.

    Args:
        make: from the trained network.
        local: the norms stay with the clients, statistics and all.
        still: BatchNorm in eval mode: the statistics stay, gamma and beta learn.
        after: so many rounds with BatchNorm, whose statistics then are of the new domain.
    """

    make: Callable[[nn.Module], nn.Module]
    local: bool = False
    still: bool = False
    after: int = 0


def ours(to: str) -> Callable[[nn.Module], nn.Module]:
    return lambda model: normswap.convert(model, to, purpose="federated").model


WAYS = {
    BATCHNORM: Way(lambda model: model),
    "FixBN: BatchNorm, after round 1 in eval mode": Way(lambda model: model, still=True, after=1),
    "GroupNorm, gamma and beta copied": Way(copied),
    "`groupnorm --for federated`": Way(ours("groupnorm")),
    "`frozen-bn --for federated`": Way(ours("frozen-bn")),
    "`skipinit --for federated`": Way(ours("skipinit")),
    "BatchNorm, after round 1 `skipinit --for federated`": Way(ours("skipinit"), after=1),
    "FedBN": Way(lambda model: model, local=True),
}


def shifted(shift: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Shifted images (N, 3, H, W) and their labels (N,): to train on, held out, and to test on."""
    model = source()
    change = {**recalibrate.shifts(model), TURNED: lambda x: x.rot90(1, (2, 3))}[shift]
    (train_images, train_labels), (test_images, test_labels) = (
        shuffled(model, split, count)
        for split, count in (("train", TRAINED + HELD_OUT), ("test", TESTED))
    )
    train_images = change(train_images)

    return {
        "train": (train_images[:TRAINED], train_labels[:TRAINED]),
        "held out": (train_images[TRAINED:], train_labels[TRAINED:]),
        "test": (change(test_images), test_labels),
    }


def source() -> nn.Module:
    return open_model(str(NETWORKS[NETWORK])).eval()


@functools.cache
def images(shift: str) -> dict[str, tuple[Tensor, Tensor]]:
    """`shifted`, which every process reads."""
    torch.set_num_threads(1)
    found: dict[str, tuple[Tensor, Tensor]] = cached(
        f"federated-{SHIFTS.index(shift)}", lambda: shifted(shift)
    )
    return found


@functools.cache
def network(way_name: str) -> nn.Module:
    """The network of a way; its values are set for every use."""
    return WAYS[way_name].make(source())


@functools.cache
def dealt(seed: int) -> list[Tensor]:
    """The training images of each client; nobody has fewer than a batch."""
    labels = images(SHIFTS[0])["train"][1].numpy()
    random = np.random.default_rng(seed)
    while True:
        hands: list[list[int]] = [[] for _ in range(CLIENTS)]
        for label in range(10):
            own = random.permutation(np.flatnonzero(labels == label))
            ends = (np.cumsum(random.dirichlet([ALPHA] * CLIENTS))[:-1] * len(own)).astype(int)
            for hand, part in zip(hands, np.split(own, ends), strict=True):
                hand.extend(part.tolist())
        if min(map(len, hands)) >= BATCH:
            return [torch.tensor(hand) for hand in hands]


def shares(seed: int) -> Tensor:
    """Of each client's images, the share of each class, (clients, classes)."""
    labels = images(SHIFTS[0])["train"][1]
    counts = torch.stack(
        [torch.bincount(labels[hand], minlength=10) for hand in dealt(seed)]
    ).double()
    return counts / counts.sum(1, keepdim=True)


@torch.inference_mode()
def by_class(model: nn.Module, shift: str, part: str, chosen: slice = slice(None)) -> Tensor:
    """Top-1 in percent of each class."""
    x, y = (values[chosen] for values in images(shift)[part])
    right = torch.cat([model(batch).argmax(1) for batch in x.split(250)]) == y
    return torch.stack([100 * right[y == label].double().mean() for label in range(10)])


client = ClientApp()


def opened(message: Message, context: Context) -> tuple[nn.Module, ConfigRecord, int]:
    """The global network as this client has it, the server's request, and the client's number."""
    config = message.content["config"]
    number = int(context.node_config["partition-id"])
    model = network(config["way"])
    state = message.content["arrays"].to_torch_state_dict()
    kept = context.state.array_records.get(f"{config['run']}")
    if kept is not None:
        state |= kept.to_torch_state_dict()
    model.load_state_dict(state)
    return model, config, number


@client.train()
def train(message: Message, context: Context) -> Message:
    """Its epochs; of FedBN's the norms stay in the client's own state."""
    model, config, number = opened(message, context)
    way = WAYS[config["way"]]
    seed = int(config["seed"])
    torch.manual_seed(
        1000 * seed + 100 * (int(config["server-round"]) + int(config["done"])) + number
    )
    model.train(not way.still)
    x, y = images(config["shift"])["train"]
    hand = dealt(seed)[number]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]

    optimizer = torch.optim.SGD(learning, lr=float(config["lr"]))
    for _ in range(EPOCHS):
        for batch in hand[torch.randperm(len(hand))].split(BATCH):
            if len(batch) > 1:  # of one image BatchNorm knows no variance at 1 x 1
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                nn.utils.clip_grad_norm_(learning, CLIP)
                optimizer.step()

    state = model.eval().state_dict()
    if way.local:
        norms = [path for path, module in model.named_modules() if affine.is_batchnorm(module)]
        own = {name: value for name, value in state.items() if name.rpartition(".")[0] in norms}
        context.state.array_records.clear()
        context.state[str(config["run"])] = ArrayRecord(own)

    answer = {"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": len(hand)})}
    return Message(RecordDict(answer), reply_to=message)


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """The client's own network on its part of the images: the mean over all clients is over all
    images.
    """
    model, config, number = opened(message, context)
    shift = str(config["shift"])
    part = str(config["part"])
    length = len(images(shift)[part][1]) // CLIENTS
    found = by_class(model.eval(), shift, part, slice(number * length, (number + 1) * length))
    return Message(
        RecordDict({"metrics": figures(found, shares(int(config["seed"]))[number])}),
        reply_to=message,
    )


def figures(found: Tensor, own: Tensor) -> MetricRecord:
    """The mean top-1 over classes, and over the client's own images.

    Args:
        found: The top-1 by class, (classes,); NaN for a class without images.
        own: The share of each class in the images of a client, (classes,) or (clients, classes).
    """
    top1 = torch.nan_to_num(found)
    mean = {"top1": float(found.nanmean()), "own": float((own @ top1).mean())}
    return MetricRecord({"num-examples": 1, **mean})
