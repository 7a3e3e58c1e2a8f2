"""The result of a comparison."""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kept:
    """How well the answers of source and result agree on held-out images, without labels.

    Args:
        agreement: The share of images, or of places in maps, with the same argmax. None where the
            outputs have no argmax.
        relative_l2: The distance |result - source| / |source| at the outputs.
        count: The number of images.
        answer: The output that the argmax is taken of. Of several outputs it is the one that agrees
            least, with the agreement of the others.
        axis: The axis of the argmax. None where outputs have names.
    """

    agreement: float | None
    relative_l2: float
    count: int
    answer: str = ""
    axis: int | None = None

    @property
    def least(self) -> float | None:
        """The least agreement with 97.5 % confidence.

        Source: Wilson 1927, as Brown et al. 2001, equation 4. Places of one image go together: for
        maps the bound is too high.
        """
        if self.agreement is None:
            return None
        z = 1.96
        n = self.count
        p = self.agreement
        middle = p + z * z / (2 * n)
        spread = z * (p * (1 - p) / n + (z / (2 * n)) ** 2) ** 0.5
        return float((middle - spread) / (1 + z * z / n))

    @property
    def least_percent(self) -> int | None:
        """The least agreement in whole percent, rounded down, so that it stays a bound."""
        return None if self.least is None else math.floor(100 * self.least)

    def __str__(self) -> str:
        images = f"{self.count} held-out images"
        distance = f"relative L2 {self.relative_l2:.1e}"
        if self.agreement is None or self.least is None:
            return f"{distance} on {images}"
        sure = f"97.5 % sure: at least {self.least_percent} %"
        # A classifier's scores, on axis 1, need no word.
        answer = f", {self.answer}" * bool(self.answer and self.axis != 1)
        return (
            f"same prediction on {100 * self.agreement:.1f} % of {images} ({sure}{answer}),"
            f" {distance}"
        )


@dataclass(frozen=True)
class Error:
    """How far a result is from its reference: at the logits, or at the output of the module `site`.

    Args:
        site: The path of the module at whose output it was measured, or "logits".
        precision: The precision that both networks ran in.
        size: The size of the input.
        relative_l2: The distance |a - b| / |a|.
        largest: The largest difference, max |a - b| / max |a|.
        agreement: The fraction of inputs, or of places in maps, with the same argmax. It is None
            unless it is an error at logits of more than one class.
        output: The name of the worst output, where there are several.
        answer: The output that the argmax is taken of, as in `Kept`.
        axis: The axis of the argmax, as in `Kept`.
    """

    site: str
    precision: str
    size: tuple[int, ...]
    relative_l2: float
    largest: float
    agreement: float | None = None
    output: str = ""
    answer: str = ""
    axis: int | None = None


@dataclass(frozen=True)
class Report:
    """The measurements, and the verdict.

    Args:
        exact: Whether the conversion claims to keep the function.
        passed: Whether the result is good. An exact one must keep the function within tolerance, an
            approximate one must give finite numbers.
        inputs: The name of the inputs that the networks were run on.
        logits: The errors at the logits, one for each precision and input size.
        sites: The errors at the residual blocks' outputs, in float32.
        tolerance: The largest relative L2 error that is allowed, by precision.
        remarks: Sentences that a reader must know: a branch, or the input, hardly moves the output,
            or the proof is at blocks, or in one precision only.
        kept: The agreement of an approximate result with its source on the user's held-out images.
        unmeasured: Why there is no such agreement, although there were images.
        unproved: Why nothing that was compared could have shown an error. Empty otherwise.
    """

    exact: bool
    passed: bool
    inputs: str
    logits: tuple[Error, ...]
    sites: tuple[Error, ...] = ()
    tolerance: dict[str, float] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    kept: Kept | None = None
    unmeasured: str = ""
    unproved: str = ""

    @property
    def verdict(self) -> str:
        """PROVED, NOT PROVED or WRONG of what claims to be exact; MEASURED of what does not."""
        if self.passed:
            return "PROVED" if self.exact else "MEASURED"
        return "NOT PROVED" if self.unproved else "WRONG"

    @property
    def worst(self) -> Error:
        """The largest relative L2 error at the logits in the network's own precision."""
        errors = [error for error in self.logits if error.precision != "float64"] or list(
            self.logits
        )
        return max(errors, key=lambda error: error.relative_l2)
