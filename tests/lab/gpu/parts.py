"""What only a GPU can show, part by part; `run.sh` runs them. With `--dry`: on the CPU with tiny
sizes.
"""

import argparse
import copy
import itertools
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import circumstances
import timm
import torch
from kept import markdown_head
from safetensors.torch import load_file
from support import small_trainings
from support.lived_in_networks import distance
from timm.layers import GroupNorm, is_fast_norm, set_fast_norm
from timm.utils.agc import adaptive_clip_grad
from torch import Tensor, nn

import normswap
from normswap.images.accuracy import agreement
from normswap.images.datasets import make_loader
from normswap.models import zoo
from normswap.schemes.catalogue import TARGETS
from normswap.training.optimizing import clip_gradients
from normswap.training.recipe import Clip

DEMO = Path(normswap.__file__).parent / "demo_data"
# Options with which a scheme keeps the function; the others keep it by default, or never.
KEEPING: dict[str, dict[str, Any]] = {
    "centered-weightnorm": {"mean": "keep"},
    "fixup": {"init": "keep"},
    "nf": {"mean": "keep"},
}
TRAINED = (
    "batchnorm",
    "skipinit",
    "nf",
    "groupnorm",
    "groupnorm --relative-eps 0",
    "frozen-bn",
    "tune",
    "folded",
)


@dataclass(frozen=True)
class Machine:
    """Where the parts run, and how large they are."""

    device: str
    network: str
    side: int
    batch: int
    passes: int

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object]) -> float:
        """Median seconds of a call, of `passes`, after three that warm up."""
        taken = []
        for _ in range(self.passes + 3):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            taken.append(time.perf_counter() - start)
        return sorted(taken[3:])[self.passes // 2]

    def some(self, names: Sequence[str]) -> Sequence[str]:
        """All of them on a GPU, a few in a dry run."""
        return names if self.device == "cuda" else names[::6]

    def heading(self, title: str, about: str, *columns: str) -> str:
        """What comes before the rows of a part's table, which it begins."""
        made_with = circumstances.lines("tests/lab/gpu/run.sh OUT", self.device)
        return "\n".join([f"# {title}", "", *made_with, about, "", markdown_head(*columns)])


GPU = Machine("cuda", "resnet50", side=224, batch=128, passes=15)
DRY = Machine("cpu", "test_resnet", side=32, batch=4, passes=1)


@contextmanager
def tensor_float(*, allowed: bool) -> Iterator[None]:
    """Whether products and convolutions may round float32 to 10 bits (TF32)."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def layer_norms() -> nn.Module:
    """A ViT whose LayerNorms have a scale and a shift that are not trivial."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=10)
    for layer in model.modules():
        if isinstance(layer, nn.LayerNorm):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, std=0.2)
    return model.eval()


@torch.no_grad()
def schemes(machine: Machine) -> Iterator[str]:
    """Every scheme, converted on the GPU with and without TF32, against the same conversion on the
    CPU.
    """
    demo = zoo.open_source("demo").eval()
    images = next(iter(make_loader(demo, str(DEMO / "images.tar"), batch_size=500, workers=0)))[0]
    fitted_to = images[:100]
    images = images[100 : 200 if machine.device == "cpu" else 500]
    networks = {"batchnorm": normswap.convert(demo, "skipinit").model, "rmsnorm": layer_norms()}
    yield machine.heading(
        "Every scheme, converted on the GPU",
        "The demo's network (batchnorm: as skipinit; rmsnorm: a ViT of three blocks),"
        f" {len(images)} images that no fit used, float32. Each result is moved to the CPU and"
        " answers there, so that the conversion alone is compared. Relative L2 to the source's"
        " answers, and to those of the result that was converted on the CPU; share of images with"
        " the source's class.",
        "scheme",
        "L2 to the source: CPU",
        "GPU",
        "TF32",
        "L2 to the CPU's: GPU",
        "TF32",
        "same class: CPU",
        "GPU",
        "TF32",
    )

    for name in machine.some(list(TARGETS)):
        scheme = TARGETS[name]
        source = networks.get(name, demo)
        options = dict(KEEPING.get(name, {}))

        results = []
        for device, rounds in ((None, False), (machine.device, False), (machine.device, True)):
            with tensor_float(allowed=rounds):
                model = copy.deepcopy(source).to(device or "cpu")
                batches = None
                if scheme.fit is not None and not KEEPING.get(name):
                    batches = list(fitted_to.to(device or "cpu").split(50))
                try:
                    made = normswap.convert(model, name, calibrate=batches, **options).model
                except normswap.NormswapError as error:
                    results.append(error)
                    continue

            results.append(made.cpu().float().eval()(images))

        yield row_of_scheme(name, results, source(images))


