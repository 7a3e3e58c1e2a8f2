"""The demo: a small trained network that ships with the package, converted, saved, loaded and
measured. Offline.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from normswap.analysis import summary
from normswap.images.accuracy import agreement, classify
from normswap.images.datasets import make_loader
from normswap.plan import Body
from normswap.shipped import IMAGES, NAME
from normswap.storage import checkpoint
from normswap.surgery import comparison
from normswap.surgery.conversion import convert
from normswap.surgery.network import Network

SCHEMES = ("folded", "skipinit")
# Errors are measured on so many batches.
_FEW = 4


def run(progress: Callable[[str], None] = lambda what: None) -> Body:
    """Inspect, convert, save, load, verify, evaluate; `progress` is called with what is going on.

    `anatomy` is the source's summary without its long lists; a row has the norms that are left, the
    trainable values, top-1 in percent, the fraction of images with the source's answer, and |logits
    - the source's| / |the source's|.
    """
    start = time.perf_counter()
    progress("opening and inspecting the network")
    source = checkpoint.open_model(NAME)
    anatomy = summary.of_network(Network(source), "demo")
    anatomy["skips"] = dict(Counter(block["skip"] for block in anatomy.pop("blocks")))
    del anatomy["sites"]
    networks = {"source": source}
    with tempfile.TemporaryDirectory(prefix="normswap-demo-") as folder:
        for scheme in SCHEMES:
            progress(f"converting to {scheme}, saving, loading again")
            networks[scheme] = checkpoint.load(
                checkpoint.save(convert(source, scheme), Path(folder) / scheme)
            )
    progress("reading the images")
    batches = list(make_loader(source, str(IMAGES), workers=0))
    first, truth = classify(source, batches)
    rows = []
    passed = True
    for name, model in networks.items():
        progress(f"verifying and evaluating {name}")
        evaluation, answers = classify(model, batches)
        report = comparison.verify(source, model, [images for images, _ in batches[:_FEW]])
        same = agreement(truth, answers)
        passed = passed and report.passed and same == 1 and evaluation.top1 == first.top1
        measured = {
            "top1": evaluation.top1,
            "agreement": same,
            "relative_l2": report.worst.relative_l2,
        }
        rows.append({"network": name, **summary.sizes(model), **measured})
    seconds = time.perf_counter() - start
    return {
        "passed": passed,
        "seconds": seconds,
        "images": first.count,
        "anatomy": anatomy,
        "rows": rows,
    }
