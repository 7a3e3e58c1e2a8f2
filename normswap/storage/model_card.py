"""The model card that stands beside converted weights."""

from __future__ import annotations

import re

from huggingface_hub import ModelCardData

from normswap import schemes
from normswap.models import kinds
from normswap.plan import Step
from normswap.provenance import Provenance
from normswap.surgery.report import Report

_PLACE = '"path/to/this/directory"'
_LOAD = f"model = normswap.load({_PLACE}"
_CARD = """---
{data}
---
# {title}

- Source: `{source}`{hash}
- Conversion: {conversion}

{measured}
## Use

```python
import normswap
{load})  # in eval mode
```

`normswap verify DIR` measures it against its source again; `normswap convert DIR --to ...` goes on from here{back}.
"""


def render(record: Provenance, report: Report | None) -> str:
    """Write in Markdown what this is, what was done, what was measured, and how to use it."""
    steps = [_said(step) for step in record.plan.steps]
    foreign = record.arch is None or kinds.by_builder(record.arch.builder).foreign
    arch = getattr(record.arch, "name", "network")
    builder = "pytorch" if foreign or record.arch is None else record.arch.builder
    task = ["image-classification"] if record.pretrained_cfg.get("num_classes") else []
    reversible = record.norms and (not report or report.exact)
    return _CARD.format(
        data=ModelCardData(library_name=builder, tags=[*task, builder, "normswap"]).to_yaml(),
        title=f"{arch} converted to {steps[-1]}" if steps else arch,
        source=record.source,
        hash=f" (tensors' SHA-256 `{record.sha256}`)" if record.sha256 else "",
        conversion=" -> ".join(["source", *steps]),
        measured=_measured(report) if report else "Not verified since the last change to its weights.\n",
        load=_LOAD + (", trust_factory=True" if record.arch and foreign else ""),
        back="; `--to unfold` brings the BatchNorm network back" if reversible else "",
    )


def published(card: str, repo: str, *, alone: bool) -> str:
    """Return the card as it stands on the hub: how to get the network from there, and by which library.

    Args:
        alone: timm builds and loads it without normswap.
    """
    if alone:
        code = f'import timm\nmodel = timm.create_model("hf-hub:{repo}", pretrained=True).eval()'
        return re.sub(rf"import normswap\n{re.escape(_LOAD)}.*", lambda _: code, card)
    card = card.replace("import normswap\n", "import normswap\nfrom huggingface_hub import snapshot_download\n")
    return re.sub(r"library_name: .*", "library_name: normswap", card).replace(_PLACE, f'snapshot_download("{repo}")')


def _said(step: Step) -> str:
    options = ", ".join(f"{key} = {value}" for key, value in schemes.changed(step.scheme, step.options).items())
    if not options:
        return step.scheme
    return f"{step.scheme} ({options})"


def _measured(report: Report) -> str:
    claim = "keeps the function of its source" if report.exact else "changes the function of its source"
    lines = [
        f"Measured against the source on {report.inputs} (this conversion {claim}):\n",
        "| precision | input | relative L2 | largest |" + " same argmax |" * report.exact,
        "|---|---|---|---|" + "---|" * report.exact,
    ]
    for error in report.logits:
        size, same = "x".join(map(str, error.size)), "" if error.agreement is None else f"{error.agreement:.1%}"
        row = f"| {error.precision} | {size} | {error.relative_l2:.1e} | {error.largest:.1e} |"
        # On noise an approximate result's argmax says nothing.
        lines.append(row + f" {same} |" * report.exact)
    if report.kept:
        lines.append(f"\nMeasured on images that nothing was fitted to: {report.kept}. Other images may keep less.")
    elif not report.exact:
        why = f": {report.unmeasured}" if report.unmeasured else ""
        lines.append(f"\nHow much of the accuracy this keeps was not measured{why}.")
    return "\n".join([*lines, ""])
