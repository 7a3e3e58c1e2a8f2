"""Each figure of docs/situations.md is that of a table which a script wrote."""

import re
from collections.abc import Callable

import pytest
from support.lab_tables import ROOT, Row, number, row_of, table, tenths, text
from support.readme_figures import share_folded, share_left_by_torch

PAGE = (ROOT / "docs" / "situations.md").read_text(encoding="utf-8")
UNSEEN = "doctor_unseen.md"
TIMMS = "timm's"


def section(heading: str) -> str:
    """Return a section of the page, each run of blanks as one blank."""
    body = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert body, f"docs/situations.md has no section {heading!r}"
    return " ".join(body.split())


def ended(task: str, way: str) -> str:
    """Return where training ended, in percent, without its deviation."""
    row = row_of("after_training.md", task=task, way=way)
    return tenths(number(row["at the end"]))


def one_image_an_update() -> str:
    return (
        f"trained with two images an update, ends at {ended('two', 'frozen-bn')} % top-1 with"
        f" `frozen-bn`, {ended('two', 'skipinit')} with `skipinit` and {ended('two', 'groupnorm')}"
        f" with `groupnorm`. BatchNorm in training mode ends at {ended('two', 'BatchNorm')}"
    )


def small_batches() -> str:
    return (
        f"With two images an update `skipinit` ends at {ended('two', 'skipinit')} % top-1,"
        f" BatchNorm at {ended('two', 'BatchNorm')}, BatchNorm in eval mode at"
        f" {ended('two', 'BatchNorm in eval mode')}"
    )


def frozen() -> str:
    return (
        "An encoder in a U-Net, two pictures an update, ends at a mean IoU of"
        f" {ended('segmentation', 'frozen-bn')} % with `frozen-bn`, {ended('segmentation', 'tune')}"
        f" with `tune`, and {ended('segmentation', 'BatchNorm in eval mode')} with BatchNorm kept"
        " in eval mode by hand"
    )


def private() -> str:
    before = row_of("after_training.md", task="private", way="skipinit")["top-1: at once"]
    by_hand = ended("private", "GroupNorm, gamma and beta copied, groups of 16")
    return (
        f"from {before} % top-1 on blurred images to {ended('private', 'skipinit')} at epsilon 3,"
        f" `groupnorm` to {ended('private', 'groupnorm')}, a GroupNorm with copied gamma and beta"
        f" to {by_hand}"
    )


def federated() -> str:
    def after(way: str) -> str:
        row = row_of("federated.md", images="blurred, 5 x 5", norms=way)
        return tenths(number(row["round 6"]))

    before = row_of("federated.md", images="blurred, 5 x 5", norms="FedAvg, BatchNorm")["before"]
    return (
        f"from {before} % top-1 on blurred images to {after('skipinit --for federated')} after six"
        f" rounds; FedAvg with BatchNorm reaches {after('FedAvg, BatchNorm')}, a GroupNorm with"
        f" copied gamma and beta {after('GroupNorm, gamma and beta copied')}"
    )


def shifted(shift: str) -> tuple[str, str]:
    """Return the top-1 of `demo` on shifted images, and after new statistics."""
    row = row_of("recalibrate.md", network="demo", shift=shift)
    return tenths(row["top-1"]), tenths(row["recalibrated"])


def recalibrated() -> str:
    before, after = shifted("contrast 30 %")
    at_home, _ = shifted("none")
    return (
        f"With 30 % of the contrast `demo` answers {before} % of its images right, and {after} %"
        f" once recalibrated (at full contrast: {at_home} %)"
    )


def new_domain() -> str:
    before, after = shifted("blurred, 5 x 5")
    return (
        f"On blurred images `demo` answers {before} % right, and {after} % once recalibrated;"
        " torch's `update_bn` measures the same statistics"
    )


def changed_weights(change: str) -> Row:
    row = row_of("recalibrate_pruned.md", network="resnet18_narrow", change=change)
    # torch's own function gives the same wherever it can be used.
    assert row["torch's update_bn"] in (row["recalibrated"], "-")
    return row


