"""Networks that others fused get BatchNorms back, exactly; those train, their statistics move, and they fold again."""

import copy
import importlib.util
import io
from collections.abc import Iterator
from typing import Any

import onnx
import pytest
import timm
import torch
from lived import batchnorms, calm, lived_in
from narrow_networks import skeleton, source as lived
from onnx import numpy_helper
from timm.utils.model import reparameterize_model
from torch import Tensor, nn

import normswap
from normswap.models.calling import named_tensors

LIMIT = 1e-10
STEPS = 3


def photographs(size: int, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(4, 3, size, size, dtype=torch.float64, generator=generator) for _ in range(count)]


def outputs(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([value.flatten() for _, value in named_tensors(net(x)) if value.is_floating_point()])


def apart(a: nn.Module, b: nn.Module, x: Tensor) -> float:
    wanted = outputs(a, x)
    return float((outputs(b, x) - wanted).norm() / wanted.norm())


def trained(model: nn.Module, batches: list[Tensor]) -> nn.Module:
    """After a few steps; what comes out of a layer in training may be another structure than in eval mode."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        values = [value for _, value in named_tensors(model(batch)) if value.requires_grad]
        sum((value.square().mean() for value in values), torch.zeros(())).backward()
        optimizer.step()
    return model.eval()


def assert_comes_back(net: nn.Module, batches: list[Tensor], **options: Any) -> nn.Module:
    """BatchNorm put in, trained, and folded away: the same function before and after, and something that learns."""
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
    """Weight and bias of each Conv and Gemm of an ONNX file that torch's own exporter fused the norms of, in order."""
    file = io.BytesIO()
    torch.onnx.export(model, (x,), file, dynamo=False)  # type: ignore[arg-type]
    graph = onnx.load_from_string(file.getvalue()).graph
    tensors = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer}
    for node in graph.node:
        assert node.op_type != "BatchNormalization"
        if node.op_type in ("Conv", "Gemm"):
            yield tensors[node.input[1]], tensors[node.input[2]]


def bare() -> nn.Module:
    """The architecture without norms, whose convolutions have a bias: what people load an export's weights into."""
    model = skeleton("resnet18")
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.Identity())
            elif isinstance(child, nn.Conv2d):
                child.register_parameter("bias", nn.Parameter(torch.zeros(child.out_channels, dtype=torch.float64)))
    return model


@pytest.mark.filterwarnings("ignore")  # of the exporter
@pytest.mark.parametrize("like", [False, True])
def test_weights_of_an_onnx_file(like: bool) -> None:
    model, batches, net = lived("resnet18")[0], photographs(33), bare()
    layers = [module for module in net.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        for layer, (weight, bias) in zip(layers, weights_of_file(model, batches[0]), strict=True):
            layer.weight.copy_(weight)
            layer.get_parameter("bias").copy_(bias)
    assert apart(model, net, batches[0]) < 1e-5  # the exporter folds in float32
    done = assert_comes_back(net, batches, **({"like": skeleton("resnet18")} if like else {}))
    assert len(list(batchnorms(done))) == len(list(batchnorms(model)))


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
@pytest.mark.skipif(importlib.util.find_spec("ultralytics") is None, reason="ultralytics is not installed")
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
