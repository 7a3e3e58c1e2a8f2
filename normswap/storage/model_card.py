"""The model card that stands beside converted weights."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePath

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.utils import yaml_dump

from normswap import schemes
from normswap.errors import printable
from normswap.models import kinds
from normswap.plan import Step
from normswap.proof.verdict import Report
from normswap.provenance import Provenance

_CARD = Path(__file__).with_suffix(".md")
# Characters that Markdown, or HTML in it, would not show. It shows an underscore within a word.
_MARKS = re.compile(r"[\\`*\[\]<|&~$]|\b_|_\b")


@dataclass(frozen=True)
class Accuracy:
    """Top-1 of a network on labelled images, as its card states it.

    Args:
        top1: The share of images whose label has the highest score, in percent.
        count: The number of images.
        images: The name of the images for a reader.
        split: The part of the dataset. Empty where it has no parts.
        dataset: The repository of the dataset on the hub. With None the images are on no hub, and
            only the card's text has the figure: the hub has no place for other images.
        task: The name of the measurement in the dataset's `eval.yaml`.
        source_top1: Top-1 of the network's source on the same images. None where it was not
            measured.
    """

    top1: float
    count: int
    images: str
    split: str = ""
    dataset: str | None = None
    task: str = "default"
    source_top1: float | None = None

    def __str__(self) -> str:
        part = f"{_plain(self.images)}, {_plain(self.split)}" if self.split else _plain(self.images)
        sentence = f"Top-1: **{self.top1:.2f} %** of {self.count} labelled images ({part})"
        if self.source_top1 is None:
            return f"{sentence}.\n"
        return f"{sentence}; the source has {self.source_top1:.2f} % of the same images.\n"


def eval_results(accuracy: Accuracy | None) -> dict[str, bytes]:
    """Return the content of a file in `.eval_results/`, by the file's path.

    The hub reads the top-1 from this file, and shows it if the dataset is one of its benchmarks.
    Without a dataset the dict is empty.

    Source: https://huggingface.co/docs/hub/eval-results
    """
    if accuracy is None or accuracy.dataset is None:
        return {}

    notes = f"top-1 in percent, {accuracy.count} images"
    if accuracy.split:
        notes += f" of {printable(accuracy.split)}"
    dataset = {"id": printable(accuracy.dataset), "task_id": printable(accuracy.task)}
    entry = {"dataset": dataset, "value": accuracy.top1, "notes": notes}
    name = re.sub(r"[^a-z0-9._-]", "-", accuracy.dataset.rpartition("/")[2].lower()).lstrip(".")
    return {f".eval_results/{name}.yaml": yaml_dump([entry], sort_keys=False).encode()}


# The tensors of frozen norms have the names of BatchNorm's, so timm loads them into BatchNorms.
_THAWS = (
    "The norms are frozen where normswap opens this network. timm opens it with BatchNorms: the"
    " same in eval mode, but in training mode their statistics move."
)


def render(
    record: Provenance,
    report: Report | None,
    *,
    code: str = "",
    license: str | None = None,
    accuracy: Accuracy | None = None,
) -> str:
    """Return the card in Markdown: the network, its conversion, its measurements and how it loads.

    Names and figures may come from somebody else's file. Whatever they hold, Markdown shows them
    literally, in one line.

    Args:
        record: Where the network is from, and its plan.
        report: The measurements. None where the weights have changed since.
        code: Code that loads the network. The default opens the directory of the card.
        license: The license of the weights, by the hub's name.
        accuracy: Top-1 of this network on labelled images. None where it was not measured.
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
    dataset = accuracy.dataset if accuracy else None
    data = ModelCardData(
        license=license and printable(license),
        base_model=base and printable(base),
        datasets=[printable(dataset)] if dataset else None,
        metrics=["accuracy"] if accuracy else None,
        pipeline_tag=task,
        library_name="normswap" if "normswap" in code else "timm",
        tags=[*map(printable, builders), "normswap"],
        model_name=printable(title),
        eval_results=_results(task, accuracy),
    )

    # A path is of no use to anybody else.
    source = record.source if base else PurePath(record.source).name
    sha256 = f" (tensors' SHA-256 {_code_span(record.sha256)})" if record.sha256 else ""
    measured = "Not verified since the last change to its weights.\n"
    is_exact = schemes.are_exact_if_known(record.plan.steps)
    if is_exact is None:
        is_exact = report is None or report.exact
    if report:
        before = " -> ".join(["source", *steps[: report.steps_before]])
        measured = _measured(report, before, is_exact=is_exact)
    if accuracy:
        measured = f"{accuracy}\n{measured}"
    if record.arch is not None and record.arch.builder == "timm" and _is_frozen(record):
        measured = f"{measured}\n{_THAWS}\n"
    reversible = record.norms and is_exact
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


