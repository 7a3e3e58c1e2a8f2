"""The records of a diagnosis: the network as the checks see it, a fault, and all faults."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor, fx, nn

from normswap import copying, provenance
from normswap.calibration import channel_moments, population
from normswap.copying import doubled
from normswap.diagnosis import weight_moments
from normswap.diagnosis.image_batches import ImageBatches
from normswap.errors import NormswapError
from normswap.graph.anatomy import Anatomy
from normswap.graph.tracing import LINEAR, Traced, inputs
from normswap.models import zoo
from normswap.models.calling import Example
from normswap.sites.known_norms import Pair
from normswap.sites.own_forwards import Linearity
from normswap.sites.site import site_of
from normswap.surgery.network import Network

# A correlation over fewer channels than this says nothing.
_FEWEST_CHANNELS = 8
# Stored and predicted means of the same weights correlate by more than this, usually by 0.99.
_SAME_WEIGHTS = 0.9


class Certainty(str, Enum):
    """How sure a finding is.

    A finding is CERTAIN if no sound network can store the numbers that were found, whatever was
    done to it. It is LIKELY if a sound network may store them after something that the evidence
    names, such as training in eval mode.
    """

    CERTAIN = "certain: no sound network stores this"
    LIKELY = "likely: far beyond chance, but read what else could explain it"


@dataclass(frozen=True)
class Remark:
    """A sentence on something that is no fault, but that the user should know.

    Args:
        text: The sentence.
    """

    text: str


@dataclass(frozen=True)
class Finding:
    """One fault.

    Args:
        name: The kind of fault in one word, the same for every network.
        paths: The paths of the norms that have it.
        evidence: The observation, with figures.
        certainty: How sure it is.
        cost: The harm that the fault does in use.
        mend: The command, or the line of Python, that mends all of it.
    """

    name: str
    paths: tuple[str, ...]
    evidence: str
    certainty: Certainty
    cost: str
    mend: str


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a network.

    Args:
        faults: The faults. A cause stands before what follows from it.
        norms: How many BatchNorms were looked at.
        notes: Sentences on parts that could not be looked at, and why.
    """

    faults: tuple[Finding, ...]
    norms: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class StoredNorm:
    """A BatchNorm, as the network stores it.

    Args:
        path: The path of the norm.
        module: The norm itself.
        mean: The running mean (C,) in float64. It is empty if the norm keeps no statistics.
        var: The running variance (C,) in float64. It is empty if the norm keeps no statistics.
        gamma: The learned scale (C,) in float64. None if the norm has none.
        beta: The learned shift (C,) in float64. None if the norm has none.
        eps: The epsilon that is added to the variance.
        momentum: The momentum of the running statistics. None if the norm has no such number.
    """

    path: str
    module: nn.Module
    mean: Tensor
    var: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    eps: float
    momentum: float | None

    @property
    def at_init(self) -> Tensor:
        """A mask (C,) of the channels that store mean 0 and variance 1, as a new norm does."""
        return (self.mean == 0) & (self.var == 1)

    @property
    def starts_at_init(self) -> bool:
        """Whether all channels store mean 0 and variance 1, as a new norm does.

        It is False for a norm that keeps no statistics.
        """
        return len(self.at_init) > 0 and bool(self.at_init.all())

    @property
    def is_untouched(self) -> bool:
        """Whether gamma and beta are those of a new norm: gamma 1 or 0 throughout, beta 0."""
        has_new_gamma = self.gamma is None or any(
            bool((self.gamma == value).all()) for value in (0, 1)
        )
        has_new_beta = self.beta is None or bool((self.beta == 0).all())
        return has_new_gamma and has_new_beta


