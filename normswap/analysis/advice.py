"""Which target to choose: three rules, and the first target that the network admits.

1. For inference `folded`. 2. Private training allows no statistics of the batch: `skipinit`, which
keeps the function, then `groupnorm`. 3. BatchNorm is kept for 16 or more images a batch; with fewer
its statistics are too noisy (Wu & He 2018, arXiv:1803.08494, table 2: ResNet-50 errs 23.6 % with 32
images, 23.7 % with 16, 24.8 % with 8, 27.3 % with 4, 34.7 % with 2). Then `skipinit`, or
`groupnorm` where there are no residual blocks.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from normswap import schemes
from normswap.errors import OptionError, RefusedError, spelled
from normswap.layers import affine, own_forwards
from normswap.surgery.conversion import plan_steps
from normswap.surgery.network import Network

# From so many images in a batch on, BatchNorm is no trouble.
ENOUGH = 16
# Where targets ended on other networks.
_ELSEWHERE = Path(__file__).parent / "after_training.md"
# The plain norm, which other libraries load as it is, stands beside ours.
_VARIANTS: dict[str, list[dict[str, object]]] = {"groupnorm": [{}, {"relative_eps": 0}]}


@dataclass(frozen=True)
class Advice:
    """A scheme, as it is typed after --to, why, the command, whether the function is kept exactly,
    and the options.
    """

    scheme: str
    target: str
    why: str
    command: str
    exact: bool
    options: Mapping[str, object] = field(default_factory=dict)


def advise(
    network: Network,
    name: str,
    batch_size: int,
    *,
    private: bool = False,
    deploy: bool = False,
    data: str = "DATA",
) -> tuple[list[Advice], dict[str, str]]:
    """Find the possible targets for a network, the best first, and why others are not possible.

    Args:
        name: the network's name in the commands.
        batch_size: the images that would share statistics: those of a device, or of a client.
        data: images to fit to, in the commands.

    Raises OptionError: no batch size, or purposes that exclude each other; RefusedError: nothing is
    possible.
    """
    if batch_size < 1:
        raise OptionError(spelled("batch_size", batch_size), "a batch has at least one image")
    if private and deploy:
        raise OptionError(
            f"{spelled('private', True)} and {spelled('deploy', True)}",
            "one trains, the other does not",
            "Ask twice",
        )
    possible = []
    refused = {}
    purpose = {"purpose": "opacus"} if private else {}
    wishes = _wishes(network.module, batch_size, private, deploy)
    for to, why, variant in (
        (*wish, variant) for wish in wishes for variant in _VARIANTS.get(wish[0], [{}])
    ):
        if to == "batchnorm":
            possible.append(Advice(to, to, why, "", True))
            continue
        scheme = schemes.get(to)
        options = {**variant, **purpose}
        is_fitted = scheme.fit is not None and not scheme.is_exact(scheme.defaults)
        if variant:
            why += "; with the eps of other libraries, which keeps less at once"
        target = to + " --relative-eps 0" * bool(variant)
        words = f" --calibrate {shlex.quote(data)}" * is_fitted + " --for opacus" * private
        try:
            list(plan_steps(network, to, measured=is_fitted, **options))
        except RefusedError as error:
            refused[to] = str(error)
            continue
        if to == "skipinit" and any(block.order == "post" for block in network.anatomy.blocks):
            why += "; from scratch, v1 wants `regularized-skipinit` (De & Smith 2020, Table 7)"
        command = f"normswap convert {name} --to {target}{words}"
        possible.append(Advice(to, target, why, command, not is_fitted, options))
    if not possible:
        raise RefusedError("no target fits this network", "; ".join(refused.values()))
    return possible, refused


def elsewhere(
    network: Network, batch_size: int, *, private: bool = False
) -> tuple[str, dict[str, str]]:
    """Return which task of the table is most like this one, and where targets ended in it: top-1,
    with a deviation.
    """
    task = "labels"
    if private:
        task = "private"
    elif batch_size < ENOUGH:
        task = "two"
    elif any(block.order == "pre" for block in network.anatomy.blocks):
        task = "preact"
    elif any(own_forwards.is_depthwise(module) for module in network.module.modules()):
        task = "depthwise"
    _, *sections = _ELSEWHERE.read_text(encoding="utf-8").split("**")
    tables = zip(sections[::2], sections[1::2], strict=True)
    first_cell = f"| {task} |"
    about, table = next((about, table) for about, table in tables if first_cell in table)
    lines = [line for line in table.splitlines() if line.startswith(first_cell)]
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in lines]
    return about, {row[2].replace("BatchNorm", "batchnorm"): row[6] for row in rows}


def _wishes(
    model: nn.Module, batch_size: int, private: bool, deploy: bool
) -> list[tuple[str, str]]:
    if deploy:
        return [("folded", "inference: nothing is left to normalize, and the function is kept")]
    without = [
        ("skipinit", "keeps the function; no norm, one scalar per branch"),
        ("groupnorm", "normalizes still, each sample by itself"),
        (
            "frozen-bn",
            (
                "statistics as constants; in federated training often ahead of GroupNorm"
                " (arXiv:2303.06530)"
            ),
        ),
    ]
    if private:
        return [
            (scheme, f"gradients per sample need norms without the batch: {why}")
            for scheme, why in without
        ]
    if batch_size >= ENOUGH and any(affine.is_batchnorm(module) for module in model.modules()):
        enough = f"{batch_size} images are enough for its statistics ({ENOUGH} or more)"
        return [
            ("batchnorm", f"keep it: {enough}"),
            ("tune", "frozen statistics, where the domain stays the same"),
        ]
    few = f"{batch_size} images are too few for BatchNorm (fewer than {ENOUGH})"
    return [
        *((scheme, f"{few}: {why}") for scheme, why in without),
        ("tune", "frozen statistics, for a short tuning"),
    ]
