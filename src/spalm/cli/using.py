"""The verbs that use a model with a memory: attach one to a pretrained model, write, score, serve."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from spalm.attachment import Attached, AttachSettings, attach, print_attached, score_files
from spalm.cli.options import PORT, Address, Device, Host, OnEngine, Port, Restart, Threads, app, place
from spalm.compute import Execution, Hardware, open_engine
from spalm.console import say
from spalm.settings import read_settings

LiveArgument = Annotated[Path, typer.Argument(metavar="DIR", help="What `spalm attach` made, or a finished run.")]
OfRun = Annotated[str | None, typer.Option(help="Of a finished run: which of its models; default spalm-adaptive.")]


@app.command(name="attach")
def attach_(
    model: Annotated[str, typer.Argument(help="Folder of a causal LM, its name on the hub, or a .gguf file.")],
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT...", help="Files and folders of text.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
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
    budget = [] if search is None else [f"search={search}"]
    asked = read_settings(AttachSettings, [*(settings or []), *budget])
    if engine != "local" and Path(model).exists():
        model = str(place(Path(model), engine))
    with open_engine(engine, address, threads) as opened:
        execution = Execution(Hardware(device, threads), opened, restart=restart)
        made = attach(model, texts, place(out, engine), asked, execution)
    print_attached(made, Console())


@app.command()
def score(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What `spalm attach` made.")],
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT...", help="Files and folders that it does not know.")],
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Perplexity of texts, with the memory as it is (static) and with what the texts themselves say (dynamic)."""
    typer.echo(json.dumps(score_files(Attached(directory, Hardware(device, threads)), texts), indent=2))


@app.command()
def generate(
    directory: LiveArgument,
    prompt: Annotated[str, typer.Argument(help="The text to go on with; - reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option(help="Tokens to write at most.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens, of this probability together.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only so many of the likeliest tokens; 0: all.", min=0)] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A text at which it ends; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling; default: another each time.")] = None,
    cite: Annotated[bool, typer.Option("--cite", help="Name what the memory decided, and where from.")] = False,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="With the memory, or the model alone.")] = True,
    model: OfRun = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Go on with a text, token by token."""
    from spalm.generation import Sampling, open_live, write  # not needed by other verbs

    asked = Sampling.parse(
        {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "stop": stop or [],
            "seed": seed,
        },
        "generate",
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    live = open_live(directory, Hardware(device, threads), model)
    citations = write(live, text, asked, cite, memory, lambda part: print(part, end="", flush=True))
    print()
    for line in citations:
        say(line)


@app.command(name="serve")
def serve_(
    directory: LiveArgument,
    host: Host = "127.0.0.1",
    port: Port = PORT,
    key: Annotated[
        str | None, typer.Option(envvar="SPALM_KEY", help="Who asks must know it: Authorization: Bearer KEY.")
    ] = None,
    limits: Annotated[
        list[str] | None, typer.Option("--limit", metavar="KEY=VALUE", help="See `spalm settings serve`.")
    ] = None,
    model: OfRun = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Serve a model with a memory: OpenAI-style completions, documents to add and delete, the explorer's page."""
    from spalm.server import Limits, allowed_hosts, open_server  # not needed by other verbs
    from spalm.server import listen as serve

    asked = read_settings(Limits, limits or [])
    served = open_server(directory, Hardware(device, threads), model, asked, key, allowed_hosts(host))
    serve(served, host, port, "the server")
