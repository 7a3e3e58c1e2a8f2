"""The record of a network: the module, and what `convert` and other functions need to know of it.

Its recorded structure (anatomy), calls and images are computed once, when they are first needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from normswap import copying, provenance
from normswap.calibration import synthetic_images
from normswap.calibration.synthetic_images import SyntheticImages
from normswap.errors import NormswapError, OptionError
from normswap.graph import inspection
from normswap.graph.inspection import Anatomy
from normswap.models import calling, network_input
from normswap.models.calling import Example, Inputs
from normswap.models.modes import Progress
from normswap.models.network_input import DrawnCalls
from normswap.proof import running
from normswap.provenance import Provenance

Batches: TypeAlias = Iterable[object] | Callable[[], Iterable[object]]
"""The images that values are fitted to: batches of what the network takes, or a function that
returns them.
"""


# A batch of at most so many samples is never cut to its first sample.
_SMALL_BATCH = 4


class HasModel(Protocol):
    """Any object that holds a network in its attribute `model`, such as a `Conversion`."""

    @property
    def model(self) -> nn.Module: ...


class _CallsOfBatches:
    """Batches as calls of a network. It can be iterated repeatedly if the batches can.

    Args:
        calibrate: The batches, the function or the single batch.
        form: The names and places of the arguments of a call, without their values.
    """

    def __init__(self, calibrate: Batches, form: Example) -> None:
        batches: object = calibrate
        if callable(calibrate):
            batches = calibrate()

        # A single batch may be given without a list around it. A tuple with one entry for each
        # argument of the network is one.
        is_arguments = isinstance(batches, tuple) and len(batches) == len(form.args) > 1
        is_batch = isinstance(batches, Tensor | Mapping | Example)
        if is_arguments or is_batch or not isinstance(batches, Iterable):
            batches = [batches]

        self.batches: Iterable[object] = batches
        self.form = form

    def __iter__(self) -> Iterator[Example]:
        # `read` returns the call and the labels, which are not needed here. Images that require a
        # gradient are detached.
        calls = (self.form.read(batch)[0] for batch in self.batches)
        return (call.map(Tensor.detach) for call in calls)

    def __length_hint__(self) -> int:
        return operator.length_hint(self.batches)


@dataclass(frozen=True, eq=False)
class Network:
    """A network, how it is called, and the images that its values are fitted to.

    No function that takes such a record changes it. The record stores what it has computed, so make
    another one after a change of the module.

    Args:
        module: The network itself.
        inputs: The network's inputs: a tensor, a tuple of arguments, a dict of keywords, or a list
            of batches of these. By default they are random ones of its stated shapes
            (`network_input.drawn_calls`), or N(0, 1) noise of `size`.
        size: The size of one input (C, H, W). By default the network's own (`network_input.size`),
            or that of the first batch to calibrate on.
        seed: The seed of all random numbers.
        calibrate: Batches to fit values to, a function that returns them, or "synthetic": images
            made from the statistics of the network's BatchNorms.
        progress: Called while values are fitted, with the number of layers done and their total.
    """

    module: nn.Module
    inputs: Inputs = None
    size: Sequence[int] | None = None
    seed: int = 0
    calibrate: Batches | str | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        # The caller may give a result that holds a network, such as a Conversion. Then the network
        # in it is taken. The record is frozen, so its fields are set by `object.__setattr__`.
        object.__setattr__(self, "module", network_input.require_module(self.module))
        network_input.require_size(self.size)
        network_input.require_seed(self.seed)

        # Without inputs and size, the inputs are random ones of the shapes that the network states.
        # If it states none, the first batch of images gives the size or the inputs.
        if self.inputs is None and self.size is None:
            object.__setattr__(
                self, "inputs", network_input.drawn_calls(self.module, seed=self.seed)
            )
            if self.inputs is None and network_input.stated_size(self.module) is None:
                self._look_at_images()

        if isinstance(self.calibrate, str) and self.calibrate != "synthetic":
            raise OptionError(
                f"calibrate={self.calibrate!r} is neither batches of images nor 'synthetic'"
            )

    def _look_at_images(self) -> None:
        """Set `size` or `inputs`, in place, to those of the first batch of images.

        Nothing is set if there are no images, or if looking would use up an iterator.
        """
        if self.calibrate is None or isinstance(self.calibrate, str | Iterator):
            return
        # Batches that cannot be read raise nothing here. The function that uses them says it.
        with suppress(NormswapError):
            # Only the first call is looked at. There may be none. `calling.form` is an empty call,
            # which shows how a batch is given to the network.
            for call in _CallsOfBatches(self.calibrate, calling.form(self.module)):
                of_images = call.only_images and not call.listed and call.images.is_floating_point()
                # Of images the size is enough, as noise can take their place. Of anything else the
                # first two samples become the inputs. The record is frozen, so its fields are set
                # by `object.__setattr__`.
                if of_images:
                    object.__setattr__(self, "size", call.size)
                else:
                    object.__setattr__(self, "inputs", [call.first(2)])
                return

    @classmethod
    def of(
        cls,
        model: nn.Module | Network | HasModel,
        *,
        inputs: Inputs = None,
        size: Sequence[int] | None = None,
        seed: int | None = None,
        calibrate: Batches | str | None = None,
        progress: Progress | None = None,
    ) -> Network:
        """Return the record of a module, or of a result that holds a module.

        Args:
            model: A module, a result that holds a module, or a record. A record is returned with
                the fields that are given below in place of its own. Inputs take the place of a
                size, and a size that of inputs. Another seed draws other inputs if they are drawn.
            inputs: The network's inputs, as the record's field of this name.
            size: The size (C, H, W) of one input.
            seed: The seed of all random numbers. By default it is 0, or the record's own.
            calibrate: The images to fit values to, as the record's field of this name.
            progress: Called while values are fitted, with the layers done and their total.

        Raises:
            OptionError: Both `inputs` and `size` are given.
            SourceError: `model` holds no module, or the module cannot be converted as it is.
        """
        if inputs is not None and size is not None:
            raise OptionError(
                "inputs= and input_size= both say what the network takes", remedy="Give one of them"
            )

        if not isinstance(model, Network):
            module = network_input.require_module(model)
            network_input.check_values(module)
            return cls(module, inputs, size, seed or 0, calibrate, progress)

        values = {
            "inputs": inputs,
            "size": size,
            "seed": seed,
            "calibrate": calibrate,
            "progress": progress,
        }
        changes: dict[str, Any] = {
            name: value for name, value in values.items() if value is not None
        }
        if not changes:
            return model
        if inputs is not None:
            changes["size"] = None
        is_drawn = isinstance(model.inputs, DrawnCalls)
        if size is not None or (seed is not None and is_drawn and inputs is None):
            changes["inputs"] = None

        network = replace(model, **changes)
        # The anatomy and the calls do not depend on these two fields, so those that were computed
        # are taken over.
        if changes.keys() <= {"calibrate", "progress"}:
            return network._with_findings_of(model)

        return network

    def fitted_to(self, images: Batches | None, progress: Progress | None = None) -> Network:
        """Return a `Network` record of the same module, with other images to fit values to.

        It takes over the anatomy and the calls that this record has computed, as images to fit to
        do not change them.

        Args:
            images: The images. None stands for no images.
            progress: Called while values are fitted, with the layers done and their total.
        """
        return replace(self, calibrate=images, progress=progress)._with_findings_of(self)

    def _with_findings_of(self, other: Network) -> Network:
        """Take over, in place, what another record of the same module has computed already.

        Returns:
            This record itself.
        """
        # A `cached_property` is stored in `__dict__`, under its name.
        looked_up = ("anatomy", "calls", "examples", "short_example")
        self.__dict__.update(
            {name: value for name, value in other.__dict__.items() if name in looked_up}
        )
        return self

    def after(self, module: nn.Module) -> Network:
        """Return a `Network` record of another module that takes the same inputs.

        The other module is the result of a step, or a copy in float64. Given inputs are cast to its
        dtype.
        """
        after = Network(module, self.inputs, self.size, self.seed)
        if self.inputs is None or after.dtype == self.dtype:
            return after
        return replace(after, inputs=[call.like(module) for call in self.calls])

    def doubled(self) -> Network:
        """Return a `Network` record of a float64 copy of the module, with inputs in float64."""
        return self.after(copying.to_double(self.module))

    @property
    def dtype(self) -> torch.dtype:
        return self._anchor.dtype

    @cached_property
    def coarsest_dtype(self) -> torch.dtype:
        """The dtype among those of the parameters that rounds most.

        It decides how large an error of a result may be.
        """
        dtypes = {p.dtype for p in nn.Module.parameters(self.module) if p.is_floating_point()}
        return max(dtypes | {self.dtype}, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def has_double(self) -> bool:
        """Whether a float64 copy of the network can be made, and would differ from it.

        No such copy is made of modules of TorchScript.
        """
        scripted = any(
            isinstance(module, torch.jit.ScriptModule) for module in nn.Module.modules(self.module)
        )
        return self.coarsest_dtype != torch.float64 and self.device_has_double and not scripted

    @cached_property
    def device_has_double(self) -> bool:
        """Whether the network's device has float64, which MPS lacks."""
        try:
            torch.empty(1, dtype=torch.float64, device=self.device)
        except (TypeError, RuntimeError):
            return False
        return True

    def with_double(self) -> Network:
        """Return a `Network` record whose module is on a device that has float64.

        It is this record itself. If its device lacks float64 (MPS), it is a record with a copy of
        the module on the CPU.
        """
        if self.device_has_double:
            return self
        return replace(self, module=copying.duplicate(self.module, {}).cpu())

    @property
    def device(self) -> torch.device:
        return self._anchor.device

    @cached_property
    def _anchor(self) -> Tensor:
        """The tensor of the network from which `dtype` and `device` are read."""
        return calling.anchor(self.module)

    @cached_property
    def anatomy(self) -> Anatomy:
        """The recorded structure of the network: its graph, norms, residual blocks and classifier.

        It is recorded on the given inputs, or on noise of `size`, or by default on noise of the
        network's own size.

        Raises:
            TraceError: The network does not run, or cannot be recorded.
        """
        if self.inputs is not None:
            return inspection.inspect(self.module, self.calls)
        if self.size:
            return inspection.inspect(
                self.module, network_input.noise(self.module, self.size, batch=2)
            )
        return inspection.inspect(self.module)

    @property
    def form(self) -> Example:
        """A call of the network with empty tensors, which shows how inputs are given to it."""
        return self.anatomy.traced.form

    @property
    def provenance(self) -> Provenance:
        return provenance.of(self.module)

    @property
    def input_size(self) -> tuple[int, ...]:
        """The size of one input without the batch dimension, such as (C, H, W) of an image."""
        if isinstance(self.inputs, DrawnCalls):
            return self.inputs[0].size
        return tuple(self.size or network_input.size(self.module))

    @cached_property
    def calls(self) -> list[Example]:
        """The calls on which the network is recorded and compared: the given inputs, or noise.

        Noise has two sizes if the network takes both.

        Raises:
            OptionError: There are no images, or they hold NaN.
        """
        if self.inputs is None:
            return running.noise(self.module, self.input_size, seed=self.seed)
        calls = calling.batches(self.inputs)
        network_input.check_calls(calls)
        return [call.on(self.device) for call in calls]

    @cached_property
    def examples(self) -> list[Example]:
        """The calls that a result is proved on: `calls`, or the first one alone.

        A single call of noise is enough if inputs of every size take the same path through forward.
        """
        if self.inputs is not None:
            return self.calls
        traced = self.anatomy.traced
        # The network was recorded on some of these calls, so `noise` need not try whether it runs
        # on them.
        noise = running.noise(self.module, self.input_size, seed=self.seed, ran=traced.recorded)
        if traced.input_independent:
            return noise[:1]
        return noise

    @cached_property
    def short_example(self) -> Example:
        """The first call, cut to a single sample where possible, for runs that need not see more.

        Given inputs are cut only if the batch has more than four samples, and the network gives the
        same outputs for the first sample alone. Noise is always cut, so the network may not run on
        this call. The caller then takes the whole batch, `examples[0]`.
        """
        example = self.examples[0]
        if self.inputs is None:
            return example.first(1)
        if example.count <= _SMALL_BATCH or not running.runs_on_one(self.module, example):
            return example
        return example.first(1)

    @cached_property
    def images(self) -> Batches | None:
        """The images that values are fitted to: the user's, or synthetic ones of this network."""
        if not isinstance(self.calibrate, str):
            return self.calibrate

        # The function that makes the images is called when they are first read. `form` shows it how
        # images are given to the network.
        size = self.size or self.examples[0].size
        make = partial(
            synthetic_images.make,
            self.module,
            self.form,
            size,
            seed=self.seed,
            progress=self.progress,
        )

        return SyntheticImages(make)

    @property
    def described(self) -> str:
        """Words for reports that say which inputs the network is called with."""
        if isinstance(self.inputs, DrawnCalls):
            return f"random inputs of the stated shapes, seed {self.seed}"
        if self.inputs is not None:
            return "given inputs"
        return f"N(0, 1) noise, seed {self.seed}"


def calls_of(images: Batches, network: Network) -> Iterable[Example]:
    """Return images as calls of a network. The calls can be iterated repeatedly if the images can.

    Args:
        images: Batches, a function that returns them, or a single batch.
        network: The network that the calls are for.
    """
    # An iterator can be read only once, so its calls are an iterator, too.
    calls = _CallsOfBatches(images, network.form)
    if isinstance(calls.batches, Iterator):
        return iter(calls)
    return calls
