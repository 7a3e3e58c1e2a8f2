"""What other programs wrap around a network is taken off before it is saved or sorted."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
from opacus import GradSampleModule
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import normswap
from normswap import provenance


class LightningModule(nn.Module):
    """As Lightning's own: it holds the network beside what has no parameters."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()
        self.network = network


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "DDP": DistributedDataParallel,
    "DataParallel": DataParallel,
    "AveragedModel": AveragedModel,
    "Opacus": GradSampleModule,
    "Lightning": LightningModule,
    "compiled in DDP in Lightning": lambda model: LightningModule(
        DistributedDataParallel(torch.compile(model, backend="eager"))
    ),
}


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def converted() -> nn.Module:
    torch.manual_seed(0)
    source = timm.create_model("resnet18", channels=(4, 4, 8, 8), num_classes=3).eval()
    return normswap.convert(source, to="skipinit", input_size=(3, 32, 32)).model


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_network_inside_is_saved(wrapper: str, converted: nn.Module, tmp_path: Path) -> None:
    wrapped = WRAPPERS[wrapper](copy.deepcopy(converted))
    folder = normswap.save(wrapped, tmp_path / "out")

    loaded = normswap.load(folder)
    state = converted.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    assert provenance.of(loaded).plan == provenance.of(converted).plan
    assert type(wrapped).__name__ not in (folder / "README.md").read_text(encoding="utf-8")
    assert "resnet18 converted to skipinit" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_its_parameters_keep_their_groups(wrapper: str, converted: nn.Module) -> None:
    wrapped = WRAPPERS[wrapper](copy.deepcopy(converted))
    plain = normswap.param_groups(converted)

    groups = normswap.param_groups(wrapped)

    own = {id(parameter) for parameter in wrapped.parameters()}
    assert {id(parameter) for group in groups for parameter in group["params"]} == own
    sizes = [(group["name"], len(group["params"])) for group in groups]
    assert sizes == [(group["name"], len(group["params"])) for group in plain]


def test_a_skeleton_may_be_wrapped(converted: nn.Module, tmp_path: Path) -> None:
    folder = normswap.save(converted, tmp_path / "out")
    bare = timm.create_model("resnet18", channels=(4, 4, 8, 8), num_classes=3)

    loaded = normswap.load(folder, skeleton=DataParallel(bare))

    assert loaded.state_dict().keys() == converted.state_dict().keys()


def test_parameters_beside_the_network_keep_the_module_of_lightning() -> None:
    module = LightningModule(nn.Linear(3, 2))
    module.temperature = nn.Parameter(torch.ones(1))

    groups = normswap.param_groups(module)

    assert sum(len(group["params"]) for group in groups) == 3
