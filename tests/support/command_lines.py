"""Bad command lines: a table of them, what the names in it stand for, and random changes."""

import re
import shlex
from pathlib import Path

import numpy as np

from spalm.memory import remember, source_of_text
from support.commands import SMALL_RECIPE
from support.stub_memory import StubEncoder, new_memory, random_texts, stream

HUGE = "9" * 30
ENDLESS = "9" * 5000
VERBS = (
    *("download", "corpus", "train", "remember", "forget", "compact", "verify", "neighbours", "index", "evaluate"),
    *("run", "study", "vary", "plan", "report", "explore", "show", "attach", "score", "generate", "trace", "serve"),
    *("pack", "unpack", "knn"),
)
NUMBERS = {  # whole numbers of each verb: the command up to them, and their options
    "train RECIPE spalm --out OUT": ["--threads"],
    "remember RECIPE --out OUT": ["--threads"],
    "neighbours RECIPE --out OUT": ["--threads"],
    "knn NOTHING.npy --out OUT": ["--k", "--seed", "--threads"],
    "index MEMORY --out OUT": ["--count", "--seed", "--threads"],
    "evaluate RECIPE spalm --out OUT": ["--threads"],
    "run RECIPE --out OUT": ["--threads"],
    "study NOTHING": ["--first", "--length"],
    "vary NOTHING": ["--count", "--threads"],
    "plan RECIPE --tokens 1M": ["--machines", "--cores"],
    "explore NOTHING": ["--port", "--threads"],
    "attach NOTHING NOTHING --out OUT": ["--threads"],
    "score NOTHING NOTHING": ["--threads"],
    "generate NOTHING x": ["--max-tokens", "--top-k", "--seed", "--passages", "--threads"],
    "trace MEMORY x": ["--least"],
    "serve NOTHING": ["--port", "--threads"],
}
LINES = """
no-such-verb
--no-such-option
-x
trian demo
download nothing
download ''
download wikitext-104 --to OUT
corpus nothing --out OUT
corpus NOTHING.yaml --out OUT
corpus FOLDER.yaml --out OUT
corpus EMPTY.yaml --out OUT
corpus BINARY.yaml --out OUT
corpus LIST.yaml --out OUT
corpus LOOP.yaml --out OUT
corpus ../demo --out OUT
corpus '' --out OUT
corpus '[/x]' --out OUT
corpus RECIPE --out FILE
corpus RECIPE --out FILE/below
corpus RECIPE --out OUT corpus.source.path=NOTHING
corpus RECIPE --out OUT corpus.source.path=EMPTY
corpus RECIPE --out OUT corpus.source.path=BINARY
corpus RECIPE --out OUT corpus.source.path=LOOP
corpus RECIPE --out OUT corpus.source.path=~nobody-of-that-name/x
corpus RECIPE --out OUT 'corpus.source.path="a\\0b"'
corpus RECIPE --out OUT corpus.source.path=[]
corpus RECIPE --out OUT corpus.source.path={a: 1}
corpus RECIPE --out OUT corpus.source.kind=nothing
corpus RECIPE --out OUT corpus.source.kind=wikitext
corpus RECIPE --out OUT corpus.source.kind=enwik8
corpus RECIPE --out OUT corpus.source.document_start=(
corpus RECIPE --out OUT corpus.source.document_start=[1]
corpus RECIPE --out OUT corpus.tokeniser.kind=nothing
corpus RECIPE --out OUT corpus.tokeniser.kind=pretrained
corpus RECIPE --out OUT corpus.tokeniser.size=1
corpus RECIPE --out OUT corpus=null
corpus RECIPE --out OUT =
corpus RECIPE --out OUT =3
corpus RECIPE --out OUT training
corpus RECIPE --out OUT training.=3
corpus RECIPE --out OUT .training=3
corpus RECIPE --out OUT training..steps=3
corpus RECIPE --out OUT training.steps.more=3
corpus RECIPE --out OUT training.steps
corpus RECIPE --out OUT training.steps=
corpus RECIPE --out OUT training.steps=[1
corpus RECIPE --out OUT training.steps={
corpus RECIPE --out OUT 'training.steps=!!python/object:os.system x'
corpus RECIPE --out OUT 'training.steps=*nothing'
corpus RECIPE --out OUT training.steps=soon
corpus RECIPE --out OUT training.steps=1.5
corpus RECIPE --out OUT training.steps=ENDLESS
corpus RECIPE --out OUT training.step=3
corpus RECIPE --out OUT nothing=3
corpus RECIPE --out OUT title=[1]
corpus RECIPE --out OUT training=3
corpus RECIPE --out OUT network.width=15
corpus RECIPE --out OUT network.cutoffs=[3,2]
corpus RECIPE --out OUT network.norm=none
corpus RECIPE --out OUT memory.stride=99
corpus RECIPE --out OUT evaluation.stride=99
corpus RECIPE --out OUT controls=perhaps
corpus RECIPE --out OUT extended=perhaps
corpus RECIPE --out OUT extended_gate.neighbours=99
corpus RECIPE --out OUT extended_gate.copying=some
corpus RECIPE --out OUT extended_gate.copy_width=-1
train RECIPE transformer-xl-restarted --out OUT spalm.start=0
evaluate RECIPE transformer-xl-restarted --out OUT spalm.start=0
evaluate RECIPE knn-lm-literal --out OUT spalm.gate.neighbours=0
corpus RECIPE --out OUT evaluation.unit=metres
corpus RECIPE --out OUT evaluation.memory_lengths=[-1]
corpus RECIPE --out OUT evaluation.memory_lengths=[HUGE]
corpus RECIPE --out OUT spalm.gate.neighbours=99
corpus RECIPE --out OUT knn.lambdas=[]
corpus RECIPE --out OUT knn.lambdas=[2]
corpus RECIPE --out OUT knn.counts=[0]
corpus RECIPE --out OUT knn.counts=[HUGE]
corpus RECIPE --out OUT knn.temperatures=[.nan]
corpus RECIPE --out OUT paper=[1]
train RECIPE transformer-xxl --out OUT
train RECIPE '' --out OUT
train RECIPE transformer
train RECIPE transformer --out
train RECIPE transformer --out OUT --device nope
train RECIPE transformer --out OUT --device meta
train RECIPE transformer --out OUT --device ''
train RECIPE transformer --out OUT --device cuda:99
train RECIPE transformer --out OUT --device cpu:cpu
train RECIPE transformer --out OUT --fsdp
train RECIPE transformer --out OUT --bf16=3
train RECIPE transformer --out OUT --ram 3X
train RECIPE transformer --out OUT --ram ENDLESS
remember RECIPE
remember RECIPE --out OUT --text NOTHING
remember RECIPE --out OUT --text LOOP
remember RECIPE --out OUT --text ~nobody-of-that-name/x
remember RECIPE --out OUT --address here:1
remember RECIPE --out OUT --engine cluster
remember FOLDER
remember ATTACHED --out OUT
remember ATTACHED training.steps=3
remember ATTACHED --bf16
forget NOTHING x
forget FILE x
forget MEMORY nothing
forget MEMORY text-0 nothing
forget MEMORY ''
forget MEMORY $'a\\nb'
forget MEMORY ESCAPE
forget MEMORY ENDLESS
compact NOTHING
compact FILE
compact FOLDER
verify NOTHING
verify FILE
verify FOLDER
verify EMPTY
pack NOTHING OUT
pack FILE OUT
pack FOLDER OUT
pack ATTACHED OUT
pack MEMORY
pack MEMORY FILE
pack MEMORY MEMORY/x.tar
pack MEMORY FOLDER
pack MEMORY OUT --with-model
pack MEMORY FILE/below
unpack NOTHING OUT
unpack FOLDER OUT
unpack EMPTY OUT
unpack BINARY OUT
unpack FILE OUT
unpack FILE FOLDER
unpack LOOP OUT
unpack FILE OUT --model NOTHING
unpack /dev/zero OUT
neighbours RECIPE --out OUT --recall 0
neighbours RECIPE --out OUT --recall 2
neighbours RECIPE --out OUT --recall nan
neighbours RECIPE --out OUT --recall x
neighbours RECIPE --out OUT --ram -1
neighbours RECIPE --out OUT --ram 0
neighbours RECIPE --out OUT --ram ''
neighbours RECIPE --out OUT neighbours.count=0
knn
knn NOTHING.npy
knn '' --out OUT
knn NOTHING.npy --out OUT
knn NOTHING.fbin --out OUT
knn NOTHING --out OUT
knn FILE --out OUT
knn FOLDER --out OUT
knn EMPTY.yaml --out OUT
knn NOTHING.npy --out OUT --k 0
knn NOTHING.npy --out OUT --k 101
knn NOTHING.npy --out OUT --recall 0
knn NOTHING.npy --out OUT --recall nan
knn NOTHING.npy --out OUT --metric l1
knn NOTHING.npy --out OUT --ram ''
knn NOTHING.npy --out OUT --ram 1
knn NOTHING.npy --out OUT --queries NOTHING.npy
index MEMORY
index NOTHING --out OUT
index FOLDER --out OUT
index MEMORY --out FILE
index MEMORY --out OUT --recall 0
index MEMORY --out OUT --recall 2
index MEMORY --out OUT --recall -1
index MEMORY --out OUT --recall nan
index MEMORY --out OUT --recall inf
index MEMORY --out OUT --count 100000000
index MEMORY --out OUT --kind tree
index MEMORY --out OUT --address here:1
index MEMORY x --out OUT
evaluate RECIPE gpt --out OUT
evaluate RECIPE --out OUT
run
run RECIPE
run nothing --out OUT
run RECIPE --out OUT --device nope
run RECIPE --out OUT --compile=yes
run RECIPE --out OUT --engine nothing
run RECIPE --out OUT --address nowhere
run RECIPE --out OUT training.batch_size=1000000000
run RECIPE --out OUT training.batch_size=0
run RECIPE --out OUT training.segment_length=1000000000
run RECIPE --out OUT training.memory_length=10000000000
run RECIPE --out OUT evaluation.memory_lengths=[10000000000]
run RECIPE --out OUT neighbours.window=1000000000
run RECIPE --out ''
study NOTHING
study FOLDER
study FOLDER nothing
study FOLDER --split train
study FOLDER --model gpt
study FOLDER --length 401
vary FOLDER
vary NOTHING --count x
vary NOTHING --steps 5
vary FOLDER --steps 0
vary FOLDER --steps x
vary FOLDER --steps 5,,6
vary FOLDER --steps ENDLESS
vary FOLDER --steps 5 --count 1
vary FOLDER --steps 5 --retrain
vary FOLDER network.width=16
vary FOLDER --steps 5 --ram 3X
plan RECIPE
plan RECIPE --tokens x
plan RECIPE --tokens -1
plan RECIPE --tokens 0
plan RECIPE --tokens ENDLESS
plan RECIPE --tokens nan
plan RECIPE --tokens 1M --ram 3X
plan RECIPE --tokens 1M --storage 0
plan RECIPE --tokens 1M --storage ENDLESS
plan RECIPE --tokens 1M --json=3
report NOTHING
report FILE
report FOLDER --out OUT
explore NOTHING
explore FOLDER
explore FOLDER --port 70000
settings nothing
settings attach nothing
settings ESCAPE
show NOTHING
show FILE
show FOLDER
show LOOP
show MEMORY x
show MEMORY --documents=3
attach
attach NOTHING
attach NOTHING TEXT
attach NOTHING NOTHING --out OUT
attach NOTHING LOOP --out OUT
attach NOTHING ~nobody-of-that-name/x --out OUT
attach NOTHING TEXT --out OUT --memory nothing
attach NOTHING TEXT --out OUT --keys x
attach NOTHING TEXT --out OUT --precision float16
attach NOTHING TEXT --out OUT --keys 0
attach NOTHING TEXT --out OUT --keys -5
attach NOTHING TEXT --out OUT --keys ENDLESS
attach NOTHING TEXT --out OUT --memory exact --keys 5
attach NOTHING TEXT --out OUT --like NOTHING
attach NOTHING TEXT --out OUT --library NOTHING
attach NOTHING TEXT --out OUT --search 0
attach NOTHING TEXT --out OUT --search nan
attach NOTHING TEXT --out OUT --search x
attach NOTHING TEXT --out OUT --set nothing=3
attach NOTHING TEXT --out OUT --set context
attach NOTHING TEXT --out OUT --set context=1
attach NOTHING TEXT --out OUT --set context=HUGE
attach NOTHING TEXT --out OUT --set stride=5000
attach NOTHING TEXT --out OUT --set seed=HUGE
attach NOTHING TEXT --out OUT --set seed=-1
attach NOTHING TEXT --out OUT --set combiner=sum
attach NOTHING TEXT --out OUT --set 'document_start=('
attach NOTHING TEXT --out OUT --device nope
attach FOLDER TEXT --out OUT
attach FILE TEXT --out OUT
attach NOTHING.gguf TEXT --out OUT
attach BINARY.gguf TEXT --out OUT
score NOTHING TEXT
score FOLDER TEXT
score FOLDER
generate NOTHING x
generate FOLDER x
generate FILE x
generate FOLDER
generate FOLDER x y
generate FOLDER x --temperature -1
generate FOLDER x --temperature nan
generate FOLDER x --temperature inf
generate FOLDER x --temperature x
generate FOLDER x --top-p 0
generate FOLDER x --top-p -1
generate FOLDER x --top-p 1.1
generate FOLDER x --top-p nan
generate FOLDER x --passages 9
generate FOLDER x --backend onnx
generate FOLDER x --precision int4
generate FOLDER x --max-token 3
generate FOLDER x --memory=yes
generate FOLDER NOT-UTF-8
generate NOT-UTF-8 x
forget MEMORY NOT-UTF-8
run RECIPE --out NOT-UTF-8
trace NOTHING x
trace MEMORY
trace MEMORY x --file FILE
trace MEMORY --file NOTHING
trace MEMORY --file BINARY
trace MEMORY --file LOOP
trace MEMORY --file FOLDER
trace MEMORY x
trace FOLDER x
serve NOTHING
serve FOLDER
serve FOLDER --keys NOTHING
serve FOLDER --keys FILE
serve FOLDER --keys BINARY
serve FOLDER --keys FOLDER
serve FOLDER --keys LOOP
serve FOLDER --memory NOTHING
serve FOLDER --limit nothing=3
serve FOLDER --limit waiting
serve FOLDER --limit waiting=0
serve FOLDER --limit waiting=HUGE
serve FOLDER --limit body_bytes=.nan
serve FOLDER --limit document_bytes=0
serve FOLDER --port -1
serve FOLDER --port 65536
serve FOLDER --backend nothing
serve FOLDER --host ''
serve FOLDER --host ' '
serve FOLDER --host 0.0.0.0
serve FOLDER --host ::
serve FOLDER --host no.such.host.invalid
explore FOLDER --host ''
explore FOLDER --host 0.0.0.0
"""
CASES = [
    *LINES.strip().splitlines(),
    *(f"{verb} --no-such-option" for verb in VERBS),
    *VERBS,
    *(
        f"{command} {option} {value}"
        for command, options in NUMBERS.items()
        for option in options
        for value in ("x", "1.5", "''", "-1", HUGE)
    ),
]


