"""What `inspect` says of fifteen networks, against figures worked out by hand.

The figures follow He et al. 2015 and Kim et al. 2022. The last tests are about auxiliary heads,
which only training runs.
"""

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import timm
import torch
import torchvision
from support.lived_in_networks import batchnorms, lived_in
from torch import Tensor, nn

import normswap
from normswap.graph.inspection import Anatomy, inspect
from normswap.models.modes import evaluating, with_heads
from normswap.proof import comparison
from normswap.surgery.network import Network
from normswap.surgery.verification import verify


@dataclass(frozen=True)
class Row:
    """What must be seen in a network.

    Args:
        arch: Its name in timm.
        roles: The number of norms with each role.
        blocks: The number of blocks with each skip and order.
        stages: The paths of the stages, in order.
        classifier: The path of the classifier.
        norms: The role of some norms, by path.
        kind: What the class of every norm is called, or begins with.
        ends: The tail, the last norm and the gate of every block, as paths within it.
        dropout: The path of the dropout before the classifier; None where it is not looked at.
    """

    arch: str
    roles: dict[str, int]
    blocks: dict[str, int]
    stages: str
    classifier: str
    norms: dict[str, str] = field(default_factory=dict)
    kind: str = "BatchNorm"
    ends: tuple[str, str, str | None] | None = None
    dropout: str | None = None

    def __str__(self) -> str:
        return self.arch


