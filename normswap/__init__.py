"""normswap moves a pretrained vision network to another normalization scheme.

The network keeps the function that it learned. Here are the public names. Each is imported when it
is first used, so that `import normswap` and `normswap --help` stay fast. No file of the package has
the name of a public function: importing the file would put the module in the function's place.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from normswap.version import __version__ as __version__

if TYPE_CHECKING:
    from normswap.analysis.block_signals import signal_propagation as signal_propagation
    from normswap.analysis.weight_decay import param_groups as param_groups
    from normswap.diagnosis.doctor import diagnose as diagnose
    from normswap.diagnosis.findings import Diagnosis as Diagnosis, Finding as Finding
    from normswap.errors import NormswapError as NormswapError
    from normswap.exporting.exporter import Exported as Exported, export as export
    from normswap.graph.inspection import Anatomy as Anatomy, inspect as inspect
    from normswap.images.accuracy import evaluate as evaluate
    from normswap.plan import Arch as Arch, Plan as Plan
    from normswap.proof.verdict import Report as Report
    from normswap.schemes import Scheme as Scheme, register_scheme as register_scheme
    from normswap.sites.known_norms import register_norm as register_norm
    from normswap.storage.checkpoint import load as load, open_model, save as save
    from normswap.storage.publishing import push as push
    from normswap.surgery.carrying_out import Conversion as Conversion
    from normswap.surgery.conversion import convert as convert
    from normswap.surgery.network import Network as Network
    from normswap.surgery.recalibration import recalibrate as recalibrate
    from normswap.surgery.verification import verify as verify
    from normswap.training.engine import Result as Result, finetune as finetune
    from normswap.training.optimizing import (
        adaptive_clip_ as adaptive_clip_,
        teacher_loss as teacher_loss,
    )
    from normswap.training.recipe import Recipe as Recipe
    from normswap.training.recipe_files import load_recipe as load_recipe

    open = open_model
    from normswap.analysis.advice import advise as advise

    doctor = diagnose
    spp = signal_propagation

# Public names by the file that defines them.
_NAMES = {
    "analysis.block_signals": "signal_propagation",
    "analysis.weight_decay": "param_groups",
    "diagnosis.doctor": "diagnose",
    "diagnosis.findings": "Diagnosis Finding",
    "errors": "NormswapError",
    "exporting.exporter": "Exported export",
    "graph.inspection": "Anatomy inspect",
    "images.accuracy": "evaluate",
    "sites.known_norms": "register_norm",
    "plan": "Arch Plan",
    "schemes": "Scheme register_scheme",
    "storage.checkpoint": "load open save",
    "storage.publishing": "push",
    "surgery.carrying_out": "Conversion",
    "surgery.verification": "verify",
    "surgery.conversion": "convert",
    "surgery.network": "Network",
    "surgery.recalibration": "recalibrate",
    "proof.verdict": "Report",
    "training.engine": "Result finetune",
    "training.optimizing": "adaptive_clip_ teacher_loss",
    "training.recipe": "Recipe",
    "training.recipe_files": "load_recipe",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
# A public name that its file spells otherwise: there `open` would hide Python's.
_OTHER_NAMES = {"open": "open_model"}
__all__ = sorted([*_HOMES, "__version__"])
# Commands whose function has another name, or none of the names above. Whoever knows the command
# finds the function.
_COMMANDS = {
    "advise": "analysis.advice.advise",
    "doctor": "diagnosis.doctor.diagnose",
    "spp": "analysis.block_signals.signal_propagation",
}


def __getattr__(name: str) -> Any:
    # Python calls this for a name that the package does not have yet. The file that defines the
    # name is imported only now. `_COMMANDS` has further names, which are those of commands.
    if name in _COMMANDS:
        file, _, function = _COMMANDS[name].rpartition(".")
        return getattr(importlib.import_module(f"normswap.{file}"), function)
    if name not in _HOMES:
        raise AttributeError(f"module 'normswap' has no attribute {name!r}")

    # `_HOMES` has the file of each public name. In its file, `open` is called `open_model`.
    home = importlib.import_module(f"normswap.{_HOMES[name]}")
    return getattr(home, _OTHER_NAMES.get(name, name))


def __dir__() -> list[str]:
    return __all__
