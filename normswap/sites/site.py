"""`Site`: what one module is, where it stands, and how the network's forward reaches it.

Everything that decides a conversion is read off this record. `graph.tracing` makes the sites of a
recorded network, and `site_of` makes the site of a module by itself.

A refusal is written here, once. Every scheme and every command gives the same sentence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from timm.layers import norm_act
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from normswap.sites import affine, known_norms, position_norms
from normswap.sites.known_norms import NormKind, Pair, Statistics
from normswap.sites.own_layer import OwnLayer

# Forwards that take statistics in training as their classes say.
_KNOWN_IN_TRAINING = {
    _BatchNorm.forward,
    _InstanceNorm.forward,
    nn.SyncBatchNorm.forward,
    norm_act.BatchNormAct2d.forward,
}


@dataclass(frozen=True, eq=False)
class Site:
    """One module of a network: what it is, where it stands, and how forward reaches it.

    Args:
        module: The module itself.
        path: Its dotted path. It is empty for a module that is looked at by itself.
        called: How often forward calls it. If several forwards were recorded, the largest number
            counts.
        shapes: The shapes of the values that it read, one for each call and recorded size.
        sizes_are_known: Whether these are the sizes that the network is used at. False where the
            network was recorded on one small input of normswap's own.
        tensor_read: The path of a tensor of the module that forward reads without calling the
            module. None if there is none.
        hidden: Why the recording could not see into the module around this one. None if it could.
        holder: The module that has this one as an attribute. None for the network, and where the
            module is looked at by itself.
    """

    module: nn.Module = field(repr=False)
    path: str = ""
    called: int = 0
    shapes: tuple[Sequence[int], ...] = ()
    sizes_are_known: bool = True
    tensor_read: str | None = None
    hidden: str | None = None
    holder: nn.Module | None = field(default=None, repr=False)

    @property
    def kind(self) -> str:
        """The name of the module's class."""
        return type(self.module).__name__

    @cached_property
    def norm(self) -> NormKind | None:
        """The `NormKind` that says what the norm computes, or None if the module is no norm."""
        return known_norms.kind_of(self.module)

    @property
    def is_norm(self) -> bool:
        """Whether the module is any kind of normalization layer."""
        return self.norm is not None

    @property
    def statistics(self) -> Statistics | None:
        """The member of `Statistics` that says what normalizes the input in eval mode.

        It is None if the module is no norm.
        """
        return None if self.norm is None else self.norm.statistics

    @property
    def statistics_in_training(self) -> Statistics | None:
        """The member of `Statistics` that says what normalizes the input in training mode.

        It is None if the module is no norm.
        """
        if self.norm is None or self.is_frozen:
            return self.statistics
        return self.norm.training or self.statistics

    @property
    def is_batchnorm(self) -> bool:
        """Whether the module is a norm that in eval mode uses statistics kept from training."""
        return self.statistics is Statistics.POPULATION

    @property
    def is_plain_batchnorm(self) -> bool:
        """Whether the module is torch's BatchNorm or a subclass of it, and applies no activation.

        It must have statistics kept from training.
        """
        is_torchs = isinstance(self.module, _BatchNorm)
        return is_torchs and self.is_batchnorm and self.activation is None

    @property
    def is_batchnorm1d_or_3d(self) -> bool:
        """Whether the module is torch's BatchNorm of rows and signals, or that of volumes."""
        return isinstance(self.module, nn.BatchNorm1d | nn.BatchNorm3d)

    @property
    def is_at_each_position(self) -> bool:
        """Whether the module is any kind of LayerNorm or RMSNorm."""
        return self.statistics is Statistics.POSITION

    @property
    def is_layernorm(self) -> bool:
        """Whether the module is a LayerNorm, of whatever class."""
        return self.is_at_each_position and not self.is_rms_norm

    @property
    def is_rms_norm(self) -> bool:
        """Whether the module is a norm that does not subtract the mean."""
        return self.norm is not None and not self.norm.centres

    @property
    def is_frozen(self) -> bool:
        """Whether a BatchNorm's four tensors never change, not even in training."""
        has_parameters = bool(self.module._parameters)
        return self.is_batchnorm and not isinstance(self.module, _BatchNorm) and not has_parameters

    @property
    def learns_statistics(self) -> bool:
        """Whether the module is a BatchNorm or InstanceNorm of torch's that has running statistics.

        Training updates these from the module's input.
        """
        if not isinstance(self.module, (_BatchNorm, _InstanceNorm)):
            return False
        return self.module.running_mean is not None and self.module.running_var is not None

    @property
    def refusal_to_measure(self) -> str | None:
        """Why the running statistics cannot be measured anew on images, or None if they can.

        Only a known forward is sure to measure them in training.
        """
        is_patched = "forward" in vars(self.module)
        is_known = type(self.module).forward in _KNOWN_IN_TRAINING
        if not is_patched and (is_known or isinstance(self.module, OwnLayer)):
            return None
        return f"what a {self.kind} does in training is unknown"

    def together(self, count: int) -> list[int]:
        """Return how many samples are normalized together in training, for each such group.

        Samples of one group share their statistics. BatchNorm makes one group of all samples, and
        InstanceNorm one of each sample. Ghost batch norm makes several.

        Args:
            count: The number of samples of the batch.
        """
        if self.statistics_in_training is Statistics.SAMPLE:
            return [1] * count
        if isinstance(self.module, OwnLayer):
            return self.module.ghost_sizes(count)
        return [count]

    @property
    def learns(self) -> bool:
        """Whether the module has parameters of its own that training changes."""
        return any(
            parameter.requires_grad
            for parameter in nn.Module.parameters(self.module, recurse=False)
        )

    @property
    def can_be_synchronized(self) -> bool:
        """Whether torch's SyncBatchNorm can take the place of the module in training.

        SyncBatchNorm computes neither the ghost batches nor the activation of normswap's own
        BatchNorm.
        """
        if not self.is_batchnorm or not isinstance(self.module, OwnLayer):
            return True
        has_ghost_batches = bool(getattr(self.module, "ghost", 0))
        return not has_ghost_batches and self.activation is None

    @property
    def is_affine(self) -> bool:
        """Whether the module computes y = act(s * x + t) in eval mode, with s and t per channel.

        BatchNorms do, and so do the layers that normswap puts in their place. Those may also apply
        the activation behind the norm, `act`.
        """
        return affine.is_affine(self.module)

    @property
    def is_leaf(self) -> bool:
        """Whether the recorded forward calls the module as one step and does not look into it."""
        return self.is_norm or self.is_affine

    @property
    def is_affine_norm(self) -> bool:
        """Whether the module is a norm that is y = act(s * x + t) in eval mode."""
        return affine.is_affine_norm(self.module)

    @property
    def is_registered(self) -> bool:
        """Whether s and t of y = s * x + t are read by a function for the module's class.

        `register_norm` or a measurement gives that function (`affine.is_registered`).
        """
        return affine.is_registered(self.module)

    @property
    def holds_statistics(self) -> bool:
        """Whether the module is an affine norm, or a layer of normswap with a norm's statistics."""
        return affine.holds_statistics(self.module)

    @property
    def has_moments(self) -> bool:
        """Whether the norm keeps the mean and variance of its input."""
        return affine.has_moments(self.module)

    @cached_property
    def averages(self) -> bool:
        """Whether this norm uses each sample's own statistics, and a BatchNorm can replace it.

        The BatchNorm is fitted to images. It has the statistics of all of them, so it equals the
        norm only for an average sample.
        """
        return affine.has_average(self.module) and not self.lacks_batch

    @property
    def channels(self) -> int:
        """The number of the norm's channels, or 0 if the norm does not state it."""
        return affine.channels(self.module)

    @property
    def channel_dim(self) -> int | None:
        """The dimension along which a LayerNorm or RMSNorm normalizes: -1, 1, or None."""
        return position_norms.channel_dim(self.module)

    @property
    def scaled_dim(self) -> int | None:
        """The dimension in which a LayerScale has its channels: -1, 1, or None if it is none."""
        return position_norms.scaled_dim(self.module)

    @property
    def activation(self) -> nn.Module | None:
        """The activation that the module applies after its affine map, or None."""
        return affine.activation(self.module)

    @property
    def eps(self) -> float:
        """The epsilon of the norm: a BatchNorm for which `refusal_of_kind` is None."""
        return affine.epsilon(self.module)

    @property
    def scale_and_shift(self) -> Pair:
        """s and t of y = s * x + t, each (C,) or (1,), in float64."""
        return affine.read_map(self.module)

    @property
    def standardization(self) -> Pair:
        """s and t of a BatchNorm as if gamma were 1 and beta 0, each (C,), in float64."""
        return affine.read_map(self.module, unit_gamma=True)

    @property
    def input_moments(self) -> Pair:
        """Mean and variance per channel of the norm's input, each (C,), in float64."""
        return affine.statistics(self.module)

    @property
    def output_moments(self) -> Pair:
        """Mean and standard deviation per channel of the norm's output, each (C,), in float64."""
        return affine.moments(self.module)

    def recorded_tensors(self) -> dict[str, Tensor]:
        """Return the tensors and settings of an affine norm by name, as a conversion records them.

        They serve to put the norm back later. The dict is empty for any other module.
        """
        return affine.tensors(self.module)

    def signs(self, dtype: torch.dtype) -> Tensor:
        """Return the sign of each channel's scale, (C,): 0 for a channel that is constant."""
        _, sign, _ = affine.split(self.module, dtype)
        return sign

    @property
    def lacks_batch(self) -> bool:
        """Whether the module is an InstanceNorm that read a single sample in the recorded forward.

        The sample has no batch dimension: it is (C, L) or (C, H, W), for instance.
        """
        if not isinstance(self.module, _InstanceNorm):
            return False
        unbatched: int = self.module._get_no_batch_dim()
        return any(len(shape) == unbatched for shape in self.shapes)

    @property
    def reads_rows(self) -> bool:
        """Whether the module read rows (N, C), not maps, at the first call."""
        return bool(self.shapes) and len(self.shapes[0]) == 2

    @property
    def sees_one_value(self) -> bool:
        """Whether the norm's input has one value per channel and sample, whatever the input size.

        It is False if the recorded forward does not show it.
        """
        if not self.shapes:
            return False
        # Rows (N, C) have one value at any size, whatever else the network would take. A map of
        # 1 x 1 may be larger for another input.
        if self.reads_rows:
            return True
        return self.sizes_are_known and all(prod(shape[2:]) == 1 for shape in self.shapes)

    @cached_property
    def refusal(self) -> str | None:
        """Why the module cannot be converted, or None if it can."""
        return self.refusal_of_reach or self.refusal_of_kind

    @property
    def refusal_of_reach(self) -> str | None:
        """Why the module's place in the network, or its use, forbids to change it, or None.

        The module's class plays no part in this reason.
        """
        if self.lacks_batch:
            return "it reads single samples, without a batch dimension"
        # `holder` is the module that has this one as an attribute.
        if self.holder is not None and _is_prepared_for_qat(self.holder):
            return (
                f"the {type(self.holder).__name__} around it folds it anew in each forward, for"
                " quantization-aware training: convert the network before `prepare_qat`"
            )
        # If another module took this one's place, forward would still read the tensor.
        if self.tensor_read and not self.path:
            return "it is the whole network, where no layer can stand: wrap it in nn.Sequential"
        if self.tensor_read and self.called:
            return f"{self.tensor_read} is read in forward, not only by the norm itself"
        if self.tensor_read:
            return f"forward reads {self.tensor_read} by itself and does not call the module"
        # A module that is not called may be inside one that could not be recorded. `hidden` has the
        # reason then, and is None otherwise.
        if not self.called:
            return self.hidden
        return None

    @cached_property
    def refusal_of_kind(self) -> str | None:
        """Why the module cannot be read as y = s * x + t per channel, or None if it can."""
        return affine.refusal(self.module)

    @cached_property
    def refusal_of_gamma(self) -> str | None:
        """Why gamma and beta of a LayerNorm or RMSNorm cannot be changed, or None."""
        return position_norms.refusal(self.module) or self.refusal_of_reach

    @property
    def refusal_in_training(self) -> str | None:
        """Why private or federated training refuses the norm, or None.

        In training the norm would change more than its parameters, or mix the samples of a batch.
        """
        # With the same source of statistics, training computes what eval mode computes.
        if self.statistics_in_training is self.statistics:
            return None

        remedy = "groupnorm, skipinit and frozen-bn do not"
        if not self.called:
            remedy += "; the given input never reaches it"
        if self.statistics_in_training is Statistics.BATCH:
            return f"a {self.kind} takes its statistics from the batch; {remedy}"
        return f"a {self.kind} keeps running statistics; {remedy}"


def _is_prepared_for_qat(module: nn.Module) -> bool:
    """Whether a module is one of torch.ao's that hold a convolution and the norm behind it.

    The class is looked up by name, because torch says that it will drop `torch.ao`.
    """
    kinds = type(module).__mro__
    return any(kind.__module__.startswith("torch.ao.nn.intrinsic.qat") for kind in kinds)


def site_of(module: nn.Module, path: str = "") -> Site:
    """Return the `Site` of a module that is looked at by itself, without a recorded forward."""
    return Site(module, path)


def sites_of(model: nn.Module) -> list[Site]:
    """Return the `Site` of every module of a network, in the order of `named_modules`."""
    return [Site(module, path) for path, module in nn.Module.named_modules(model)]