def row_of_scheme(name: str, results: list[Any], expected: Tensor) -> str:
    """A row of the table of schemes, or the first error."""
    errors = [str(result) for result in results if isinstance(result, Exception)]
    if errors:
        return f"| {name} | {' '.join(errors[0].split())} |" + " |" * 7

    on_cpu, off, on = results
    distances = [distance(expected.double(), result.double()) for result in results]
    between = [distance(on_cpu.double(), result.double()) for result in (off, on)]
    figures = [f"{value:.1e}" for value in (*distances, *between)]
    figures += [
        f"{100 * agreement(result.argmax(1), expected.argmax(1)):.1f}" for result in results
    ]

    return f"| {name} | {' | '.join(figures)} |"


def training(machine: Machine) -> Iterator[str]:
    """`finetune` by the same recipe on the CPU and the GPU, in float32 and bf16, with all that a
    recipe may ask for.
    """
    yield machine.heading(
        "finetune on the GPU",
        "A tiny ResNet, converted to skipinit, 80 random images, 10 updates an epoch; mean loss of"
        " each epoch.",
        "run",
        "first epoch",
        "second",
        "third",
        "first, against the CPU's",
    )

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        images = small_trainings.write_images(place / "images", per_class=8)
        clipped = {"optim": {"clip": {}}, "distill": {}}
        # On CPUs with AVX2 alone torch 2.14's backward of few channels last writes past its memory,
        # also without us.
        everything = {"ema": {"decay": 0.9}, "channels_last": machine.device == "cuda"}
        base: dict[bool, list[float]] = {}

        runs = (("CPU", "float32", "no"), ("GPU", "float32", "no"), ("GPU", "bf16", "bf16"))
        for has_teacher, (processor, dtype_name, precision) in itertools.product(
            (False, True), runs
        ):
            name = f"{processor}, {dtype_name}{', adaptive clipping, EMA, teacher' * has_teacher}"
            train = {"epochs": 3, "precision": precision, **(everything if has_teacher else {})}
            changed = {
                "train": train,
                "convert": {"to": "skipinit"},
                **(clipped if has_teacher else {}),
            }
            device = "cpu" if processor == "CPU" else machine.device
            recipe = small_trainings.recipe(images, **changed)
            result = small_trainings.train(
                small_trainings.network(), recipe, place / name.replace(" ", "-"), device=device
            )
            losses = [row["train_loss"] for row in result.rows[1:]]
            first = base.setdefault(has_teacher, losses)
            yield (
                f"| {name} | {' | '.join(f'{loss:.4f}' for loss in losses)} |"
                f" {losses[0] / first[0] - 1:+.1e} |"
            )

        yield ""
        yield killed(machine, images, place)


def killed(machine: Machine, images: Path, place: Path) -> str:
    """A run that is killed at its seventh update and continued, beside one that was not."""
    changed = json.dumps({"train": {"checkpoint": 3, "precision": "bf16"}})
    whole = place / "whole"

    cut = place / "cut"
    for out, more in ((whole, []), (cut, ["--kill", 7]), (cut, ["--resume", "auto"])):
        command = small_trainings.command(
            images, out, "skipinit", changed, "--device", machine.device, *more
        )
        code = subprocess.run(command, check=False).returncode
        if code != (-9 if "--kill" in more else 0):
            return f"The run {out.name} {more} ended with {code}."

    pairs = [load_file(out / "last" / "model.safetensors") for out in (whole, cut)]
    worst = max(
        float((pairs[0][key].double() - pairs[1][key].double()).abs().max()) for key in pairs[0]
    )

    return (
        f"Killed at update 7 and continued from update 6: weights differ by at most {worst:.1e}"
        " from an uncut run's."
    )


