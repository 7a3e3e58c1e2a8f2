"""The records of all schemes that come with the package. Importing this file imports no torch.

A scheme's functions are named by module and function, and imported when they are first called.
Third parties add schemes with `normswap.register_scheme`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from normswap.schemes.scheme import Option, Options, Range, Scheme, TrainingProof


@dataclass(frozen=True)
class Function:
    """A function of the package that is imported when it is first called.

    Args:
        name: The path of the function below `normswap`, such as `schemes.dyt.plan`.
    """

    name: str

    def load(self) -> Callable[..., Any]:
        """Import and return the function."""
        module, _, function = self.name.rpartition(".")
        loaded: Callable[..., Any] = getattr(
            importlib.import_module(f"normswap.{module}"), function
        )
        return loaded

    def __call__(self, *args: object, **options: object) -> Any:
        return self.load()(*args, **options)


def _has(option: str, value: str) -> Callable[[Options], bool]:
    """Return a function that tells whether a scheme's options have `value` for `option`."""
    return lambda options: bool(options[option] == value)


_ALPHA = Option(
    "alpha",
    object,
    "match",
    "`match` keeps the function; 1 / sqrt(blocks) or a number does not",
    "NUMBER",
    choices=("match", "inv-sqrt-depth"),
)
_EPS_HELP = (
    "eps, in multiples of the mean variance; 0: the plain norm; more keeps more and normalizes less"
)
_RELATIVE_EPS = Option("relative_eps", float, 9.0, _EPS_HELP, "RATIO", range=Range(0))
_BEND = Range(0, 4, low_open=True, high_open=False)
_FILTER_MEANS = (
    Option("mean", str, "fit", "`fit` or `keep` the filters' means", choices=("fit", "keep")),
    Option(
        "stem",
        str,
        "keep",
        "`fit` or `keep` those of the first convolution",
        choices=("fit", "keep"),
    ),
    Option(
        "depthwise",
        str,
        "keep",
        "`fit` or `keep` those of depthwise filters",
        choices=("fit", "keep"),
    ),
)
_START = Option(
    "init",
    str,
    "keep",
    "`keep` the function, or start a fresh network as the papers do (`reset`)",
    choices=("keep", "reset"),
)
_RULES = ("balduzzi", "szegedy", "hanin", "arpit", "rescale")
_RECALIBRATED = {"data": "", "samples": None, "batch_size": 64, "against": 0, "scales": True}
# The fields of a scheme that puts a norm with statistics per sample in place of every BatchNorm.
_PER_SAMPLE: dict[str, Any] = {
    "exact": False,
    "fit": Function("schemes.groupnorm.fit"),
    "starts_from": "batchnorm",
}

