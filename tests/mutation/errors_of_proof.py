"""Planted errors: what proves a result, and what says how often two networks agree."""

from __future__ import annotations

from planted_error import Planted

GATES = ("tests/test_gates.py",)

ERRORS = (
    Planted(
        "convert does not compare in float64",
        "normswap/surgery/carrying_out.py",
        "_precise(network, result, step) if exact else None",
        "None",
        GATES,
    ),
    Planted(
        "the result in float64 was rounded before",
        "normswap/surgery/applying.py",
        "    like = _like(model).double()\n",
        "    like = _like(model)\n",
        GATES,
    ),
    Planted(
        "a wrong result passes",
        "normswap/surgery/report.py",
        "    if report.passed:\n        return",
        "    if report.passed or report.exact:\n        return",
        GATES,
    ),
    Planted(
        "newcomers are not made in float64",
        "normswap/surgery/running.py",
        "for module in newcomers or {}]",
        "for module in {}]",
        GATES,
    ),
    Planted(
        "what the parts say is believed",
        "normswap/surgery/comparison.py",
        "if error is None or not error.relative_l2 <= FLOAT64_TOLERANCE:",
        "if error is None:",
        GATES,
    ),
    Planted(
        "tensors that were lent are not given back",
        "normswap/surgery/running.py",
        "            _hold(module, name, tensor)\n",
        "            pass\n",
        GATES,
    ),
    Planted(
        "unfold is not compared in float64",
        "normswap/surgery/conversion.py",
        "comparison.compare_double(network, lambda: _unfolded_in_double(network))",
        "None",
        GATES,
    ),
    Planted(
        "unfold may be wrong",
        "normswap/surgery/conversion.py",
        '    require_passed(report, "unfold")\n',
        "",
        GATES,
    ),
    Planted(
        "unfold does not scale the bias",
        "normswap/layers/folded.py",
        "scale * old.bias.double()\n",
        "old.bias.double()\n",
        GATES,
    ),
    Planted(
        "unfold drops the sign of gamma",
        "normswap/layers/folded.py",
        "torch.where(dead, torch.ones_like(factor), factor)",
        "torch.where(dead, torch.ones_like(factor), factor).abs()",
        GATES,
    ),
    Planted(
        "unfold drops eps",
        "normswap/layers/folded.py",
        "        after = [(norm, take.channels)",
        "        for norm in reads:\n            norm.eps = 0.0\n        after = [(norm, take.channels)",
        GATES,
    ),
    Planted("fp16 files may be anything", "normswap/exporting/checks.py", '"fp16": 1e-2', '"fp16": 1e-1', GATES),
    Planted("bf16 files may be anything", "normswap/exporting/checks.py", '"bf16": 3e-2', '"bf16": 3e-1', GATES),
    Planted("fp16 files may be as float32", "normswap/exporting/checks.py", '"fp16": 1e-2', '"fp16": 1e-3', GATES),
    Planted("int8 files may be zeros", "normswap/exporting/checks.py", '"int8": 1.0', '"int8": 10.0', GATES),
    Planted(
        "float32 files may be off by 1e-3",
        "normswap/exporting/checks.py",
        "allowed = max(allowed, 4 * _stray(source, first, signature, name, sums))",
        "allowed = max(allowed, 1e-3)",
        GATES,
    ),
    Planted(
        "probabilities are allowed the square",
        "normswap/exporting/checks.py",
        "2 * sums.peak)",
        "2 * sums.peak**2)",
        GATES,
    ),
    Planted(
        "probabilities are allowed what scores are",
        "normswap/exporting/checks.py",
        "allowed *= max(1.0, 2 * sums.peak)",
        "allowed *= 1.0",
        GATES,
    ),
    Planted(
        "probabilities are compared with scores",
        "normswap/exporting/checks.py",
        "logits.softmax(-1) if softmax else logits",
        "logits",
        GATES,
    ),
    Planted(
        "every file agrees",
        "normswap/exporting/checks.py",
        "same = (expected.argmax(1) == got.argmax(1)).double()",
        "same = (expected.argmax(1) == expected.argmax(1)).double()",
        GATES,
    ),
    Planted(
        "every result agrees",
        "normswap/surgery/comparison.py",
        "float((a.argmax(1) == b.argmax(1)).float().mean())",
        "float((a.argmax(1) == a.argmax(1)).float().mean())",
        GATES,
    ),
    Planted(
        "every network agrees",
        "normswap/images/agreement.py",
        "float((one == two).double().mean())",
        "float((one == one).double().mean())",
        GATES,
    ),
    Planted(
        "every network in training is sound",
        "normswap/training/engine.py",
        "return all(bool(parameter.isfinite().all())",
        "return all(bool(parameter.isfinite().any())",
        GATES,
    ),
)
