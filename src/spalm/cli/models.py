"""Verbs that use a model with a memory: attach one to a pretrained model, generate, score, serve."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from spalm.api import attach_and_export, load
from spalm.attachment import Attached, AttachSettings, print_attached, score_files
from spalm.cli.options import PORT, Address, Backend, Device, Host, OnEngine, Port, Restart, Threads, app, path_for
from spalm.compute import Execution, Hardware, open_engine
from spalm.console import say
from spalm.errors import InputError
from spalm.generation import Sampling, SamplingOptions, citation_lines, open_traceable, print_spans, text_of_file
from spalm.memory.exact import LEAST
from spalm.planning import parse_count
from spalm.settings import read_settings

ModelArgument = Annotated[Path, typer.Argument(metavar="DIR", help="What `spalm attach` made, or a finished run.")]
RowOption = Annotated[str | None, typer.Option(help="Which model of a finished run; default: the last of its table.")]


@app.command(name="attach")
def attach_(
    model: Annotated[str, typer.Argument(help="Folder of a causal LM, its name on the hub, or a .gguf file.")],
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT...", help="Files and folders of text.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    memory: Annotated[
        Literal["auto", "both", "exact"],
        typer.Option(help="memory=: nearest contexts and exact matches, or exact matches alone, which need no keys."),
    ] = "auto",
    keys: Annotated[
        str | None, typer.Option(metavar="N", help="keys=: how many positions get keys at most, such as 200k.")
    ] = None,
    like: Annotated[
        Path | None, typer.Option(help="like=: the documents most like this text get keys; default: the last ones.")
    ] = None,
    library: Annotated[
        list[Path] | None,
        typer.Option(help="library=: more text, for exact matches; may be repeated."),
    ] = None,
    search: Annotated[
        float | None, typer.Option(help="search=: share of the positions to search, such as 0.3.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting; see `spalm settings attach`.")
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    engine: OnEngine = "local",
    address: Address = None,
    restart: Restart = False,
) -> None:
    """Give a pretrained model a memory of your texts: only a small combiner is trained."""
    number = None if keys is None else int(parse_count(keys, "--keys"))
    more = json.dumps([str(path) for path in library]) if library else None
    options = {"memory": memory, "keys": number, "like": like, "library": more, "search": search}
    given = [f"{name}={value}" for name, value in options.items() if value not in (None, "auto")]
    chosen = read_settings(AttachSettings, [*(settings or []), *given])
    if engine != "local" and Path(model).exists():
        model = str(path_for(engine, Path(model)))
    with open_engine(engine, address, threads) as opened:
        execution = Execution(Hardware(device, threads), opened, restart=restart)
        made = attach_and_export(model, texts, path_for(engine, out), chosen, execution)
    print_attached(made, Console())


@app.command()
def score(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What `spalm attach` made.")],
    texts: Annotated[
        list[Path], typer.Argument(metavar="TEXT...", help="Files and folders that the memory does not hold.")
    ],
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Perplexity of texts, with the memory as it is (static) and with the texts' own past searched too (dynamic)."""
    typer.echo(json.dumps(score_files(Attached(directory, Hardware(device, threads)), texts), indent=2))


@app.command()
def generate(
    directory: ModelArgument,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option(help="Highest number of tokens to generate.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many of the likeliest tokens; 0: all.", min=0)] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A text at which the answer ends; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling; default: a new one each time.")] = None,
    cite: Annotated[bool, typer.Option("--cite", help="List what the memory decided, and its sources.")] = False,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Use the memory, or the model alone.")] = True,
    model: RowOption = None,
    device: Device = "auto",
    threads: Threads = None,
    backend: Backend = "torch",
) -> None:
    """Continue a text, token by token."""
    options: SamplingOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "stop": stop or [],
        "seed": seed,
    }
    Sampling.parse(options, "generate")  # refuses wrong options before anything is loaded
    text = sys.stdin.read() if prompt == "-" else prompt
    opened = load(directory, model, execution=Execution(Hardware(device, threads, backend=backend)))
    answer, citations = "", None
    for chunk in opened.stream(text, memory=memory, cite=cite, **options):
        print(chunk.text, end="", flush=True)
        answer, citations = answer + chunk.text, chunk.citations
    print()
    for line in citation_lines(answer, citations or []) if cite else []:
        say(line)


@app.command(name="trace")
def trace_(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="What `spalm attach` made, a run, or the memory of one of them.")
    ],
    text: Annotated[str | None, typer.Argument(help="The text to trace; - reads it from standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="File to trace, instead of a text.")] = None,
    least: Annotated[int, typer.Option(help="Number of tokens of the shortest span to report.", min=1)] = LEAST,
    as_json: Annotated[bool, typer.Option("--json", help="Print the spans as JSON.")] = False,
) -> None:
    """Find the spans of a text that stand word for word in the memory, with their documents, longest first."""
    if (text is None) == (file is None):
        raise InputError("give either a text or --file FILE")
    given = text_of_file(file) if file is not None else sys.stdin.read() if text == "-" else text or ""
    found = open_traceable(directory).trace(given, least=least)
    if as_json:
        typer.echo(json.dumps([asdict(span) for span in found], indent=2, ensure_ascii=False))
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
    limits: Annotated[
        list[str] | None, typer.Option("--limit", metavar="KEY=VALUE", help="A limit; see `spalm settings serve`.")
    ] = None,
    model: RowOption = None,
    device: Device = "auto",
    threads: Threads = None,
    backend: Backend = "torch",
) -> None:
    """Serve a model with a memory: OpenAI-style completions, documents to add and delete, the explorer's page."""
    from spalm.server import Limits, allowed_hosts, make_server, serve  # not needed by other verbs

    chosen = read_settings(Limits, limits or [])
    opened = load(directory, model, execution=Execution(Hardware(device, threads, backend=backend)))
    serve(make_server(opened, limits=chosen, key=key, hosts=allowed_hosts(host)), host, port, "the server")