TARGETS: dict[str, Scheme] = {
    "affine": Scheme(
        Function("schemes.norm_insertion.plan_affine"),
        summary=(
            "A scale and a shift per channel in place of every norm; they learn; no statistics at"
            " all."
        ),
        paper="Touvron et al. 2021, ResMLP, arXiv:2105.03404, section 2 (Aff)",
    ),
    "batchnorm": Scheme(
        Function("schemes.norm_insertion.plan"),
        summary=(
            "BatchNorm wherever one stood; `--ghost-batch N` takes training statistics over N"
            " samples at a time."
        ),
        paper="Ioffe & Szegedy 2015, arXiv:1502.03167, section 3",
        options=(
            Option(
                "where",
                str,
                "norms",
                "`norms`: where norms stand or stood. In a network that never had any, with"
                " --calibrate: after each convolution that an `activation` reads next, or another"
                " layer (`conv`)",
                choices=("norms", "activation", "conv"),
            ),
            Option(
                "like",
                str,
                "",
                "an architecture, whose own class the result then has (of `unfold`, too)",
                "ARCH",
            ),
            Option(
                "ghost_batch",
                int,
                0,
                "samples that share statistics in training; 0: all",
                "N",
                range=Range(0),
            ),
        ),
    ),
    "centered-weightnorm": Scheme(
        Function("schemes.filters.plan_centered_weightnorm"),
        summary=(
            "Centered weight normalization: W = g (v - mean v) / |v - mean v| per filter; no norm"
            " of activations."
        ),
        paper="Huang et al. 2017, arXiv:1710.02338, section 3",
        exact=_has("mean", "keep"),
        needs_data=True,
        fit=Function("schemes.filters.fit"),
        options=_FILTER_MEANS,
    ),
    "dyt": Scheme(
        Function("schemes.dyt.plan"),
        summary=(
            "Dynamic Tanh in place of every BatchNorm: gamma tanh(alpha x) + beta, one alpha a"
            " layer."
        ),
        paper="Zhu et al. 2025, arXiv:2503.10622, section 4",
        exact=False,
        fit=Function("schemes.dyt.fit"),
        starts_from="batchnorm",
        options=(
            Option(
                "bend", float, 0.25, "the alpha that every layer starts with", "ALPHA", range=_BEND
            ),
        ),
    ),
    "fixup": Scheme(
        Function("schemes.fixup.plan"),
        summary=(
            "Fixup: no norm; a multiplier per residual branch, scalar biases before each layer and"
            " activation."
        ),
        paper="Zhang, Dauphin & Ma 2019, arXiv:1901.09321",
        exact=_has("init", "keep"),
        on_branches=True,
        decay="all",
        options=(
            Option(
                "init",
                str,
                "keep",
                "`keep` the weights, or reset them (`fixup`), or by component 1 (`zeros`) or 2"
                " (`scaled`) alone",
                choices=("keep", "fixup", "zeros", "scaled"),
            ),
        ),
    ),
    "folded": Scheme(
        Function("schemes.folded.plan"),
        summary=(
            "The canonical form, for fast inference: convolutions with bias, activations and sums;"
            " nothing else."
        ),
        paper="Ioffe & Szegedy 2015, arXiv:1502.03167, section 3.1",
        options=(
            Option(
                "branches",
                str,
                "merge",
                "`merge` summed branches, or `keep` them",
                choices=("merge", "keep"),
            ),
        ),
    ),
    "frozen-bn": Scheme(
        Function("schemes.norm_insertion.plan_frozen"),
        summary=(
            "Frozen BatchNorm: statistics, gamma and beta as constants, as in detection and small"
            " batches."
        ),
        paper="He et al. 2016, arXiv:1512.03385, section 4.3; torchvision.ops.FrozenBatchNorm2d",
    ),
    "groupnorm": Scheme(
        Function("schemes.groupnorm.plan"),
        summary=(
            "GroupNorm for every BatchNorm: one group, eps 9 times the mean variance;"
            " `--relative-eps 0`: plain."
        ),
        paper="Wu & He 2018, arXiv:1803.08494, section 3",
        **_PER_SAMPLE,
        options=(
            Option(
                "groups",
                int,
                1,
                "number of groups, or the channels' nearest divisor to it",
                "N",
                range=Range(1),
            ),
            Option(
                "group_size",
                int,
                0,
                "channels of each group",
                "N",
                range=Range(0),
                instead_of="groups",
            ),
            _RELATIVE_EPS,
        ),
    ),
    "instancenorm": Scheme(
        Function("schemes.groupnorm.plan_instancenorm"),
        summary=(
            "InstanceNorm: every channel of every sample is normalized by itself; little of a"
            " classifier is kept."
        ),
        paper="Ulyanov et al. 2016, arXiv:1607.08022, section 2",
        **_PER_SAMPLE,
    ),
    "layernorm": Scheme(
        Function("schemes.groupnorm.plan_layernorm"),
        summary="LayerNorm over all channels and positions of a sample: GroupNorm with one group.",
        paper="Ba et al. 2016, arXiv:1607.06450, section 3",
        **_PER_SAMPLE,
        options=(_RELATIVE_EPS,),
    ),
    "nf": Scheme(
        Function("schemes.filters.plan_nf"),
        summary=(
            "Normalizer-free: y = skip + alpha f(x), every convolution with standardized weights;"
            " no norm."
        ),
        paper="Brock et al. 2021, arXiv:2101.08692",
        exact=_has("mean", "keep"),
        resets=_has("init", "reset"),
        needs_data=True,
        fit=Function("schemes.filters.fit"),
        on_branches=True,
        options=(*_FILTER_MEANS, _START),
    ),
    "regularized-skipinit": Scheme(
        Function("schemes.skipinit.plan_regularized"),
        summary=(
            "SkipInit, dropout before the classifier, and a scalar bias after every residual sum of"
            " a v1 network."
        ),
        paper="De & Smith 2020, arXiv:2002.10444, section 4 and appendix F",
        exact=_has("alpha", "match"),
        on_branches=True,
        options=(
            _ALPHA,
            Option(
                "dropout",
                float,
                0.2,
                "dropout of features before the classifier",
                "P",
                range=Range(0, 1),
            ),
        ),
    ),
    "residual-scale": Scheme(
        Function("schemes.residual_scale.plan"),
        summary=(
            "Residual scaling: y = a x + b f(x), a and b fixed by a rule; no norm. On v2 the"
            " branches hold a, too."
        ),
        paper=(
            "Balduzzi et al. 2017, arXiv:1702.08591; Szegedy et al. 2016, arXiv:1602.07261, section"
            " 3.3; Hanin & Rolnick 2018, arXiv:1803.01719; Arpit et al. 2019, arXiv:1906.02341;"
            " Shao et al. 2020, arXiv:2001.07094"
        ),
        exact=_has("init", "keep"),
        on_branches=True,
        keeps_blocks=False,
        options=(
            Option("rule", str, "rescale", "the published rule that gives a and b", choices=_RULES),
            Option(
                "factor",
                object,
                "rule",
                "b of `szegedy`, 0.1 to 0.3 (`rule`: 0.2), or of `hanin`, whose b_l is b^l (`rule`:"
                " 0.9)",
                "NUMBER",
                choices=("rule",),
                range=Range(0, 1, low_open=True, high_open=False),
            ),
            _START,
        ),
    ),
    "rmsnorm": Scheme(
        Function("schemes.rmsnorm.plan"),
        summary=(
            "RMSNorm in place of every LayerNorm: exact, by centring whatever writes to the"
            " residual stream."
        ),
        paper=(
            "Zhang & Sennrich 2019, arXiv:1910.07467; centring: Ashkboos et al. 2024,"
            " arXiv:2401.15024, section 3.1"
        ),
    ),
    "skipinit": Scheme(
        Function("schemes.skipinit.plan"),
        summary=(
            "SkipInit: no norm, a learned scalar ends each branch; for v1 from scratch:"
            " `regularized-skipinit`."
        ),
        paper="De & Smith 2020, arXiv:2002.10444, section 2.2",
        exact=_has("alpha", "match"),
        on_branches=True,
        options=(_ALPHA,),
    ),
    "spectralnorm": Scheme(
        Function("schemes.filters.plan_spectralnorm"),
        summary=(
            "Spectral normalization: W = alpha V / sigma(V), sigma the largest singular value, one"
            " alpha a layer."
        ),
        paper="Miyato et al. 2018, arXiv:1802.05957, section 2.1",
    ),
    "tune": Scheme(
        Function("schemes.norm_insertion.plan_tune"),
        summary=(
            "Tune mode: frozen statistics, and a gamma that learns and scales the convolution's"
            " weight."
        ),
        paper="You et al. 2023, Efficient ConvBN Blocks, arXiv:2305.11624, section 3.3",
    ),
    "weightnorm": Scheme(
        Function("schemes.filters.plan_weightnorm"),
        summary=(
            "Weight normalization: W = g v / |v| per filter, with g the filter's norm; no norm of"
            " activations."
        ),
        paper="Salimans & Kingma 2016, arXiv:1602.07868, section 2",
    ),
}

