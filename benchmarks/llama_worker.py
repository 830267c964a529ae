"""The other side of benchmarks/real_model.py: llama.cpp through its Python package, run by the Python of an environment that has it.

A question is what to sample (see `llama_side` there); the answer is the number of tokens sampled, and the id of this process. All sequences
are decoded together, and each prompt once for all its answers: llama.cpp's sequences share its cells of the cache.
"""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp as llama
from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize
from sides import serve

CONTEXT, SEQUENCES = 8192, 64


def widened(source: Path, target: Path) -> None:
    """Write a GGUF file with the same weights in float32."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type", "general.quantization_version"):
            continue
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, weights.reshape([int(size) for size in reversed(tensor.shape)]).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@cache
def context_of(file: str, weights: str, threads: int) -> Any:
    llama.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(file)
        if weights == "float32":
            path = Path(folder) / "float32.gguf"
            widened(Path(file), path)
        how = llama.llama_model_default_params()
        how.use_extra_bufts = weights == "float32"  # with AMX, version 0.3.36 dies of weights of 4 bits (segmentation fault)
        model = llama.llama_model_load_from_file(str(path).encode(), how)
    settings = llama.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max, settings.kv_unified = CONTEXT, SEQUENCES, True
    settings.n_batch = settings.n_ubatch = 512
    settings.n_threads = settings.n_threads_batch = threads
    return llama.llama_init_from_model(model, settings)


def decode(context: Any, entries: list[tuple[int, int, list[int], bool]]) -> None:
    """Args: entries: token, position, sequences, whether its logits are needed."""
    batch = llama.llama_batch_init(len(entries), 0, SEQUENCES)
    batch.n_tokens = len(entries)
    for i, (token, position, sequences, wanted) in enumerate(entries):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, len(sequences), wanted
        for j, sequence in enumerate(sequences):
            batch.seq_id[i][j] = sequence
    failed = llama.llama_decode(context, batch)
    llama.llama_batch_free(batch)
    if failed:
        raise RuntimeError(f"llama_decode: {failed}")


def sample(question: dict[str, Any]) -> dict[str, int]:
    context = context_of(question["gguf"], question["weights"], question["threads"])
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    samples, ends = question["samples"], set(question["ends"])
    sampler = llama.llama_sampler_init_dist(question["seed"])  # the whole distribution, at temperature 1
    count, running = 0, []  # of each sequence that goes on: its number, position and last token
    for number, prompt in enumerate(question["prompts"]):
        sequences = list(range(number * samples, (number + 1) * samples))
        last = len(prompt) - 1
        decode(context, [(token, place, sequences, place == last) for place, token in enumerate(prompt)])
        running += [(one, last + 1, llama.llama_sampler_sample(sampler, context, -1)) for one in sequences]
    for step in range(question["max_tokens"]):
        count += len(running)
        running = [one for one in running if one[2] not in ends]
        if not running or step == question["max_tokens"] - 1:
            break
        decode(context, [(token, place, [one], True) for one, place, token in running])
        running = [(one, place + 1, llama.llama_sampler_sample(sampler, context, i)) for i, (one, place, _) in enumerate(running)]
    llama.llama_sampler_free(sampler)
    return {"tokens": count, "process": os.getpid()}


if __name__ == "__main__":
    serve(sample)
