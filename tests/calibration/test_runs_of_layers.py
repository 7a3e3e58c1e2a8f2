"""How often each layer runs while values are fitted: what a calibration costs, without a clock."""

from collections import Counter

import torch
import zoo_networks
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from normswap.calibration import sequential_fit
from normswap.surgery import conversion

IMAGES, LOOKS = 16, 8  # and the images with which a network is looked at before it is run


def test_a_fit_runs_each_layer_once_over_the_images_and_their_mirror_images() -> None:
    images = torch.randn(IMAGES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model = zoo_networks.trained("preact")
    result = conversion.convert(model, "groupnorm", relative_eps=0.0, inputs=images[:2]).model
    through: Counter[nn.Module] = Counter()

    def look(module: nn.Module, args: tuple[Tensor, ...], _output: object) -> None:
        through[module] += len(args[0])

    handle = register_module_forward_hook(look)
    try:
        sequential_fit.refit(model, result, [images])
    finally:
        handle.remove()
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            assert max(through[module], through[result.get_submodule(path)]) <= 2 * IMAGES + LOOKS, path
