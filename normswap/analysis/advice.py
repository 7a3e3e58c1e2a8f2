"""Which target to choose for a network. Three rules rank the targets that can be advised for it.

1. For inference: `folded`.
2. For private training, which allows no statistics of the batch: `skipinit`, which keeps the
   function, then `groupnorm`.
3. Otherwise BatchNorm is kept for 16 or more images a batch. With fewer images its statistics are
   too noisy (Wu & He 2018, arXiv:1803.08494, table 2: ResNet-50 errs 23.6 % with 32 images, 23.7 %
   with 16, 24.8 % with 8, 27.3 % with 4, 34.7 % with 2). Then it is replaced, by `skipinit`, or by
   `groupnorm` if there are no residual blocks.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from normswap import schemes
from normswap.errors import OptionError, RefusedError, spelled
from normswap.sites import own_forwards
from normswap.sites.site import sites_of
from normswap.surgery.conversion import plan_steps
from normswap.surgery.network import Network

# With at least so many images in a batch, BatchNorm is kept.
ENOUGH = 16
# ResNet-50 on an H200, images a second beside BatchNorm's (tests/lab/gpu/h200.md, "Speed").
_GROUPNORM_COST = "3.5 times slower to train and 5 times slower to run than BatchNorm"
_IN_LARGE_BATCHES = (
    "; from scratch, in very large batches, it was behind BatchNorm (De & Smith 2020, Table 2)"
)
# Checkpoints that were trained without BatchNorm, by what they have instead.
READY = (
    "timm has ImageNet networks that were trained without BatchNorm: resnet50_gn,"
    " resnetv2_50d_gn and resnetv2_50x1_bit (GroupNorm), nf_resnet50 (none). If you need no"
    " checkpoint of your own, take one of these"
)
# The file holds, for some training tasks on other networks, the top-1 that each target ended with.
# tests/docs_pages.py writes it.
_AFTER_TRAINING = Path(__file__).with_name("after_training.json")


@dataclass(frozen=True)
class Advice:
    """A scheme that the network can be converted to, with the reason for it.

    Args:
        scheme: The name of the scheme.
        target: The words typed after `--to`: the name, perhaps with options.
        why: The reason, for the user.
        command: The command that converts the network. It is empty where nothing is to be done.
        exact: Whether the conversion keeps the function exactly.
        options: The options of the conversion, as `convert` takes them.
    """

    scheme: str
    target: str
    why: str
    command: str
    exact: bool
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class _Candidate:
    """A conversion scheme that suits what the user wants to do with the network.

    Whether this network can be converted by it is not known yet.

    Args:
        scheme: The name of the scheme.
        why: The reason, for the user.
        options: The options of the conversion, as `convert` takes them.
    """

    scheme: str
    why: str
    options: Mapping[str, object] = field(default_factory=dict)


def advise(
    network: nn.Module | Network,
    name: str = "MODEL",
    batch_size: int = 64,
    *,
    private: bool = False,
    deploy: bool = False,
    data: str = "DATA",
) -> tuple[list[Advice], dict[str, str]]:
    """Return the schemes that a network can be converted to for a purpose, the best first.

    The second value that is returned is a dict. For each scheme that would suit the purpose but is
    not possible for this network, it has the reason, by the name of the scheme.

    Args:
        network: The network, or its record.
        name: The name of the network in the commands. The default is MODEL.
        batch_size: The number of images that would share statistics: the images of one device, or
            of one client. The default is 64.
        private: Whether the network will be trained privately, with gradients per sample.
        deploy: Whether the network is for inference only.
        data: The name of the images to fit to in the commands. The default is DATA.

    Raises:
        OptionError: There is no batch size, or the purposes exclude each other.
        RefusedError: The network admits no target.
    """
    if batch_size < 1:
        raise OptionError(spelled("batch_size", batch_size), "a batch has at least one image")
    if private and deploy:
        raise OptionError(
            f"{spelled('private', True)} and {spelled('deploy', True)}",
            "one trains, the other does not",
            "Ask twice",
        )

    network = Network.of(network)
    possible: list[Advice] = []
    refused: dict[str, str] = {}
    for candidate in _candidates(network.module, batch_size, private=private, deploy=deploy):
        # A network that keeps its BatchNorms is not converted, so no command is given.
        if candidate.scheme == "batchnorm":
            possible.append(
                Advice("batchnorm", target="batchnorm", why=candidate.why, command="", exact=True)
            )
            continue
        try:
            possible.append(_planned(network, candidate, name=name, data=data, private=private))
        except RefusedError as error:
            refused[candidate.scheme] = str(error)

    if not possible:
        raise RefusedError("no target fits this network", "; ".join(refused.values()))
    return possible, refused


def _planned(
    network: Network, candidate: _Candidate, *, name: str, data: str, private: bool
) -> Advice:
    """Return the advice to convert a network by a scheme, with the command to type.

    Args:
        network: The network.
        candidate: The scheme, with the reason for it.
        name: What the commands call the network.
        data: What the commands call the images to fit to.
        private: Whether the network will be trained privately.

    Raises:
        RefusedError: The network cannot be converted by this scheme.
    """
    # A scheme needs images if it fits values to them and does not keep the function exactly.
    scheme = schemes.get(candidate.scheme)
    is_fitted = scheme.fit is not None and not scheme.is_exact(scheme.defaults)
    options = dict(candidate.options)
    if private:
        options["purpose"] = "opacus"

    # The steps are planned only for the RefusedError. The plan itself is not used.
    list(plan_steps(network, candidate.scheme, measured=is_fitted, **options))

    why = candidate.why
    is_v1 = any(block.order == "post" for block in network.anatomy.blocks)
    if candidate.scheme == "skipinit" and is_v1:
        why += (
            ". This network normalizes after each convolution (v1). The paper tests SkipInit on"
            " pre-activation networks (v2); to train a v1 network from scratch, it needs"
            " `regularized-skipinit` (De & Smith 2020, table 7)"
        )

    # The only option that a candidate may have is `relative_eps`, with the value 0.
    target = candidate.scheme
    if candidate.options:
        target += " --relative-eps 0"
    command = f"normswap convert {name} --to {target}"
    if is_fitted:
        command += f" --calibrate {shlex.quote(data)}"
    if private:
        command += " --for opacus"
    return Advice(
        candidate.scheme,
        target=target,
        why=why,
        command=command,
        exact=not is_fitted,
        options=options,
    )


def elsewhere(network: Network, batch_size: int, *, private: bool) -> tuple[str, dict[str, str]]:
    """Return accuracies that other networks had after conversion and training in a similar task.

    Args:
        network: The network that is asked about.
        batch_size: How many images share statistics.
        private: Whether training is private.

    Returns:
        The task in words, and the top-1 with its deviation, as text, by target.
    """
    # The tasks are keys of the JSON file. `labels` is the usual one: training on labels in large
    # batches. In `two` a batch has two images. If the user's task differs from the usual one in
    # several respects, the first of them below decides.
    task = "labels"
    if private:
        task = "private"
    elif batch_size < ENOUGH:
        task = "two"
    elif any(block.order == "pre" for block in network.anatomy.blocks):
        task = "preact"
    elif any(own_forwards.is_depthwise(module) for module in nn.Module.modules(network.module)):
        task = "depthwise"

    measured = json.loads(_AFTER_TRAINING.read_text(encoding="utf-8"))["tasks"][task]
    return measured["about"], measured["ended"]


def _candidates(
    model: nn.Module, batch_size: int, *, private: bool, deploy: bool
) -> Iterator[_Candidate]:
    """Yield the conversion schemes that suit the user's purpose, the best first.

    Whether the network can be converted by them is not checked here.

    Args:
        model: The network.
        batch_size: The number of images that a device trains on at once.
        private: Whether the network will be trained with differential privacy, which needs the
            gradient of each sample.
        deploy: Whether the network is not trained any more, but only run.
    """
    if deploy:
        yield _Candidate(
            "folded", "inference: nothing is left to normalize, and the function is kept"
        )
        return

    if private:
        reason = "gradients per sample need norms without the batch"
        yield from _without_batch_statistics(reason, caution=_IN_LARGE_BATCHES)
        return

    has_batchnorm = any(site.is_batchnorm for site in sites_of(model))
    if batch_size >= ENOUGH and has_batchnorm:
        enough = f"{batch_size} images are enough for its statistics ({ENOUGH} or more)"
        yield _Candidate("batchnorm", f"keep it: {enough}")
        yield _Candidate("tune", "frozen statistics, where the domain stays the same")
        return

    reason = "the network has no BatchNorm to keep"
    if batch_size < ENOUGH:
        reason = f"{batch_size} images are too few for BatchNorm (fewer than {ENOUGH})"
    yield from _without_batch_statistics(reason)
    yield _Candidate("tune", "frozen statistics, for a short tuning")


def _without_batch_statistics(reason: str, *, caution: str = "") -> Iterator[_Candidate]:
    """Yield the conversion schemes that need no statistics of the batch, the best first.

    Args:
        reason: The words with which each printed reason begins: why the statistics of the batch
            are of no use to the user.
        caution: The words with which the reason for `skipinit` ends: what speaks against its
            scalars. Empty if nothing does.
    """
    keeps = "keeps the function; no norm, one scalar per branch"
    yield _Candidate("skipinit", f"{reason}: {keeps}{caution}")

    groupnorm = _Candidate(
        "groupnorm",
        f"{reason}: normalizes still, each sample by itself; on a GPU in eager mode it is"
        f" {_GROUPNORM_COST}",
    )
    yield groupnorm
    # By default `groupnorm` gives each norm a large eps of its own. It is also advised with the
    # usual eps, because other libraries load that network as it is.
    yield replace(
        groupnorm,
        why=f"{groupnorm.why}; with the eps of other libraries, which keeps less at once",
        options={"relative_eps": 0},
    )

    yield _Candidate(
        "frozen-bn",
        f"{reason}: statistics as constants; in federated training often ahead of GroupNorm"
        " (arXiv:2303.06530)",
    )
