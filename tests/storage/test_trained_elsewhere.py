"""What another program trained comes back: its weights file fills the converted network."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.command_line import Capture, run_json
from torch import Tensor, nn

import normswap
from normswap import provenance
from normswap.cli.app import main
from normswap.errors import SourceError
from normswap.storage import checkpoint
from normswap.surgery import reverification

State = dict[str, Tensor]


def _prefixed(prefix: str) -> Callable[[State], State]:
    return lambda state: {prefix + name: tensor for name, tensor in state.items()}


# How the file of each trainer wraps the tensors of the network.
FILES: dict[str, Callable[[State], Any]] = {
    "timm's train.py": lambda state: {"epoch": 1, "arch": "resnet18", "state_dict": state},
    "timm's average of checkpoints": lambda state: state,
    "Lightning": lambda state: {"epoch": 1, "state_dict": _prefixed("network.")(state)},
    "torch.compile in Lightning": lambda state: {
        "state_dict": _prefixed("network._orig_mod.")(state)
    },
    "DDP": lambda state: {"model": _prefixed("module.")(state)},
    "AveragedModel": lambda state: {
        "n_averaged": torch.tensor(2),
        **_prefixed("module.")(state),
    },
    "Opacus": _prefixed("_module."),
    "TimmWrapper of transformers": _prefixed("timm_model."),
}


class Counted(nn.Module):
    """A layer that keeps a plain number as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def get_extra_state(self) -> dict[str, float]:
        return {"factor": self.factor}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.factor = state["factor"]


def test_extra_state_is_that_of_the_trained_file(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Counted()).eval()

    done = normswap.convert(build(), "affine", inputs=torch.rand(2, 3, 8, 8))
    place = normswap.save(done, tmp_path / "net")
    done.model.get_submodule("2").set_extra_state({"factor": 3.0})
    torch.save(done.model.state_dict(), tmp_path / "trained.pth")

    loaded = normswap.load(place, skeleton=build(), weights=tmp_path / "trained.pth")

    assert loaded.get_submodule("2").get_extra_state() == {"factor": 3.0}


def test_a_plan_proves_nothing_of_a_layer_with_other_extra_state() -> None:
    """The plan of a result is no proof where the result is not what its plan makes."""
    source = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Counted()).eval()
    images = torch.rand(2, 3, 8, 8)
    model = normswap.convert(source, "affine", inputs=images).model
    assert reverification._is_what_is_planned(source, model)

    model.get_submodule("2").set_extra_state({"factor": 3.0})

    assert not reverification._is_what_is_planned(source, model)
    assert normswap.verify(source, model, images).verdict == "WRONG"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    conversion = normswap.convert(normswap.open("demo"), to="skipinit")
    return checkpoint.save(conversion, tmp_path_factory.mktemp("saved") / "skipinit")


@pytest.fixture(scope="module")
def trained(saved: Path) -> nn.Module:
    """The converted network after a small change, as training elsewhere makes one."""
    model = normswap.load(saved)
    with torch.no_grad():
        model.get_parameter("fc.bias").add_(0.01)
    return model


