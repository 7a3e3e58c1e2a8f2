"""Converted networks in other people's programs: a step of training, its own file, and back.

`python tests/lab/benchmarks/clients.py` prints the table of clients.md. Each cell is the relative
L2 between the answers of the trained network and of what came back, or the class of the client's
error; a client that is not installed has no column. Train images are random: what is compared is
what was written, not what was learned. tests/storage/test_clients.py runs the same functions.
"""

import copy
import functools
import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normswap

SCHEMES: dict[str, dict[str, Any]] = {
    "folded": {},
    "skipinit": {},
    "affine": {},
    "frozen-bn": {},
    "tune": {},
    "groupnorm": {},
    "dyt": {},
    "nf": {"mean": "keep"},
    "weightnorm": {},
}
# Opacus' hooks cannot see past activations in place, so its networks are converted for it.
PURPOSES = {"Opacus": "opacus"}
IMAGES = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8)


# The trained network, and the file that the client wrote.
Written = tuple[nn.Module, Path]


class NotTakenError(Exception):
    """The client says that it does not take the network."""


def step(model: nn.Module, inner: nn.Module | None = None) -> None:
    """Train one update."""
    optimizer = torch.optim.SGD(normswap.param_groups(inner or model), lr=1e-3)
    F.cross_entropy(model.train()(IMAGES), LABELS).backward()
    optimizer.step()


def apart(model: nn.Module, other: Callable[[Tensor], Tensor]) -> float:
    with torch.no_grad():
        wanted = model.eval()(IMAGES)
        return float((other(IMAGES) - wanted).norm() / wanted.norm())


def written(content: object, folder: Path) -> Path:
    file = folder / "trained.pt"
    torch.save(content, file)
    return file


def timm_train(saved: Path, folder: Path) -> Written:
    """A checkpoint as timm's own saver writes it."""
    from timm.utils import CheckpointSaver

    model = normswap.load(saved)
    optimizer = torch.optim.SGD(normswap.param_groups(model), lr=1e-3)
    step(model)
    saver = CheckpointSaver(model, optimizer, checkpoint_dir=str(folder))
    saver.save_checkpoint(0, metric=1.0)
    return model, folder / "last.pth.tar"


def lightning(saved: Path, folder: Path) -> Written:
    import lightning

    class Loop(lightning.LightningModule):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.network = network

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(normswap.param_groups(self.network), lr=1e-3)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.network(batch[0]), batch[1])

    model = normswap.load(saved)
    data = torch.utils.data.TensorDataset(IMAGES, LABELS)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Loop(model), torch.utils.data.DataLoader(data, batch_size=8))
    trainer.save_checkpoint(folder / "last.ckpt")
    return model, folder / "last.ckpt"


def trainer_of_transformers(saved: Path, folder: Path) -> float:
    """A network of timm in TimmWrapper, converted whole, in Trainer."""
    from transformers import (
        TimmWrapperConfig,
        TimmWrapperForImageClassification,
        Trainer,
        TrainingArguments,
    )

    scheme = saved.name
    config = TimmWrapperConfig(
        architecture="resnet18", num_labels=10, model_args={"channels": (8, 8, 8, 8)}
    )
    torch.manual_seed(0)
    source = TimmWrapperForImageClassification(config).eval()
    model = normswap.convert(source, to=scheme, inputs=IMAGES, **SCHEMES[scheme]).model
    rows = [{"pixel_values": x, "labels": y} for x, y in zip(IMAGES, LABELS, strict=True)]
    arguments = TrainingArguments(
        str(folder / "run"), max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
    )
    Trainer(model, arguments, train_dataset=rows).train()
    with torch.no_grad():
        wanted = model.eval()(IMAGES).logits
        again = normswap.load(folder / "run" / "checkpoint-1")(IMAGES).logits
    return float((again - wanted).norm() / wanted.norm())


def accelerate(saved: Path, folder: Path) -> Written:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model: nn.Module = accelerator.prepare(normswap.load(saved))
    step(model)
    accelerator.save_model(model, folder / "accelerate")
    return model, folder / "accelerate" / "model.safetensors"


def opacus(saved: Path, folder: Path) -> Written:
    from opacus import GradSampleModule
    from opacus.validators import ModuleValidator

    model = normswap.load(saved).train()
    if ModuleValidator.validate(model):
        raise NotTakenError("ModuleValidator")
    wrapped = GradSampleModule(model)
    step(wrapped, model)
    return model, written(wrapped.state_dict(), folder)


