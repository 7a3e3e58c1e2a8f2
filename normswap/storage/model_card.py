"""The model card that stands beside converted weights."""

import re
from pathlib import Path, PurePath

from huggingface_hub import EvalResult, ModelCardData

from normswap import schemes
from normswap.errors import printable
from normswap.models import kinds
from normswap.plan import Step
from normswap.provenance import Provenance
from normswap.surgery.report import Report

_CARD = Path(__file__).with_suffix(".md")
# Characters that Markdown, or HTML in it, would not show. It shows an underscore within a word.
_MARKS = re.compile(r"[\\`*\[\]<|&~$]|\b_|_\b")


def render(
    record: Provenance, report: Report | None, *, code: str = "", license: str | None = None
) -> str:
    """Return the card in Markdown: what this network is, what was done and measured, how it loads.

    Names and figures may come from somebody else's file. Whatever they hold, Markdown shows them
    literally, in one line.

    Args:
        record: Where the network is from, and its plan.
        report: The measurements. None where the weights have changed since.
        code: Code that loads the network. The default opens the directory of the card.
        license: The license of the weights, by the hub's name.
    """
    steps = [_described(step) for step in record.plan.steps]
    arch = getattr(record.arch, "name", "network")
    title = f"{arch} converted to {steps[-1]}" if steps else arch
    task = "image-feature-extraction"
    if record.pretrained_cfg.get("num_classes"):
        task = "image-classification"
    code = code or loading_code(".", record)

    builders = [record.arch.builder] if record.arch else []
    base = base_model(record)
    data = ModelCardData(
        license=license and printable(license),
        base_model=base and printable(base),
        library_name="normswap" if "normswap" in code else "timm",
        tags=[task, *map(printable, builders), "normswap"],
        model_name=printable(title),
        eval_results=_results(task, report) if report else None,
    )

    # A path is of no use to anybody else.
    source = record.source if base else PurePath(record.source).name
    sha256 = f" (tensors' SHA-256 {_code_span(record.sha256)})" if record.sha256 else ""
    measured = "Not verified since the last change to its weights.\n"
    if report:
        measured = _measured(report)
    reversible = record.norms and (not report or report.exact)
    return _CARD.read_text(encoding="utf-8").format(
        data=data.to_yaml(),
        title=_plain(title),
        source=_code_span(source),
        hash=sha256,
        conversion=_plain(" -> ".join(["source", *steps])),
        measured=measured,
        code=code,
        back="; `--to unfold` brings the BatchNorm network back" if reversible else "",
    )


def loading_code(place: str, record: Provenance) -> str:
    """Return code that opens the network at that place by normswap."""
    trust = ""
    if record.arch is not None and kinds.by_builder(record.arch.builder).foreign:
        trust = ", trust_factory=True"
    return f'import normswap\n\nmodel = normswap.open("{place}"{trust})  # in eval mode'


def base_model(record: Provenance) -> str | None:
    """Return the repository on the hub that the weights are from, if they are from one."""
    prefix, _, place = record.source.rpartition(":")
    if record.sha256 is None or PurePath(place).is_absolute():
        return None
    if prefix in ("hf-hub", "hf"):
        return place.partition("@")[0]
    is_timms = (
        not prefix and record.arch is not None and record.arch.builder == "timm" and "." in place
    )
    return f"timm/{place}" if is_timms else None


def _plain(text: str) -> str:
    """Return the text for a line of Markdown, which shows it as it is."""
    return _MARKS.sub(r"\\\g<0>", printable(text))


def _code_span(text: str) -> str:
    """Return the text as a span of code, between more backticks than it has in a row."""
    text = printable(text)
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    # Markdown takes one blank off at each end.
    padding = " " if longest else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def _results(task: str, report: Report) -> list[EvalResult]:
    """Return the measurements of a conversion as the hub's evaluation results."""
    kept = report.kept
    inputs = printable(report.inputs)
    results = [EvalResult(task, "noise", inputs, "relative_l2", report.worst.relative_l2)]
    if kept is not None and kept.agreement is not None:
        results.append(
            EvalResult(task, "images", f"{kept.count} held-out images", "agreement", kept.agreement)
        )
    return results


def _described(step: Step) -> str:
    """Return the name of a step's scheme, with the options that differ from the defaults."""
    options = ", ".join(
        f"{key} = {value}" for key, value in schemes.changed(step.scheme, step.options).items()
    )
    if not options:
        return step.scheme
    return f"{step.scheme} ({options})"


def _measured(report: Report) -> str:
    """Return the card's paragraph about the measurements, in Markdown."""
    claim = "changes the function of its source"
    if report.exact:
        claim = "keeps the function of its source"
    lines = [
        f"Measured against the source on {_plain(report.inputs)} (this conversion {claim}):\n",
        "| precision | input | relative L2 | largest |" + " same argmax |" * report.exact,
        "|---|---|---|---|" + "---|" * report.exact,
    ]
    for error in report.logits:
        size = "x".join(map(str, error.size))
        agreement = "" if error.agreement is None else f"{error.agreement:.1%}"
        precision = _plain(error.precision)
        row = f"| {precision} | {size} | {error.relative_l2:.1e} | {error.largest:.1e} |"
        # On noise the argmax of an approximate result means nothing, and is left out.
        lines.append(row + f" {agreement} |" * report.exact)

    if report.kept:
        kept = _plain(str(report.kept))
        lines.append(
            f"\nMeasured on images that nothing was fitted to: {kept}. Other images may keep less."
        )
    elif not report.exact:
        why = f": {_plain(report.unmeasured)}" if report.unmeasured else ""
        lines.append(f"\nHow much of the accuracy this keeps was not measured{why}.")
    return "\n".join([*lines, ""])
