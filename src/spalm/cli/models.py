"""Verbs that use a model with a memory: attach one to a pretrained model, generate, score, serve."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from spalm.choices import LARGEST, LEAST_SPAN, MOST_PASSAGES
from spalm.cli.application import app
from spalm.cli.options import (
    PORT,
    Address,
    AllowHost,
    Backend,
    Device,
    Host,
    Memories,
    NoKey,
    OnEngine,
    Port,
    Precision,
    Restart,
    Threads,
    given_path,
    path_for,
)
from spalm.cli.streams import read_standard_input
from spalm.console import Console, print_json, print_text, say
from spalm.errors import InputError

if TYPE_CHECKING:
    from spalm.generation import SamplingOptions

ModelArgument = Annotated[
    Path, typer.Argument(parser=given_path, metavar="DIR", help="What `spalm attach` made, or a finished run.")
]
RowOption = Annotated[str | None, typer.Option(help="Which model of a finished run; default: the last of its table.")]


@app.command(name="attach")
def attach_(
    model: Annotated[str, typer.Argument(help="Folder of a causal LM, its name on the hub, or a .gguf file.")],
    texts: Annotated[
        list[Path], typer.Argument(parser=given_path, metavar="TEXT...", help="Files and folders of text.")
    ],
    out: Annotated[Path, typer.Option(parser=given_path, help="Folder to make.")],
    memory: Annotated[
        Literal["auto", "both", "exact"],
        typer.Option(help="memory=: nearest contexts and exact matches, or exact matches alone, which need no keys."),
    ] = "auto",
    keys: Annotated[
        str | None, typer.Option(metavar="N", help="keys=: how many positions get keys at most, such as 200k.")
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            parser=given_path, help="like=: the documents most like this text get keys; default: the last ones."
        ),
    ] = None,
    library: Annotated[
        list[Path] | None,
        typer.Option(parser=given_path, help="library=: more text, for exact matches; may be repeated."),
    ] = None,
    search: Annotated[
        float | None, typer.Option(help="search=: share of the positions to search, such as 0.3.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting; see `spalm settings attach`.")
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    backend: Backend = "auto",
    precision: Precision = "auto",
    engine: OnEngine = "local",
    address: Address = None,
    restart: Restart = False,
) -> None:
    """Give a pretrained model a memory of your texts: only a small combiner is trained."""
    from spalm.api import attach_and_export
    from spalm.attachment import AttachSettings, print_attached
    from spalm.compute import Execution, Hardware, open_engine
    from spalm.planning import parse_count
    from spalm.settings import read_settings

    number = None if keys is None else int(parse_count(keys, "--keys"))
    more = json.dumps([str(path) for path in library]) if library else None
    options = {"memory": memory, "keys": number, "like": like, "library": more, "search": search}
    given = [f"{name}={value}" for name, value in options.items() if value not in (None, "auto")]
    chosen = read_settings(AttachSettings, [*(settings or []), *given])
    if engine != "local" and Path(model).exists():
        model = str(path_for(engine, Path(model)))
    with open_engine(engine, address, threads) as opened:
        hardware = Hardware(device, threads, backend=backend, precision=precision)
        execution = Execution(hardware, opened, restart=restart)
        made = attach_and_export(model, texts, path_for(engine, out), settings=chosen, execution=execution)
    print_attached(made, Console())


@app.command()
def score(
    directory: Annotated[Path, typer.Argument(parser=given_path, metavar="DIR", help="What `spalm attach` made.")],
    texts: Annotated[
        list[Path],
        typer.Argument(parser=given_path, metavar="TEXT...", help="Files and folders that the memory does not hold."),
    ],
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Perplexity of texts, with the memory as it is (static) and with the texts' own past searched too (dynamic)."""
    from spalm.attachment import Attached, score_files
    from spalm.compute import Hardware

    print_json(score_files(Attached(directory, Hardware(device, threads)), texts))