# How the norms were counted, from the papers and timm's source, not from our output.
#
# `stem`: before the end of the first residual block, and in no block; `head`: after the last block;
# `down`: on projection skips; `last`: one per block.
#
# ResNets: basic blocks have 2 norms, bottlenecks 3; stages of 2-2-2-2 and 3-4-6-3; the first block
# of a stage projects its skip, but for the first stage of basic blocks. In v2 the first norm of a
# downsampling block feeds its projection: it counts as `down`.
#
# RegNetY-200MF: 1 + 1 + 4 + 7 = 13 bottlenecks of 3 norms, the first of each stage with a
# projection; stem 1.
#
# MobileNetV3-small x 0.5: 1 depthwise-separable, 10 inverted residuals, 1 convolution: 1 + 2 + 30 +
# 1 = 34 norms. Residual: blocks.1.1, 2.1, 2.2, 3.0 (24 channels before and after, at half width),
# 3.1, 4.1, 4.2 = 7; before: 6.
#
# DLA-34: base and levels 0, 1: 3. BasicBlocks 2 + 4 + 4 + 2 = 12, of which the first of each level
# has a projection (4); a root for every pair: 6, the last of them after the last block.
#
# HRNet-W18-small (v1): stem 2; layer1 one bottleneck; 2 BasicBlocks in each of 2 + 3 + 4 branches =
# 18; 4 incre bottlenecks: 23 blocks, the 5 bottlenecks with projections. Others in blocks: 5 * 2 +
# 18 = 28; transitions 2 + 1 + 1; fusions, one per convolution up (1 + 3 + 6) and one per halving (1
# + 4 + 10): 25; 3 downsamplings: 60; final_layer 1.
#
# Res2Net-50 14w 8s: 16 blocks of bn1, 7 bns, bn3.
#
# RepVGG-A0: stem, 2 + 4 + 14 + 1 blocks of 2 norms; identity norms where shape is kept: 1 + 3 + 13
# = 17 sums that have an identity arm (whose norm is neither a projection's nor a branch's last).
# Before the first of them 2 + 2; after: 2.
#
# ConvNeXt: 2 + 2 + 6 + 2 blocks of 1, stem 1, 3 downsamplings, head 1. ViT-Ti: 12 * 2 + 1. Swin-T:
# patch_embed 1, 12 * 2, 3 mergings, 1. In all three two linear layers follow the norms of the MLPs,
# so none is a branch's last.
LAYERS = "layer1 layer2 layer3 layer4"
STAGES = "stages.0 stages.1 stages.2 stages.3"
ROWS = [
    Row(
        "resnet18",
        {"stem": 1, "last": 8, "down": 3, "other": 8},
        {"identity post": 5, "projection post": 3},
        LAYERS,
        "fc",
        ends=("bn2", "bn2", None),
        dropout="drop_rate",
    ),
    Row(
        "resnet50",
        {"stem": 1, "last": 16, "down": 4, "other": 32},
        {"identity post": 12, "projection post": 4},
        LAYERS,
        "fc",
        {"bn1": "stem", "layer1.0.downsample.1": "down", "layer4.0.downsample.1": "down"},
        ends=("bn3", "bn3", None),
        dropout="drop_rate",
    ),
    Row(
        "resnet50d",
        {"stem": 3, "last": 16, "down": 4, "other": 32},
        {"identity post": 12, "projection post": 4},
        LAYERS,
        "fc",
        ends=("bn3", "bn3", None),
    ),
    Row(
        "ecaresnet50t",
        {"stem": 3, "last": 16, "down": 4, "other": 32},
        {"identity post": 12, "projection post": 4},
        LAYERS,
        "fc",
        ends=("se", "bn3", "se"),
    ),
    Row(
        "resnetv2_50",
        {"last": 16, "down": 4, "other": 28, "head": 1},
        {"identity pre": 12, "projection pre": 4},
        STAGES,
        "head.fc",
        {"stages.0.blocks.0.norm1": "down", "stages.3.blocks.0.norm1": "down", "norm": "head"},
        ends=("drop_path", "norm3", None),
        dropout="head.drop",
    ),
    Row(
        "resnetv2_18",
        {"last": 8, "down": 3, "other": 5, "head": 1},
        {"identity pre": 5, "projection pre": 3},
        STAGES,
        "head.fc",
        ends=("drop_path", "norm2", None),
        dropout="head.drop",
    ),
    Row(
        "regnety_002",
        {"stem": 1, "other": 26, "last": 13, "down": 4},
        {"projection post": 4, "identity post": 9},
        "s1 s2 s3 s4",
        "head.fc",
        {
            "stem.bn": "stem",
            "s2.b1.conv3.bn": "last",
            "s2.b1.downsample.bn": "down",
            "s4.b7.conv1.bn": "other",
        },
    ),
    Row(
        "mobilenetv3_small_050",
        {"stem": 6, "other": 20, "last": 7, "head": 1},
        {"identity linear": 7},
        "blocks.1 blocks.2 blocks.3 blocks.4",
        "classifier",
        {
            "bn1": "stem",
            "blocks.1.1.bn3": "last",
            "blocks.1.1.bn1": "other",
            "blocks.5.0.bn1": "head",
        },
    ),
    Row(
        "dla34",
        {"stem": 3, "down": 4, "other": 17, "last": 12, "head": 1},
        {"projection post": 4, "identity post": 8},
        "level2 level3.tree1 level3.tree2 level4.tree1 level4.tree2 level5",
        "fc",
        {
            "base_layer.1": "stem",
            "level2.project.1": "down",
            "level2.tree2.bn2": "last",
            "level3.tree1.root.bn": "other",
            "level5.root.bn": "head",
        },
    ),
    Row(
        "res2net50_14w_8s",
        {"stem": 1, "other": 128, "last": 16, "down": 4},
        {"projection post": 4, "identity post": 12},
        "layer1 layer2 layer3 layer4",
        "fc",
        {"layer1.1.bns.3": "other", "layer1.1.bn3": "last", "layer2.0.downsample.1": "down"},
    ),
    Row(
        "repvgg_a0",
        {"stem": 4, "other": 55, "head": 2},
        {"other linear": 17},
        "stages.0 stages.1 stages.2",
        "head.fc",
        {
            "stem.conv_1x1.bn": "stem",
            "stages.0.1.identity": "other",
            "stages.3.0.conv_kxk.bn": "head",
        },
    ),
    Row(
        "convnext_atto",
        {"stem": 1, "other": 15, "head": 1},
        {"identity linear": 12},
        "stages.0 stages.1 stages.2 stages.3",
        "head.fc",
        {"stem.1": "stem", "stages.1.downsample.0": "other", "head.norm": "head"},
        "LayerNorm",
    ),
    Row(
        "hrnet_w18_small",
        {"stem": 2, "other": 60, "last": 23, "down": 5, "head": 1},
        {"projection post": 5, "identity post": 18},
        "layer1 stage2.0.branches.0 stage2.0.branches.1 stage3.0.branches.0 stage3.0.branches.1"
        " stage3.0.branches.2 stage4.0.branches.0 stage4.0.branches.1 stage4.0.branches.2"
        " stage4.0.branches.3 incre_modules.0 incre_modules.1 incre_modules.2 incre_modules.3",
        "classifier",
        {
            "bn2": "stem",
            "layer1.0.downsample.1": "down",
            "stage3.0.branches.1.1.bn2": "last",
            "stage3.0.fuse_layers.0.1.1": "other",
            "final_layer.1": "head",
        },
    ),
    Row(
        "swin_tiny_patch4_window7_224",
        {"stem": 1, "other": 27, "head": 1},
        {"identity pre": 24},
        "layers.0 layers.1 layers.2 layers.3",
        "head.fc",
        {"patch_embed.norm": "stem", "layers.1.downsample.norm": "other", "norm": "head"},
        "LayerNorm",
    ),
    Row(
        "vit_tiny_patch16_224",
        {"other": 24, "head": 1},
        {"identity pre": 24},
        "blocks",
        "head",
        {"blocks.0.norm1": "other", "blocks.0.norm2": "other", "norm": "head"},
        "LayerNorm",
    ),
]


def summary(seen: Anatomy) -> tuple[Counter[str], Counter[str], str]:
    roles = Counter(norm.role for norm in seen.norms)
    blocks = Counter(f"{block.skip} {block.order}" for block in seen.blocks)
    return roles, blocks, " ".join(dict.fromkeys(_tree(block.stage) for block in seen.blocks))


def _tree(stage: str) -> str:
    """The stage without the last level of a tree.

    DLA's blocks hang in trees: `level3.tree1.tree2` is in `level3.tree1`, `level2.tree1` in
    `level2`.
    """
    return stage.rsplit(".tree", 1)[0]


