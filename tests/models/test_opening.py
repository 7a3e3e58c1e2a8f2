"""What costs nothing must change nothing: one record for all sizes, networks that are not drawn,
memory, threads.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from support.command_line import DEMO, MODEL, Capture, here, refused
from support.lived_in_networks import distance, lived_in, run, step
from support.tiny_modules import C, Net, bn, conv
from torch import Tensor, nn

from normswap.errors import OptionError
from normswap.graph.recording import record
from normswap.models import devices
from normswap.models.zoo import _undrawn
from normswap.surgery import applying
from normswap.surgery.conversion import convert

SMALL = (2, C, 64, 96)
LARGE = (2, C, 160, 224)
LIMIT = 150  # a width between those of the two sizes that are recorded, 224 and 128


def stays(m: Any, x: Tensor) -> Tensor:
    return m.bn(m.conv(x)).relu()  # type: ignore[no-any-return]


def asks(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x)).relu()
    return y.flatten(1).mean(1, keepdim=True) * y.shape[-1]  # type: ignore[no-any-return]


def other_norm(m: Any, x: Tensor) -> Tensor:
    """The convolution may absorb neither norm: each is right on one way only."""
    y = m.conv(x)
    return m.bn(y) if x.shape[-1] < LIMIT else m.bn2(y)  # type: ignore[no-any-return]


def without(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.bn(y) if x.size(-1) < LIMIT else y  # type: ignore[no-any-return]


def apart(m: Any, x: Tensor) -> Tensor:
    return m.bn(m.conv(x)) if len(x[0][0][0]) < LIMIT else m.bn2(m.conv2(x))  # type: ignore[no-any-return]


def deeper(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x)).relu()
    while y.shape[-1] > LIMIT:
        y = torch.nn.functional.max_pool2d(m.bn2(m.conv2(y)), 2)
    return y  # type: ignore[no-any-return]


def built(body: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    model = Net(body, conv=conv(), bn=bn(), conv2=conv(), bn2=bn())
    for norm in (model.bn, model.bn2):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return lived_in(model, torch.randn(*LARGE).double())


@pytest.mark.parametrize("body", [asks, other_norm, without, apart, deeper])
def test_a_forward_that_asks_for_a_size_is_recorded_at_two(
    body: Callable[[Any, Tensor], Tensor],
) -> None:
    traced = record(built(body))
    assert traced.size_dependent
    assert len(traced.recorded) == 2
    assert len(traced.others) == (body is asks)


def test_a_forward_that_does_not_is_recorded_at_one() -> None:
    traced = record(built(stays))
    assert not traced.size_dependent
    assert traced.flexible
    assert len(traced.recorded) == 1


@pytest.mark.parametrize(
    ("given", "other"), [((192, 256), (96, 128)), ((128, 160), (96, 128)), ((20, 24), (52, 88))]
)
def test_the_other_size_is_less_work_unless_the_first_is_small(
    given: tuple[int, int], other: tuple[int, int]
) -> None:
    traced = record(built(asks).float(), torch.randn(1, C, *given))
    assert [tuple(map(int, size.split("x")[-2:])) for size in traced.recorded] == [given, other]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("body", [stays, asks, other_norm, without, apart, deeper])
@pytest.mark.parametrize("scheme", ["folded", "affine", "weightnorm"])
def test_both_ways_of_a_forward_are_still_right(
    body: Callable[[Any, Tensor], Tensor], scheme: str
) -> None:
    model = built(body)
    planned, builder = step(model, scheme)
    result = model if builder.refusals else applying.apply_step(model, planned)
    for size in (SMALL, LARGE):
        x = torch.randn(*size, dtype=torch.float64)
        assert distance(run(model, x), run(result, x)) < 1e-12, size

    assert bool(builder.refusals) or planned.edits


class Noisy(nn.Module):
    """Its random features are no parameter, and in no state dict."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        if keep:
            self.features = torch.randn(4)
        else:
            self.register_buffer("features", torch.randn(4), persistent=False)


class Hidden(nn.Linear):
    """Its bias is in no state dict."""

    def __init__(self) -> None:
        super().__init__(3, 4)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight if keep_vars else self.weight.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.weight.data.copy_(state_dict[f"{prefix}weight"])


