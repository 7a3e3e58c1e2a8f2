"""Converted networks in other people's programs: a step of training, its own file, and back.

`python tests/lab/benchmarks/clients.py --timm CHECKOUT` prints the table of clients.md. Each cell
is the relative L2 between the answers of the trained network and of what came back, or the class of
the client's error. A client that is not installed has no column. timm's wheel does not carry its
scripts, so their column needs a checkout of timm. Train images are random: what is compared is what
was written, not what was learned. tests/storage/test_clients.py runs the same functions.
"""

import argparse
import copy
import functools
import importlib.util
import json
import logging
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs_pages import ROOT, blocks
from support.detectors import opened_detector, write_squares

import normswap
from normswap import shipped
from normswap.images.datasets import make_loader
from normswap.models.calling import named_tensors

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
DETECTOR = "yolov8n.yaml"
# What Ultralytics' trainer is asked for where only its files matter.
QUICK: dict[str, Any] = {
    "epochs": 1,
    "imgsz": 64,
    "batch": 4,
    "device": "cpu",
    "workers": 0,
    "plots": False,
}
# The file of docs/your_loop.md that runs a script of timm's.
RUNNER = "timm_script.py"
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


def trainer_of_transformers(saved: Path, folder: Path) -> Written:
    """A network of timm in transformers' TimmWrapper, trained by its Trainer."""
    from transformers import Trainer, TrainingArguments

    model = normswap.load(saved)
    rows = [{"pixel_values": x, "labels": y} for x, y in zip(IMAGES, LABELS, strict=True)]
    arguments = TrainingArguments(
        str(folder / "run"), max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
    )
    Trainer(model, arguments, train_dataset=rows).train()
    return model, folder / "run" / "checkpoint-1" / "model.safetensors"


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


def ultralytics(saved: Path, folder: Path) -> Written:
    """An epoch of a detector in its own trainer, which writes the averaged weights, halved."""
    from ultralytics import YOLO
    from ultralytics.models.yolo.detect import DetectionTrainer

    network = normswap.load(saved)
    averaged: list[nn.Module] = []

    class OwnTrainer(DetectionTrainer):  # type: ignore[misc]
        def get_model(self, *args: object, **options: object) -> nn.Module:
            return network

        def save_model(self) -> bool:
            averaged[:] = [copy.deepcopy(self.ema.ema)]
            done: bool = super().save_model()
            return done

    YOLO(DETECTOR).train(
        trainer=OwnTrainer,
        data=str(write_squares(folder / "squares", side=64, count=8)),
        project=str(folder / "runs"),
        name="of_trainer",
        **QUICK,
    )
    [trained] = averaged
    return trained.half().float(), folder / "runs" / "of_trainer" / "weights" / "last.pt"


def timm_scripts(saved: Path, folder: Path, checkout: Path) -> Written:
    """timm's train.py, validate.py and avg_checkpoints.py, as docs/your_loop.md calls them.

    Args:
        saved: The directory of the converted network.
        folder: The folder that the scripts write into.
        checkout: A checkout of timm.

    Raises:
        AssertionError: validate.py measures another accuracy than `normswap.evaluate`.
    """
    [runner] = [block for block in blocks(ROOT / "docs" / "your_loop.md") if block.file == RUNNER]
    (folder / RUNNER).write_text(
        runner.text.replace('"converted"', repr(str(saved)), 1), encoding="utf-8"
    )
    images = folder / "images"
    for part in ("train", "val"):
        with tarfile.open(shipped.IMAGES) as archive:
            archive.extractall(images / part, filter="data")
    own = ["--model", "converted", "--data-dir", str(images), "--device", "cpu", "--workers", "0"]

    def call(*words: str) -> None:
        command = [sys.executable, str(folder / RUNNER), *words]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)

    trained = ["--epochs", "2", "--batch-size", "50", "--lr", "0.001", "--no-prefetcher"]
    call(str(checkout / "train.py"), *own, *trained, "--output", "out", "--experiment", "run")
    call(str(checkout / "avg_checkpoints.py"), "--input", "out/run", "--output", "averaged.pth")
    file = folder / "averaged.pth"
    written_to = ["--results-file", "results.json", "--results-format", "json"]
    validated = ["--checkpoint", str(file), "--split", "val", *written_to]
    call(str(checkout / "validate.py"), *own, *validated)

    model = normswap.load(saved)
    model.load_state_dict(torch.load(file, weights_only=True))
    loader = make_loader(model, str(images), batch_size=50, workers=0)
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    found = normswap.evaluate(model, loader).top1
    assert abs(results["top1"] - found) < 0.01, (results, found)
    return model, file


