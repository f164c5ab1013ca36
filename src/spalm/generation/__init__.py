"""A model with its memory in, text out: generation with citations, scores, explanations, documents, transformers."""

from spalm.generation.answer import Answer, Chunk, Citation, CitedSource, FinishReason, GeneratedToken
from spalm.generation.citations import citation_lines, citations_of
from spalm.generation.decoding.batch import AnswerBatch, AnswerRequest, RunningAnswer
from spalm.generation.decoding.decoder import Decoder, EncodedTokens
from spalm.generation.decoding.detokenise import IncrementalDetokeniser, token_texts
from spalm.generation.decoding.generate import GenerationOptions, generate_tokens
from spalm.generation.decoding.sampling import Sampling, SamplingOptions
from spalm.generation.documents import DocumentExists, DocumentService, MemoryDocument, UnknownDocument
from spalm.generation.load import load_model, model_of, open_models
from spalm.generation.memories import MemoryFolders, MemorySelection, UnknownMemory, named_folders
from spalm.generation.model import Model
from spalm.generation.models import AttachedModels, ModelSet, RunModels, Variant
from spalm.generation.passages import RankedPassage
from spalm.generation.score import Score, TokenScore
from spalm.generation.trace import Traceable, TracedSpan, open_traceable, print_spans, text_of_file, trace_text

__all__ = [
    "Answer",
    "AnswerBatch",
    "AnswerRequest",
    "AttachedModels",
    "Chunk",
    "Citation",
    "CitedSource",
    "Decoder",
    "MemoryDocument",
    "DocumentExists",
    "DocumentService",
    "EncodedTokens",
    "FinishReason",
    "GeneratedToken",
    "GenerationOptions",
    "IncrementalDetokeniser",
    "MemoryFolders",
    "MemorySelection",
    "Model",
    "ModelSet",
    "RankedPassage",
    "RunModels",
    "RunningAnswer",
    "Sampling",
    "SamplingOptions",
    "Score",
    "TokenScore",
    "Traceable",
    "TracedSpan",
    "UnknownDocument",
    "UnknownMemory",
    "Variant",
    "citation_lines",
    "citations_of",
    "generate_tokens",
    "load_model",
    "model_of",
    "named_folders",
    "open_models",
    "open_traceable",
    "print_spans",
    "text_of_file",
    "token_texts",
    "trace_text",
]