def lived_in(machine: Machine) -> nn.Module:
    """The network, with statistics of its own."""
    torch.manual_seed(0)
    model = timm.create_model(machine.network, zero_init_last=False).to(machine.device).train()
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(32, 3, machine.side, machine.side, device=machine.device))
    return model.eval()


def calibration(machine: Machine) -> Iterator[str]:
    """What fitting to 100 images costs, counted in forward passes of the same images."""
    model = lived_in(machine)
    size = (3, machine.side, machine.side)
    images = torch.randn(100 if machine.device == "cuda" else 8, *size, device=machine.device)
    with torch.inference_mode():
        forward = machine.seconds(lambda: model(images))
    what = f"{machine.network}, {len(images)} images of {machine.side} pixels, float32"
    columns = (
        "scheme",
        "not fitted, s",
        "fitted, s",
        "fitting, in forward passes",
        "launches",
        "copies from or to the host",
        "waits",
    )
    yield machine.heading(
        "Fitting to images", f"{what}; a forward pass: {forward:.4f} s.", *columns
    )
    normswap.convert(model, "folded", input_size=size)  # whatever only the first conversion does

    for name in machine.some(["nf", "dyt", "groupnorm"]):
        taken = []
        for options in (KEEPING.get(name, {}), {"calibrate": list(images.split(50))}):
            machine.wait()
            start = time.perf_counter()
            normswap.convert(model, name, input_size=size, **options)
            machine.wait()
            taken.append(time.perf_counter() - start)
        events = profiled(
            lambda name=name: normswap.convert(
                model, name, input_size=size, calibrate=list(images.split(50))
            ),
            machine,
        )
        counts = [
            sum(word in event for event in events)
            for word in ("LaunchKernel", "cudaMemcpyAsync", "StreamSynchronize")
        ]
        passes = (taken[1] - taken[0]) / forward
        yield (
            f"| {name} | {taken[0]:.2f} | {taken[1]:.2f} | {passes:.0f} |"
            f" {' | '.join(map(str, counts))} |"
        )


def profiled(run: Callable[[], object], machine: Machine) -> list[str]:
    """The names of all events of torch's profiler in a call."""
    with torch.profiler.profile() as profile:
        run()
        machine.wait()
    return [event.name for event in profile.events()]


def clipping(machine: Machine) -> Iterator[str]:
    """Adaptive clipping: launches and time, ours and timm's over the same parameters."""
    model = lived_in(machine).train()
    model(
        torch.randn(8, 3, machine.side, machine.side, device=machine.device)
    ).square().mean().backward()
    parameters = [p for name, p in model.named_parameters() if not name.startswith("fc.")]
    clip = Clip()
    ways: dict[str, Callable[[], object]] = {
        "timm": lambda: adaptive_clip_grad(parameters, clip.value),
        "normswap": lambda: clip_gradients(model, clip),
        "clip_grad_norm_ (torch)": lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
    }
    about = f"{machine.network}, {len(parameters)} parameters."
    yield machine.heading("Adaptive clipping", about, "way", "kernels", "ms")

    for name, run in ways.items():
        run()
        launches = sum("LaunchKernel" in event for event in profiled(run, machine))
        yield f"| {name} | {launches} | {1e3 * machine.seconds(run):.2f} |"