@dataclass(frozen=True, eq=False)
class Case:
    """A network that is diagnosed, with all that the checks read of it.

    Args:
        network: The network.
        anatomy: Its recorded graph, or None if its forward cannot be recorded.
        sites: Its BatchNorms, in the order of the forward pass as far as that is known.
        name: The name of the network in the commands that are proposed.
        data: The name of the images in the commands that are proposed.
        images: The images for the checks that need some, or None.
    """

    network: Network
    anatomy: Anatomy | None
    sites: tuple[StoredNorm, ...]
    name: str
    data: str
    images: ImageBatches | None = None

    @property
    def model(self) -> nn.Module:
        """The torch module of the network that is diagnosed."""
        return self.network.module

    @property
    def traced(self) -> Traced | None:
        """The graph of operations that one forward has recorded. None if none can be recorded."""
        return None if self.anatomy is None else self.anatomy.traced

    def calls(self, site: StoredNorm) -> list[fx.Node]:
        """Return the nodes of the recorded forward that call a norm.

        The list is empty if no forward could be recorded, or if the forward does not call the norm.
        """
        if self.traced is None:
            return []
        return self.traced.calls.get(id(site.module), [])

    def layer_before(self, site: StoredNorm) -> Linearity | None:
        """Return the convolution or linear layer right before a norm, or None."""
        calls = self.calls(site)
        if self.traced is None or not calls:
            return None

        sources = inputs(calls[0])
        module = self.traced.module(sources[0]) if sources else None
        return module if isinstance(module, LINEAR) else None

    def is_called(self, site: StoredNorm) -> bool:
        """Whether the forward calls a norm.

        If no forward could be recorded, the answer is yes for every norm.
        """
        return self.traced is None or bool(self.calls(site))

    @cached_property
    def input_variances(self) -> dict[str, Tensor]:
        """Variance (C,) of each norm's input in eval mode, by the norm's path, in float64.

        The variance is measured on the images. Without images it is measured on the network's
        example, which is noise. A norm whose input cannot be measured is left out.
        """
        examples = self.network.examples[:1] if self.images is None else self.images.calls
        model = copying.duplicate(self.model, memo={})
        norms = {site.path: model.get_submodule(site.path) for site in self.sites}
        try:
            moments = channel_moments.measure(model, norms, examples).moments
        except NormswapError:
            return {}
        return {path: measured.variance.cpu() for path, measured in moments.items()}

    def bias_before(self, site: StoredNorm) -> Tensor:
        """Return the bias (C,) of the layer right before a norm, in float64.

        It is the number 0, as a tensor, if that layer has no bias or is not known.
        """
        bias = getattr(self.layer_before(site), "bias", None)
        return doubled(bias, torch.zeros((), dtype=torch.float64))

    @cached_property
    def predicted(self) -> dict[str, Pair]:
        """Mean and variance (C,) of each norm's input, by the norm's path.

        They are predicted, without images, from the norms before it and the weights between. Norms
        whose input cannot be predicted are left out.
        """
        return {} if self.traced is None else weight_moments.predicted_moments(self.traced)

    @cached_property
    def estimates(self) -> list[dict[str, Pair]]:
        """Mean and variance (C,) of the input of each norm, by path, for each part of the images.

        The list is empty if the network does not run on the images. There must be some.
        """
        assert self.images is not None, "statistics are estimated from images"
        try:
            renewed = [population.norms_of(self.renewed(calls)) for calls in self.images.parts]
        except NormswapError:
            return []

        # The network was copied for each part of the images. In such a copy, each norm stores the
        # statistics that its input has on this part.
        moments_by_part = []
        for norms in renewed:
            moments = {
                path: site_of(norm.module.cpu()).input_moments for path, norm in norms.items()
            }
            moments_by_part.append(moments)
        return moments_by_part

    def renewed(self, calls: Sequence[Example]) -> nn.Module:
        """Return a copy of the network, with BatchNorm statistics that are measured anew.

        Args:
            calls: The batches on which they are measured, as arguments of the network.
        """
        model = copying.duplicate(self.model, memo={})
        population.estimate_population(model, calls)
        return model

    def likeness(self, site: StoredNorm) -> float | None:
        """Return the correlation of a norm's running means with the predicted means.

        The bias of the layer before is part of both means, so it is subtracted from both. The
        result is None if no mean is predicted or stored, or if the norm has too few channels.

        Args:
            site: The norm.
        """
        # A norm that stores mean 0 and variance 1 throughout was never updated. Another check finds
        # that.
        if site.path not in self.predicted or site.starts_at_init:
            return None
        if len(site.mean) < _FEWEST_CHANNELS or not bool(torch.isfinite(site.mean).all()):
            return None

        bias = self.bias_before(site)
        predicted_mean, _ = self.predicted[site.path]
        return correlation(predicted_mean - bias, site.mean - bias)

    @cached_property
    def of_other_weights(self) -> bool:
        """Whether most norms store statistics of other weights than the network has.

        Their running means then correlate too little with the means that the weights predict. This
        is a fault, unless training went on with frozen statistics.
        """
        likenesses = [self.likeness(site) for site in self.sites]
        known = [likeness for likeness in likenesses if likeness is not None]
        return bool(known) and statistics.median(known) < _SAME_WEIGHTS

    @cached_property
    def bare(self) -> nn.Module | None:
        """The same architecture as its library, such as timm, builds it, without trained weights.

        None says that the architecture is not known, or cannot be built.
        """
        try:
            arch = provenance.of(self.model).arch or zoo.identify(self.model, self._set_alike)
            return None if arch is None else zoo.skeleton(arch)
        except NormswapError:
            return None

    def _set_alike(self, bare: nn.Module) -> nn.Module:
        """Copy the eps and momentum of this network's norms to a newly built one, and return it.

        `zoo.identify` compares the two to recognize the architecture. It shall do so even if eps or
        momentum is wrong in this network.

        Args:
            bare: The newly built network, which is changed in place.
        """
        # A class may have a method `named_modules` of its own, so torch's is called.
        modules_here = dict(nn.Module.named_modules(self.model))
        for path, norm in nn.Module.named_modules(bare):
            if site_of(norm).is_batchnorm and path in modules_here:
                settings = vars(modules_here[path])
                vars(norm).update({name: settings.get(name) for name in ("eps", "momentum")})
        return bare

    @property
    def recalibrate(self) -> str:
        """The command line, as text, that measures the network's statistics anew."""
        return f"normswap recalibrate {self.name} --data {self.data}"

    @property
    def recalibrate_and_measure(self) -> str:
        """The command that measures the statistics anew, with a warning.

        The warning is for networks that may have been trained with the statistics that they store.
        """
        return (
            f"{self.recalibrate}, and measure before and after: if the training ended with frozen"
            " statistics, they are right as they are, and this undoes it"
        )


