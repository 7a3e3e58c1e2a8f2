"""How the user says that images are prepared, and whether any can be. No torch is imported."""

from collections.abc import Sequence
from dataclasses import dataclass

from normswap.errors import OptionError

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")


@dataclass(frozen=True)
class Preprocessing:
    """How images are prepared for a network, as the user states it.

    If a field is None, the value in the network's record holds, or else a usual value.

    Args:
        mean: The mean of pixels in 0..1, per channel or for all channels.
        std: The standard deviation of pixels in 0..1, per channel or for all channels.
        crop_pct: The share of the image's side that the crop at its centre keeps.
        interpolation: The method of resizing, one of `INTERPOLATIONS`.
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop_pct: float | None = None
    interpolation: str | None = None

    def check(self) -> None:
        """Raise OptionError if no image can be prepared with these values."""
        if self.std is not None and min(self.std) <= 0:
            raise OptionError(
                f"std {comma_list(self.std)}", "it must be positive: images are divided by it"
            )

        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if numbers is not None and not all(0 <= number <= 1 for number in numbers):
                remedy = "Numbers for pixels in 0..255 must be divided by 255"
                raise OptionError(
                    f"{name} {comma_list(numbers)}", "it is that of pixels in 0..1", remedy
                )

        if self.crop_pct is not None and not 0 < self.crop_pct <= 1:
            raise OptionError(
                f"crop-pct {self.crop_pct:g}",
                "it is a share of the image's side, above 0 and at most 1",
            )
        if self.interpolation is not None and self.interpolation not in INTERPOLATIONS:
            raise OptionError(
                f"interpolation {self.interpolation}", f"it is one of {', '.join(INTERPOLATIONS)}"
            )


def comma_list(value: Sequence[float]) -> str:
    """Return numbers with commas between them, as the command line takes them: `0.5,0.5,0.5`."""
    return ",".join(f"{number:g}" for number in value)
