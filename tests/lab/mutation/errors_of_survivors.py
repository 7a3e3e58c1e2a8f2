"""Planted errors: what `drawn.py` drew and no test noticed, until one was written."""

from __future__ import annotations

from planted_error import Planted

WEIGHT_NORM, COMPARISON = "normswap/layers/weight_norm.py", "normswap/surgery/comparison.py"
INPUT, LEAST = "normswap/models/network_input.py", "normswap/calibration/least_squares.py"

ERRORS = (
    Planted("operators are methods in the record", "normswap/graph/spelling.py", '(1 if bare == "neg" else 2)',
            '(2 if bare == "neg" else 1)', ("tests/graph/test_spelling.py",)),
    Planted("the rate of a head is the network's", "normswap/graph/ending.py",
            'node.meta["inside"][-1] if node.meta["inside"]', 'node.meta["inside"][0] if node.meta["inside"]',
            ("tests/graph/test_inspection.py",)),
    Planted("weight norm is per input channel", WEIGHT_NORM, "norm = torch.norm_except_dim(weight.double(), 2, dim)",
            "dim = 1\n        norm = torch.norm_except_dim(weight.double(), 2, dim)", ("tests/schemes/test_paper_constants.py",)),
    Planted("a dead filter's direction is forgotten", WEIGHT_NORM, "torch.where(norm == 0, torch.ones_like(before)",
            "torch.where(norm >= 0, torch.ones_like(before)", ("tests/schemes/test_paper_constants.py",)),
    Planted("small answers are vacuous", COMPARISON, "norm() / logits.norm().clamp_min(1e-30)",
            "norm() * logits.norm().clamp_min(1e-30)", ("tests/surgery/test_comparison.py",)),
    Planted("answers of other classes agree", COMPARISON, "a.ndim < 2 or a.shape != b.shape or",
            "a.ndim < 2 or a.shape != b.shape and", ("tests/surgery/test_wrong_results.py",)),
    Planted("a size that the source does not take stops the proof", "normswap/surgery/running.py",
            "except Exception as error:  # whatever the network raises\n        if example is first",
            "except RuntimeError as error:\n        if example is first", ("tests/surgery/test_comparison.py",)),
    Planted("an error of the disk without its words", "normswap/storage/checkpoint.py", "error.strerror or str(error)",
            "error.strerror and str(error)", ("tests/storage/test_checkpoint.py",)),
    Planted("a range of numbers from one base to another", "normswap/training/number_grid.py",
            "float(low[1]) != float(high[1])", "float(low[1]) < float(high[1])", ("tests/training/test_sweep.py",)),
    Planted("optim.args are lost", "normswap/training/optimizing.py", ", **part.args)", ")",
            ("tests/training/test_recipe_keys.py",)),
    Planted("an indefinite covariance keeps its ridge", LEAST, "10 * damp, damp)", "1.0001 * damp, damp)",
            ("tests/calibration/test_least_squares.py",)),
    Planted("a covariance of NaN has a factor", LEAST, 'raise torch.linalg.LinAlgError("the covariance is not finite")',
            "return cls(covariance, damp)", ("tests/calibration/test_least_squares.py",)),
    Planted("a compiled network is converted", INPUT, "if inner is not None:", "if inner is None and False:",
            ("tests/models/test_wrapped.py",)),
    Planted("a lazy layer is converted", INPUT, "isinstance(tensor, UninitializedParameter | UninitializedBuffer)",
            "isinstance(tensor, UninitializedBuffer)", ("tests/models/test_wrapped.py",)),
    Planted("a network's words without its weights", "normswap/cli/options.py",
            "if value is not None for word in (flag, value)", "if value is None for word in (flag, value)",
            ("tests/analysis/test_advice.py",)),
)  # fmt: skip
