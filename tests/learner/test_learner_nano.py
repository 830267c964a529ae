"""The nano model: a plain Hugging Face folder whose tokenizer fits the task, and a supervised start that learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenkeel.correction.errors import DataError
from evenkeel.learner.hf.nano import NanoModelConfig, build_nano_model
from evenkeel.learner.results import EncodedDemonstration
from evenkeel.learner.warmup import WarmupConfig, pack_demonstrations, warm_up
from tests.learner.learner_cases import learner_on

QUESTIONS = [f"State the final answer to the following arithmetic problem: {a} + {b} =" for a in range(10, 40) for b in range(5, 25)]
SMALL = NanoModelConfig(layers=1, hidden_size=32, heads=2, key_value_heads=1, head_dim=16, intermediate_size=64, max_vocab_size=400)


@pytest.fixture(scope="module")
def nano_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nano")
    build_nano_model(folder, QUESTIONS, SMALL)
    return folder


def test_transformers_loads_the_folder(nano_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(nano_folder), AutoTokenizer.from_pretrained(nano_folder)
    assert model.config.model_type == "qwen3" and model.config.architectures == ["Qwen3ForCausalLM"]
    assert model.config.vocab_size == len(tokenizer) <= 400
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|pad|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    assert all(float(matrix.detach().std()) == pytest.approx(0.02, rel=0.1) for matrix in matrices)


def test_parameter_count_is_what_the_default_shape_gives(tmp_path: Path) -> None:
    """4 layers of 2 h (heads + groups) w + 3 h f + 2 h + 2 w, embedding v h, last norm h; h 256, f 768, 4 + 2 heads of w 64."""
    h, f, w = 256, 768, 64
    count = build_nano_model(tmp_path / "m", QUESTIONS)
    from transformers import AutoTokenizer

    vocab = len(AutoTokenizer.from_pretrained(tmp_path / "m"))
    assert count == 4 * (2 * h * (4 + 2) * w + 3 * h * f + 2 * h + 2 * w) + vocab * h + h
    assert 3e6 < count < 4e6


def test_tokenizer_round_trips_and_splits_digits(nano_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(nano_folder)
    for text in (*QUESTIONS[:20], "12345", "-7", "größer → 試す \n\t ok", "  two  spaces "):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([i]) for i in tokenizer("90210")["input_ids"]] == list("90210")
    assert len(tokenizer(QUESTIONS[0])["input_ids"]) < 20  # words of the task are tokens
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(prompt)["input_ids"]
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2 and tokenizer.eos_token_id in ids


def test_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, seed in zip(folders, (1, 1, 2), strict=True):
        build_nano_model(folder, QUESTIONS, SMALL.model_copy(update={"seed": seed}))
    first, same, other = (load_file(folder / "model.safetensors")["model.embed_tokens.weight"] for folder in folders)
    assert first.equal(same) and not first.equal(other)
    with pytest.raises(DataError, match="holds a model already"):
        build_nano_model(folders[0], QUESTIONS, SMALL)


def test_warm_up_lowers_the_loss_and_is_reproducible(nano_folder: Path) -> None:
    """From ln(vocabulary), as a random model has, to less than half of it on answers that depend on the prompt's last token."""
    import math

    demonstrations = [EncodedDemonstration((5, 6, 10 + i), (40 + i, 2)) for i in range(16)]
    runs = []
    for _ in range(2):
        seen: list[tuple[int, float]] = []
        with learner_on(nano_folder, learning_rate=5e-3, warmup_steps=5) as learner:
            config = WarmupConfig(steps=60, sequences_per_step=16)
            losses = warm_up(learner, demonstrations, config, on_step=lambda step, loss, seen=seen: seen.append((step, loss)))
            runs.append((losses, learner.weight_checksums()))
        assert seen == list(enumerate(losses))
    assert runs[0] == runs[1]
    losses = runs[0][0]
    assert losses[0] == pytest.approx(math.log(SMALL.max_vocab_size), rel=0.1)
    assert losses[-1] < losses[0] / 2


def test_demonstrations_are_packed_with_the_answers_masked() -> None:
    ids, offsets, mask = pack_demonstrations([EncodedDemonstration((1, 2), (3,)), EncodedDemonstration((4,), (5, 6))])
    assert (ids.tolist(), offsets.tolist()) == ([1, 2, 3, 4, 5, 6], [0, 3, 6])
    assert mask.tolist() == [False, False, True, False, True, True]
    with pytest.raises(DataError, match="demonstration 1: 2 prompt and 0 answer"):
        pack_demonstrations([EncodedDemonstration((1,), (2,)), EncodedDemonstration((1, 2), ())])


def test_a_nano_mixture_of_experts(tmp_path: Path) -> None:
    """Every expert has the initial spread, in transformers and under the learner's names; a tied head is refused, since SGLang has none."""
    from transformers import AutoModelForCausalLM

    shape = SMALL.model_dump() | {"experts": 4, "tie_word_embeddings": False}
    build_nano_model(tmp_path / "m", QUESTIONS, NanoModelConfig(**shape))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    experts = model.model.layers[0].mlp.experts
    assert model.config.model_type == "qwen3_moe" and experts.gate_up_proj.shape == (4, 128, 32)
    assert all(float(e.std()) == pytest.approx(0.02, rel=0.1) for e in [*experts.gate_up_proj.detach(), *experts.down_proj.detach()])
    with learner_on(tmp_path / "m") as learner:
        names = [name for piece in learner.weights() for name in piece if "experts" in name]
    assert len(names) == 4 * 3
    for changes, reason in (({"experts": 2}, "experts_per_token = 2"), ({"tie_word_embeddings": True}, "head of its own")):
        with pytest.raises(ValueError, match=reason):
            NanoModelConfig(**shape | changes)
