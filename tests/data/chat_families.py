"""Chat templates of the usual families, what each prints of an answer, and tiny tokenizers to read them with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{% for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set prefix = messages[0]['content'] + '\n\n' -%}"
    "{%- set rest = messages[1:] -%}{%- else -%}{%- set prefix = '' -%}{%- set rest = messages -%}{%- endif -%}"
    "{%- for message in rest -%}{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') }}{{ message['content'] | trim }}{{ '<end_of_turn>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
# No generation prompt: the target speaks after [/INST], and its answer begins with a blank.
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for message in rest %}"
    "{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# The system prompt stands before the last question, so the beginning of a conversation is printed differently once it goes on.
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set rest = messages %}{%- endif %}"
    "{%- set questions = rest | selectattr('role', 'equalto', 'user') | list %}{{- bos_token }}"
    "{%- for message in rest %}{%- if message['role'] == 'user' %}{%- if system is defined and message == questions[-1] %}"
    "{{- '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}{%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}"
    "{%- endif %}{%- else %}{{- ' ' + message['content'] | trim + eos_token }}{%- endif %}{%- endfor %}"
)
QWEN3 = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- set ns = namespace(last_query=messages|length - 1, searching=true) %}{%- for message in messages[::-1] %}"
    "{%- set index = (messages|length - 1) - loop.index0 %}{%- if ns.searching and message.role == 'user' "
    "and not message.content.startswith('<tool_response>') %}{%- set ns.searching = false %}{%- set ns.last_query = index %}"
    "{%- endif %}{%- endfor %}{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- elif message.role == 'assistant' %}"
    "{%- set content = message.content %}{%- set thought = '' %}{%- if message.reasoning_content is string %}"
    "{%- set thought = message.reasoning_content %}{%- elif '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last_query and (loop.last or thought) %}"
    "{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{%- else %}"
    "{{- '<|im_start|>assistant\n' + content }}{%- endif %}{%- if message.tool_calls %}{%- for call in message.tool_calls %}"
    "{%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}"
    "{{- '<tool_call>\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}{%- elif message.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
# The generation prompt opens the thinking, which is dropped from every printed answer.
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% else %}"
    "{{ '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
# The generation prompt opens the thinking with a line end that answers bring along themselves.
NEMOTRON = (
    "{% for message in messages %}{% set content = message['content'] %}{% if message['role'] == 'assistant' "
    "and not content.startswith('<think>') %}{% set content = '<think></think>' + content %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' + ('</think>' if enable_thinking is defined and "
    "not enable_thinking else '\n') }}{% endif %}"
)
# The end of the last turn is another token than that of earlier ones, and the header is partly generated.
HARMONY = (
    "{{ '<|start|>system<|message|>You are ChatGPT.<|end|>' }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message['content'] + ('<|return|>' if loop.last and not add_generation_prompt "
    "else '<|end|>') }}{% else %}{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# The header and the line end stand inside the generation block, as in SmolLM3's template.
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ '<|im_start|>assistant\n' + message['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Only the content is marked: the end of turn stands behind the block.
MARKED_CONTENT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A template, and what the target generates for an answer: `spoken(content, is_last)` with the end-of-turn token."""

    template: str
    spoken: Callable[[str, bool], str]
    system: bool = True


def _qwen3(content: str, last: bool) -> str:
    return f"<think>\n\n</think>\n\n{content.lstrip(chr(10))}<|im_end|>" if last else f"{content}<|im_end|>"


def _chatml(content: str, last: bool) -> str:
    return f"{content}<|im_end|>"


def _harmony(content: str, last: bool) -> str:
    return f"<|channel|>final<|message|>{content}{'<|return|>' if last else '<|end|>'}"


FAMILIES = {
    "chatml": Family(CHATML, _chatml),
    "smollm2": Family(SMOLLM2, _chatml),
    "llama3": Family(LLAMA3, lambda content, last: f"{content.strip()}<|eot_id|>"),
    "gemma2": Family(GEMMA2, lambda content, last: f"{content.strip()}<end_of_turn>", system=False),
    "gemma3": Family(GEMMA3, lambda content, last: f"{content.strip()}<end_of_turn>"),
    "llama2": Family(LLAMA2, lambda content, last: f" {content.strip()} </s>"),
    "mistral": Family(MISTRAL, lambda content, last: f" {content.strip()}</s>"),
    "qwen3": Family(QWEN3, _qwen3),
    "deepseek-r1": Family(DEEPSEEK_R1, lambda content, last: f"{content}<｜end▁of▁sentence｜>"),
    "harmony": Family(HARMONY, _harmony),
    "marked": Family(MARKED, _chatml),
    "marked-content": Family(MARKED_CONTENT, _chatml),
}
SPECIAL = (
    *(
        "<s>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<start_of_turn>",
    ),
    *(
        "<end_of_turn>",
        "[INST]",
        "[/INST]",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
        "<|start|>",
        "<|end|>",
    ),
    *("<|return|>", "<|channel|>", "<|message|>", "<think>", "</think>"),
)
_CORPUS = [
    "assistant\n\n  the answer is the one that they gave\n\n\tthen and there, in the other tone\n    return 1234",
    "assistant:\n\n\n  user asked  and  answered\n\n",
] * 4


def byte_tokenizer(template: str | None, *, add_bos: bool = False, trim_offsets: bool = True) -> Any:
    """A byte-level BPE tokenizer with some merges across blanks and line ends, like GPT-2's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False, max_token_length=6)
    backend.train_from_iterator(_CORPUS, trainer)
    return _wrap(backend, template, add_bos)


def metaspace_tokenizer(template: str | None) -> Any:
    """A tokenizer in the manner of SentencePiece: blanks are letters, and a text gets one in front."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *byte_tokens], show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    return _wrap(backend, template, False)


def _wrap(backend: Tokenizer, template: str | None, add_bos: bool) -> Any:
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def supervised_texts(tokenizer: Any, input_ids: Any, loss_mask: Any) -> list[str]:
    """The decoded runs of supervised tokens."""
    runs: list[list[int]] = []
    previous = 0
    for token, supervised in zip(input_ids.tolist(), loss_mask.tolist(), strict=True):
        if supervised and not previous:
            runs.append([])
        if supervised:
            runs[-1].append(token)
        previous = supervised
    return [tokenizer.decode(run, skip_special_tokens=False, clean_up_tokenization_spaces=False) for run in runs]
