"""Entry point of `python -m spalm`, and so of `torchrun -m spalm`."""

from spalm.cli import main

main()