def pruned() -> str:
    row = changed_weights("pruned 50%")
    bare = changed_weights("folded, pruned 50%")
    return (
        f"loses half of its weights: {row['top-1 before']} % top-1 become {row['changed']}, and"
        f" {row['recalibrated']} after `recalibrate` or torch's `update_bn`. Folded, it goes from"
        f" {bare['changed']} to {bare['recalibrated']}; `update_bn` finds no norm there"
    )


def averaged() -> str:
    row = changed_weights("average of two trainings")
    return (
        f"answers {row['changed']} % right with the statistics of one of them, and"
        f" {row['recalibrated']} % after `recalibrate` or torch's `update_bn`"
    )


def not_finite() -> str:
    row = row_of("doctor.md", fault="NaN in a variance")
    return (
        f"With NaN in one variance a narrow ResNet-18 answers {row['with the fault']} % right, and"
        f" {row['after its mend']} % after `recalibrate` ({row['top-1 before']} % before the NaN)"
    )


def doctor_unseen() -> str:
    found = re.search(r"first in (\d+) of (\d+); false alarms: (\d+) of (\d+)", text(UNSEEN))
    assert found
    named, planted, alarms, sound = found.groups()
    assert alarms == "0"
    before = re.search(
        r"The first run named (\d+) of (\d+).* raised a false alarm on", text(UNSEEN)
    )
    assert before
    return (
        f"Of {planted} further planted faults it names {named} first, and on {sound} sound networks"
        " it raises no alarm. That is after its checks were mended once on them: at the first run"
        f" it named {before[1]} of {before[2]}, with 3 false alarms"
    )


def exchanged_colours() -> str:
    faults = [row for name in ("doctor.md", UNSEEN) for row in table(name) if "fault" in row]
    exchanged = [row for row in faults if row["fault"] == "BGR"]
    named = [row for row in exchanged if row["right"] == "yes"]
    sound = [row for row in faults if row["fault"] == "none"]
    (alarm,) = [row for row in sound if row["right"] == "NO"]

    demo = next(row for row in named if row["network"] == "demo")
    missed = [row for row in exchanged if row not in named]
    assert all(row["network"].startswith("efficientnet_lite") for row in missed)
    costliest = max(missed, key=_lost)
    return (
        f"Red and blue were exchanged for {len(exchanged)} networks. It named that on the"
        f" {len(named)} that the check was made with; `demo` falls from {demo['top-1 before']} to"
        f" {demo['with the fault']} % top-1 by it. It missed it on the {len(missed)} others,"
        " EfficientNets of which it looked at 32 photographs; the costliest fell from"
        f" {costliest['top-1 before']} to {costliest['with the fault']} %."
        f" On {len(sound)} networks without a fault it raised one false alarm, on inverted images,"
        f" of which that network answers {alarm['top-1 before']} % right"
    )


def _lost(row: Row) -> float:
    """Return the points of top-1 that a fault costs."""
    return number(row["top-1 before"]) - number(row["with the fault"])


def by_hand(how: str, images: str) -> str:
    return row_of("imagenet.md", how=how, images=images)["top-1"]


def ruined() -> str:
    copied = by_hand("GroupNorm, gamma and beta copied", "none")
    return (
        "EfficientNet-Lite0 on 500 photographs of ImageNet's training set:"
        f" {by_hand('folded', 'none')} % top-1 before, {copied} with gamma and beta copied,"
        f" {by_hand('groupnorm', 'none')} with `groupnorm`, and {by_hand('groupnorm', '100')}"
        " after a fit to 100 images"
    )


def plain_groupnorm() -> str:
    # The GroupNorms of both tables have groups of 16 channels, as the other libraries' have.
    taught = ended("teacher", "groupnorm --relative-eps 0 --group-size 16")
    rows = {"network": "resnet18_narrow"}
    at_once = row_of("robot_policy.md", to="groupnorm --relative-eps 0", **rows)["top-1"]
    source = row_of("robot_policy.md", to="source (BatchNorm)", **rows)["top-1"]
    copied = ended("teacher", "GroupNorm, gamma and beta copied, groups of 16")
    return (
        f"A narrow ResNet-18 keeps {at_once} of {source} % top-1 with it at once. Taught by its"
        f" source, it ends at {taught} %"
        f" (copied gamma and beta: {copied}; BatchNorm: {ended('teacher', 'BatchNorm')})"
    )