def make_places(root: Path) -> dict[str, str]:
    """Makes what the names in the table stand for; returns that by name."""
    (root / "folder").mkdir()
    (root / "folder.yaml").mkdir()
    (root / "attached").mkdir()
    (root / "attached" / "attached.json").write_text("{}")
    files = {"file": b"text\n", "empty": b"", "binary": b"\xff\x00\x9b" * 40, "list": b"- 1\n- 2\n"}
    for name, content in files.items():
        for end in ("", ".yaml", ".gguf"):
            (root / f"{name}{end}").write_bytes(content)
    for end in ("", ".yaml"):
        (root / f"loop{end}").symlink_to(root / f"loop{end}")
    texts = root / "text"
    texts.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text("the cat sat on a mat .\n" * 30)
    (root / "recipe.yaml").write_text(SMALL_RECIPE.replace("PATH", str(texts)))
    encoder = StubEncoder()
    memory, text = new_memory(root / "memory", encoder), stream(random_texts(np.random.default_rng(0), 3))
    remember(memory, encoder, text, source=source_of_text(text))
    names = ("folder", "file", "empty", "binary", "list", "loop", "text", "memory", "attached", "nothing", "out")
    return {
        **{name.upper(): str(root / name) for name in names},
        **{"RECIPE": str(root / "recipe.yaml"), "HUGE": HUGE, "ENDLESS": ENDLESS},
        **{"NOT-UTF-8": "caf\udce9", "ESCAPE": "\x1b[31mred\x9b\u202e"},
    }


