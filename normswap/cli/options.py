"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A timm name, hf-hub:ORG/NAME, local-dir:DIR, a directory (timm's hub layout, or written by normswap), "
        "or a .safetensors/.pth file with --arch.",
    ),
]
Weights = Annotated[str, typer.Option(metavar="pretrained|random", help="Random: the bare architecture.")]
ArchName = Annotated[str | None, typer.Option("--arch", metavar="NAME", help="timm architecture of a weights file.")]
ArchArgs = Annotated[
    list[str] | None,
    typer.Option("--arch-arg", metavar="KEY=VALUE", help="Argument of the architecture, e.g. channels=16,32,64,128."),
]
NumClasses = Annotated[int | None, typer.Option(min=0, metavar="N", help="Another head than the source's.")]
InChans = Annotated[int | None, typer.Option(min=1, metavar="N", help="Another number of input channels.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="PATH", show_default=False, help="Class folders, a tar of them, or timm's PREFIX/NAME[:ROOT]."
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, metavar="N")]
Workers = Annotated[int, typer.Option(min=0, metavar="N", help="Processes that load images.")]
Samples = Annotated[int | None, typer.Option(min=1, metavar="N", help="Take this many images, drawn by a fixed seed.")]
Split = Annotated[str, typer.Option(metavar="NAME", help="Part of a dataset that has parts.")]