# A check yields a Finding for each fault, a text for each question that it cannot decide, and a
# Remark for anything else that the user should know. After a fault or a question, the checks on
# images are left out.
Check: TypeAlias = Callable[[Case], Iterator[Finding | Remark | str]]


def rule(
    name: str,
    hits: Callable[[Case, StoredNorm], bool],
    evidence: str,
    cost: str,
    mend: str = "",
    *,
    unless: str = "",
) -> Check:
    """Return a check that tests each norm by itself for one fault.

    The check yields one finding that names all norms with the fault, or nothing if there are none.

    Args:
        name: The name of the finding.
        hits: Tells whether a norm has the fault.
        evidence: The evidence, in which "{}" stands for the number of norms that have the fault.
        cost: The harm that the fault does.
        mend: The remedy, in which "{}" stands for the network's name. The default is to measure the
            statistics anew.
        unless: What may have happened to a network that has these numbers and no fault, such as `it
            was trained in eval mode`. With it the finding is LIKELY. Without it the finding is
            CERTAIN.
    """

    def check(case: Case) -> Iterator[Finding | Remark | str]:
        """Yield one finding that names all norms with the fault, or nothing if there are none.

        The fault, and the words that report it, are the arguments of `rule`.
        """
        sites = [site for site in case.sites if hits(case, site)]
        if sites:
            # The numbers of a sound network with another past may look the same (`unless`). Without
            # such a past the fault is certain.
            yield Finding(
                name,
                paths=paths_of(sites),
                evidence=with_exception(evidence.format(count_text(sites, case.sites)), unless),
                certainty=Certainty.LIKELY if unless else Certainty.CERTAIN,
                cost=cost,
                mend=mend.format(case.name) or case.recalibrate,
            )

    return check