def speed(machine: Machine) -> Iterator[str]:
    """Images per second in training and inference, by scheme; the compiled ones last, which take
    longest to begin.
    """
    source = lived_in(machine)
    yield machine.heading(
        "Speed of a converted network",
        f"{machine.network}, batches of {machine.batch} images of {machine.side} pixels, bf16"
        " autocast, channels last, SGD with momentum; median of passes in one process; training is"
        " forward, backward and update. Memory: the peak of training.",
        "scheme",
        "compiled",
        "inference, images/s",
        "to BatchNorm",
        "training, images/s",
        "to BatchNorm",
        "GiB",
    )
    base: dict[tuple[bool, bool], float] = {}
    networks = {name: converted(source, name, machine) for name in TRAINED}

    # Compiling takes a minute for each, on the CPU too.
    compiled = ("batchnorm", "skipinit", "groupnorm", "folded") if machine.device == "cuda" else ()
    for name, is_compiled in (
        *itertools.product(TRAINED, (False,)),
        *itertools.product(compiled, (True,)),
    ):
        figures = []
        for trains in (False, True):
            if trains and name == "folded":
                figures += ["", ""]
                continue
            rate = images_per_second(networks[name], machine, trains=trains, compiled=is_compiled)
            first = base.setdefault((is_compiled, trains), rate)
            figures += [f"{rate:.0f}", f"{rate / first:.2f}"]

        memory = torch.cuda.max_memory_allocated() / 2**30 if machine.device == "cuda" else 0.0
        yield f"| {name} | {'yes' if is_compiled else ''} | {' | '.join(figures)} | {memory:.1f} |"


def converted(source: nn.Module, name: str, machine: Machine) -> nn.Module:
    """The source after a conversion that is spelled as on the command line."""
    scheme, *option = name.split(" --relative-eps ")
    if scheme == "batchnorm":
        return copy.deepcopy(source)
    options = {**KEEPING.get(scheme, {}), **({"relative_eps": float(option[0])} if option else {})}
    return normswap.convert(
        source, scheme, input_size=(3, machine.side, machine.side), **options
    ).model


