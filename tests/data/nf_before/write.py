"""Writes the directory beside this file, as it was run when `mean` of `nf` was (O, 1, 1, 1).

It shows that directories of then still load: `python tests/data/nf_before/write.py` at commit
a1987ab7 wrote `network/` and `outputs.safetensors`.
"""

from pathlib import Path

import timm
import torch
from safetensors.torch import save_file
from torch import nn

import normswap

HERE = Path(__file__).parent
ARGUMENTS = {"channels": (4, 4, 4, 4), "layers": (1, 1, 1, 1), "num_classes": 3}

torch.manual_seed(0)
source = timm.create_model("resnet18", **ARGUMENTS).eval()
for layer in source.modules():
    if isinstance(layer, nn.BatchNorm2d):
        nn.init.normal_(layer.running_mean, 0, 0.2)
        nn.init.uniform_(layer.running_var, 0.5, 2)
        nn.init.uniform_(layer.weight, 0.5, 1.5)

conversion = normswap.convert(source, to="nf", mean="keep", input_size=(3, 32, 32))
normswap.save(conversion, HERE / "network")
images = torch.randn(2, 3, 32, 32)
with torch.no_grad():
    outputs = conversion.model(images)
save_file({"images": images, "outputs": outputs}, HERE / "outputs.safetensors")
