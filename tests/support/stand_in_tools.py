"""Stand-ins for tools that a machine may lack: what a format's module asks of them is recorded.

What a stand-in is given is compared with the network, so that a keyword that is lost shows without
the tool. That the tool itself takes it is tested where the tool is there.
"""

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normswap.exporting.exported_module import FileContents, Shipped
from normswap.exporting.signature import Signature
from normswap.models.calling import Example

# Records with any attributes, as the tools return them.
Record: Any = SimpleNamespace
METADATA = {"source": "a net", "labels": '["ä", "b"]'}


class Two(nn.Module):
    """Two inputs and two outputs, in an order that is not the alphabet's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, view: Tensor, other: Tensor) -> dict[str, Tensor]:
        x = self.conv(view)
        return {"wide": x, "narrow": (x * other).mean((2, 3))}


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """Put a stand-in of a module, and of the packages that it is in, where Python finds it."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        if not getattr(sys.modules.get(path), "is_stand_in", False):
            module: Any = ModuleType(path)
            module.is_stand_in = True
            monkeypatch.setitem(sys.modules, path, module)
    for key, value in contents.items():
        setattr(sys.modules[name], key, value)


def noise() -> None:
    """Write to both streams, as the tools do while they work."""
    print("a note of the tool")
    os.write(2, b"a note from C++\n")


def two_inputs() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(1, 3, 8, 6, generator=random), torch.randn(1, 4, 6, 4, generator=random)


def two(*, half: bool) -> nn.Module:
    """The network in float32. With `half`, its weights are numbers of float16."""
    torch.manual_seed(0)
    network = Two().eval()
    return network.half().float() if half else network


def two_contents(*, half: bool) -> FileContents:
    """The contents of a file of `two`, in fp16 if `half` is given."""
    network = two(half=False)
    inputs = two_inputs()
    shipped = Shipped(network, Signature.of(network, Example(inputs)))
    if half:
        shipped.in_half(torch.float16)
    return FileContents(shipped, inputs, metadata=METADATA)


def require_two(network: Any, *, half: bool) -> None:
    """A tool must be given the network in float32, with the weights that the file shall have."""
    with torch.no_grad():
        found = network(*two_inputs())
        wanted = two(half=half)(*two_inputs())
    for value, right in zip(found, wanted.values(), strict=True):
        torch.testing.assert_close(value, right, rtol=1e-6, atol=1e-6)