class Tied(nn.Module):
    """One weight has two names in the state dict, and a buffer has none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("positions", torch.arange(1.0, 5.0), persistent=False)


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return make()

    return build


def everything(model: nn.Module) -> dict[str, Tensor]:
    plain: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                plain[f"{path}!{name}"] = value
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **plain}


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: timm.create_model("resnet18", channels=(4, 4, 8, 8), num_classes=3),
    "swin": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=56,
        embed_dim=12,
        depths=(1, 1, 1, 1),
        num_heads=(1, 1, 1, 1),
        num_classes=3,
    ),
    "a random buffer": lambda: Noisy(False),
    "a random attribute": lambda: Noisy(True),
    "a hidden parameter": Hidden,
    "a tied weight beside a buffer that is not saved": Tied,
}


@pytest.mark.parametrize("name", MAKERS)
def test_networks_that_were_not_drawn_equal_others_once_they_are_loaded(name: str) -> None:
    build = seeded(MAKERS[name])
    usual = build()
    found = _undrawn(build, lambda model: model)
    torch.manual_seed(99)
    state = usual.state_dict()
    for key, tensor in state.items():
        if tensor.is_floating_point():
            state[key] = torch.randn_like(tensor)
    usual.load_state_dict(state)
    found.load_state_dict(state)
    ours = everything(found)
    theirs = everything(usual)

    assert ours.keys() == theirs.keys()

    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor), key


def test_what_was_not_drawn_is_zero_and_what_looks_at_values_is_built_as_ever() -> None:
    model = _undrawn(MAKERS["resnet"], lambda model: model)
    assert not any(bool(parameter.any()) for parameter in model.parameters())
    looks = _undrawn(lambda: nn.Linear(int(torch.ones(1).item()), 2), lambda model: model)
    assert looks.weight.any()


class Looks(nn.Module):
    """Asks for no size, and looks at a value, or not."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.looks = looks
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, 4)"""
        x = self.bn(self.conv(x))
        if self.looks and bool(x.mean() > 1e6):
            x = -x
        return x.mean((2, 3))


@pytest.mark.parametrize(("looks", "sizes"), [(False, [64]), (True, [64, 97])])
def test_only_a_way_that_depends_on_nothing_is_compared_at_one_size(
    looks: bool, sizes: list[int]
) -> None:
    report = convert(Looks(looks).eval(), "folded").report
    assert [error.size[-1] for error in report.logits if error.precision == "float32"] == sizes


_CONVERTING = """
import timm, torch
from normswap import convert
def memory(which):  # getrusage knows of the process that this one was forked from, too
    lines = open("/proc/self/status").read().splitlines()
    line = next(line for line in lines if line.startswith(which))
    return 1024 * int(line.split()[1])
small = timm.create_model("resnet18", channels=(4, 4, 4, 4)).eval()
convert(small, "folded", input_size=(3, 64, 64))  # all is imported and every pool of memory there
model = timm.create_model("resnet50").eval()
whole = sum(t.numel() * t.element_size() for t in model.state_dict().values())
before = memory("VmRSS")
result = convert(model, "folded", input_size=(3, 64, 64))
print((memory("VmHWM") - before) / whole)
"""


@pytest.mark.slow
@pytest.mark.needs("Linux", sys.platform.startswith("linux"))
def test_a_conversion_holds_little_more_than_its_result() -> None:
    """In checkpoints beyond the source: one for the result, and what runs; float64 is there layer
    by layer only.
    """
    command = [sys.executable, "-c", _CONVERTING]
    setting = {**os.environ, "OMP_NUM_THREADS": "1"}
    # What else the process happens to hold is added, so the least of three runs is nearest.
    runs = (
        subprocess.run(command, capture_output=True, text=True, check=True, env=setting)
        for _ in range(3)
    )
    least = min(float(done.stdout) for done in runs)

    assert 0.9 < least < 1.9, "1.5 when this was written; a result in float64 is two more"


class Narrowing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)


def test_layers_of_two_dtypes_keep_theirs() -> None:
    torch.manual_seed(0)
    first, second = (
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(2)
    )
    model = nn.Sequential(first, Narrowing(), second.bfloat16()).eval()
    result = convert(model, "folded", input_size=(4, 9, 9)).model

    assert [p.dtype for p in result.parameters()] == [torch.float32] * 2 + [torch.bfloat16] * 2


__all__ = ["here"]
ABSENT = "cuda:7" if torch.cuda.is_available() else "cuda"
DATA = ("--data", MODEL)
COMMANDS = {
    "convert": (*DEMO, "skipinit"),
    "verify": ("verify", MODEL),
    "evaluate": ("evaluate", MODEL, *DATA),
    "recalibrate": ("recalibrate", MODEL, *DATA),
    "spp": ("spp", MODEL),
    "report": ("report", MODEL),
    "export": ("export", MODEL, "-o", "x.onnx"),
    "finetune": ("finetune", MODEL, "--recipe", "none"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("here")
def test_commands_refuse_an_absent_device_before_they_begin(
    command: str, here: Path, capfd: Capture
) -> None:
    refused(
        (*COMMANDS[command], "--device", ABSENT),
        (f"device {ABSENT} is not available here", "--device cpu"),
        here,
        capfd,
    )
    refused((*COMMANDS[command], "--device", "tpu"), ("device 'tpu'",), here, capfd)


def test_names_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.find("cpu") == torch.device("cpu")
    with pytest.raises(OptionError, match="meta"):
        devices.find("meta")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)

    assert devices.find("auto") == torch.device("cpu")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)

    assert devices.find("auto") == torch.device("cuda")
    assert devices.find("cuda:1") == torch.device("cuda:1")

    for absent in ("cuda:2", "mps"):
        with pytest.raises(OptionError, match="not available"):
            devices.find(absent)

    with pytest.raises(OptionError, match="exported"):
        devices.place(torch.nn.ReLU(), "cuda")