def images_per_second(
    model: nn.Module,
    machine: Machine,
    *,
    trains: bool,
    compiled: bool | str = False,
    autocast: bool = True,
    layout: torch.memory_format = torch.channels_last,
) -> float:
    """How many images a network infers, or trains on, in a second.

    Args:
        model: the network, which is copied.
        machine: where it runs.
        trains: forward, backward and update, instead of forward.
        compiled: by torch.compile, in this mode where one is named.
        autocast: whether the network is in float32, under bf16 autocast; else it is in bf16.
        layout: of the maps.
    """
    dtype = torch.float32 if autocast else torch.bfloat16
    model = copy.deepcopy(model).to(dtype=dtype, memory_format=layout).train(trains)
    images = torch.randn(machine.batch, 3, machine.side, machine.side, device=machine.device)
    images = images.to(dtype=dtype, memory_format=layout)
    labels = torch.zeros(machine.batch, dtype=torch.long, device=machine.device)
    mode = compiled if isinstance(compiled, str) else None
    run: Callable[..., Tensor] = torch.compile(model, mode=mode) if compiled else model
    if machine.device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def infer() -> None:
        with torch.no_grad(), torch.autocast(machine.device, torch.bfloat16, enabled=autocast):
            run(images)

    if not trains:
        return machine.batch / machine.seconds(infer)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, momentum=0.9
    )

    def update() -> None:
        with torch.autocast(machine.device, torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(run(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return machine.batch / machine.seconds(update)


def group_norms(machine: Machine) -> Iterator[str]:
    """GroupNorm in place of every BatchNorm, by class, layout and compiler."""
    source = lived_in(machine)
    with_norms = converted(source, "groupnorm", machine)
    networks = {
        "BatchNorm": source,
        "torch's GroupNorm": with_norms,
        "timm's GroupNorm": timms(with_norms, fast=False),
        "timm's GroupNorm, fast": timms(with_norms, fast=True),
    }
    yield machine.heading(
        "GroupNorm by class",
        f"{machine.network}, batches of {machine.batch} images of {machine.side} pixels, bf16"
        " autocast; `set_fast_norm` makes timm's class compute in autocast's dtype, where torch's"
        " computes in float32. Ratios are to BatchNorm in the same row's layout and compiler; how"
        " far the answers are from torch's class, relative L2 under autocast.",
        "norms",
        "layout",
        "compiled",
        "inference, images/s",
        "to BatchNorm",
        "training, images/s",
        "to BatchNorm",
        "answers apart",
    )

    images = torch.randn(8, 3, machine.side, machine.side, device=machine.device)
    with torch.no_grad(), torch.autocast(machine.device, torch.bfloat16):
        expected = with_norms(images).double()
        apart = {
            name: distance(expected, network(images).double()) for name, network in networks.items()
        }

    layouts = {"NCHW": torch.contiguous_format, "channels last": torch.channels_last}
    compiles = (False, True) if machine.device == "cuda" else (False,)
    for is_compiled, (layout_name, layout) in itertools.product(compiles, layouts.items()):
        base: dict[bool, float] = {}
        for name, network in networks.items():
            figures = []
            for trains in (False, True):
                rate = images_per_second(
                    network, machine, trains=trains, compiled=is_compiled, layout=layout
                )
                first = base.setdefault(trains, rate)
                figures += [f"{rate:.0f}", f"{rate / first:.2f}"]

            far = "" if name == "BatchNorm" else f"{apart[name]:.1e}"
            yield (
                f"| {name} | {layout_name} | {'yes' if is_compiled else ''} |"
                f" {' | '.join(figures)} | {far} |"
            )


def timms(model: nn.Module, *, fast: bool) -> nn.Module:
    """A copy of a network with timm's class in place of torch's GroupNorm."""
    model = copy.deepcopy(model)
    before = is_fast_norm()
    set_fast_norm(fast)
    for path, norm in [*model.named_modules()]:
        if type(norm) is nn.GroupNorm:
            new = GroupNorm(norm.num_channels, norm.num_groups, eps=norm.eps)
            new.load_state_dict(norm.state_dict())
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, new.to(norm.weight).eval())
    set_fast_norm(before)
    return model


def exact_speed(machine: Machine) -> Iterator[str]:
    """What keeps the function, beside BatchNorm, in every way that people run networks."""
    source = lived_in(machine)
    networks = {
        name: converted(source, name, machine)
        for name in ("batchnorm", "folded", "skipinit", "frozen-bn")
    }
    yield machine.heading(
        "Speed of exact results",
        f"{machine.network}, batches of {machine.batch} images of {machine.side} pixels, channels"
        " last. Weights in float32 under bf16 autocast, or in bf16; `reduce-overhead` uses CUDA"
        " graphs.",
        "scheme",
        "weights",
        "compiled",
        "inference, images/s",
        "to BatchNorm",
        "training, images/s",
        "to BatchNorm",
    )

    # Compiling takes a minute for each, on the CPU too.
    modes: list[bool | str] = [False]
    if machine.device == "cuda":
        modes += [True, "reduce-overhead", "max-autotune"]
    for mode, autocast in itertools.product(modes, (True, False)):
        base: dict[bool, float] = {}
        for name, network in networks.items():
            figures = []
            for trains in (False, True):
                # A folded network does not train, and compiling backward takes longest.
                if trains and (name == "folded" or mode):
                    figures += ["", ""]
                    continue
                rate = images_per_second(
                    network, machine, trains=trains, compiled=mode, autocast=autocast
                )
                first = base.setdefault(trains, rate)
                figures += [f"{rate:.0f}", f"{rate / first:.2f}"]

            how = mode if isinstance(mode, str) else "yes" if mode else ""
            weights = "float32" if autocast else "bf16"
            yield f"| {name} | {weights} | {how} | {' | '.join(figures)} |"


PARTS = {
    part.__name__: part
    for part in (calibration, group_norms, exact_speed, speed, schemes, training, clipping)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--dry", action="store_true", help="on the CPU with tiny sizes")
    arguments = parser.parse_args()
    with tensor_float(allowed=False):
        for line in PARTS[arguments.name](DRY if arguments.dry else GPU):
            print(line, flush=True)


if __name__ == "__main__":
    main()
