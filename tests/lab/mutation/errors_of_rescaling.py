"""Planted errors: rescaling before zero-sum filters, factors that pass, and images made from statistics."""

from __future__ import annotations

from planted_error import Planted

RESCALING, SEQUENCE = "normswap/schemes/parts/zero_sum_rescaling.py", "normswap/calibration/sequential_fit.py"
FACTORS, MADE = "normswap/folding/channel_factors.py", "normswap/calibration/synthetic_images.py"
TESTS, PASSING = ("tests/schemes/test_zero_sum_rescaling.py",), ("tests/folding/test_channel_factors.py",)
BOTH = "for network in (target, result):"
IMAGES = ("tests/calibration/test_synthetic_images.py",)

ERRORS = (
    Planted("factors for their inverses", RESCALING, "u = (-logs[self.reads]).exp()", "u = logs[self.reads].exp()", TESTS),
    Planted("what is held moves", RESCALING, "                logs[HELD] = 0\n", "", TESTS),
    Planted("factors without a bound", RESCALING, "logs.clamp_(-FARTHEST, FARTHEST)", "pass", TESTS),
    Planted("factors without a cost", RESCALING, " + STIFF * logs.square().mean()", "", TESTS),
    Planted("sums over the kernel for means", RESCALING, "flatten(2).mean(2)", "flatten(2).sum(2)", TESTS),
    Planted("means over the kernel for sums", RESCALING, "-1)).sum(4)", "-1)).mean(4)", TESTS),
    Planted("covariances that are not centred", RESCALING, "mean[:, :, None] * mean[:, None]", "0", TESTS),
    Planted("variances that are not centred", RESCALING, "(self.yy / self.count - (self.y / self.count).square()).sum()",
            "(self.yy / self.count).sum()", TESTS),
    Planted("nothing is taken for chance", RESCALING, "width / self.count * level", "0 * level", TESTS),
    Planted("the result keeps its units", RESCALING, BOTH, "for network in (target,):", TESTS),
    Planted("the pattern keeps its units", RESCALING, BOTH, "for network in (result,):", TESTS),
    Planted("the gradient of half", RESCALING, "(2 * u - fixed)", "fixed", TESTS),
    Planted("the prior in the old units", SEQUENCE, "weight.shape[0] // groups, -1) * units",
            "weight.shape[0] // groups, -1)", TESTS),
    Planted("the fit in the wrong units", SEQUENCE, "(fit.weight / units)", "fit.weight", TESTS),
    Planted("sums in the wrong units", SEQUENCE, "zero_sum = 1 / units[:, 0].double()",
            "zero_sum = units[:, 0].double()", TESTS),
    Planted("a factor through another activation", FACTORS,
            "isinstance(module, ChannelAffine | ChannelBias) and is_homogeneous(module.act)",
            "isinstance(module, ChannelAffine | ChannelBias)", PASSING),
    Planted("a factor through a scalar with a bias", FACTORS, "scales_branch(module) and module.bias is None",
            "scales_branch(module)", PASSING),
    Planted("levels keep their units", FACTORS, "level.copy_(level.double() * factors[layer.writes])", "pass", PASSING),
    Planted("means are not compared", MADE, "((mean * scale + shift).square() + off.square())", "off.square()", IMAGES),
    Planted("deviations are not compared", MADE, "((mean * scale + shift).square() + off.square())",
            "(mean * scale + shift).square()", IMAGES),
    Planted("eps counts as deviation", MADE, "affine.statistics(norm)[1].to(var).sqrt() * scale", "1", IMAGES),
    Planted("statistics of each image", MADE, "(0, *range(2, x.ndim))", "tuple(range(2, x.ndim))", IMAGES),
    Planted("every batch is the same", MADE, "seed * len(counts) + i", "seed", IMAGES),
    Planted("in training mode", MADE, "with evaluating(model), _without", "with _without", IMAGES),
    Planted("parameters stay without gradients", MADE, "parameter.requires_grad_(True)", "pass", IMAGES),
    Planted("hooks stay", "normswap/models/modes.py", "hooks.enter_context(handle)", "handle", IMAGES),
    Planted("norms without statistics", MADE, "affine.is_batchnorm(m) and affine.refusal(m) is None",
            "affine.is_batchnorm(m)", IMAGES),
    Planted("what noise keeps is told", "normswap/surgery/made_images.py",
            "note, telling=False)", "note, telling=True)", IMAGES),
    Planted("how often answers agree on made images is told", "normswap/surgery/held_out.py", "agreement=None, of=",
            "of=", IMAGES),
    Planted("each step of a plan makes its own", "normswap/cli/commands/convert_command.py",
            "images, progress = network.images", "images, progress = network.calibrate", IMAGES),
)  # fmt: skip
