"""The layer that gives the logits: adaptive clipping leaves it alone, and a teacher's features are what it reads."""

from __future__ import annotations

from torch import nn

from normswap.errors import OptionError, TraceError
from normswap.graph import inspection


def classifier(model: nn.Module) -> nn.Module:
    """The layer that gives the logits: what timm says it is, else the last linear layer of the traced network.

    Raises:
        OptionError: it has none.
    """
    ask = getattr(model, "get_classifier", None)
    found = ask() if callable(ask) else None
    if isinstance(found, nn.Module) and any(True for _ in found.parameters()):
        return found
    try:
        path = inspection.inspect(model).classifier
    except TraceError:
        path = None
    if path is None:
        raise OptionError("the classifier of this network is not known", "optim.clip.mode agc and distill.kind need it")
    return model.get_submodule(path)
