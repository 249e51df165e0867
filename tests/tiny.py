"""Tiny models and tokenizers, built offline in about a second, and trainers around them."""

import dataclasses
import random
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(swap: tuple[int, int] | None = None, pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level tokenizer with four special tokens; `swap` exchanges the ids of two bytes."""
    tokens = ["<|pad|>", "<|eos|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if swap is not None:
        a, b = swap
        tokens[a], tokens[b] = tokens[b], tokens[a]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|eos|>" if pad_is_eos else "<|pad|>",
        eos_token="<|eos|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        padding_side="left",
        model_max_length=512,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model(
    seed: int = 0, vocab_size: int = 300, layers: int = 2, tie: bool = True, hidden: int = 32, **options: Any
) -> Qwen3ForCausalLM:
    """`options` of `Qwen3Config` stand in for those here."""
    torch.manual_seed(seed)
    defaults: dict[str, Any] = dict(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=tie,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(Qwen3Config(**{**defaults, **options}))


def moe_model(seed: int = 0) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,  # pyright: ignore[reportCallIssue]
            max_position_embeddings=512,
            tie_word_embeddings=True,
            router_aux_loss_coef=0.01,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


def teacher() -> dict[str, Any]:
    """Arguments of a SAF trainer: another tiny model as the teacher."""
    return dict(teacher_model=model(7), teacher_processing_class=tokenizer())


def dataset(rows: int = 16) -> Dataset:
    """Prompts of very different lengths."""
    rng = random.Random(0)
    return Dataset.from_dict({"prompt": ["x" * rng.randint(1, 12) + f" {i}" for i in range(rows)]})


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward with spread that depends on the completion alone."""
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def fixed_rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of 1 to 9 tokens that depend on the prompt and on the row's place among its completions."""
    completions = []
    for i, prompt in enumerate(prompts):
        seed = 31 * sum(map(ord, prompt)) + 17 * (i % trainer.num_generations)
        completions.append([4 + (seed * (t + 1) + t * t) % 250 for t in range(1 + seed % 9)])
    prompt_ids = trainer.processing_class(prompts)["input_ids"]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}


def config(cls: type, output_dir: Any, **kwargs: Any) -> Any:
    """A config for the tiny models: float32, CPU, deterministic, quiet."""
    defaults: dict[str, Any] = dict(
        output_dir=str(output_dir),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=8,
        max_steps=2,
        learning_rate=1e-3,
        bf16=False,
        use_cpu=True,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    # renamed in the course of the transformers versions that the package admits
    names = {f.name for f in dataclasses.fields(cls)}
    defaults["activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"] = False
    if "teacher_self_test" in names:
        # untrained models find permuted completions as likely as any
        defaults["teacher_self_test"] = False
    return cls(**{**defaults, **kwargs})
