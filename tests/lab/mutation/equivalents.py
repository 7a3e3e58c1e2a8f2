"""Errors of `drawn.py` that are none: nothing that the program says or writes is another. And some that nobody sees."""

from __future__ import annotations

from typing import NamedTuple


class Reason(NamedTuple):
    """One of them.

    Args:
        file: where, within the package.
        change: a part of the line as it becomes, which no other error of the file has.
        why: nothing, or no test, tells the two apart.
    """

    file: str
    change: str
    why: str


EQUIVALENTS = (
    Reason("graph/recording.py", "small, batch= 3)", "two samples and three are recorded alike"),
    Reason("graph/recording.py", "width + 31)", "any other length of a series does"),
    Reason("graph/recording.py", "width + 33)", "any other length of a series does"),
    Reason("graph/recording.py", "small(sizes[0])[: 2]", "who takes 97 pixels and not 64 may be recorded at 97"),
    Reason("graph/recorder.py", "for t in tensors) or not any(", "the same memory under another name"),
    Reason("graph/recorder.py", "mark.version < version(tensor)", "versions only grow"),
    Reason("graph/spelling.py", "- return 0 + return 1", "tensors without a version are told apart by nothing"),
    Reason("folding/propagation.py", "+ if len(traced.users[node]) > 0:", "the only reader is the one passed already"),
    Reason("folding/propagation.py", '"get_attr" or traced.users', "a node of another kind names no tensor"),
    Reason("folding/propagation.py", 'node.op >= "get_attr" and', "a node of another kind names no tensor"),
    Reason("folding/channel_factors.py", "zip(one, two, strict=False)", "both have the channels of their sum"),
    Reason("folding/channel_factors.py", "self._alone(node, sources[ -1]", "of one source the first is the last"),
    Reason("schemes/parts/fixed_factors.py", "users[ -1]).target)", "there is one, or it was said before"),
    Reason("layers/weight_norm.py", "weight[ -1].eval()", "a weight has one parametrization"),
    Reason("surgery/conversion.py", "fitted[ -1] if len(fitted) == 1", "of one, the first is the last"),
    Reason("graph/recording.py", "a.shape < b.shape or not torch.equal", "torch.equal tells shapes apart, too"),
    Reason("calibration/lockstep.py", "way is not FAR or", "a value is kept or computed anew: it is the same"),
    Reason(
        "calibration/lockstep.py", "zip(self.interpreters, nodes, strict=False)", "there is a node for each interpreter"
    ),
    Reason("calibration/sampling.py", "layer.dilation, strict=False)", "both have as many numbers"),
    Reason("folding/layer_scale.py", "(scaled_dim(module) >= 1)", "a LayerScale's channels are in 1 or -1"),
    Reason("schemes/parts/fixed_factors.py", "str(after[ -1].target)) and", "of one, the first is the last"),
    Reason("layers/folded.py", "absorption.way == AbsorbMode.BEFORE", "a member of an enumeration equals itself alone"),
    Reason("layers/folded.py", "zip(reads, takes, strict=False)", "an edit has a take for each of its reads"),
    Reason("layers/weight_norm.py", "manual_seed( -1)", "any seed does that is always the same"),
    Reason("training/sweep_table.py", "markersize= 18", "the star on the plot is a point larger"),
    Reason("schemes/parts/per_sample_norms.py", "range(1, channels + 2)", "no number divides a smaller one"),
    Reason("surgery/conversion.py", "if len(steps) != 1 else calibrate", "every path has a step"),
    Reason(
        "folding/residual_stream.py", "if norm is None and axis", "no LayerNorm is None, and streams have their axes"
    ),
    Reason("folding/residual_stream.py", "stream.tensors[path] = +1", "it is set again when the tensor is looked at"),
    Reason("layers/unknown_norms.py", "1e-12, 1.0)", "1e-12 is told from 0 by no measurement"),
    Reason(
        "folding/channel_factors.py", "while self.parent[channel] < channel", "no parent is larger than its channel"
    ),
    Reason("surgery/applying.py", "kept.get(head, -1)", "-1 times a word is nothing, as 0 times is"),
    Reason("surgery/kept_accuracy.py", "len(answers) is len(parts)", "small numbers that are equal are the same"),
    Reason("benchmarking/forms.py", "any(batch > 1 for", "no batch has fewer than one image"),
    Reason("cli/commands/verify_command.py", "ORDER = 31", "the next command has 40"),
    Reason("benchmarking/timing_plot.py", "zip(places, ordered, strict=False):", "there is a place for each row"),
    Reason(
        "folding/branches.py",
        "- break + continue",
        "what was asked of this scale would be answered for the next one alike",
    ),
    Reason("calibration/lockstep.py", "example.tensors(), strict=False", "there is an entry for each tensor"),
    Reason("benchmarking/forms.py", "dynamo=True, verbose=True", "what it prints is silenced"),
    Reason("layers/folded.py", "absorption.way <= AbsorbMode.AFTER", "no other way comes before it in the alphabet"),
    Reason("folding/channel_factors.py", "self.of.get(sources[ -1])", "a linear layer has one source"),
    Reason("layers/unknown_norms.py", "1.000000000001, 0.0)", "1e-12 is told from 0 by no measurement"),
    Reason("analysis/signal_propagation.py", "zip(*self.batches, strict=False)", "each batch has the same three"),
    Reason("training/synced_batchnorm.py", "- @torch.no_grad()", "what it is given is detached"),
    Reason(
        "analysis/signal_propagation.py",
        "norm.running_var = True, None",
        "without statistics those of the batch are taken",
    ),
    Reason("training/assembly.py", "if not TYPE_CHECKING", "types alone, and the package is there"),
    Reason("analysis/scheme_check.py", "seed: int = 1)", "any seed does"),
    Reason("analysis/scheme_check.py", "tensor.copy_( 1.5 +", "any numbers do that are far from 0"),
    Reason("surgery/typed_convert.py", "- class ResidualScaleOptions", "at run time nothing reads it; mypy does"),
    Reason("surgery/typed_convert.py", "- @overload", "at run time nothing reads it; mypy does"),
    Reason("images/datasets.py", "packed, plain, 2 << 20)", "the same bytes in larger pieces"),
    Reason("diagnosis/findings.py", "self.mean is None and self.var is None", "a norm keeps both or neither"),
    Reason("analysis/plots.py", "np.isfinite(drawn) * (drawn > 0)", "the product of two truths is their and"),
    Reason("training/objective.py", "self.value = args[ -1]", "a classifier is called with one tensor"),
    Reason("diagnosis/weight_moments.py", "return known[ -1]", "of one, the first is the last"),
    Reason("diagnosis/weight_moments.py", "if len(before) <= 1", "a norm reads one value"),
    Reason(
        "folding/propagation.py", '"end_dim", +1) == -1', "what is not seen at once is proved: the same comes of it"
    ),
    Reason("models/network_input.py", "len(first or ( 2, 0, 0))", "three numbers are three, whatever the first is"),
    Reason(
        "graph/tracing.py", "*module.buffers(recurse=True))", "asked of layers and norms, whose inner modules have none"
    ),
)
UNNOTICED = (
    Reason("folding/norm_free.py", 'node.target <= "mul_"', "a NormFreeBlock calls no other method before its sum"),
    Reason(
        "surgery/unfolding.py", "shape is not tensor.shape", "a scalar in a norm's place: the norm's own come after"
    ),
    Reason("graph/channel_axes.py", "TypeError, CosmicRay", "no step is called on what has no such method"),
    Reason(
        "layers/site_norm.py",
        "absorption.way <= AbsorbMode.NORM",
        "no other way of its takes comes before it in the alphabet",
    ),
    Reason("benchmarking/runtimes.py", "- @torch.inference_mode()", "the answers are the same; the clock tells"),
    Reason("benchmarking/timing_plot.py", "linewidth= 1.6", "the edge of a bar is a point wider"),
    Reason("reporting/charts.py", 'Mark("o", 11, "none", 2)', "a ring is a point smaller"),
    Reason("reporting/charts.py", '"ytick.labelsize": 11', "letters are a point smaller"),
    Reason("training/sweep_table.py", "markersize= 4", "marks are a point smaller"),
    Reason("graph/channel_axes.py", "except (RuntimeError, CosmicRay", "no step is called on what it does not take"),
    Reason("exporting/weight_rounding.py", "_FAN << min", "more rows are looked at than needed"),
    Reason("images/labels.py", "_SHOWN = 9", "of many names nine are shown, not ten"),
    Reason("storage/atomic_write.py", "old, ignore_errors=False", "a folder that cannot be removed, by who made it"),
    Reason("graph/recording.py", "isinstance(one, float) or one == 1", "torch records numbers last"),
    Reason("analysis/plots.py", "zorder= 1", "a line between stages lies above the grid"),
    Reason("cli/options.py", "+ if  Path(name).is_dir() and", "the same is said when torch has been imported"),
)
