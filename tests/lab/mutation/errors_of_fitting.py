"""Planted errors: what a fit to data aims at."""

from __future__ import annotations

from planted_error import Planted

TARGETS, CALIBRATE = ("tests/calibration/test_sequential_fit.py",), ("tests/calibration/test_least_squares.py",)
FIT, LEAST = "normswap/calibration/sequential_fit.py", "normswap/calibration/least_squares.py"
NORMS, RESCALING = "normswap/layers/per_sample.py", "normswap/schemes/parts/steady_signs.py"
STEADY = ("tests/schemes/test_steady_signs.py",)
OWN, PADDED = "normswap/layers/own_forwards.py", ("tests/layers/test_own_forwards.py",)

ERRORS = (
    Planted("no rounds at all", FIT, "for _ in range(relaxing)", "for _ in range(0)", TARGETS),
    Planted("one round for all", FIT, "for _ in range(relaxing)", "for _ in range(min(relaxing, 1))", TARGETS),
    Planted("a layer moves away from the stream", FIT, "source_value + (theirs - ours)", "source_value - (theirs - ours)", TARGETS),
    Planted("a norm moves away from the stream", FIT, "y = y + theirs - ours", "y = y - theirs + ours", TARGETS),
    Planted("a norm ignores the stream", FIT, "y = y + theirs - ours", "pass", TARGETS),
    Planted("the stream is aimed at without the scale behind", FIT, ") / self.scale.to(source_value).view(per), offset + ours",
            "), offset + ours", TARGETS),
    Planted("a layer without a bias is fitted with one", FIT, "Folds(biased=module.bias is not None)", "Folds()", TARGETS),
    Planted("products are about the mean where no bias is", LEAST, "return cross + y[:, :, None] * x[:, None, :]", "return cross",
            CALIBRATE),
    Planted("the ReLU hides what is positive", FIT, "torch.where(wanted > low", "torch.where(wanted < low", TARGETS),
    Planted("the ReLU hides nothing", FIT, "ours.clamp_max(low)", "wanted", TARGETS),
    Planted("what is hidden is wanted positive", FIT, ".clamp_max(low)", ".clamp_min(low)", TARGETS),
    Planted("nothing is hidden at the upper end", FIT, "ours.clamp_min(high)", "wanted", TARGETS),
    Planted("a layer that bends what it reads is a convolution", OWN, "return _only_padded(x, read) and _near(",
            "return _near(", PADDED),
    Planted("weights that a forward changes are its own", OWN, "layer.weight.clone(), None", "layer.weight, None", PADDED),
    Planted("what is hidden is not seen with the other arm", FIT, "offset + ours", "offset", TARGETS),
    Planted("what is wanted before the affine map is not asked back", FIT, "(wanted - offset) / s", "wanted / s",
            TARGETS),
    Planted("what is fitted is thrown away", FIT, "    set_weight(module, (fit.weight / units).reshape("
            "weight.shape), fit.bias.flatten())", "    pass", TARGETS),
    Planted("the fitted bias is thrown away", FIT, "module.bias.copy_(bias)", "pass", TARGETS),
    Planted("the ridge is chosen without the bias", LEAST, " + offset.square()", "", TARGETS),
    Planted("the ridge is chosen on the half that it was fitted on", LEAST,
            "_error(weight, asked, halves[one], halves[other], known[other])",
            "_error(weight, asked, halves[one], halves[one], known[one])", TARGETS),
    Planted("the largest ridge", LEAST, "return min(range(len(seen))", "return max(range(len(seen))", TARGETS),
    Planted("uphill", LEAST, "error(at + step) < error(at)", "error(at + step) > error(at)", CALIBRATE),
    Planted("wide patches are tried as all others", LEAST, "prior.shape[2] >= _COSTLY", "False", CALIBRATE),
    Planted("eps is v steady", "normswap/schemes/parts/per_sample_norms.py", "ratio = steady / (1 - steady)", "ratio = steady", TARGETS),
    Planted("each group is as loud as it was", NORMS, "scale = (scale.view(groups, -1) * level).flatten()", "pass", TARGETS),
    Planted("each group's eps is that of the mean", RESCALING, "eps * usual / usual.mean().clamp_min(1e-30)",
            "eps + 0 * usual", STEADY),
    Planted("a channel's factor is not given back", NORMS, "scale = scale / into.scale", "scale = scale * into.scale.sign()",
            CALIBRATE),
    Planted("a BatchNorm keeps the channel's factor", NORMS, " / (scale * (var + eps).sqrt())", " * scale.sign()", STEADY),
    Planted("a mean is taken off no other channel's error", RESCALING, "- 2 * off * moved * back", "", STEADY),
    Planted("factors are the square root of what channels cost", RESCALING, "self.var) ** 0.25", "self.var) ** 0.5", STEADY),
    Planted("the factors stay where they started", RESCALING, "scale * log.exp()", "scale", STEADY),
    Planted("offsets are drawn at other places than the values", FIT, "generator.set_state(draw)", "pass", TARGETS),
    Planted("a smaller batch in between is left out", "normswap/calibration/population.py", "if left_out:", "if False:",
            ("tests/calibration/test_population.py",)),
    Planted("of results in results one step is lost", "normswap/graph/recorder.py", "mark.keys = tuple(rest)",
            "mark.keys = ()", ("tests/graph/test_recorder.py",)),
)  # fmt: skip
