"""What can go wrong, said once: what happened, why, and what to do about it."""

from __future__ import annotations


class NormswapError(Exception):
    """Base of every error that is the input's fault, not the program's.

    Args:
        what: what is wrong, naming the file, module path or option.
        why: the reason, if it is not already in `what`.
        remedy: what the user can do now.
    """

    def __init__(self, what: str, why: str = "", remedy: str = "") -> None:
        self.what, self.why, self.remedy = what, why, remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        text = self.what + (f": {self.why}" if self.why else "")
        return text + (f". {self.remedy}" if self.remedy else "")


def first_line(error: BaseException) -> str:
    """The error's message cut to one line, or its class when it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class SourceError(NormswapError):
    """A model, file or dataset cannot be found, read or understood."""


class TraceError(NormswapError):
    """The model does not run on the example, or something in its forward cannot be seen."""


class PlanError(NormswapError):
    """A plan is malformed, was edited into nonsense, or does not fit the model."""


class OptionError(NormswapError):
    """An option is unknown or out of range for the scheme."""


class RecipeError(NormswapError):
    """A recipe cannot be found or read, or says something that it may not say."""


class RefusedError(NormswapError):
    """The surgery is impossible at some module path, or there is nothing to do."""


class VerificationError(NormswapError):
    """The result does not compute what the source computes."""


class TrainingError(NormswapError):
    """Training has gone wrong: the loss is not finite."""


class OutputError(NormswapError):
    """The output cannot be written."""
