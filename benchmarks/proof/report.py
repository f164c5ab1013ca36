"""The study's report: a table and a picture of each part, from its results."""

from collections.abc import Callable
from pathlib import Path

from proof.drawings import Drawing, draw_beside, draw_curves, draw_forgetting, draw_harm, draw_questions
from proof.tables import Results, beside_table, curve_table, forgetting_table, harm_table, question_table
from spalm.files import write_atomically
from spalm.study.drawing import draw_figure, save_figure

TITLES: dict[str, tuple[str, Callable[[Results], str], Callable[[Results], Drawing]]] = {
    "curves": ("Perplexity by size of the memory", curve_table, draw_curves),
    "beside": ("Beside LoRA and retrieval into the context", beside_table, draw_beside),
    "questions": ("Questions", question_table, draw_questions),
    "harm": ("What the memory does to everything else", harm_table, draw_harm),
    "forgetting": ("Forgetting", forgetting_table, draw_forgetting),
}
"""Title, table and picture of each part."""


def write_report(directory: Path, results: dict[str, Results]) -> None:
    """Writes report.md, and a picture of each part that has results."""
    text = "# Proof\n\nIntervals hold 95 of 100 bootstrap draws over documents, paragraphs of questions, or problems.\n"
    for name, (title, in_table, picture) in TITLES.items():
        if name in results:
            save_figure(draw_figure(picture(results[name]), 6.5, 3.8), directory / name)
            text += f"\n## {title}\n\n{in_table(results[name])}\n![{title}]({name}.svg)\n"
    write_atomically(directory / "report.md", text.encode())
