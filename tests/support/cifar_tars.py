"""CIFAR-10's packed tars as plain ones, which is what normswap reads."""

import lzma
import shutil
import tempfile
from pathlib import Path


def unpacked(packed: Path) -> Path:
    """Return a plain copy of a `.tar.xz`, made once on this machine.

    Of a file that is not there, return its own path.
    """
    if not packed.is_file():
        return packed

    plain = Path(tempfile.gettempdir()) / f"normswap-{packed.parent.name}-{packed.stem}"
    if not plain.is_file():
        with (
            lzma.open(packed) as source,
            tempfile.NamedTemporaryFile(dir=plain.parent, delete=False) as target,
        ):
            shutil.copyfileobj(source, target)
        Path(target.name).replace(plain)
    return plain