PURPOSES: dict[str, Scheme] = {
    "federated": Scheme(
        Function("schemes.purposes.plan_federated"),
        may_do_nothing=True,
        training=TrainingProof(),
    ),
    "opacus": Scheme(
        Function("schemes.purposes.plan_opacus"),
        may_do_nothing=True,
        training=TrainingProof(
            rows_are_samples=True, validator=Function("schemes.purposes.refused_by_opacus")
        ),
    ),
}

# Steps of a plan that are no targets. They come before or after the step of a scheme, or alone.
STEPS: dict[str, Scheme] = {
    "estimate": Scheme(
        Function("schemes.statistics.plan_estimate"),
        paper="least squares per channel",
        exact=False,
        needs_data=True,
        fit=Function("schemes.statistics.fit_estimate"),
    ),
    "measured-batchnorm": Scheme(
        Function("schemes.statistics.plan_measured"),
        paper="Ioffe & Szegedy 2015, arXiv:1502.03167, section 3",
        needs_data=True,
        takes_all_images=True,
        fit=Function("schemes.statistics.fit_measured"),
        settle=Function("schemes.statistics.settle_measured"),
        options=(Option("where", str, "activation"),),
    ),
    "merged-branches": Scheme(
        Function("schemes.folded.plan_merged"),
        paper="Ding et al. 2021, arXiv:2101.03697, section 3.3",
        may_do_nothing=True,
    ),
    "recalibrate": Scheme(
        Function("schemes.statistics.plan_recalibrate"),
        paper="Ioffe & Szegedy 2015, arXiv:1502.03167, algorithm 2",
        exact=False,
        needs_data=True,
        takes_all_images=True,
        fit=Function("schemes.statistics.fit_recalibrate"),
        options=tuple(Option(name, str, default) for name, default in _RECALIBRATED.items()),
    ),
}