def tiles() -> str:
    norms = row_of("unlabelled.md", **{"U-Net": "one group", "norms": "GroupNorm"})
    bare = row_of("unlabelled.md", **{"U-Net": "one group", "norms": "folded, 100 images"})
    assert bare["tile off"] == "0"
    return (
        f"A U-Net's tile was off by {norms['tile off']} (relative L2), and is off by 0; its mean"
        f" IoU goes from {norms['mean IoU']} to {bare['mean IoU']} %, its time in ONNX Runtime"
        f" from {norms['ONNX Runtime'].split(', ')[1]} to {bare['ONNX Runtime'].split(', ')[1]}"
    )


def not_fused() -> str:
    deep = row_of("export.md", network="resnetv2_50", format="onnx")
    runtime = row_of("operators.md", network="resnetv2_50", batch="1", runtime="onnxruntime")
    left = re.findall(r"(\d+) norm", deep["exported plainly"])[0]
    assert "0 norm" in deep["nodes"]
    same = re.search(r"same operators on the same shapes: (\d+) of (\d+)", text("operators.md"))
    assert same
    return (
        f"Torch's own export of timm's `resnetv2_50` keeps {left} of its 49 norms, ours none; ONNX"
        f" Runtime then runs {runtime['ours']} operators, not {runtime[TIMMS]}."
        f" In {same[1]} of {same[2]} cases the runtimes run the same operators of both"
    )


def same_file() -> str:
    # The table has formats, too, that `export` does not write any more.
    written = [row for row in table("export.md") if row.get("format") in ("onnx", "pt2")]
    whole = [row for row in written if row.get("dtype") == "fp32"]
    halves = [row for row in written if row.get("dtype") in ("fp16", "bf16")]
    assert all(number(row["same argmax"]) == 10_000 for row in whole)
    least = min(number(row["same argmax"]) for row in halves)
    return (
        f"Of 10,000 CIFAR-10 images, {len(whole)} ONNX and `.pt2` files in fp32 gave the source's"
        f" answer to all, and {len(halves)} in fp16 or bf16 to {least:,.0f} or more"
    )


def int8() -> str:
    row = row_of("int8.md", network="lite0", format="onnx")
    return (
        f"EfficientNet-Lite0 in ONNX Runtime has {tenths(row['top-1 of fp32, %'])} % top-1 in"
        f" fp32, {tenths(row['of tool'])} by the runtime's own quantizer ({row['tool, ms']} ms an"
        f" image) and {tenths(row['of ours'])} by ours ({row['ours, ms']} ms)"
    )


def elsewhere() -> str:
    light = "in another light"
    ways = ("groupnorm --groups 32", "BatchNorm", "BatchNorm in eval mode")
    groups, batch, in_eval = (row_of("policy_seeds.md", way=way) for way in ways)
    there = row_of("policy_recalibrated.md", way="BatchNorm")

    def of(row: Row, column: str) -> str:
        return tenths(number(row[column]))

    return (
        f"A robot's policy acts as in training in {of(batch, 'as in training')} % of its episodes"
        f" with BatchNorm, in {of(in_eval, 'as in training')} in eval mode and in"
        f" {of(groups, 'as in training')} with `--groups 32`. In another light these are"
        f" {of(batch, light)}, {of(in_eval, light)} and {of(groups, light)} %, and"
        f" {of(there, light + ', recalibrated')} with BatchNorm recalibrated there"
    )


