"""Planted errors: what only a device that is not the CPU shows."""

from __future__ import annotations

from planted_error import Planted

DEVICE = ("tests/lab/device/test_second_device.py",)

ERRORS = (
    Planted("a scale stays on the CPU", "normswap/calibration/sequential_fit.py", "scale.to(s) * s", "scale * s", DEVICE),
    Planted("whether a patch is padded is asked of the device", "normswap/calibration/sampling.py",
            "bool(inside.all())", "bool(inside.to(maps.device).all())", DEVICE),
    Planted("a recording takes inputs as they lie", "normswap/graph/recording.py",
            "batch.on(device) for batch", "batch for batch", DEVICE),
    Planted("quantiles stay on the CPU", "normswap/diagnosis/weight_moments.py", "_POINTS.to(mean)", "_POINTS", DEVICE),
    Planted("TF32 stays on", "normswap/models/modes.py", "setattr(holder, switch, off)", "getattr(holder, switch)", DEVICE),
    Planted("the device's random numbers are moved", "normswap/layers/seeding.py",
            "forks.enter_context(torch.random.fork_rng([device], device_type=device.type))", "pass", DEVICE),
    Planted("a device without float64 is folded on", "normswap/surgery/conversion.py",
            "if network.device_has_double:", "if True:", DEVICE),
    Planted("a result stays on the CPU", "normswap/surgery/conversion.py", "module=done.model.to(network.device)",
            "module=done.model", DEVICE),
    Planted("inputs stay where they are", "normswap/surgery/network.py", "call.on(self.device) for call", "call for call",
            DEVICE),
    Planted("a network is exported where it lies", "normswap/exporting/request.py", "copy.deepcopy(network).cpu()",
            "copy.deepcopy(network)", DEVICE),
    Planted("factors are chosen on the device", "normswap/schemes/parts/steady_signs.py", ".cpu().view(2, groups, -1)",
            ".view(2, groups, -1)", DEVICE),
)  # fmt: skip
