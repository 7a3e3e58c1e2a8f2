"""Networks that others fused get BatchNorms back, exactly; those train, their statistics move, and
they fold again.

There and back: chains of conversions that end where they began, or somewhere that could be reached
directly.
"""

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import timm
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from support.lived_in_networks import batchnorms, calm, distance, lived_in, run
from support.narrow_networks import NORM_FREE, norm_free, skeleton, source as lived
from support.tiny_modules import ONE, C, bn, conv, net
from timm.layers import BatchNormAct2d, ScaledStdConv2d
from timm.utils.model import reparameterize_model
from torch import Tensor, nn

import normswap
from normswap.layers.scalars import Scale
from normswap.models.calling import named_tensors
from normswap.storage import checkpoint

LIMIT = 1e-10
STEPS = 3


def photographs(size: int, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.rand(4, 3, size, size, dtype=torch.float64, generator=generator) for _ in range(count)
    ]


def outputs(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat(
            [value.flatten() for _, value in named_tensors(net(x)) if value.is_floating_point()]
        )


def apart(a: nn.Module, b: nn.Module, x: Tensor) -> float:
    wanted = outputs(a, x)
    return float((outputs(b, x) - wanted).norm() / wanted.norm())


def trained(model: nn.Module, batches: list[Tensor]) -> nn.Module:
    """After a few steps; what comes out of a layer in training may be another structure than in
    eval mode.
    """
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        values = [value for _, value in named_tensors(model(batch)) if value.requires_grad]
        sum((value.square().mean() for value in values), torch.zeros(())).backward()
        optimizer.step()
    return model.eval()


def assert_comes_back(net: nn.Module, batches: list[Tensor], **options: Any) -> nn.Module:
    """BatchNorm put in, trained, and folded away: the same function before and after, and something
    that learns.
    """
    done = normswap.convert(net, "batchnorm", inputs=batches[0], calibrate=batches, **options)
    assert not list(batchnorms(net))
    assert apart(net, done.model, batches[1]) < LIMIT

    after = trained(done.model, batches)
    for path in batchnorms(done.model):
        old: Any = done.model.get_submodule(path)
        new: Any = after.get_submodule(path)
        assert not torch.equal(old.running_mean, new.running_mean)
        assert not torch.equal(old.running_var, new.running_var)
        assert not torch.equal(old.weight, new.weight)
        assert int(new.num_batches_tracked) == STEPS

    again = normswap.convert(after, "folded", inputs=batches[0]).model
    assert not list(batchnorms(again))
    assert apart(after, again, batches[1]) < LIMIT
    assert apart(net, again, batches[1]) > 1e3 * LIMIT  # it has learned

    return done.model


def weights_of_file(model: nn.Module, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Weight and bias of each Conv and Gemm of an ONNX file that torch's own exporter fused the
    norms of, in order.
    """
    file = io.BytesIO()
    torch.onnx.export(model, (x,), file, dynamo=False)  # type: ignore[arg-type]
    graph = onnx.load_from_string(file.getvalue()).graph
    tensors = {
        one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer
    }
    for node in graph.node:
        assert node.op_type != "BatchNormalization"
        if node.op_type in ("Conv", "Gemm"):
            yield tensors[node.input[1]], tensors[node.input[2]]


def bare() -> nn.Module:
    """The architecture without norms, whose convolutions have a bias: what people load an export's
    weights into.
    """
    model = skeleton("resnet18")
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.Identity())
            elif isinstance(child, nn.Conv2d):
                child.register_parameter(
                    "bias", nn.Parameter(torch.zeros(child.out_channels, dtype=torch.float64))
                )
    return model


@pytest.mark.filterwarnings("ignore")  # of the exporter
@pytest.mark.parametrize("like", [False, True])
def test_weights_of_an_onnx_file(like: bool) -> None:
    model = lived("resnet18")[0]
    batches = photographs(33)
    net = bare()

    layers = [module for module in net.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        for layer, (weight, bias) in zip(layers, weights_of_file(model, batches[0]), strict=True):
            layer.weight.copy_(weight)
            layer.get_parameter("bias").copy_(bias)

    assert apart(model, net, batches[0]) < 1e-5  # the exporter folds in float32

    done = assert_comes_back(net, batches, **({"like": skeleton("resnet18")} if like else {}))
    assert len(list(batchnorms(done))) == len(list(batchnorms(model)))


@pytest.mark.slow
def test_repvgg_in_deploy_form() -> None:
    torch.manual_seed(0)
    batches = photographs(64)  # at 32 px the last maps have one position, and get no norm
    model = lived_in(timm.create_model("repvgg_a0", num_classes=4, width_factor=0.25), batches[0])
    net = reparameterize_model(model)
    assert apart(model, net, batches[1]) < LIMIT
    done = assert_comes_back(net, batches)
    assert len(list(batchnorms(done))) == 22


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ultralytics' own
@pytest.mark.needs("ultralytics")
@pytest.mark.parametrize("name", ["yolov8n", "yolo11n"])
@pytest.mark.parametrize("like", [False, True])
def test_a_detector_that_ultralytics_fused(name: str, like: bool) -> None:
    from ultralytics import YOLO

    def built() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = YOLO(f"{name}.yaml", verbose=False).model
        return model

    batches = [batch[:2] for batch in photographs(64)]
    own: Any = calm(built(), batches[0])
    net = copy.deepcopy(own).fuse(verbose=False)
    done = assert_comes_back(net, batches, **({"like": built()} if like else {}))
    if like:
        own.load_state_dict(done.state_dict())
        assert apart(net, own, batches[0]) < LIMIT


@pytest.mark.parametrize("arch", NORM_FREE)
@pytest.mark.one_in(2)
def test_norm_free_to_skipinit_in_one_step(arch: str) -> None:
    """The standardized weights are baked, the factors folded, and every branch gets its scalar: in
    one conversion.
    """
    model, x = norm_free(arch)
    done = normswap.convert(model, "skipinit", inputs=x)
    assert [step.scheme for step in done.plan.steps] == ["folded", "skipinit"]
    assert done.report.exact
    assert distance(run(model, x), run(done.model, x)) <= 1e-12
    assert not any(isinstance(module, ScaledStdConv2d) for module in done.model.modules())
    blocks = len(normswap.inspect(model).blocks)
    assert sum(isinstance(module, Scale) for module in done.model.modules()) == blocks > 0


def test_a_standardized_layer_with_a_hook_stays() -> None:
    model = (
        nn.Sequential(ScaledStdConv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
        .double()
        .eval()
    )
    model[0].register_forward_hook(lambda module, args, output: None)
    done = normswap.convert(model, "folded", inputs=torch.randn(2, 3, 9, 9).double())
    assert done.notes == ("0 stays a ScaledStdConv2d: 0 has forward hooks, which see its output",)


@pytest.mark.parametrize("cut", ["not called any more", "taken out"])
def test_norms_do_not_come_back_where_nothing_is_called(cut: str) -> None:
    """Of a network that was changed after its conversion: what is left gets its norms, and a note
    names the rest.
    """
    torch.manual_seed(0)
    x = torch.randn(4, C, 9, 9, dtype=torch.float64)
    whole = net(lambda m, x: F.silu(m.bn2(m.bn(m.conv(x)) + x)), **ONE, bn2=bn)()
    half: Any = normswap.convert(lived_in(whole, x), "folded", inputs=x).model
    half.body = lambda m, x: F.silu(m.bn(m.conv(x)))
    if cut == "taken out":
        del half.bn2
    done = normswap.convert(half, "batchnorm", inputs=x)

    assert "bn2: there is no place for its norm any more" in done.notes
    assert [path for path in batchnorms(done.model) if path != "bn2"] == ["bn"]
    assert distance(run(half, x), run(done.model, x)) <= 1e-12


SIZE = (3, 40, 40)
FACTORY = """
from torch import nn

def make():
    head = nn.Flatten(), nn.Linear(4 * 38 * 38, 5)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *head)
"""


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A network that takes images of one size, which nothing but its record says."""
    (tmp_path / "made_for_forty.py").write_text(FACTORY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = checkpoint.open_model("made_for_forty:make", weights="random", input_size=SIZE)
    return lived_in(model, torch.randn(4, *SIZE))


def test_a_network_of_one_size_is_unfolded_at_that_size(network: nn.Module) -> None:
    x = torch.randn(2, *SIZE, dtype=torch.float64)
    folded = normswap.convert(network, "folded").model
    back = normswap.convert(folded, "unfold")
    assert batchnorms(back.model) == batchnorms(network) == ["1"]
    assert distance(run(network, x), run(back.model, x)) < 1e-12
    assert [error.size[1:] for error in back.report.logits] == [SIZE]


def test_the_size_that_is_given_is_the_size_that_is_looked_at(
    network: nn.Module, tmp_path: Path
) -> None:
    """Also of one that was saved with a record that says nothing of it."""
    folded = normswap.convert(network, "folded").model
    record = normswap.Network(folded).provenance.pretrained_cfg
    record.pop("input_size")
    assert normswap.convert(folded, "unfold", input_size=SIZE).report.passed


def test_a_norm_that_left_its_activation_before_a_scalar_comes_back_to_it() -> None:
    """The activation stands in a chain by then, with the scalar of the branch behind it."""
    x = torch.randn(3, C, 9, 9, dtype=torch.float64)
    parts = {"conv": conv, "bn": lambda: BatchNormAct2d(C, act_layer=nn.LeakyReLU)}
    model = lived_in(net(lambda m, x: x + m.bn(m.conv(x)), **parts)(), x)
    scaled = normswap.convert(model, "skipinit", inputs=x)

    back: Any = normswap.convert(scaled, "batchnorm", inputs=x).model

    assert batchnorms(back) == ["bn.inner"]
    assert isinstance(back.bn.inner.act, nn.LeakyReLU)
    assert not any(isinstance(module, Scale) for module in back.modules())
    assert distance(run(model, x), run(back, x)) <= LIMIT