def layer_norms() -> str:
    onnx = row_of("layer_norms.md", format="onnx")
    executorch = row_of("layer_norms.md", format="executorch")
    return (
        f"A small ViT in ONNX Runtime takes {onnx['LayerNorms: ms']} ms with LayerNorms and"
        f" {onnx['RMSNorms: ms']} with RMSNorms; in ExecuTorch it"
        f" takes {executorch['LayerNorms: ms']} and {executorch['RMSNorms: ms']} ms"
    )


def folded() -> str:
    ours = re.search(r"(\d+) architectures, .*?\*\*(\d+) exact", text("summary.md"))
    assert ours
    whole = row_of("summary.md", family="all")
    return (
        f"{ours[2]} of {ours[1]} timm architectures with BatchNorm fold exactly. Of their"
        f" {int(whole['norms']):,} norms {share_folded()} % fold into other layers, and"
        f" {100 - share_left_by_torch()} % by"
        " `torch.fx`'s fuser"
    )


def ported() -> str:
    resnet = row_of("yvinec.md", network="ResNet 50, timm's resnet50")
    densenet = row_of("yvinec.md", network="DenseNet 121, timm's densenet121")
    assert number(resnet["folded here"]) == number(resnet["norms"])
    return (
        f"a ResNet-50 has none: all {resnet['norms']} norms fold into the layer before. Of a"
        f" DenseNet-121 {number(densenet['folded here']):.0f} of {densenet['norms']} do"
    )


def norms_again() -> str:
    row = row_of("h200.md", scheme="batchnorm")
    error = row["L2 to the source: CPU"]
    return (
        "A `skipinit` network with BatchNorms again differs from its source by a relative L2 of"
        f" {error} in float32"
    )


SENTENCES: dict[str, Callable[[], str]] = {
    '"Expected more than 1 value per channel when training"': one_image_an_update,
    "train() is good, eval() is bad": recalibrated,
    "Is something wrong with the BatchNorms of this checkpoint?": doctor_unseen,
    "Are my images prepared as in training? BGR or RGB, bytes or shares, whose mean and std?": (
        exchanged_colours
    ),
    "BatchNorm with batch size 1 or 2, gradient accumulation, many small GPUs": small_batches,
    "Freezing BatchNorm while fine-tuning, and model.train() thaws it": frozen,
    '"You can\'t replace BatchNorm in a pretrained model without ruining the weights"': ruined,
    "GroupNorm for a torchvision or robot encoder, loaded without normswap": plain_groupnorm,
    "A GroupNorm network in tiles, or faster": tiles,
    "EMA, SWA, target networks, MoCo: what about BatchNorm's buffers": averaged,
    "Private training: Opacus refuses BatchNorm": private,
    "Federated training: BatchNorm's statistics differ from client to client": federated,
    "The exporter does not fuse my BatchNorm": not_fused,
    "The exported file answers otherwise than PyTorch": same_file,
    "int8 lost my accuracy": int8,
    "BatchNorm after pruning, merging or averaging weights": pruned,
    "Test-time adaptation, a new domain": new_domain,
    "It will act in another light, or from another place": elsewhere,
    "LayerNorm is slow on my NPU": layer_norms,
    "Interpretability, encrypted inference, spiking networks: no BatchNorm, please": folded,
    "NaN in running_mean or running_var, under AMP": not_finite,
    "Folding for a port to C++, ggml or MLX: the numbers": ported,
    "I need BatchNorm back": norms_again,
}


@pytest.mark.parametrize("heading", SENTENCES)
def test_a_section_has_the_figure_of_the_tables(heading: str) -> None:
    assert SENTENCES[heading]() in section(heading)


def test_every_section_has_figures_or_says_that_there_are_none() -> None:
    assert "[Figures]" not in PAGE
    for heading in re.findall(r"^## (.*)", PAGE, re.M):
        text = section(heading)
        has_figure = heading in SENTENCES or "(results.md#" in text
        assert has_figure or "not measured" in text, heading


def test_links_to_results_lead_to_a_heading() -> None:
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)", results, re.M)
    anchors = set(re.findall(r"\(results\.md#([\w-]+)\)", PAGE))
    assert anchors <= {re.sub(r"\W+", "-", heading.lower()) for heading in headings}