def arguments_of(line: str, places: dict[str, str]) -> list[str]:
    """Returns a line of the table as arguments."""
    names = "|".join(sorted(places, key=len, reverse=True))
    return [
        re.sub(rf"\b({names})\b", lambda found: places[found[0]], part) for part in shlex.split(line.replace("$'", "'"))
    ]


HOSTILE = (
    *("", "-", "--", "-1", "0", "NaN", "1e999", "HUGE", "ENDLESS", "NOT-UTF-8", "ESCAPE", "%s%n", "$(id)", "`id`", "*"),
    *("NOTHING", "FOLDER", "FILE", "EMPTY", "BINARY", "LIST", "LOOP", "MEMORY", "RECIPE", "TEXT", "ATTACHED", "OUT"),
    *("/dev/null", "/dev/zero", "/proc/self/mem", "..", "~", "{}", "[]", "a=b", "training.steps=-1", "=" * 99),
    *("--help", "--out", "--threads", "--device", "--seed", "--no-such", "--out=", "-h", "--version", "\u202e", "'"),
)
"""Arguments that a line may get."""


def changed(parts: list[str], random: np.random.Generator) -> list[str]:
    """Returns arguments with one to three random changes: others put in, in their place, twice, or in another order."""
    parts = list(parts)
    for _ in range(random.integers(1, 4)):
        place, hostile = int(random.integers(1, len(parts) + 1)), str(random.choice(HOSTILE))
        match random.integers(4):
            case 0:
                parts.insert(place, hostile)
            case 1:
                parts[place:] = [hostile, *parts[place + 1 :]]
            case 2:
                parts.insert(place, parts[place - 1])
            case _:
                parts[1:] = random.permutation(np.array(parts[1:], object)).tolist()
    return parts
