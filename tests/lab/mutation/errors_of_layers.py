"""Planted errors: Dynamic Tanh, the integers of int8 files, names of the same memory, what is expected to be kept."""

from __future__ import annotations

from planted_error import Planted

TANH, TESTS = "normswap/layers/dynamic_tanh.py", ("tests/schemes/test_dyt.py",)
TAILS, FACTORS = "normswap/schemes/parts/tails.py", ("tests/schemes/test_tails.py",)
FIT = "normswap/calibration/sequential_fit.py"
OPENVINO, GRID = "normswap/exporting/openvino_int8.py", "normswap/exporting/weight_grid.py"
MEANS, POSITIONED = "normswap/exporting/position_means.py", ("tests/exporting/test_position_means.py",)
ROUNDER, SHARED = "normswap/exporting/weight_rounding.py", ("tests/exporting/test_weight_rounding.py",)
RANGES = ("tests/exporting/test_int8.py::test_ranges_go_from_the_least_number_to_the_largest",)
GRIDS = ("tests/exporting/test_int8_weights.py",)
NAMES, PROGRAMS = "normswap/folding/overwriting.py", ("tests/folding/test_random_programs.py",)
RIGHT, ANSWERS = "normswap/surgery/expected_accuracy.py", ("tests/surgery/test_expected_accuracy.py",)
REQUEST, INPUTS = "normswap/exporting/request.py", ("tests/exporting/test_signature.py",)

