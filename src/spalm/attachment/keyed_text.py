"""Choice of the training documents that get keys: all, those most like a given text, the last ones, or none.

A key takes a forward pass of the model, an exact match none. So the number of keys is what attaching costs.
"""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float
from pydantic import PositiveFloat

from spalm.attachment.base import PretrainedBase
from spalm.attachment.estimate import announce, duration, tokens_to_read
from spalm.attachment.settings import AttachSettings
from spalm.compute import Execution
from spalm.console import say
from spalm.corpus import Corpus, TokenStream, tokenise_files
from spalm.errors import InputError
from spalm.files import read_json, validated, write_json
from spalm.lm.pretrained import Backend, usable_backends
from spalm.settings import differences

CHOICE_FILE = "memory-choice.json"
"""File that holds which memory a folder was begun with, so that a killed run continues with the same."""
_CHOICES = ("memory", "keys", "like", "library")
"""Settings that it holds."""
_ALL_WITHIN, _SOME_WITHIN = 600, 300
"""Seconds: if all keys are made within the first, all are made; otherwise those that are made within the second."""
_MEASURED = 1024
"""Number of tokens that are read to measure the model's speed."""
_WORTH_TRYING = 60
"""Seconds of reading by torch in float32 from which on other backends are tried; loading them takes seconds too."""


@dataclass(frozen=True)
class KeyedText:
    """Documents, divided into those with keys and those without."""

    with_keys: TokenStream
    without_keys: TokenStream

    @classmethod
    def choose(cls, train: TokenStream, settings: AttachSettings, corpus: Corpus) -> "KeyedText":
        """Divides the training documents as the settings say."""
        everything = np.ones(len(train.ends), bool)
        if settings.memory == "exact":
            return cls(train.only(~everything), train)
        if settings.keys is None or settings.keys >= len(train):
            return cls(train, train.only(~everything))
        sample = _sample(settings, corpus)
        scores = np.arange(len(train.ends), dtype=float) if sample is None else likeness(train, sample)
        chosen = _within(train, scores, settings.keys)
        if not chosen.any():
            raise InputError(f"keys = {settings.keys:,}: no training document is so short; give a higher number")
        return cls(train.only(chosen), train.only(~chosen))

    @classmethod
    def choose_from_library(cls, library: TokenStream, settings: AttachSettings, corpus: Corpus) -> "KeyedText":
        """Divides a library: the keys that the training documents leave over go to what is most like these."""
        train = corpus.split("train")
        sample = _sample(settings, corpus)
        scores = likeness(library, train if sample is None else sample)
        chosen = _within(library, scores, keys_for_library(settings, corpus))
        return cls(library.only(chosen), library.only(~chosen))


def keys_for_library(settings: AttachSettings, corpus: Corpus) -> int:
    """Returns how many positions of the library may get keys: as many as the training documents leave over."""
    return max(0, (settings.keys or 0) - len(corpus.split("train")))


def _sample(settings: AttachSettings, corpus: Corpus) -> TokenStream | None:
    """Returns the text that documents with keys are to be like, if one was given."""
    return None if settings.like is None else tokenise_files([Path(settings.like)], corpus.tokeniser)


def choose_memory(
    settings: AttachSettings, base: PretrainedBase, corpus: Corpus, *, directory: Path, execution: Execution
) -> tuple[AttachSettings, PretrainedBase]:
    """Returns the settings with `memory` resolved, and the model with the backend that makes keys.

    The first choice for a folder and a text holds. Another memory would be measured with the held-out documents in it,
    and keys of another backend would not be the same bytes, so other wishes are refused.
    """
    path = directory / CHOICE_FILE
    known = read_json(path, dict, remedy=f"remove {path}") if path.exists() else {}
    if known.get("corpus") == corpus.digest:
        begun = {name: known.get(name) for name in _CHOICES}
        asked = {name: getattr(settings, name) for name in _CHOICES}
        left_to_us = settings.memory == "auto" and settings.keys is None
        if left_to_us:
            asked |= {"memory": begun["memory"], "keys": begun["keys"]}
        elif settings.memory == "auto":
            asked["memory"] = "both"
        if changed := differences(begun, asked):
            raise InputError(f"{directory} was begun with another memory ({changed[0]}); give another --out")
        keys_by: Backend = validated(known.get("keys_by", {}), Backend, path, remedy=f"remove {path}")
        if not keys_by.is_as_wanted(base.hardware):
            raise InputError(
                f"{directory} was begun with keys by {keys_by}; leave out --backend and --precision, or give another "
                "--out"
            )
        settings, base = settings.model_copy(update=begun), replace(base, keys_by=keys_by)
        speed = validated(known.get("tokens_per_second"), PositiveFloat | None, path, remedy=f"remove {path}")
        announce(settings, base, corpus, directory=directory, speed=speed)
        return settings, base
    tokens = tokens_to_read(settings, corpus)
    base, speed = _fastest(base, corpus.split("train"), tokens, on_this_machine=not execution.engine.separate_processes)
    if settings.memory == "auto":
        keys = settings.keys or _affordable_keys(len(corpus.split("train")), speed)
        settings = settings.model_copy(update={"memory": "both", "keys": keys})
    chosen = {name: getattr(settings, name) for name in _CHOICES}
    write_json(path, {"corpus": corpus.digest, **chosen, "keys_by": asdict(base.keys_by), "tokens_per_second": speed})
    announce(settings, base, corpus, directory=directory, speed=speed)
    return settings, base


