"""The inputs and outputs of a file, by name: images and an answer, or all of the network's."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normswap.errors import NormswapError, OptionError, explained, first_line
from normswap.models.calling import Example, form, named_arguments, named_tensors
from normswap.models.modes import undisturbed
from normswap.models.network_input import answer

INPUT = "images"
_OTHERS = (
    "Without int8, normalize and softmax, all that it gives goes into a file with a graph, as it is"
)


class NoAnswerError(OptionError):
    """Raised if the network's answer is not one tensor with a row per image.

    Such a network gives boxes, for example. It can still be exported with all of its outputs.
    """


@dataclass(frozen=True)
class Signature:
    """The names of a file's inputs and outputs, and how the network inside is called with them.

    Args:
        form: The arguments of a call of the network, with empty tensors in place of its tensors.
        inputs: The names of the file's inputs, in order.
        outputs: The names of the file's outputs, in order.
        whole: Whether all tensors of the network go in and come out, one by one. Otherwise images
            go in and the answer comes out.
    """

    form: Example
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    whole: bool = False

    @classmethod
    def of_images(cls, model: nn.Module, output: str) -> Signature:
        """Return the signature of a file that takes images (N, C, H, W) and gives one answer.

        Args:
            model: The network.
            output: The name of the answer in the file, such as `logits`.
        """
        return cls(form(model), (INPUT,), (output,))

    @classmethod
    def of(cls, model: nn.Module, example: Example) -> Signature:
        """Return the signature of a file that takes and gives every tensor of the network.

        An input or output is named by forward's argument, and by the keys of dicts and the
        attributes of objects that lead to it.

        Args:
            model: The network.
            example: A call of the network.

        Raises:
            OptionError: The network does not run, or gives no tensor.
        """
        taken = _named(named_arguments(model, example), "input")
        with (
            explained(OptionError, f"the network does not run on {example}"),
            undisturbed(model),
            torch.no_grad(),
        ):
            output = example.call_on_copies(model)

        outputs = _named(output, "output")
        if not outputs:
            raise OptionError("the network gives no tensor", f"it gives a {type(output).__name__}")

        # An output that has the name of an input gets another name, which no other output has.
        names = list(outputs)
        for i, name in enumerate(names):
            if name in taken:
                names[i] = _new_among(names, f"output_{name}")

        # `hollow` is the call with empty tensors, as only the places of its tensors are needed.
        return cls(example.hollow, tuple(taken), tuple(names), whole=True)

    def example(self, tensors: Sequence[Tensor]) -> Example:
        """Return the call of the network that has some tensors as its arguments.

        Args:
            tensors: The inputs of the file, in the order of `inputs`: images, or all tensors that
                the network takes.
        """
        # `form` is a call of the network with an empty tensor in the place of each input. Unless
        # the file takes all inputs (`whole`), it takes images alone.
        if not self.whole:
            return self.form.of(tensors[0])
        # Each empty tensor is replaced by the next input.
        values = iter(tensors)
        return self.form.map(lambda _: next(values))

    def call(self, network: nn.Module, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run a network on the file's inputs, and return its outputs in the order of `outputs`.

        Args:
            network: The network.
            tensors: The inputs, in the order of `inputs`.
        """
        output = self.example(tensors).call(network)
        if not self.whole:
            return (answer(output),)
        return tuple(value for _, value in named_tensors(output))

    def answers(self, network: nn.Module, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Run a network on the inputs of the file, and return its outputs by name.

        They have no gradients. Floating-point outputs are in float32.

        Args:
            network: The network.
            tensors: The inputs, in the order of `inputs`.

        Raises:
            OptionError: The network does not run.
            NoAnswerError: The network does not give one tensor with a row per image.
        """
        try:
            with torch.no_grad():
                # The forward may write into its input, so it gets copies.
                outputs = self.call(network, [tensor.clone() for tensor in tensors])
        # `call` found no answer among the network's outputs.
        except NormswapError as error:
            raise NoAnswerError(error.what, error.why, _OTHERS) from None
        # The forward is the user's, and may raise anything.
        except Exception as error:
            what = f"an input of size {','.join(map(str, tensors[0].shape[1:]))}"
            raise OptionError(f"the network does not run on {what}", first_line(error)) from None

        if len(outputs) != len(self.outputs):
            raise OptionError(
                f"the network gives {len(outputs)} tensors here and {len(self.outputs)} on the"
                " first input",
                "a file always gives the same",
            )
        if not self.whole and (outputs[0].ndim < 2 or len(outputs[0]) != len(tensors[0])):
            raise NoAnswerError(
                "the network does not give one tensor, a row per image", remedy=_OTHERS
            )
        pairs = zip(self.outputs, outputs, strict=True)
        return {
            name: value.float() if value.is_floating_point() else value for name, value in pairs
        }


def _named(value: object, alone: str) -> dict[str, Tensor]:
    """Return every tensor in a value, by a name that is made of the keys on the way to it.

    Args:
        value: A tensor, or dicts, lists and objects that hold tensors.
        alone: The name of a tensor that no key leads to. If the keys begin with a digit, as for the
            items of a list, this word is put before them: `output_0`.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in named_tensors(value):
        # Different names can become equal here, as a.b and a_b. A number is then added, below.
        key = name.replace(".", "_")
        if not key or key[0].isdigit():
            key = "_".join(filter(None, (alone, key)))
        named[_new_among(named, key)] = tensor
    return named


def _new_among(named: Collection[str], key: str) -> str:
    """Return the key, with a number behind it if these names have it already."""
    numbered = (f"{key}_{number}" for number in itertools.count(len(named)))
    return next(name for name in itertools.chain([key], numbered) if name not in named)


def together(x: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a tuple of tensors, from a single tensor or a sequence of tensors."""
    if isinstance(x, Tensor):
        return (x,)
    return tuple(x)


def alone(values: Iterable[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """Return the tensor itself if there is only one, or else a tuple of all tensors."""
    several = tuple(values)
    if len(several) == 1:
        return several[0]
    return several
