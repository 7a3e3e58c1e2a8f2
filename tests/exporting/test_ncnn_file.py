"""ncnn: files of folded networks, in a process that has ncnn alone; what they cannot hold is said
in a line.
"""

from pathlib import Path

import pytest
import timm
import torch
from support import needs
from support.hand_written_networks import Anchored, Spectrum
from support.lived_in_networks import calm, distance, living, run
from support.runtime_process import run_alone
from torch import Tensor, nn

import normswap
from normswap.errors import NormswapError, RefusedError, VerificationError
from normswap.exporting import formats

ncnn = needs.package("ncnn")
needs.need("pnnx")


class UNet(nn.Module):
    """Transposed convolutions whose norms come after them, and one after the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.BatchNorm2d(8))
        self.deep = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 8, 2, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.out = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 2, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        down = self.down(x)
        return self.out(torch.cat([down, self.up(self.deep(down))], 1))


class Solid(nn.Sequential):
    """Convolutions in three dimensions."""

    def __init__(self) -> None:
        first = nn.Conv3d(1, 4, 3, padding=1)
        second = nn.Conv3d(4, 6, 3, 2, 1)
        super().__init__(first, nn.BatchNorm3d(4), nn.ReLU(), second, nn.BatchNorm3d(6), nn.ReLU())


def unfolded(nodes: dict[str, int]) -> list[str]:
    return [kind for kind in nodes if "Norm" in kind or kind == "Scale"]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["resnet10t", "mobilenetv2_035"])
def test_a_network_alone(name: str, dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 64, 64)
    model = calm(timm.create_model(name, num_classes=10), x).float()
    file = tmp_path / "net.ncnn.param"
    done = normswap.export(model, file, dtype=dtype, input_size=(3, 64, 64))

    assert (done.format, unfolded(done.nodes)) == ("ncnn", [])
    assert {p.name for p in tmp_path.iterdir()} == {
        "net.ncnn.param",
        "net.ncnn.bin",
        "net.ncnn.param.preprocess.json",
    }

    weights = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert file.with_suffix(".bin").stat().st_size < weights * {"fp32": 4.4, "fp16": 2.4}[dtype]
    assert (
        distance(run(model, x), run_alone(file, "ncnn", x))
        <= {"fp32": 1e-5, "fp16": done.figures.tolerance}[dtype]
    )


def test_a_unet_has_no_norm_left(tmp_path: Path) -> None:
    model, x = living(UNet(), 3, 32, 32)
    done = normswap.export(model, tmp_path / "net.param", images=x, input_size=(3, 32, 32))
    assert unfolded(done.nodes) == []
    assert distance(run(model, x), run_alone(done.file, "ncnn", x)) <= 1e-5


def test_three_dimensions(tmp_path: Path) -> None:
    model, x = living(Solid(), 1, 8, 12, 10)
    done = normswap.export(model, tmp_path / "net.param", inputs=x)
    assert unfolded(done.nodes) == []
    assert (done.figures.passed, done.figures.count) == (True, 3)


def test_a_transformer_and_anchors(tmp_path: Path) -> None:
    """pnnx knows neither the five dimensions of timm's attention nor a grid: what it is given
    instead has none.
    """
    sizes: dict[str, int] = {
        "img_size": 16,
        "patch_size": 4,
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 2,
    }

    transformer = timm.create_model("vit_tiny_patch16_224", num_classes=10, **sizes)
    for model in (transformer, Anchored()):
        model, x = living(model, 3, 16, 16)
        file = tmp_path / f"{type(model).__name__}.param"
        done = normswap.export(model, file, input_size=(3, 16, 16))
        assert not set(done.nodes) & {"torch.unbind", "aten::meshgrid", "Tensor.reshape"}
        assert distance(run(model, x), run_alone(file, "ncnn", x)) <= 1e-5


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()),
            {"dynamic_batch": True},
            "one image at a time",
        ),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), {"dtype": "bf16"}, "not written in bf16"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), {"dtype": "int8"}, "not written in int8"),
        (Spectrum(nn.Conv2d(3, 4, 3)), {}, "no layer torch.fft.fft2"),
    ],
    ids=["any number", "bf16", "int8", "a layer"],
)
def test_what_it_cannot_hold_is_said(
    model: nn.Module, options: dict[str, bool], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(NormswapError, match=reason):
        normswap.export(model.eval(), tmp_path / "net.param", input_size=(3, 8, 8), **options)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_file_with_a_layer_that_it_lacks_names_the_layer(tmp_path: Path) -> None:
    file = normswap.export(
        nn.Conv2d(3, 4, 3).eval(), tmp_path / "net.param", input_size=(3, 8, 8)
    ).file
    file.write_text(
        file.read_text(encoding="utf-8").replace("Convolution ", "aten::meshgrid "),
        encoding="utf-8",
    )
    with pytest.raises(
        VerificationError, match="ncnn cannot run it: it has no layer aten::meshgrid"
    ):
        formats.get("ncnn").open(file)


def test_what_pnnx_says_reaches_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pnnx.EXEC_PATH", "/bin/false")
    with pytest.raises(RefusedError, match="pnnx cannot express the network: it ends with 1"):
        normswap.export(nn.Conv2d(3, 4, 3).eval(), tmp_path / "net.param", input_size=(3, 8, 8))
