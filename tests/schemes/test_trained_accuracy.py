"""The trained networks, on all 10,000 test images: folded and SkipInit classify each as the source does.

    pytest -m slow tests/schemes/test_trained_accuracy.py -s      # prints the README's table

Needs `../shared` (images and checkpoints); the demo's network ships with the package.
"""

from __future__ import annotations

import pytest
from trained_networks import IMAGES, NETWORKS, logits

import normswap
from normswap.images import datasets
from normswap.storage.checkpoint import open_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not IMAGES.is_file(), reason=f"the images are not there: {IMAGES}"),
]


@pytest.mark.parametrize("name", NETWORKS)
def test_every_image_is_classified_as_by_the_source(name: str) -> None:
    if not NETWORKS[name].is_dir():
        pytest.skip(f"the checkpoint is not there: {NETWORKS[name]}")
    source = open_model(str(NETWORKS[name]))
    schemes = ("folded", "skipinit")
    results = [normswap.convert(source, to).model for to in schemes]
    loader = datasets.make_loader(source, str(IMAGES), batch_size=250, workers=2)
    (reference, *others), labels = logits([source, *results], loader)
    assert len(labels) == 10_000
    right = (reference.argmax(1) == labels).sum().item()
    for to, result in zip(schemes, others, strict=True):
        error = ((result - reference).double().norm() / reference.double().norm()).item()
        agree = (result.argmax(1) == reference.argmax(1)).sum().item()
        accuracy = (result.argmax(1) == labels).sum().item()
        print(f"\n| `{name}` | `{to}` | {right / 100:.2f} | {accuracy / 100:.2f} | {agree} of 10000 | {error:.1e} |")
        assert agree == 10_000
        assert accuracy == right
        assert error <= 1e-5