def with_exception(evidence: str, unless: str) -> str:
    """Return evidence, followed by "No fault if" and the exception, if there is one.

    Args:
        evidence: What was seen.
        unless: What may have happened to a network that has these numbers and no fault, such as `it
            was trained in eval mode`. It is empty if there is no exception.
    """
    return f"{evidence}. No fault if {unless}" if unless else evidence


def python_line(case: Case, sites: Sequence[StoredNorm], statement: str) -> str:
    """Return a line of Python that does something to some norms, and to no other module.

    Args:
        case: The network, which the line calls `model`.
        sites: The norms.
        statement: The statement for each norm, in which the norm is called `norm`, such as
            `norm.eps = 0.001`.
    """
    # For one norm: model.get_submodule('bn1').eps = 0.001
    if len(sites) == 1:
        return statement.replace("norm", f"model.get_submodule({sites[0].path!r})", 1)

    # The norms need not be listed if they are all modules that have a running variance. A class may
    # have a method `modules` of its own, so torch's is called.
    chosen = {id(site.module) for site in sites}
    with_statistics = {
        id(module) for module in nn.Module.modules(case.model) if hasattr(module, "running_var")
    }
    if chosen == with_statistics:
        norms = "(m for m in model.modules() if hasattr(m, 'running_var'))"
    else:
        paths = ", ".join(repr(site.path) for site in sites)
        norms = f"map(model.get_submodule, ({paths}))"
    return f"for norm in {norms}: {statement}"


def sites_of(model: nn.Module, anatomy: Anatomy | None) -> tuple[StoredNorm, ...]:
    """Return the BatchNorms of a network, each once, as it stores them.

    The norms of the recorded graph come first, in the order of the forward pass. The others follow
    in the order of the modules.

    Args:
        model: The network.
        anatomy: Its recorded graph. With None the order is that of the modules.
    """
    # A class may have a method `named_modules` of its own, so torch's is called.
    modules = dict(nn.Module.named_modules(model))
    recorded = [norm.path for norm in getattr(anatomy, "norms", ())]
    ordered = [path for path in dict.fromkeys([*recorded, *modules]) if path in modules]
    return tuple(
        _stored_norm(path, modules[path]) for path in ordered if site_of(modules[path]).is_batchnorm
    )


def _stored_norm(path: str, module: nn.Module) -> StoredNorm:
    """Return a norm as the network stores it: statistics, gamma, beta and settings."""
    mean = torch.zeros(0, dtype=torch.float64)
    var = torch.zeros(0, dtype=torch.float64)
    site = site_of(module)
    if site.has_moments:
        mean, var = site.input_moments
    momentum = getattr(module, "momentum", None)
    if momentum is not None:
        momentum = float(momentum)

    return StoredNorm(
        path=path,
        module=module,
        mean=mean,
        var=var,
        gamma=_tensor_or_none(module, "weight"),
        beta=_tensor_or_none(module, "bias"),
        eps=site.eps,
        momentum=momentum,
    )


def _tensor_or_none(module: nn.Module, name: str) -> Tensor | None:
    """Return a module's parameter in float64, or None if it has none of that name."""
    value = getattr(module, name, None)
    return value.detach().double() if isinstance(value, Tensor) else None


def correlation(first: Tensor, second: Tensor) -> float:
    """Return Pearson's correlation of two vectors, or 0 if one of them is constant."""
    first = first - first.mean()
    second = second - second.mean()
    return float(first @ second / (first.norm() * second.norm()).clamp_min(1e-30))


def count_text(hit: Sized, norms: Sized) -> str:
    """Return how many norms are hit in words: `3 of 22 norms`, or `all 22 norms`."""
    if len(hit) == len(norms) > 1:
        return f"all {len(norms)} norms"
    return f"{len(hit)} of {len(norms)} norms"


def paths_of(sites: Iterable[StoredNorm]) -> tuple[str, ...]:
    """Return the paths of the norms."""
    return tuple(site.path for site in sites)
