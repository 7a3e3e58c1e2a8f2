"""A trained network made ready for Opacus in four ways, then trained privately: top-1 before and after.

    python tests/lab/benchmarks/private_training.py -o tests/lab/benchmarks/private_training.md

`resnet18_narrow`, trained on CIFAR-10, moves to a domain that it has not seen: the same classes, blurred. The private
images are training images under that shift, measured are test images under it. `PrivacyEngine` with Poisson
sampling, its own accountant and its own noise, SGD without momentum. What is measured is kept, a line each, in
runs/private_training.jsonl, and the table is written anew after each run.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import recalibrate
import torch
import torch.nn.functional as F
from kept import Kept, arguments
from schemes_table import NETWORKS, ROOT, SHARED, opacus, unpacked
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import normswap
from normswap.images.datasets import make_loader
from normswap.storage.checkpoint import open_model

with warnings.catch_warnings():  # what opacus imports warns about itself
    warnings.simplefilter("ignore")
    from opacus import PrivacyEngine
    from opacus.validators import ModuleValidator

NETWORK, SHIFT = "resnet18_narrow", "blurred, 5 x 5"
PRIVATE, TESTED, BATCH, EPOCHS, CLIP, DELTA = 3000, 2000, 500, 2, 1.0, 1e-4
EPSILONS, RATES = (3.0, 8.0), (0.1, 0.5)
HOW = (
    f"`{NETWORK}` on blurred CIFAR-10; {PRIVATE} private images, {EPOCHS} epochs, {BATCH} images a step on average,",
    f"clipped at {CLIP:g}, delta {DELTA:g}. Top-1 in percent on {TESTED} test images under the same shift, one seed.",
    f"After training: the better of the learning rates {' and '.join(map(str, RATES))}, and what Opacus' accountant",
    "says at the end. The rate was chosen on the test images, and the choice is not private.",
    "",
)
Make = Callable[[nn.Module], nn.Module]


def ours(to: str) -> Make:
    return lambda model: normswap.convert(model, to, purpose="opacus").model


class Clone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def fixed(model: nn.Module) -> nn.Module:
    """Opacus' fix. By itself it does not train: timm's ResNet writes into what its norms return, so that is undone."""
    model = opacus(model)
    for path, module in [*model.named_modules()]:
        if isinstance(module, nn.GroupNorm):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, nn.Sequential(module, Clone()))
        elif getattr(module, "inplace", False):
            module.inplace = False
    return model


WAYS: dict[str, Make] = {
    "source (BatchNorm)": lambda model: model,
    "`ModuleValidator.fix`, made to run": fixed,
    "`groupnorm --for opacus`": ours("groupnorm"),
    "`frozen-bn --for opacus`": ours("frozen-bn"),
    "`skipinit --for opacus`": ours("skipinit"),
}


def read(model: nn.Module, part: str, count: int) -> tuple[Tensor, Tensor]:
    """Shifted images (N, 3, H, W) and their labels (N,)."""
    shift = recalibrate.shifts(model)[SHIFT]
    data = str(unpacked(SHARED / "data" / "cifar10" / f"{part}.tar.xz"))
    pairs = list(make_loader(model, data, batch_size=250, workers=0, samples=count, seed=0))
    return shift(torch.cat([x for x, _ in pairs])), torch.cat([y for _, y in pairs])


def train(model: nn.Module, images: Tensor, labels: Tensor, epsilon: float, lr: float) -> float:
    """Train privately, in place; returns the epsilon that was spent."""
    torch.manual_seed(0)
    model.train()
    engine = PrivacyEngine()
    private: Any
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr), epochs=EPOCHS, target_epsilon=epsilon,
        data_loader=DataLoader(TensorDataset(images, labels), batch_size=BATCH), target_delta=DELTA,
        max_grad_norm=CLIP,
    )  # fmt: skip
    for _ in range(EPOCHS):
        for x, y in loader:
            F.cross_entropy(private(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return float(engine.get_epsilon(DELTA))


@torch.inference_mode()
def top1(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    answers = torch.cat([model(x).argmax(1) for x in images.split(250)])
    return 100 * float((answers == labels).double().mean())


def measure(kept: Kept, write: Callable[[], None]) -> None:
    """Every way, epsilon and learning rate that is not kept yet."""
    source = open_model(str(NETWORKS[NETWORK])).eval()
    test, known = read(source, "test", TESTED), read(source, "train", PRIVATE)
    made = {said: make(copy.deepcopy(source)).eval() for said, make in WAYS.items()}
    for said, model in made.items():
        errors = len(ModuleValidator.validate(copy.deepcopy(model).train(), strict=False))
        kept.get((said, "before"), lambda m=model, e=errors: {"top1": top1(m, *test), "errors": e})
        write()
    for epsilon, lr in ((epsilon, lr) for epsilon in EPSILONS for lr in RATES):
        for said, model in made.items():
            if not kept.rows[said, "before"]["errors"]:
                kept.get((said, str(epsilon), str(lr)), lambda m=model, e=epsilon, r=lr: run(m, *known, e, r, test))
                write()


def run(model: nn.Module, x: Tensor, y: Tensor, epsilon: float, lr: float, test: tuple[Tensor, Tensor]) -> Any:
    model = copy.deepcopy(model)
    spent = train(model, x, y, epsilon, lr)
    return {"top1": top1(model.eval(), *test), "epsilon": spent, "lr": lr}


def table(kept: Kept) -> list[str]:
    lines = ["| made ready by | before | " + " | ".join(f"after, epsilon {e:g}" for e in EPSILONS) + " |"]
    lines.append("|---" * (2 + len(EPSILONS)) + "|")
    for said in WAYS:
        before = kept.rows.get((said, "before"))
        if before is None:
            continue
        cells = []
        for epsilon in EPSILONS:
            found = [kept.rows[key] for lr in RATES if (key := (said, str(epsilon), str(lr))) in kept.rows]
            best = max(found, key=lambda row: row["top1"], default=None)
            cells.append(f"{best['top1']:.1f} (lr {best['lr']:g}, {best['epsilon']:.2f})" if best else "not run yet")
            if before["errors"]:
                cells[-1] = f"refused by Opacus: {before['errors']} layers"
        lines.append(f"| {said} | {before['top1']:.1f} | " + " | ".join(cells) + " |")
    keys = ((said, str(epsilon), str(lr)) for said in WAYS for epsilon in EPSILONS for lr in RATES)
    lacking = [" ".join(key) for key in keys if key not in kept.rows and not refused(kept, key[0])]
    return [*lines, *(["", f"Not run (way, epsilon, rate): {'; '.join(lacking)}."] if lacking else [])]


def refused(kept: Kept, said: str) -> bool:
    """Whether Opacus does not take the network."""
    return bool(kept.rows.get((said, "before"), {}).get("errors"))


def main() -> None:
    given = arguments(__doc__).parse_args()
    warnings.simplefilter("ignore")  # opacus': no secure random numbers, hooks on inputs without gradient
    kept = Kept(ROOT / "runs" / "private_training.jsonl", fresh=given.fresh)

    def write() -> None:
        kept.write(given.output, "Private training with Opacus", ["", *HOW, *table(kept)])

    measure(kept, write)
    write()


if __name__ == "__main__":
    main()