ERRORS = (
    Planted("gamma is that of a straight line", TANH, "gains(alpha, _tensor(factors, gamma)) * gamma", "gamma / alpha",
            TESTS),
    Planted("gain over numbers as often as others", TANH, "(-u.square() / 2).exp(), (alpha", "u.exp() * 0 + 1, (alpha",
            TESTS),
    Planted("the convolution keeps its units", TANH, "rescaled(old, scale, offset)",
            "rescaled(old, scale / scale, offset)", TESTS),
    Planted("the convolution keeps its mean", TANH, "rescaled(old, scale, offset)",
            "rescaled(old, scale, 0 * offset)", TESTS),
    Planted("eps is no part of the deviation", TANH, "std = (var + affine.epsilon(norm)).sqrt()",
            "std = var.sqrt()", TESTS),
    Planted("the scale in front is the deviation", TANH, "return factor / std, ", "return factor * std, ", TESTS),
    Planted("what a BatchNorm carried is lost", TANH, "beta.to(like), alpha, affine.copied_activation(old))",
            "beta.to(like), alpha)", TESTS),
    Planted("channels are made smaller as their tails are short", TAILS, "fits = ~(lost", "fits = (lost", FACTORS),
    Planted("factors are those of half the tanh", TAILS, "fits = ~(lost(x, alpha * 2", "fits = ~(lost(x, alpha * 0.5 * 2", FACTORS),
    Planted("the target keeps its gammas", TAILS, "straight.weight.double() / ratio", "straight.weight.double()", FACTORS),
    Planted("gamma is that of the old factors", TAILS, "(gains(alpha, new) / gains(alpha, old))", "(ratio / ratio)", FACTORS),
    Planted("the pattern is bent", TANH, "ChannelAffine(gamma.to", "ChannelAffine(gamma.tanh().to", TESTS),
    Planted("gamma and beta are not fitted", FIT, "if normalizes(module):\n", "if False:\n", TESTS),
    Planted("no norm of this kind is a source", TANH, "KINDS[DynamicTanh] = NormKind(Statistics.SAMPLE)", "", TESTS),
    Planted("NNCF's integers are those of others", OPENVINO, "63.5 if", "64 if", GRIDS),
    Planted("depthwise layers have 7 bits", OPENVINO, " and not depthwise else", " else", GRIDS),
    Planted("every grouped layer has 8 bits", OPENVINO, " == layer.in_channels", "",
            GRIDS),
    Planted("weights are cut off", GRID, "+ 0.5).floor()", ").floor()", GRIDS),
    Planted("one side less", GRID, "math.ceil(levels)", "math.floor(levels) - 1", GRIDS),
    Planted("what a weight loses is lost", ROUNDER, "(wish[:, :, i] + more)", "(wish[:, :, i] + 0 * more)",
            SHARED),
    Planted("of another block of columns it is", ROUNDER, "more = gained[:, :, i - start] + ", "more = ", SHARED),
    Planted("what varies least comes first", ROUNDER, "argsort(1)", "argsort(1, descending=True)", SHARED),
    Planted("the largest weight moves", ROUNDER, "weights.abs() >= largest", "weights.abs() > largest", SHARED),
    Planted("the tool is given what it will hold", ROUNDER, "torch.where(settled, weights, rounded), rounded)",
            "rounded, rounded)", SHARED),
    Planted("inputs are not about their mean", "normswap/calibration/least_squares.py",
            "covariance = self.xx / self.count - x[:, :, None] * x[:, None, :]", "covariance = self.xx / self.count", SHARED),
    Planted("layers that stay are rounded", ROUNDER, "if path not in layers or not", "if not", SHARED),
    Planted("what overflows is not named", ROUNDER, 'with naming(path, "rounded"):', "if True:", SHARED),
    Planted("the second part of a patch is the first", ROUNDER, "rising.flip(1) + first", "rising.flip(1)", SHARED),
    Planted("the tool gets the weights as they were", "normswap/exporting/quantizing.py", ".data.copy_(one.given)",
            ".data.mul_(1)", GRIDS),
    Planted("the equalization with which int8 costs most is taken", "normswap/exporting/quantizing.py",
            "best = min(errors", "best = max(errors", GRIDS),
    Planted("weights are those of the folded network", "normswap/exporting/quantizing.py",
            "return cls(shipped.around(made[equalization])", "return cls(shipped.around(made[AS_FOLDED])", GRIDS),
    Planted("biases stay as they were", "normswap/exporting/bias_correction.py",
            "module.weight - weight)", "0 * module.weight)", ("tests/folding/test_channel_factors.py",)),
    Planted("ranges are percentiles, in ONNX", "normswap/exporting/onnx_int8.py", "CalibrationMethod.MinMax,",
            "CalibrationMethod.Percentile,", RANGES),
    Planted("ranges are histograms', in OpenVINO", OPENVINO, "Set.MINMAX,", "Set.HISTOGRAM,", RANGES),
    Planted("ranges are histograms', in pt2", "normswap/exporting/pt2_int8.py", "import MinMaxObserver, Per",
            "import HistogramObserver as MinMaxObserver, Per", ("tests/exporting/test_int8.py::test_ranges_in_pt2",)),
    Planted("scores are rounded", "normswap/exporting/onnx_int8.py", '["Gemm"]', "[]", ("tests/exporting/test_int8.py",)),
    Planted("a mean keeps its sides", "normswap/exporting/onnx_arranging.py", 'if _numbers(mean, "keepdims") != [0]:',
            "if True:", ("tests/exporting/test_onnx_arranging.py",)),
    Planted("a symbolic trace asks for dimensions", "normswap/layers/own.py", "return _shaped(value, x)",
            "return value.view(1, -1, *(1,) * (x.ndim - 2))", ("tests/schemes/test_every_scheme.py",)),
    Planted("a symbolic trace asks a norm's input", "normswap/layers/site_norm.py",
            "not isinstance(input, fx.Proxy) and ", "", ("tests/schemes/test_every_scheme.py",)),
    Planted("a layer between two names is taken", NAMES, "conflicts[path] = ", "conflicts = conflicts or {}; _ = ", PROGRAMS),
    Planted("what writes in place has one name", "normswap/graph/recorder.py", "(leaf or not any(", "(not any(",
            PROGRAMS),
    Planted("errors by rank are left out", RIGHT, "in (by_class, by_rank)", "in (by_class,)", ANSWERS),
    Planted("errors by class are left out", RIGHT, "in (by_class, by_rank)", "in (by_rank,)", ANSWERS),
    Planted("images that were fitted to are not asked", RIGHT, "if others:", "if False:", ANSWERS),
    Planted("errors on images that were fitted to are taken as they are", RIGHT, "larger * fitted", "fitted", ANSWERS),
    Planted("all is handed on", RIGHT, ".clamp_min(0) * apart", ".clamp(0, 0) * apart", ANSWERS),
    Planted("all is counted", RIGHT, ".clamp_min(0) * apart", ".clamp_min(1) * apart", ANSWERS),
    Planted("chance without the error that an image gives", RIGHT, "receiving.sum() - receiving - giving",
            "receiving.sum() - receiving", ANSWERS),
    Planted("one number has a largest", "normswap/surgery/comparison.py", " or a.shape[1] == 1:", ":",
            ("tests/surgery/test_wrong_results.py",)),
    Planted("batches without tensors are dealt", "normswap/surgery/held_out.py", "if not batch.tensors():", "if False:",
            ("tests/models/test_calling.py",)),
    Planted("scalars are placed before the biases", "normswap/schemes/parts/fixup_scalars.py",
            "_shift_layers(builder)\n    _place_scales(builder)", "_place_scales(builder)\n    _shift_layers(builder)",
            ("tests/schemes/test_exact_schemes.py::test_a_branch_that_ends_in_its_convolution",)),
    Planted("everything in the file, of int8, too", REQUEST,
            'settings.dtype == "int8" or settings', "settings", INPUTS),
    Planted("an RMSNorm's mean is taken off", MEANS, "kind is not None and kind.centres", "kind is not None", POSITIONED),
    Planted("eps is torch's own, whatever the norm's is", MEANS,
            "torch.finfo(dtype).eps if eps is None else eps", "torch.finfo(dtype).eps", POSITIONED),
    Planted("a norm whose output hooks change is taken", MEANS,
            " and channel_norm.refusal(module) is None", "", POSITIONED),
    Planted("beta is left out", MEANS, "return y if self.bias is None else y + self.bias", "return y", POSITIONED),
)  # fmt: skip