def torch_compile(saved: Path, folder: Path) -> Written:
    model = normswap.load(saved)
    compiled = torch.compile(model, backend="aot_eager")
    step(compiled, model)
    return model, written(compiled.state_dict(), folder)


def fx(saved: Path, folder: Path) -> float:
    """A trace made in training mode goes to eval mode."""
    model = normswap.load(saved)
    step(model)
    return apart(model, torch.fx.symbolic_trace(copy.deepcopy(model).train()).eval())


def torchscript(saved: Path, folder: Path) -> float:
    model = normswap.load(saved)
    step(model)
    return apart(model, torch.jit.trace(copy.deepcopy(model).eval(), IMAGES))


def ultralytics(saved: Path, folder: Path) -> float:
    """A step of YOLOv8n, and the file as its trainer pickles it, halved."""
    scheme = saved.name
    source = normswap.open("yolov8n.yaml", weights="random")
    done = normswap.convert(source, to=scheme, inputs=IMAGES[:1], **SCHEMES[scheme])
    place = normswap.save(done, folder / "yolo")
    model = normswap.load(place).train()
    loss = sum(output.square().mean() for output in _tensors(model(IMAGES[:2])))
    loss.backward()
    torch.optim.SGD(normswap.param_groups(model), lr=1e-3).step()
    torch.save({"model": None, "ema": copy.deepcopy(model).half()}, folder / "last.pt")
    again = normswap.load(place, weights=folder / "last.pt")
    halved = model.half().float().eval()
    with torch.no_grad():
        wanted = torch.cat([each.flatten() for each in _tensors(halved(IMAGES[:1]))])
        found = torch.cat([each.flatten() for each in _tensors(again(IMAGES[:1]))])
    return float((found - wanted).norm() / wanted.norm())


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    found: list[Tensor] = []
    for part in parts if isinstance(parts, (list, tuple, type({}.values()))) else ():
        found += _tensors(part)
    return found


# Clients that write a file, with the package of each.
WRITERS: dict[str, tuple[str, Callable[[Path, Path], Written]]] = {
    "timm's file": ("timm", timm_train),
    "Lightning": ("lightning", lightning),
    "accelerate": ("accelerate", accelerate),
    "Opacus": ("opacus", opacus),
    "torch.compile": ("torch", torch_compile),
}
# Clients that are compared in their own way.
OTHERS: dict[str, tuple[str, Callable[[Path, Path], float]]] = {
    "Trainer": ("transformers", trainer_of_transformers),
    "Ultralytics": ("ultralytics", ultralytics),
    "FX": ("torch", fx),
    "TorchScript": ("torch", torchscript),
}


def came_back(writer: Callable[[Path, Path], Written], saved: Path, folder: Path) -> float:
    """Return the relative L2 between a trained network and the one that its file fills."""
    model, file = writer(saved, folder)
    return apart(model, normswap.load(saved, weights=file))


def clients() -> dict[str, Callable[[Path, Path], float]]:
    """Return the clients that are installed."""
    found: dict[str, Callable[[Path, Path], float]] = {}
    for name, (package, writer) in WRITERS.items():
        if importlib.util.find_spec(package) is not None:
            found[name] = functools.partial(came_back, writer)
    for name, (package, client) in OTHERS.items():
        if importlib.util.find_spec(package) is not None:
            found[name] = client
    return found


def cell(
    client: Callable[[Path, Path], float], source: nn.Module, scheme: str, purpose: Any
) -> str:
    """Convert the source for a purpose, and return the client's distance, or its error's class."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = normswap.convert(source, to=scheme, purpose=purpose, **SCHEMES[scheme])
            saved = normswap.save(done, Path(folder) / scheme)
            return f"{client(saved, Path(folder)):.0e}"
        # The clients are other people's programs, which may raise anything.
        except Exception as error:
            logging.exception(scheme)
            return type(error).__name__


def main() -> None:
    warnings.simplefilter("ignore")
    installed = clients()
    source = normswap.open("demo")
    print(f"| scheme | {' | '.join(installed)} |")
    print("|---|" + "---|" * len(installed))
    for scheme in SCHEMES:
        cells = [
            cell(client, source, scheme, PURPOSES.get(name)) for name, client in installed.items()
        ]
        print(f"| `{scheme}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