# Clients that write a file, with the package of each.
WRITERS: dict[str, tuple[str, Callable[[Path, Path], Written]]] = {
    "timm's file": ("timm", timm_train),
    "Lightning": ("lightning", lightning),
    "accelerate": ("accelerate", accelerate),
    "Opacus": ("opacus", opacus),
    "torch.compile": ("torch", torch_compile),
    "Trainer": ("transformers", trainer_of_transformers),
    "Ultralytics": ("ultralytics", ultralytics),
}
# Clients that are compared in their own way.
OTHERS: dict[str, tuple[str, Callable[[Path, Path], float]]] = {
    "FX": ("torch", fx),
    "TorchScript": ("torch", torchscript),
}


def wrapper(folder: Path) -> nn.Module:
    """Return `demo` within transformers' own class, read from the directory of that class."""
    from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

    arguments = {"channels": (32, 64, 80, 96), "stem_type": "deep", "stem_width": 16}
    config = TimmWrapperConfig(architecture="resnet18", num_labels=10, model_args=arguments)
    model = TimmWrapperForImageClassification(config)
    model.timm_model.load_state_dict(normswap.open("demo").state_dict())
    model.save_pretrained(folder / "source")
    return normswap.open(f"hf:{folder / 'source'}")


def detector(folder: Path) -> nn.Module:
    """Return a detector of Ultralytics, read from a file that Ultralytics wrote."""
    return opened_detector(DETECTOR, folder / "source.pt")


# The networks of clients that take a kind of their own; the others train `demo`.
SOURCES: dict[str, Callable[[Path], nn.Module]] = {"Trainer": wrapper, "Ultralytics": detector}


def converted(client: str, scheme: str, folder: Path) -> Path:
    """Convert the network of a client, and return the directory that it is saved in."""
    source = SOURCES[client](folder) if client in SOURCES else normswap.open("demo")
    options: dict[str, Any] = {"purpose": PURPOSES.get(client), **SCHEMES[scheme]}
    if client in SOURCES:
        options["inputs"] = IMAGES
    return normswap.save(normswap.convert(source, to=scheme, **options), folder / scheme)


def outputs(model: nn.Module) -> Tensor:
    """Return all that a network answers in eval mode, in one row."""
    with torch.no_grad():
        answers = named_tensors(model.eval()(IMAGES))
    return torch.cat([value.flatten() for _, value in answers if value.is_floating_point()])


def came_back(writer: Callable[[Path, Path], Written], saved: Path, folder: Path) -> float:
    """Return the relative L2 between a trained network and the one that its file fills."""
    model, file = writer(saved, folder)
    wanted = outputs(model)
    return float((outputs(normswap.load(saved, weights=file)) - wanted).norm() / wanted.norm())


def clients(checkout: Path | None) -> dict[str, Callable[[Path, Path], float]]:
    """Return the clients that are installed; timm's scripts where there is a checkout of timm."""
    found: dict[str, Callable[[Path, Path], float]] = {}
    if checkout is not None:
        scripts = functools.partial(timm_scripts, checkout=checkout)
        found["timm's scripts"] = functools.partial(came_back, scripts)
    for name, (package, writer) in WRITERS.items():
        if importlib.util.find_spec(package) is not None:
            found[name] = functools.partial(came_back, writer)
    for name, (package, client) in OTHERS.items():
        if importlib.util.find_spec(package) is not None:
            found[name] = client
    return found


def cell(name: str, client: Callable[[Path, Path], float], scheme: str) -> str:
    """Convert the client's network, and return the distance, or the class of the error."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return f"{client(converted(name, scheme, Path(folder)), Path(folder)):.0e}"
        # The clients are other people's programs, which may raise anything.
        except Exception as error:
            logging.exception(scheme)
            return type(error).__name__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timm", type=Path, metavar="CHECKOUT", help="a checkout of timm")
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--clients", nargs="*", metavar="NAME", help="only these columns")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    installed = clients(given.timm)
    if given.clients:
        installed = {name: installed[name] for name in given.clients}

    print(f"| scheme | {' | '.join(installed)} |")
    print("|---|" + "---|" * len(installed))
    for scheme in given.schemes:
        cells = [cell(name, client, scheme) for name, client in installed.items()]
        print(f"| `{scheme}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