BOTTLENECKS = ("resnet50", "resnet50d", "ecaresnet50t")
# Half as many channels; 64 come out of the stem.
NARROWER: dict[str, dict[str, Any]] = {
    name: {"channels": (32, 64, 128, 256)} for name in BOTTLENECKS
}
NARROWER["swin_tiny_patch4_window7_224"] = {"embed_dim": 24}


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.one_in(4)
def test_anatomy_of(row: Row) -> None:
    model = timm.create_model(row.arch, **NARROWER.get(row.arch, {}))
    seen = inspect(model)
    assert summary(seen) == (row.roles, row.blocks, row.stages)
    assert (seen.classifier, seen.refusals) == (row.classifier, ())
    assert row.dropout in (None, seen.dropout)

    role = {norm.path: norm.role for norm in seen.norms}
    assert {path: role[path] for path in row.norms} == row.norms

    for norm in seen.norms:
        module: Any = model.get_submodule(norm.path)
        assert (norm.kind, norm.channels) == (type(module).__name__, module.weight.numel())
        assert norm.kind.startswith(row.kind)

    for block in seen.blocks:
        path = block.path.split("+")[0]
        tail, last, gate = row.ends or (block.tail and block.tail[len(path) + 1 :], None, None)
        assert block.tail == f"{path}.{tail}"
        assert last is None or block.last == f"{path}.{last}"
        # Squeeze-and-excitation may stand in the middle, and LayerScale is no gate.
        assert block.gate == (gate and f"{path}.{gate}")
        assert row.ends is None or block.drop_path is None


class Two(nn.Module):
    """A trunk, a classifier, and a head that only training runs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.fc = nn.Linear(8, 4)
        self.aux = nn.Sequential(
            nn.Conv2d(8, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1)
        )

    def forward(self, x: Tensor) -> Any:
        """(N, 3, H, W) -> (N, 4), in training with the head's (N, 4)"""
        x = self.trunk(x)
        out = self.fc(x.mean((2, 3)))
        return (out, self.aux(x).mean((2, 3))) if self.training else out


class Asks(Two):
    """In training it wants targets, too."""

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        """As that of `Two`."""
        if self.training and target is None:
            raise ValueError("targets")
        return self.fc(self.trunk(x).mean((2, 3)))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(
        4, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )


def lived(model: nn.Module, x: Tensor) -> nn.Module:
    """Also what eval mode does not reach gets statistics and gammas of its own."""
    model = lived_in(model, x).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                module.running_var.uniform_(0.5, 2)
                module.running_mean.normal_()
                module.weight.uniform_(-1, 2)
                module.bias.normal_()
    return model


def head(model: Any, x: Tensor) -> Tensor:
    """What the head gives, without the forward's help."""
    with torch.no_grad(), evaluating(model):
        return model.aux(model.trunk(x)).mean((2, 3))


def test_heads_are_folded(x: Tensor) -> None:
    model = lived(Two(), x)
    done = normswap.convert(model, to="folded", inputs=x)
    assert batchnorms(done.model) == []
    assert not model.training
    torch.testing.assert_close(head(done.model, x), head(model, x), rtol=1e-11, atol=1e-11)
    assert any("auxiliary" in note for note in done.notes)


def test_a_wrong_head_fails_the_proof(x: Tensor) -> None:
    model = lived(Two(), x)
    result: Any = normswap.convert(model, to="folded", inputs=x).model
    network = Network(model, x)
    assert comparison.compare_networks(network, result).passed
    wrong = copy.deepcopy(result)
    wrong.aux[0].weight.data *= 1.001
    assert not comparison.compare_networks(network, wrong).passed
    assert verify(model, wrong, x).passed  # eval mode alone does not see it


def test_a_forward_that_wants_targets_keeps_its_head(x: Tensor) -> None:
    model = lived(Asks(), x)
    done = normswap.convert(model, to="folded", inputs=x)
    assert batchnorms(done.model) == ["aux.1"]
    assert str(done.outcomes["aux.1"]) == "never called by forward"


def test_the_mode_is_put_back() -> None:
    model = Two().eval()
    model.trunk.train()
    before = torch.get_rng_state()

    with with_heads(model):
        assert model.training
        assert not model.trunk[1].training
        torch.rand(3)

    assert [m.training for m in (model, model.trunk, model.trunk[1], model.aux)] == [
        False,
        True,
        True,
        False,
    ]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_googlenet() -> None:
    model = lived(
        torchvision.models.googlenet(weights=None, init_weights=False, num_classes=5),
        torch.randn(2, 3, 64, 64),
    ).float()
    done = normswap.convert(model, to="folded")

    assert batchnorms(done.model) == []

    example = torch.randn(2, 3, 96, 96)
    with torch.no_grad(), with_heads(model):
        expected = model(example)

    with torch.no_grad(), with_heads(done.model):
        found = done.model(example)
    for name in expected._fields:
        reference = getattr(expected, name).double()
        error = (reference - getattr(found, name).double()).norm()
        assert error <= 1e-4 * reference.norm(), name
