"""Tables on the console of what a memory gained for a pretrained model."""

from rich import box
from rich.console import Console
from rich.table import Table

from spalm.attachment.attached import Attached
from spalm.attachment.fitting.measuring import MATCH_LENGTHS

_COPIES = 0.1
"""Share of test positions after 64 tokens of the memory from which on test is taken to be copied in it."""


def print_attached(attached: Attached, console: Console) -> None:
    """Prints perplexities with and without the memory, and by the share of positions that are searched."""
    facts = attached.combiner_artifact.facts
    figures = facts["figures"]
    table = Table("model", title=f"{attached.source} with a memory", box=box.SIMPLE_HEAD)
    for heading in (*figures, "change"):
        table.add_column(heading, justify="right")
    for name in (name for name in figures["test"] if name != "tokens"):
        change = figures["test"][name] / figures["test"]["plain"] - 1
        values = [f"{figures[split][name]:.2f}" for split in figures]
        table.add_row(name, *values, "" if name == "plain" else f"{100 * change:+.1f}%")
    console.print(table)
    tokens = ", ".join(f"{split} {figures[split]['tokens']:,}" for split in figures)
    console.print(
        f"perplexity per token ({tokens} tokens); change: on test, on which nothing was tuned", highlight=False
    )
    if overlap := facts.get("overlap"):
        shares = ", ".join(f"{length} tokens {share:.1%}" for length, share in overlap["test"].items())
        console.print(f"test positions after text that stands word for word in the memory: {shares}", highlight=False)
        if overlap["test"][str(MATCH_LENGTHS[-1])] > _COPIES:
            console.print("parts of test stand in the memory as they are: these figures are those of copies")
    if knn := facts.get("knn"):
        fitted = f"lambda {knn['weight']:.2f}, T {knn['temperature']:.3g}, k {knn['count']}"
        console.print(f"knn-lm: {fitted}", highlight=False)
    if facts["curve"]:
        curve = Table("searched", "perplexity", title="test, by the share of positions searched", box=box.SIMPLE_HEAD)
        for point in facts["curve"]:
            curve.add_row(f"{100 * point['searched']:.0f}%", f"{point['perplexity']:.2f}")
        console.print(curve)
    held = attached.memory.entries()
    console.print(
        f"the memory holds {len(held):,} positions of {len(held.live_documents):,} documents, "
        f"{len(held.with_keys):,} of them with keys; write with it: "
        f'spalm generate {attached.directory} "..." --cite',
        soft_wrap=True,
        highlight=False,
    )
