"""The commands, one file each, `NAME_command.py`.

Such a file has `run`, the keys that its --json prints (`KEYS`), and `EXAMPLES`. It may import
anything. The sentences that --help lists stand here, because a command is imported only when it is
called.
"""

SUMMARIES = {
    "inspect": "Show the residual blocks and norms of a network.",
    "convert": "Convert a network, verify the result, save it.",
    "verify": "Compare a converted network or exported file with its source.",
    "evaluate": "Accuracy, loss and speed on labelled images.",
    "schemes": "List the schemes, their papers and options.",
    "demo": "Convert a shipped network; measure it before and after.",
    "advise": "Say which target to choose, and why.",
    "bench": "Time a network as it is, folded, and exported.",
    "export": "Fold a network into one file for another runtime.",
    "push": "Publish a converted network on the Hugging Face hub.",
    "doctor": "Find and name BatchNorm troubles, and how to mend them.",
    "finetune": "Train a network by a recipe, which may convert it first.",
    "recalibrate": "Measure BatchNorm's statistics anew, on other images.",
    "sweep": "Say which learning rates are best, by several seeds of each.",
    "report": "Write what was done and measured as one HTML page.",
    "spp": "Plot mean and variance of the signal, block by block.",
    "decay": "Show which parameters weight decay applies to, and why.",
    "recipes": "List the recipes of `normswap finetune`; show one, or all keys.",
}
