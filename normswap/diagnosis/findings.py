"""The records of a diagnosis: one network that is looked at, one trouble that was seen, all of
them.
"""

import copy
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor, fx, nn

from normswap import provenance
from normswap.calibration import population
from normswap.copying import doubled
from normswap.diagnosis import weight_moments
from normswap.diagnosis.image_batches import ImageBatches
from normswap.errors import NormswapError
from normswap.graph.anatomy import Anatomy
from normswap.graph.tracing import LINEAR, Traced, inputs
from normswap.layers import affine
from normswap.layers.known_norms import Pair
from normswap.layers.planned_layer import Linearity
from normswap.models import zoo
from normswap.models.calling import Example
from normswap.surgery.network import Network

# A correlation over fewer channels says nothing.
_FEWEST = 8
# Kept and foretold means correlate by more than this where they are of the same weights (by 0.99
# usually).
_OF_THESE_WEIGHTS = 0.9


class Certainty(str, Enum):
    """How sure a finding is."""

    CERTAIN = "certain: it is written in the network"
    LIKELY = "likely: measured, and far beyond what chance does"


@dataclass(frozen=True)
class Finding:
    """One trouble.

    Args:
        name: of its kind, one word, the same for every network.
        paths: of the norms that have it.
        evidence: what was seen, with figures.
        certainty: how sure it is.
        cost: what it does to the network's use.
        mend: the command, or the line of Python, that mends it.
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
        faults: a cause stands before what follows from it.
        norms: how many norms with population statistics were looked at.
        notes: what could not be looked at, and why.
    """

    faults: tuple[Finding, ...]
    norms: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class StoredNorm:
    """A norm with population statistics.

    Args:
        mean, var: what it keeps, (C,) float64; empty where it keeps none.
        gamma, beta: None where it has none.
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
        """Which channels have the statistics of a norm that was just made, mean 0 and variance 1,
        (C,); none: empty.
        """
        return (self.mean == 0) & (self.var == 1)

    @property
    def starts_at_init(self) -> bool:
        """Whether that is so of all channels."""
        return len(self.at_init) > 0 and bool(self.at_init.all())

    @property
    def is_untouched(self) -> bool:
        """Whether gamma is one number, 1 or 0, and beta 0 in every channel, as in a norm that was
        just made.
        """
        plain = self.gamma is None or any(bool((self.gamma == value).all()) for value in (0, 1))
        return plain and (self.beta is None or bool((self.beta == 0).all()))


@dataclass(frozen=True, eq=False)
class Case:
    """A network as the checks see it.

    Args:
        anatomy: None where its forward cannot be recorded.
        sites: its norms with population statistics, in order of the forward pass as far as that is
            known.
        name, data: how commands call the network and the images.
        images: what the checks that need images look at; None where there are none.
    """

    network: Network
    anatomy: Anatomy | None
    sites: tuple[StoredNorm, ...]
    name: str
    data: str
    images: ImageBatches | None = None

    @property
    def model(self) -> nn.Module:
        """The network itself."""
        return self.network.module

    @property
    def traced(self) -> Traced | None:
        """Its recorded forward."""
        return None if self.anatomy is None else self.anatomy.traced

    def calls(self, site: StoredNorm) -> list[fx.Node]:
        """The calls of a norm in the recorded forward."""
        return [] if self.traced is None else self.traced.calls.get(id(site.module), [])

    def layer_before(self, site: StoredNorm) -> Linearity | None:
        """The convolution or linear map right before a norm; None where something else is."""
        before = [node for call in self.calls(site)[:1] for node in inputs(call)]
        module = self.traced.module(before[0]) if self.traced is not None and before else None
        return module if isinstance(module, LINEAR) else None

    def bias_before(self, site: StoredNorm) -> Tensor:
        """The bias that is added right before a norm; 0 where there is none."""
        return doubled(
            getattr(self.layer_before(site), "bias", None), torch.zeros((), dtype=torch.float64)
        )

    @cached_property
    def foretold(self) -> dict[str, Pair]:
        """Mean and variance of what norms read, by path, as far as the norms before and the weights
        foretell it.
        """
        return {} if self.traced is None else weight_moments.foretold(self.traced)

    @cached_property
    def estimates(self) -> list[dict[str, Pair]]:
        """Mean and variance (C,) of what reaches each norm, by path, in each part of the images;
        none without them.
        """
        if self.images is None:
            return []
        try:
            renewed = [population.norms_of(self.renewed(calls)) for calls in self.images.parts]
        except NormswapError:
            return []
        return [
            {path: affine.statistics(norm.cpu()) for path, norm in norms.items()}
            for norms in renewed
        ]

    def renewed(self, calls: Sequence[Example]) -> nn.Module:
        """A copy of the network with the statistics of these images."""
        other = copy.deepcopy(self.model)
        population.estimate_population(other, calls)
        return other

    def likeness(self, site: StoredNorm) -> float | None:
        """Correlation of a norm's means with the foretold ones, without a bias that stands in both;
        None of too few.
        """
        if site.path not in self.foretold or site.starts_at_init:
            return None
        if len(site.mean) < _FEWEST or not bool(torch.isfinite(site.mean).all()):
            return None
        bias = self.bias_before(site)
        return correlation(self.foretold[site.path][0] - bias, site.mean - bias)

    @cached_property
    def of_other_weights(self) -> bool:
        """Whether the statistics of most norms are those of other weights, be it that training went
        on with them.
        """
        likenesses = [
            likeness for site in self.sites if (likeness := self.likeness(site)) is not None
        ]
        return bool(likenesses) and statistics.median(likenesses) < _OF_THESE_WEIGHTS

    @cached_property
    def bare(self) -> nn.Module | None:
        """The network as its library builds it, whatever eps and momentum this one has; None where
        nobody knows.
        """

        def set_alike(bare: nn.Module) -> nn.Module:
            set_here = dict(self.model.named_modules())
            for path, norm in bare.named_modules():
                if affine.is_batchnorm(norm) and path in set_here:
                    vars(norm).update(
                        {name: vars(set_here[path]).get(name) for name in ("eps", "momentum")}
                    )
            return bare

        try:
            arch = provenance.of(self.model).arch or zoo.identify(self.model, set_alike)
            return None if arch is None else zoo.skeleton(arch)
        except NormswapError:
            return None

    @property
    def recalibrate(self) -> str:
        """The command that measures statistics anew."""
        return f"normswap recalibrate {self.name} --data {self.data}"

    @property
    def recalibrate_and_measure(self) -> str:
        """The same where the network may have been trained with the statistics that it keeps."""
        return (
            f"{self.recalibrate}, and measure before and after: if the training ended with frozen"
            " statistics, they are right as they are, and this undoes it"
        )


# Yields faults, and as text what cannot be told apart.
Check: TypeAlias = Callable[[Case], Iterator[Finding | str]]


def rule(
    name: str, hits: Callable[[Case, StoredNorm], bool], evidence: str, cost: str, mend: str = ""
) -> Check:
    """A check of each norm by itself, certain.

    Args:
        evidence: "{}" stands for how many norms have it; mend: "{}" for the network's name; by
            default new statistics.
    """

    def check(case: Case) -> Iterator[Finding | str]:
        sites = [site for site in case.sites if hits(case, site)]
        if sites:
            shown = evidence.format(share(sites, case.sites))
            remedy = mend.format(case.name) or case.recalibrate
            yield Finding(name, paths_of(sites), shown, Certainty.CERTAIN, cost, remedy)

    return check


def sites_of(model: nn.Module, anatomy: Anatomy | None) -> tuple[StoredNorm, ...]:
    """The norms with population statistics, each once."""
    modules = dict(model.named_modules())
    order = [norm.path for norm in getattr(anatomy, "norms", ())]
    ordered = {path: modules[path] for path in [*order, *modules] if path in modules}
    return tuple(
        _site(path, module) for path, module in ordered.items() if affine.is_batchnorm(module)
    )


def _site(path: str, module: nn.Module) -> StoredNorm:
    mean = var = torch.zeros(0, dtype=torch.float64)
    if affine.has_moments(module):
        mean, var = affine.statistics(module)
    gamma, beta = (_double(getattr(module, name, None)) for name in ("weight", "bias"))
    momentum = getattr(module, "momentum", None)
    if momentum is not None:
        momentum = float(momentum)
    return StoredNorm(path, module, mean, var, gamma, beta, affine.epsilon(module), momentum)


def _double(value: object) -> Tensor | None:
    return value.detach().double() if isinstance(value, Tensor) else None


def correlation(first: Tensor, second: Tensor) -> float:
    """Pearson's; 0 where one is constant."""
    first = first - first.mean()
    second = second - second.mean()
    return float(first @ second / (first.norm() * second.norm()).clamp_min(1e-30))


def share(hit: Sized, norms: Sized) -> str:
    """`3 of 22 norms`; `all 22 norms`."""
    return (
        f"all {len(norms)} norms"
        if len(hit) == len(norms) > 1
        else f"{len(hit)} of {len(norms)} norms"
    )


def paths_of(sites: Iterable[StoredNorm]) -> tuple[str, ...]:
    """Where the norms stand."""
    return tuple(site.path for site in sites)
