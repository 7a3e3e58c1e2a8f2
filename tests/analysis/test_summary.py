"""What is counted of a network and told of a conversion, against counts by hand."""

from typing import Any

import torch
from torch import nn

import normswap
from normswap.analysis import summary


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 1, bias=False),
        nn.BatchNorm2d(6),
        nn.GroupNorm(2, 6),
        nn.Flatten(),
        nn.Linear(6 * 4, 5),
    ).eval()


def test_sizes_count_norms_and_the_numbers_of_parameters() -> None:
    model = network()
    # The two norms share a gamma, which counts once.
    model[5].weight = model[4].weight

    sizes = summary.sizes(model)

    convolutions = (4 * 27 + 4) + 6 * 4
    norms = (4 + 4) + (6 + 6) + 6
    assert sizes == {"norms": 3, "parameters": convolutions + norms + (24 * 5 + 5)}


def test_a_conversion_tells_which_norms_stay() -> None:
    conversion = normswap.convert(network(), "folded", inputs=torch.randn(2, 3, 4, 4), only=["1"])

    (body,) = summary.of_conversion(conversion)

    assert body["left"] == {"BatchNorm2d that stay": 1, "GroupNorm that stay": 1}
    assert body["verdicts"].keys() == {"1"}
    assert body["report"]["verdict"] == "PROVED"
    assert all(error["within"] for error in body["report"]["logits"])
