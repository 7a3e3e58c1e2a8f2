"""Networks in wrappings of others: parallel, synchronized, quantizable, fused, lazy, compiled."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from support.lived_in_networks import distance, lived_in, run
from torch import Tensor, nn
from torchvision import models
from torchvision.models import quantization

import normswap
from normswap.errors import NormswapError, SourceError

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # torch warns of what it calls deprecated in its own wrappings
SIZE = (3, 64, 64)


def example(seed: int = 0) -> Tensor:
    return torch.randn(2, *SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lived(build: Callable[..., nn.Module], **options: object) -> nn.Module:
    torch.manual_seed(0)
    return lived_in(build(weights=None, num_classes=10, **options).eval(), example())


def network() -> nn.Module:
    """torchvision's resnet18 with one block for each stage."""
    torch.manual_seed(0)
    return lived_in(
        models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10).eval(), example()
    )


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def for_training() -> nn.Module:
    """torchvision's own fusing for quantization-aware training: ConvBnReLU2d keeps a BatchNorm of
    its own.
    """
    block = quantization.resnet.QuantizableBasicBlock
    model = quantization.QuantizableResNet(block, [1, 1, 1, 1], num_classes=10)
    model.train()
    model.fuse_model(is_qat=True)
    return lived_in(model.eval(), example())


def lazy() -> nn.Module:
    return (
        nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Conv2d(8, 4, 1))
        .double()
        .eval()
    )


def run_once() -> nn.Module:
    model = lazy()
    model(example())
    return lived_in(model, example())


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "parallel": lambda: nn.DataParallel(network()),
    "distributed": lambda: nn.parallel.DistributedDataParallel(network()),
    "synchronized": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(network()),
    "channels last": lambda: network().to(memory_format=torch.channels_last),
    "quantizable": lambda: lived(quantization.mobilenet_v2, quantize=False, width_mult=0.25),
    "quantizable, shuffled": lambda: lived(quantization.shufflenet_v2_x0_5, quantize=False),
    "fused for training": for_training,
    "lazy": run_once,
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("to", ["folded", "frozen-bn"])
@pytest.mark.usefixtures("alone")
@pytest.mark.one_in(4)
def test_it_converts_in_its_wrapping(name: str, to: str) -> None:
    model = WRAPPED[name]()
    before = copy.deepcopy(model.state_dict())
    done = normswap.convert(model, to, inputs=example())

    assert type(done.model) is type(model)
    assert done.report.exact
    assert distance(run(model, example(1)), run(done.model, example(1))) <= 1e-11
    assert not any(
        isinstance(module, nn.modules.batchnorm._NormBase) for module in done.model.modules()
    )
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lazy, r"0\.weight has no shape yet: a lazy layer. Run the network once"),
    "compiled": (
        lambda: torch.compile(network()),
        r"the network is compiled: it stands for a ResNet. Give model\._orig",
    ),
    "scripted": (
        lambda: torch.jit.trace(network(), example()),
        r"the network is TorchScript.*Give the network",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(
    "look", [normswap.inspect, lambda model, x: normswap.convert(model, "folded", inputs=x)]
)
def test_what_cannot_be_seen_is_said_in_a_line(
    name: str, look: Callable[[nn.Module, Tensor], object]
) -> None:
    build, message = REFUSED[name]

    with pytest.raises(NormswapError, match=message) as said:
        look(build(), example())
    assert "\n" not in str(said.value)
    assert isinstance(said.value, SourceError)
