"""The network inside a file: folded, perhaps with normalization before it and a softmax after it.

Images and answers are in float32, whatever the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normswap import copying
from normswap.exporting.settings import Quantization
from normswap.exporting.signature import Signature
from normswap.graph.tracing import LINEAR
from normswap.models.calling import Example
from normswap.models.modes import hooked
from normswap.sites import own_forwards


class Shipped(nn.Module):
    """A network as a file holds it, with inputs and outputs in float32.

    By default images (N, C, H, W) go in and scores (N, classes) come out.

    Args:
        network: A folded network, in float32.
        signature: The names of inputs and outputs, and how the network is called with them.
        normalization: The mean and the standard deviation, (C, 1, 1) each, of a network that takes
            pixels in 0..1 and normalizes them itself.
        softmax: Whether it gives probabilities.

    Attributes:
        dtype: The type in which the file computes.
        stored: The type in which the file stores the weights of layers. In a bfloat16 file it
            differs from `dtype`, which is float32.
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(
        self,
        network: nn.Module,
        signature: Signature | None = None,
        *,
        normalization: tuple[Tensor, Tensor] | None = None,
        softmax: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.signature = signature or Signature.of_images(network, "logits")
        # `in_half` changes these.
        self.dtype = self.stored = torch.float32
        self.normalization = normalization
        self.softmax = softmax
        # Without normalization, the buffers `mean` and `std` are None.
        for name, values in zip(("mean", "std"), normalization or (None, None), strict=True):
            self.register_buffer(name, values)
        self.eval().requires_grad_(False)

    def around(self, network: nn.Module) -> Shipped:
        """Return a copy of this module that holds another network.

        The copy has the same inputs and outputs, normalization and softmax, and is in float32.

        Args:
            network: The other network, in float32.
        """
        return Shipped(
            network, self.signature, normalization=self.normalization, softmax=self.softmax
        )

    def in_half(self, dtype: torch.dtype) -> Shipped:
        """Convert this module to half precision, in place, and return it.

        Args:
            dtype: The precision: float16 for weights and arithmetic, or bfloat16 for weights alone.
        """
        self.stored = dtype
        if dtype == torch.float16:
            self.network.half()
            self.dtype = dtype
            return self
        # In bfloat16, the weights of layers are rounded but stay in float32.
        for module in nn.Module.modules(self.network):
            if isinstance(module, LINEAR):
                module.weight.copy_(module.weight.bfloat16())
        return self

    @torch.no_grad()
    def rounded(self, dtype: torch.dtype) -> Shipped:
        """Return a copy that shows how much rounding to half precision costs the network.

        The copy computes in float32, with weights rounded to the given type. For float16, the
        outputs of layers are rounded as well, since a float16 file computes in float16. A bfloat16
        file computes in float32.

        Args:
            dtype: float16 or bfloat16.
        """
        twin = copying.duplicate(self.network, {})
        for tensor in nn.Module.parameters(twin):
            tensor.copy_(tensor.to(dtype))
        for module in nn.Module.modules(twin):
            is_layer = not list(nn.Module.children(module))
            if dtype == torch.float16 and is_layer:
                module.register_forward_hook(lambda _module, _args, output: _halved(output))
        return self.around(twin)

    def forward(self, images: Tensor, *others: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Compute what the file computes, with inputs and outputs in float32.

        Args:
            images: The first input, images (N, C, H, W) by default.
            others: All further inputs of the file.

        Returns:
            The output, or a tuple if there are several.
        """
        if self.mean is not None and self.std is not None:
            images = (images - self.mean) / self.std
        inputs = self._cast((images, *others), self.dtype)
        answers = self._cast(self.signature.call(self.network, inputs), torch.float32)
        if len(answers) > 1:
            return answers
        if self.softmax:
            return answers[0].softmax(-1)
        return answers[0]

    def _cast(self, values: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return tensors in another type. Integer tensors stay as they are.

        If the file computes in float32, nothing is cast.

        Args:
            values: The tensors.
            dtype: The type.
        """
        # Even a cast to the same dtype would be a node of the graph.
        if self.dtype == torch.float32:
            return values
        return tuple(_with_dtype(value, dtype) for value in values)


def _with_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a floating-point tensor in another dtype. An integer tensor is returned as it is."""
    return value.to(dtype) if value.is_floating_point() else value


@torch.no_grad()
def correct_biases(network: Shipped, how: Quantization, *, halves: bool = False) -> None:
    """Add to each bias, in place, the mean output that rounding the weights loses.

    The bias grows by E[(W - rounded W) x], with x in float32 and the mean over images, in batches
    of one size. A layer that does not compute what its weight says keeps its bias.

    Args:
        network: The network, in float32.
        how: The images, and the bits of a weight.
        halves: Whether the quantizer makes 7-bit weights by halving the range of 8-bit ones: the
            largest weight is 63.5 steps from 0, in place of 127. Depthwise layers keep 127.

    Source: Nagel et al. 2019, section 4.2.
    """
    lost_means: dict[nn.Module, list[Tensor]] = {}

    def watch(layer: nn.Module) -> RemovableHandle:
        """Have a layer note, at each of its calls, what its outputs lose by rounding its weights.

        The mean per output channel is added to `lost_means`. The handle that is returned removes
        the hook.
        """
        # A copy of the layer computes the loss: its weight is the layer's weight less the rounded
        # weight, and it has no bias.
        losing = copying.duplicate(layer, {})
        levels = _levels_of(layer, how, halves=halves)
        losing.get_parameter("weight").sub_(_rounded(layer, levels))
        losing.register_parameter("bias", None)

        def add_loss(_layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            channel_dim = -1 if isinstance(layer, nn.Linear) else 1
            by_channel = losing(*args).movedim(channel_dim, 0).flatten(1)
            lost_means.setdefault(layer, []).append(by_channel.double().mean(1))

        return layer.register_forward_pre_hook(add_loss)

    linear = [
        module
        for module in nn.Module.modules(network)
        if isinstance(module, LINEAR) and "weight" in module._parameters
    ]
    # A layer with a forward of its own may compute something else than its weight says. A trial run
    # tells (`own_forwards.computes`). If it does, its bias is not corrected.
    plain = [
        layer for layer in linear if not own_forwards.is_own(layer) or own_forwards.computes(layer)
    ]
    with hooked([watch(layer) for layer in plain]):
        for images in how.images:
            network(images)

    # All batches have one size, so the mean of their means is the mean over all images.
    for layer, means in lost_means.items():
        bias = layer.get_parameter("bias") if layer.bias is not None else 0
        layer.bias = nn.Parameter(torch.stack(means).mean(0).float() + bias, requires_grad=False)


def _levels_of(layer: nn.Module, how: Quantization, *, halves: bool) -> float:
    """Return how many quantization steps the largest weight of a layer has.

    Args:
        layer: The layer.
        how: The bits of a weight.
        halves: Whether the quantizer makes 7-bit weights by halving the range of 8-bit ones: the
            largest weight is 63.5 steps from 0, in place of 127. Depthwise layers keep 127.
    """
    levels: float = how.levels
    # `how.levels` is below 127 if weights have 7 bits.
    if halves and levels < 127:
        levels = 127 if own_forwards.is_depthwise(layer) else 63.5
    return levels


def _rounded(layer: nn.Module, levels: float) -> Tensor:
    """Return the weight of a layer as a quantizer rounds it.

    Each number becomes a multiple of the quantization step of its output channel.

    Args:
        layer: The layer.
        levels: How many steps the largest weight of a channel has.
    """
    step = _step(layer, levels)
    return (layer.get_parameter("weight") / step).round() * step


def _step(layer: nn.Module, levels: float) -> Tensor:
    """Return the quantization step of each output channel of a layer.

    It is the largest absolute weight of the channel, divided by `levels`.

    Args:
        layer: The layer.
        levels: How many steps the largest weight of a channel has.
    """
    weight = layer.get_parameter("weight")
    # The output channels are dimension 1 of a transposed convolution's weight, else dimension 0.
    # The maximum is taken over all other dimensions.
    reduced_dims = [1 - getattr(layer, "transposed", False), *range(2, weight.ndim)]
    # A channel of zeros would have the step 0, by which nothing can be divided.
    return (weight.abs().amax(reduced_dims, keepdim=True) / levels).clamp_min(
        torch.finfo(weight.dtype).tiny
    )


@torch.no_grad()
def first_missing(network: nn.Module, content: bytes, example: Example, dtype: str) -> str:
    """Return the path of the first weight or bias whose bytes are nowhere in a file, or "".

    A file may have output or input channels last. In int8 only weights are looked for, as the steps
    of biases depend on images.

    Args:
        network: The network that the file should hold.
        content: The bytes of the file.
        example: A call of the network, which tells the order in which its layers run.
        dtype: The precision of the file.
    """
    # Run the network, to see in which order its linear layers and convolutions are called. `called`
    # lists a layer as often as it is called.
    paths: dict[nn.Module, str] = {
        m: path for path, m in nn.Module.named_modules(network) if isinstance(m, LINEAR)
    }
    called: list[nn.Module] = []
    with hooked(
        [layer.register_forward_pre_hook(lambda layer, _: called.append(layer)) for layer in paths]
    ):
        example.call_on_copies(network)

    # Look for the bytes of each tensor in the file.
    for layer in dict.fromkeys(called):
        for name, tensor in nn.Module.named_parameters(layer, recurse=False):
            if dtype == "int8" and name == "bias":
                continue
            stored = tensor.half() if dtype == "fp16" else tensor.data
            if dtype == "int8":
                # torch's quantizer multiplies by 1 / step. A division would round some numbers half
                # way between two steps another way.
                stored = (tensor * (1 / _step(layer, 127))).round().char()
            # The output or the input channels, dimensions 0 and 1, may stand last in the file.
            orders = (stored, *(stored.movedim(dim, -1) for dim in range(min(tensor.ndim, 2))))
            if not any(order.numpy().tobytes() in content for order in orders):
                return f"{paths[layer]}.{name}"

    return ""


def _halved(output: object) -> object:
    """Round a floating-point tensor to the numbers of float16, and return it in float32.

    Anything else is returned as it is.
    """
    if isinstance(output, Tensor) and output.is_floating_point():
        return output.half().float()
    return output


@dataclass(frozen=True)
class FileContents:
    """All that is written into an exported file: the network and its metadata.

    Args:
        network: The network to write.
        example: The inputs for tracing: images (N, C, H, W), or all that the network takes.
        dynamic: Whether the file takes any number of samples at a time.
        metadata: The texts to write into the file, by name.
    """

    network: Shipped
    example: tuple[Tensor, ...]
    dynamic: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def in_float32(self) -> FileContents:
        """The same contents with a copy of the network in float32, if it is in float16.

        They are for a tool that takes a network in float32 and converts it to float16 by itself.
        """
        if self.network.dtype != torch.float16:
            return self
        network = copying.duplicate(self.network.network, {}).float()
        return replace(self, network=self.network.around(network))

    @property
    def dynamic_shapes(self) -> tuple[object, ...] | None:
        """The argument `dynamic_shapes` of torch.export, which says which dimensions may vary.

        It is the first dimension of every input, the number of samples. The value is None if the
        file takes a fixed number.
        """
        if not self.dynamic:
            return None
        batch: Mapping[int, object] = {0: torch.export.Dim("batch", min=1)}
        # `Shipped.forward` takes the first input by itself, and all others as *others.
        if len(self.example) == 1:
            return (batch,)
        return (batch, (batch,) * (len(self.example) - 1))