def _is_frozen(record: Provenance) -> bool:
    """Whether the last step that placed norms froze them."""
    schemes_of_steps = [step.scheme for step in record.plan.steps]
    return schemes_of_steps[-1:] == ["frozen-bn"]


def loading_code(place: str, record: Provenance) -> str:
    """Return code that opens the network at that place by normswap."""
    trust = ""
    if record.arch is not None and kinds.by_builder(record.arch.builder).foreign:
        trust = ", trust_factory=True"
    return f'import normswap\n\nmodel = normswap.open("{place}"{trust})  # in eval mode'


def base_model(record: Provenance) -> str | None:
    """Return the hub repository that the weights come from, or None."""
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
    """Return the text, escaped so that a line of Markdown shows it literally."""
    return _MARKS.sub(r"\\\g<0>", printable(text))


def _code_span(text: str) -> str:
    """Return the text as a span of code, between more backticks than the text has in a row."""
    text = printable(text)
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    # Markdown takes one blank off at each end.
    padding = " " if longest else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def _results(task: str, accuracy: Accuracy | None) -> list[EvalResult] | None:
    """Return top-1 as the hub's evaluation result, or None if no dataset of the hub was used.

    Distances on noise and agreement with the source are no results on a dataset: the text has them.
    """
    if accuracy is None or accuracy.dataset is None:
        return None
    result = EvalResult(
        task_type=task,
        dataset_type=printable(accuracy.dataset),
        dataset_name=printable(accuracy.images),
        dataset_split=printable(accuracy.split) or None,
        dataset_args={"images": accuracy.count},
        metric_type="accuracy",
        metric_name="top-1, percent",
        metric_value=accuracy.top1,
    )
    return [result]


def _described(step: Step) -> str:
    """Return the name of a step's scheme, with the options that differ from the defaults."""
    options = ", ".join(
        f"{key} = {value}" for key, value in schemes.changed(step.scheme, step.options).items()
    )
    if not options:
        return step.scheme
    return f"{step.scheme} ({options})"


def _measured(report: Report, before: str, *, is_exact: bool) -> str:
    """Return the card's paragraph about the measurements, in Markdown.

    Args:
        report: The measurements.
        before: The network that the result was measured against, in words: "source", and the steps
            that had been applied to it.
        is_exact: Whether all steps since the source keep the function.
    """
    claim = "this conversion changes the function of its source"
    if is_exact:
        claim = "this conversion keeps the function of its source"
    elif report.exact:
        claim = "this keeps the function of that network, which has another one than its source"

    reference = "the source"
    if report.steps_before:
        reference = f"the network after {_plain(before)}"
    # On noise the argmax of an approximate result means nothing, so its column is left out.
    heading = "| precision | input | relative L2 | largest |"
    rule = "|---|---|---|---|"
    if report.exact:
        heading += " same argmax |"
        rule += "---|"
    lines = [
        f"Measured against {reference} on {_plain(report.inputs)} ({claim}):\n",
        heading,
        rule,
    ]
    for error in report.logits:
        size = "x".join(map(str, error.size))
        agreement = "" if error.agreement is None else f"{error.agreement:.1%}"
        precision = _plain(error.precision)
        row = f"| {precision} | {size} | {error.relative_l2:.1e} | {error.largest:.1e} |"
        if report.exact:
            row += f" {agreement} |"
        lines.append(row)

    if report.kept:
        kept = _plain(str(report.kept))
        lines.append(
            f"\nMeasured on images that nothing was fitted to: {kept}. Other images may keep less."
        )
    elif not report.exact:
        why = f": {_plain(report.unmeasured)}" if report.unmeasured else ""
        lines.append(f"\nHow much of the accuracy this keeps was not measured{why}.")
    return "\n".join([*lines, ""])
