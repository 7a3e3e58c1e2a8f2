"""What is saved beside the tensors of a state dict comes back; what could not is refused before a
file is written.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_sources import rewrite
from support.odd_networks import Mended
from torch import Tensor, nn

import normswap
from normswap.errors import OutputError, SourceError

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Kept(nn.Module):
    """Keeps a value as extra state."""

    def __init__(self, value: object = None) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return x

    def get_extra_state(self) -> object:
        return self.value

    def set_extra_state(self, state: object) -> None:
        self.value = state


def network(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Mended(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *more).eval()


def saved(model: nn.Module, folder: Path) -> Path:
    return normswap.save(normswap.convert(model, "folded", inputs=IMAGES), folder / "network")


@pytest.mark.parametrize("scheme", ["folded", "affine", "groupnorm"])
def test_a_layer_that_mends_old_files_leaves_a_new_one(scheme: str, tmp_path: Path) -> None:
    done = normswap.convert(network(), scheme, inputs=IMAGES, skip=["0"])
    loaded = normswap.load(normswap.save(done, tmp_path / "network"), skeleton=network())

    assert torch.equal(loaded.get_parameter("0.weight"), done.model.get_parameter("0.weight"))


@pytest.mark.parametrize(
    ("header", "dropped", "mended"),
    [
        ({}, ["layers"], False),
        ({"layers": {}}, [], True),
        ({"layers": {"0": {"version": 2}}}, [], True),
        ({"layers": {"0": {"version": 3}}}, [], False),
    ],
    ids=["no record", "version 1", "version 2", "version 3"],
)
def test_a_layer_reads_its_tensors_by_the_version_that_wrote_them(
    header: dict[str, Any], dropped: list[str], mended: bool, tmp_path: Path
) -> None:
    """A file without a record of versions is taken for one of this version."""
    done = normswap.convert(network(), "affine", inputs=IMAGES, skip=["0"])
    place = normswap.save(done, tmp_path / "network")
    rewrite(place, header=header, dropped=dropped)

    loaded = normswap.load(place, skeleton=network())

    written = done.model.get_parameter("0.weight")
    expected = written.flip(0) if mended else written
    assert torch.equal(loaded.get_parameter("0.weight"), expected)


@pytest.mark.parametrize(
    "value",
    [{"factor": 1.5}, [1, None, True], "text", 2**60, float("inf"), {"nested": {"list": [0.1]}}],
    ids=str,
)
def test_extra_state_comes_back(value: object, tmp_path: Path) -> None:
    place = saved(network(Kept(value)), tmp_path)
    loaded: Any = normswap.load(place, skeleton=network(Kept()))

    assert loaded[3].value == value
    assert type(loaded[3].value) is type(value)


@pytest.mark.parametrize(
    "value",
    [{1: "a number as its key"}, (1, 2), {3, 4}, object(), b"bytes", float("nan")],
    ids=["key", "tuple", "set", "object", "bytes", "NaN"],
)
def test_extra_state_that_would_not_come_back_is_refused(value: object, tmp_path: Path) -> None:
    model = network(Kept(value))
    with pytest.raises(OutputError, match="extra_state"):
        normswap.save(model, tmp_path / "network")
    assert not [*tmp_path.iterdir()]


def _sparse() -> Tensor:
    return torch.eye(4).to_sparse()


def _rows() -> Tensor:
    return torch.eye(4).to_sparse_csr()


def _quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [_sparse, _rows, _quantized])
def test_tensors_that_a_file_cannot_hold_are_refused(
    make: Callable[[], Tensor], tmp_path: Path
) -> None:
    model = network()
    model.register_buffer("others", make())
    with pytest.raises(OutputError, match="others"):
        normswap.save(model, tmp_path / "network")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float32])
def test_buffers_that_are_not_saved_keep_their_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = network()
    model.register_buffer("waves", torch.ones(4, dtype=dtype), persistent=False)
    model.register_buffer("order", torch.arange(4), persistent=False)
    skeleton = network()
    skeleton.register_buffer("waves", torch.ones(4), persistent=False)
    skeleton.register_buffer("order", torch.arange(4), persistent=False)

    loaded = normswap.load(saved(model, tmp_path), skeleton=skeleton)

    assert loaded.get_buffer("waves").dtype is dtype
    assert loaded.get_buffer("order").dtype is torch.int64


def test_a_skeleton_without_values_is_filled(tmp_path: Path) -> None:
    done = normswap.convert(network(nn.Conv2d(8, 4, 1)), "folded", inputs=IMAGES)
    place = normswap.save(done, tmp_path / "network")
    with torch.device("meta"):
        skeleton = network(nn.Conv2d(8, 4, 1))

    loaded = normswap.load(place, skeleton=skeleton)

    with torch.no_grad():
        assert torch.equal(loaded(IMAGES), done.model(IMAGES))
    assert all(parameter.is_meta for parameter in skeleton.parameters())


def tied() -> nn.Sequential:
    """Two layers behind a norm that hold the same tensors, one of which is a buffer."""
    first = nn.Conv2d(8, 8, 1)
    first.register_buffer("scale", torch.full((1,), 2.0))
    second = nn.Conv2d(8, 8, 1)
    second.weight = first.weight
    second.bias = first.bias
    return network(first, second)


def test_parameters_of_a_skeleton_without_values_stay_what_they_are(tmp_path: Path) -> None:
    done = normswap.convert(tied(), "folded", inputs=IMAGES)
    place = normswap.save(done, tmp_path / "network")
    with torch.device("meta"):
        skeleton = tied()
    skeleton.get_parameter("3.bias").requires_grad_(False)

    loaded = normswap.load(place, skeleton=skeleton)

    parameters = dict(loaded.named_parameters())
    assert parameters.keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert all(isinstance(parameter, nn.Parameter) for parameter in parameters.values())
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    assert frozen == ["3.bias"]
    assert loaded.get_parameter("3.weight") is loaded.get_parameter("4.weight")
    buffers = dict(loaded.named_buffers())
    assert buffers.keys() == {"3.scale"}
    assert not isinstance(buffers["3.scale"], nn.Parameter)


def test_values_that_no_file_holds_are_missed_in_a_skeleton_without_values(tmp_path: Path) -> None:
    model = network()
    model.register_buffer("waves", torch.ones(4), persistent=False)
    place = saved(model, tmp_path)
    with torch.device("meta"):
        skeleton = network()
        skeleton.register_buffer("waves", torch.ones(4), persistent=False)

    with pytest.raises(SourceError, match="waves"):
        normswap.load(place, skeleton=skeleton)
