"""Adds pages to the site: README, changelog and results from the top folder, and the generated reference.

The command line's reference comes from the help texts of its commands, the settings' from the docstrings of their
fields, and a package's page from the docstrings of its public names.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "corpus": "text -> token ids and document bounds",
    "compute": "where and how work runs: hardware, threads, ranks, engines",
    "training": "the loop that trains every model",
    "lm": "tokens -> language model",
    "memory": "language model and tokens -> entries",
    "neighbours": "entries -> nearest entries",
    "semiparametric": "hidden state and neighbours -> probabilities",
    "runs": "recipe -> stages, records, results",
    "attachment": "pretrained model and texts -> model with a memory",
    "generation": "model with a memory -> text and citations",
    "maintenance": "directory -> verified, without a document, or packed",
    "server": "model with a memory -> HTTP",
    "study": "finished run -> analyses, figures, report",
    "planning": "size of a memory -> its cost",
}
"""The packages in the order of the data, with what goes in and what comes out."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that do not lie in docs/."""
    for path in [*ROOT.glob("results/*.md"), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]:
        _add(files, config, path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    for path in [*ROOT.glob("recipes/*.yaml"), *ROOT.glob("examples/*.conf"), ROOT / "CITATION.cff"]:
        _add(files, config, path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    _add(files, config, "index.md", (ROOT / "README.md").read_text(encoding="utf-8"))
    _add(files, config, "reference/commands.md", commands_page())
    _add(files, config, "reference/settings.md", settings_page())
    _add(files, config, "reference/packages.md", packages_page())
    for name in PACKAGES:
        _add(files, config, f"reference/{name}.md", f"# spalm.{name}\n\n::: spalm.{name}\n")
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turns links between the folders of the repository into links between pages of the site."""
    where = page.file.src_uri
    if where == "index.md":
        return re.sub(r"(\]\(|src=\")docs/", r"\1", markdown)
    if where.startswith("results/"):
        return markdown.replace("](../docs/", "](../")
    if where in ("CHANGELOG.md", "CONTRIBUTING.md"):
        return markdown.replace("](docs/", "](")
    return re.sub(r"\]\(\.\./(results/|recipes/|examples/|CHANGELOG|CONTRIBUTING)", r"](\1", markdown)


def commands_page() -> str:
    """Returns the reference of the command line, from the help texts."""
    from spalm.cli.verbs import command as group

    lines = ["# Command line", "", _one_line(group.help), "", "`spalm COMMAND --help` prints the same.", ""]
    for name, command in group.commands.items():
        context = command.make_context(f"spalm {name}", [], resilient_parsing=True)
        records = [parameter.get_help_record(context) for parameter in command.params]
        usage = " ".join(_bare(piece) for piece in command.collect_usage_pieces(context))
        lines += [f"## spalm {name}", "", _one_line(command.help), "", "```", f"spalm {name} {usage}", "```", ""]
        lines += ["| argument or option | meaning |", "|---|---|"]
        lines += [_row(f"`{names}`", meaning) for names, meaning in filter(None, records)]
        lines.append("")
    return "\n".join(lines)


def _bare(piece: str) -> str:
    """Returns an argument of a usage line without doubled marks: `[[NAME]...]...` is [NAME]..."""
    doubled = re.fullmatch(r"\[(\[.*\]\.\.\.)\](\.\.\.)?|\{(.*?)\}(\.\.\.)?", piece)
    return piece if doubled is None else doubled[1] or doubled[3]


def settings_page() -> str:
    """Returns the reference of all settings."""
    from spalm.attachment import AttachSettings
    from spalm.runs import Recipe
    from spalm.server import Limits
    from spalm.settings import describe_settings

    same = "`spalm settings`, `spalm settings attach` and `spalm settings serve` print the same."
    lines = ["# Settings", "", f"{same} Defaults < recipe < command line.", ""]
    for title, about, rows in (
        ("Recipes", "Keys of a recipe file, and `KEY=VALUE` on the command line.", describe_settings(Recipe)),
        ("spalm attach", "Given as `--set KEY=VALUE`.", describe_settings(AttachSettings)),
        ("spalm serve", "Given as `--limit KEY=VALUE`.", describe_settings(Limits)),
    ):
        lines += [f"## {title}", "", about, "", "| key | default | meaning |", "|---|---|---|"]
        lines += [_row(f"`{key}`", default and f"`{default}`", meaning) for key, default, meaning in rows]
        lines.append("")
    return "\n".join(lines)


def packages_page() -> str:
    """Returns the list of packages in the order of the data."""
    lines = ["# Packages", "", "A package imports only from packages above it in this list.", ""]
    lines += ["| package | what goes in and what comes out |", "|---|---|"]
    lines += [f"| [`spalm.{name}`]({name}.md) | {about} |" for name, about in PACKAGES.items()]
    return "\n".join([*lines, ""])


def _add(files: Files, config: MkDocsConfig, uri: str, content: str) -> None:
    files.append(File.generated(config, uri, content=content))


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _row(*cells: str) -> str:
    """Returns one row of a Markdown table. A bar inside code separates no cells."""
    shown = [cell if cell.startswith("`") else _one_line(cell).replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(shown)} |"