def _affordable_keys(tokens: int, speed: float) -> int | None:
    """Returns how many keys are made at this speed, None for all, and says so if it is not all."""
    if tokens <= _ALL_WITHIN * speed:
        return None
    keys = int(_SOME_WITHIN * speed)
    say(
        f"keys of all {tokens:,} tokens would take {duration(tokens / speed)} at {speed:,.0f} tokens/s; they are made "
        f"for {keys:,} ({duration(keys / speed)}), and exact matches for everything. --memory exact makes no keys, "
        "--keys N more or fewer"
    )
    return keys


def _fastest(
    base: PretrainedBase, train: TokenStream, tokens: int, *, on_this_machine: bool
) -> tuple[PretrainedBase, float]:
    """Returns the model with the backend that reads fastest, and its speed; backends are tried where that pays.

    Workers on other machines may lack what this one has, so for them it is torch, as it is everywhere.
    """
    first, *others = usable_backends(base.folder, base.hardware)
    chosen = replace(base, keys_by=first)
    speed = _tokens_per_second(chosen, train)
    if not on_this_machine or tokens < _WORTH_TRYING * speed:
        return chosen, speed
    for backend in others:
        other = replace(base, keys_by=backend)
        try:
            found = _tokens_per_second(other, train)
        except InputError as error:
            say(f"{error}; {backend} makes no keys")
            continue
        say(f"keys by {backend}: {found:,.0f} tokens/s; by {chosen.keys_by}: {speed:,.0f}")
        if found > speed:
            chosen, speed = other, found
    return chosen, speed


def _tokens_per_second(base: PretrainedBase, train: TokenStream) -> float:
    """Returns the speed at which the model reads."""
    for text in (train.beginning(_MEASURED // 8), train.beginning(_MEASURED)):  # the first only warms up
        begin = time.perf_counter()
        for _ in base.encoder.hidden(text, 0, len(text)):
            pass
        seconds = time.perf_counter() - begin
    return len(text) / seconds


def likeness(documents: TokenStream, sample: TokenStream) -> Float[np.ndarray, "documents"]:
    """Returns how much likelier each document is as text like the sample than as text like all documents.

    That is the mean over its tokens of log((p_sample + p_all) / 2 p_all), with the relative frequencies of the token in
    the sample and in all documents: Moore and Lewis' difference of cross-entropies, by unigrams.
    """
    size = int(max(documents.tokens.max(initial=0), sample.tokens.max(initial=0))) + 1
    of_sample, of_all = (np.bincount(text.tokens, minlength=size) / max(len(text), 1) for text in (sample, documents))
    gains = np.log1p(of_sample / np.maximum(of_all, 1e-12)) - np.log(2)
    sums = np.append(0.0, np.cumsum(gains[documents.tokens]))
    return (sums[documents.ends] - sums[documents.begins]) / np.maximum(documents.ends - documents.begins, 1)


def _within(train: TokenStream, scores: Float[np.ndarray, "documents"], keys: int) -> Bool[np.ndarray, "documents"]:
    """Returns the documents with the highest scores that have at most `keys` tokens together."""
    lengths = train.ends - train.begins
    order = np.argsort(-scores, kind="stable")
    chosen = np.zeros(len(lengths), bool)
    chosen[order[np.cumsum(lengths[order]) <= keys]] = True
    return chosen