@app.command()
def generate(
    directory: ModelArgument,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option(help="Highest number of tokens to generate.", min=1, max=LARGEST)] = 64,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many of the likeliest tokens; 0: all.", min=0)] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A text at which the answer ends; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling; default: a new one each time.")] = None,
    cite: Annotated[bool, typer.Option("--cite", help="List what the memory decided, and its sources.")] = False,
    passages: Annotated[
        int, typer.Option(help="Number of passages of the memory to put before the text.", min=0, max=MOST_PASSAGES)
    ] = 0,
    memory: Memories = None,
    no_memory: Annotated[bool, typer.Option("--no-memory", help="Use the model alone.")] = False,
    draft: Annotated[
        bool, typer.Option("--draft/--no-draft", help="Guess tokens from the memory where that is faster.")
    ] = True,
    model: RowOption = None,
    device: Device = "auto",
    threads: Threads = None,
    backend: Backend = "auto",
    precision: Precision = "auto",
) -> None:
    """Continue a text, token by token."""
    from spalm.api import load
    from spalm.compute import Execution, Hardware
    from spalm.generation import Sampling, citation_lines

    options: SamplingOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "stop": stop or [],
        "seed": seed,
    }
    Sampling.parse(options, "generate")  # refuses wrong options before anything is loaded
    text = read_standard_input() if prompt == "-" else prompt
    if memory and no_memory:
        raise InputError("--no-memory uses none of the memories; leave out --memory")
    execution = Execution(Hardware(device, threads, backend=backend, precision=precision))
    opened = load(directory, model, memories=memory or (), execution=execution)
    answer, citations, used = "", None, None
    for chunk in opened.stream(text, memory=not no_memory, cite=cite, draft=draft, passages=passages, **options):
        print_text(chunk.text)
        answer, citations, used = answer + chunk.text, chunk.citations, chunk.passages
    print_text("\n")
    for passage in used or []:
        named = f"{passage.memory}: {passage.document}" if memory else passage.document
        say(f"passage of {named}, token {passage.offset:,}, score {passage.score:.2f}")
    for line in citation_lines(answer, citations or [], name_memories=bool(memory)) if cite else []:
        say(line)


@app.command(name="trace")
def trace_(
    directory: Annotated[
        Path,
        typer.Argument(
            parser=given_path, metavar="DIR", help="What `spalm attach` made, a run, or the memory of one of them."
        ),
    ],
    text: Annotated[str | None, typer.Argument(help="The text to trace; - reads it from standard input.")] = None,
    file: Annotated[Path | None, typer.Option(parser=given_path, help="File to trace, instead of a text.")] = None,
    least: Annotated[
        int, typer.Option(help="Number of tokens of the shortest span to report.", min=1, max=LARGEST)
    ] = LEAST_SPAN,
    as_json: Annotated[bool, typer.Option("--json", help="Print the spans as JSON.")] = False,
) -> None:
    """Find the spans of a text that stand word for word in the memory, with their documents, longest first."""
    from spalm.generation import open_traceable, print_spans, text_of_file

    if (text is None) == (file is None):
        raise InputError("give either a text or --file FILE")
    given = text_of_file(file) if file is not None else read_standard_input() if text == "-" else text or ""
    found = open_traceable(directory).trace(given, least=least)
    if as_json:
        print_json([asdict(span) for span in found])
    else:
        print_spans(given, found, Console())


@app.command(name="serve")
def serve_(
    directory: ModelArgument,
    host: Host = "127.0.0.1",
    port: Port = PORT,
    key: Annotated[
        str | None, typer.Option(envvar="SPALM_KEY", help="Key that clients must send: Authorization: Bearer KEY.")
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            parser=given_path, metavar="FILE", help="JSON file of further keys, each with the memories that it may use."
        ),
    ] = None,
    no_key: NoKey = False,
    memory: Memories = None,
    allow_host: AllowHost = None,
    slots: Annotated[
        int | None, typer.Option(help="Number of answers that are generated side by side; default: 4.", min=1)
    ] = None,
    limits: Annotated[
        list[str] | None, typer.Option("--limit", metavar="KEY=VALUE", help="A limit; see `spalm settings serve`.")
    ] = None,
    model: RowOption = None,
    device: Device = "auto",
    threads: Threads = None,
    backend: Backend = "auto",
    precision: Precision = "auto",
) -> None:
    """Serve a model with a memory: OpenAI-style completions, documents to add and delete, the explorer's page."""
    from spalm.api import load
    from spalm.compute import Execution, Hardware
    from spalm.server import Limits, allowed_hosts, check_access, make_server, read_keys, serve
    from spalm.settings import read_settings

    chosen = read_settings(Limits, [*(limits or []), *([] if slots is None else [f"slots={slots}"])])
    further_keys = None if keys is None else read_keys(keys)
    check_access(host, key=key is not None or keys is not None, no_key=no_key)
    hosts = allowed_hosts(host, allow_host or ())
    execution = Execution(Hardware(device, threads, backend=backend, precision=precision))
    opened = load(directory, model, memories=memory or (), execution=execution)
    if further_keys is not None and keys is not None:
        further_keys.refuse_unknown_memories(opened.memories, keys)
    opened.generate("The", max_tokens=1)  # what is not compiled yet is compiled now: no client waits for that
    app = make_server(opened, limits=chosen, key=key, keys=further_keys, hosts=hosts)
    serve(app, host, port, title="the server", no_key=no_key)