@pytest.fixture(scope="module")
def weights(trained: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trained") / "last.pth.tar"
    torch.save({"epoch": 1, "state_dict": trained.state_dict()}, file)
    return file


def assert_same_tensors(model: nn.Module, other: nn.Module) -> None:
    wanted = other.state_dict()
    state = model.state_dict()

    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("trainer", FILES)
def test_a_trainers_file_fills_the_converted_network(
    trainer: str, saved: Path, trained: nn.Module, tmp_path: Path
) -> None:
    file = tmp_path / "trained.pt"
    torch.save(FILES[trainer](dict(trained.state_dict())), file)

    model = normswap.open(str(saved), weights=str(file))

    assert_same_tensors(model, trained)
    assert provenance.of(model).plan == provenance.of(trained).plan
    assert provenance.of(model).norms.keys() == provenance.of(trained).norms.keys()
    assert provenance.of(model).changed


def test_every_way_to_name_directory_and_file(
    saved: Path, trained: nn.Module, weights: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "trained.safetensors"
    save_file(dict(trained.state_dict()), plain)

    for model in (
        normswap.load(saved, weights=weights),
        normswap.load(saved / "model.safetensors", weights=str(weights)),
        normswap.open(f"local-dir:{saved}", weights=str(weights)),
        normswap.open(str(saved / "model.safetensors"), weights=str(weights)),
        normswap.open(str(weights), arch=str(saved)),
        normswap.open(str(plain), arch=f"local-dir:{saved}"),
    ):
        assert_same_tensors(model, trained)
        assert [step.scheme for step in provenance.of(model).plan.steps] == ["skipinit"]


def test_the_card_of_what_was_trained_claims_no_proof(
    saved: Path, weights: Path, tmp_path: Path
) -> None:
    filled = normswap.load(saved, weights=weights)
    card = (checkpoint.save(filled, tmp_path / "out") / "README.md").read_text(encoding="utf-8")

    assert "Not verified since the last change" in card
    assert "Not verified" not in (saved / "README.md").read_text(encoding="utf-8")


def test_other_options_and_other_files_are_refused(
    saved: Path, weights: Path, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match="num_classes="):
        normswap.open(str(saved), weights=str(weights), num_classes=3)
    with pytest.raises(SourceError, match="weights="):
        normswap.open(str(saved), weights="random")
    with pytest.raises(SourceError, match=r"gone\.pt does not exist"):
        normswap.open(str(saved), weights=str(tmp_path / "gone.pt"))

    of_source = tmp_path / "source.pt"
    torch.save(normswap.open("demo").state_dict(), of_source)
    with pytest.raises(SourceError, match=r"source\.pt does not fit .* missing"):
        normswap.open(str(saved), weights=str(of_source))


@pytest.mark.slow
def test_commands_take_what_was_trained(
    saved: Path, weights: Path, tmp_path: Path, capfd: Capture
) -> None:
    filled = (str(saved), "--weights", str(weights))
    images = ("--data", "demo", "--samples", "50", "--workers", "0")

    verified = run_json(capfd, "verify", *filled, *images, "--min-kept", "0.8")
    against = ("--against", str(saved), "--min-kept", "0.8")
    evaluated = run_json(capfd, "evaluate", *filled, *images, *against)
    exported = run_json(capfd, "export", *filled, "-o", str(tmp_path / "net.onnx"))

    assert verified["passed"]
    assert verified["report"]["verdict"] == "MEASURED"
    assert evaluated["against"]["enough"]
    assert Path(exported["file"]).is_file()


def test_what_verify_filled_is_what_its_next_command_exports(
    saved: Path, weights: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    filled = [str(saved), "--weights", str(weights)]

    assert main(["verify", *filled]) == 0

    export = shlex.join(["normswap", "export", *filled])
    assert export in " ".join(capfd.readouterr().out.split())


def test_verify_still_asks_what_other_options_are_for(saved: Path) -> None:
    assert main(["verify", str(saved), "--arch", "resnet18"]) == 2
    assert main(["verify", str(saved), "--weights", "random"]) == 2


def test_a_pickled_network_fills_too(saved: Path, trained: nn.Module, tmp_path: Path) -> None:
    """Ultralytics' trainer pickles the whole network, in float16; none of its code is run."""
    file = tmp_path / "last.pt"
    torch.save({"epoch": 0, "model": None, "ema": trained}, file)

    assert_same_tensors(normswap.load(saved, weights=file), trained)


def test_a_card_says_that_timm_thaws_frozen_norms(saved: Path, tmp_path: Path) -> None:
    frozen = normswap.convert(normswap.open("demo"), to="frozen-bn")
    card = (checkpoint.save(frozen, tmp_path / "out") / "README.md").read_text(encoding="utf-8")

    assert "in training mode their statistics move" in card
    assert "in training mode" not in (saved / "README.md").read_text(encoding="utf-8")
