"""What `inspect` says about ten families: roles, blocks, stages, classifier, for one small network of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
import timm

from normswap.anatomy import Anatomy, inspect


@dataclass(frozen=True)
class Row:
    """What must be seen: norms by role; blocks by skip and order; for some norms, by path, their role."""

    arch: str
    roles: dict[str, int]
    blocks: dict[str, int]
    stages: str
    classifier: str
    norms: dict[str, str] = field(default_factory=dict)
    kind: str = "BatchNorm"

    def __str__(self) -> str:
        return self.arch


ROWS = [
    Row("regnety_002", {"stem": 1, "other": 26, "last": 13, "down": 4}, {"projection post": 4, "identity post": 9},
        "s1 s2 s3 s4", "head.fc",
        {"stem.bn": "stem", "s2.b1.conv3.bn": "last", "s2.b1.downsample.bn": "down", "s4.b7.conv1.bn": "other"}),
    Row("efficientnet_b0", {"stem": 6, "other": 30, "last": 9, "head": 4}, {"identity linear": 9},
        "blocks.1 blocks.2 blocks.3 blocks.4 blocks.5", "classifier",
        {"bn1": "stem", "blocks.0.0.bn1": "stem", "blocks.2.1.bn3": "last", "blocks.2.0.bn3": "other", "bn2": "head"}),
    Row("mobilenetv3_small_050", {"stem": 6, "other": 20, "last": 7, "head": 1}, {"identity linear": 7},
        "blocks.1 blocks.2 blocks.3 blocks.4", "classifier",
        {"bn1": "stem", "blocks.1.1.bn3": "last", "blocks.1.1.bn1": "other", "blocks.5.0.bn1": "head"}),
    Row("densenet121", {"other": 121}, {}, "", "classifier"),
    Row("vgg11_bn", {"other": 8}, {}, "", "head.fc"),
    Row("dla34", {"stem": 3, "down": 4, "other": 17, "last": 12, "head": 1},
        {"projection post": 4, "identity post": 8},
        "level2 level3.tree1 level3.tree2 level4.tree1 level4.tree2 level5", "fc",
        {"base_layer.1": "stem", "level2.project.1": "down", "level2.tree2.bn2": "last", "level3.tree1.root.bn":
         "other", "level5.root.bn": "head"}),
    Row("res2net50_14w_8s", {"stem": 1, "other": 128, "last": 16, "down": 4},
        {"projection post": 4, "identity post": 12}, "layer1 layer2 layer3 layer4", "fc",
        {"layer1.1.bns.3": "other", "layer1.1.bn3": "last", "layer2.0.downsample.1": "down"}),
    Row("repvgg_a0", {"stem": 4, "other": 55, "head": 2}, {"other linear": 17}, "stages.0 stages.1 stages.2",
        "head.fc", {"stem.conv_1x1.bn": "stem", "stages.0.1.identity": "other", "stages.3.0.conv_kxk.bn": "head"}),
    Row("convnext_atto", {"stem": 1, "other": 15, "head": 1}, {"identity linear": 12},
        "stages.0 stages.1 stages.2 stages.3", "head.fc",
        {"stem.1": "stem", "stages.1.downsample.0": "other", "head.norm": "head"}, "LayerNorm"),
    Row("vit_tiny_patch16_224", {"other": 12, "last": 12, "head": 1}, {"identity pre": 24}, "blocks", "head",
        {"blocks.0.norm1": "other", "norm": "head"}, "LayerNorm"),
]  # fmt: skip


def summary(seen: Anatomy) -> tuple[Counter[str], Counter[str], str]:
    roles = Counter(norm.role for norm in seen.norms)
    blocks = Counter(f"{block.skip} {block.order}" for block in seen.blocks)
    return roles, blocks, " ".join(dict.fromkeys(_tree(block.stage) for block in seen.blocks))


def _tree(stage: str) -> str:
    """DLA's blocks hang in a tree: `level3.tree1.tree2` is in `level3.tree1`, `level2.tree1` in `level2`."""
    return stage.rsplit(".tree", 1)[0]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_anatomy_of(row: Row) -> None:
    seen = inspect(timm.create_model(row.arch))
    assert summary(seen) == (row.roles, row.blocks, row.stages)
    assert seen.classifier == row.classifier
    role = {norm.path: norm.role for norm in seen.norms}
    assert {path: role[path] for path in row.norms} == row.norms
    assert all(norm.kind.startswith(row.kind) for norm in seen.norms)
    assert all(block.gate is None for block in seen.blocks), "squeeze-excite is in the middle, and LayerScale no gate"
    assert all(block.tail and block.tail.startswith(f"{block.path.split('+')[0]}.") for block in seen.blocks)
