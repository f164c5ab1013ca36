"""`python -m spalm`, and so `torchrun -m spalm`."""

from spalm.cli import main

main()
