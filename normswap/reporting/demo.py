"""The demo: a shipped trained network is converted, saved, loaded again and measured, offline."""

import time
from collections import Counter
from collections.abc import Callable

from torch import nn

from normswap.analysis import summary
from normswap.images.accuracy import agreement, classify
from normswap.images.datasets import make_loader
from normswap.plan import Body
from normswap.shipped import IMAGES, NAME
from normswap.storage import checkpoint, left_behind
from normswap.surgery.conversion import convert
from normswap.surgery.network import Network
from normswap.surgery.verification import verify

SCHEMES = ("folded", "skipinit")
# Distances are measured on this many batches.
_FEW = 4


def _ignore(sentence: str) -> None:
    """Do nothing with a sentence about progress. It is the default of `progress`."""


def run(progress: Callable[[str], None] = _ignore) -> Body:
    """Inspect, convert, save, load, verify and evaluate the shipped network.

    Args:
        progress: Called with a sentence at the beginning of each step.

    Returns:
        What `normswap demo --json` prints. `passed` says whether every converted network gives the
        answers of the source, the shipped network, within tolerance. `anatomy` describes the
        source, without the lists of its blocks and norms. `rows` has a dict for each network: the
        number of norms and of parameter values, top-1 in percent, the share of images with the
        source's answer, and the relative L2 distance |logits - the source's| / |the source's|.
    """
    start = time.perf_counter()
    progress("opening and inspecting the network")
    source = checkpoint.open_model(NAME)
    # The summary's lists of blocks and norms are long. Of the blocks, the kinds of skips are kept.
    anatomy = summary.of_network(Network(source), "demo")
    anatomy["skips"] = dict(Counter(block["skip"] for block in anatomy.pop("blocks")))
    del anatomy["sites"]

    networks = {"source": source, **_converted(source, progress)}
    progress("reading the images")
    batches = list(make_loader(source, str(IMAGES), workers=0))
    source_evaluation, source_answers = classify(source, batches)
    few_images = [images for images, _ in batches[:_FEW]]

    # Compare each network with the source. The source is one of them, and gives the first row.
    rows = []
    passed = True
    for name, model in networks.items():
        progress(f"verifying and evaluating {name}")
        evaluation, answers = classify(model, batches)
        report = verify(source, model, few_images)
        share = agreement(source_answers, answers)
        same_top1 = evaluation.top1 == source_evaluation.top1
        passed = passed and report.passed and share == 1 and same_top1
        row = {
            "network": name,
            **summary.sizes(model),
            "top1": evaluation.top1,
            "agreement": share,
            "relative_l2": report.worst.relative_l2,
        }
        rows.append(row)

    return {
        "passed": passed,
        "seconds": time.perf_counter() - start,
        "images": source_evaluation.count,
        "anatomy": anatomy,
        "rows": rows,
    }


def _converted(source: nn.Module, progress: Callable[[str], None]) -> dict[str, nn.Module]:
    """Convert a network to each of `SCHEMES`, and return the results, saved and loaded again.

    Args:
        source: The network.
        progress: Called with a sentence at the beginning of each conversion.

    Returns:
        The loaded networks, by the name of the scheme.
    """
    networks = {}
    with left_behind.temporary_folder("normswap-demo-") as folder:
        for scheme in SCHEMES:
            progress(f"converting to {scheme}, saving, loading again")
            directory = checkpoint.save(convert(source, scheme), folder / scheme)
            networks[scheme] = checkpoint.load(directory)
    return networks
