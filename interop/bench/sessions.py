# SPDX-License-Identifier: Apache-2.0
"""Records what AIPerf's own loader makes of a trace of sessions, as a vector for bench/workload.

    python sessions.py sessions.jsonl bad.jsonl > vector.json

Needs aiperf 0.13.0 of PyPI, and no network: the tokenizer is one of bytes that is made here. Blocks have 16 tokens. The prompt of a turn is
what AIPerf sends: all turns so far, and between them the answers, which stand here for tokens that no other session has. Its blocks are
numbered by their tokens: equal numbers are equal blocks after equal prefixes. A text is a token for each four bytes.

A line of bad.jsonl is one line of a trace, or a list of them; the vector says whether the loader takes them.
"""

import importlib.metadata
import json
import sys
import tempfile

from aiperf.common import random_generator as rng
from aiperf.common.tokenizer import Tokenizer
from aiperf.dataset.generator.prompt import PromptGenerator
from aiperf.dataset.loader import hash_ids_synthesis
from aiperf.dataset.loader.mooncake_trace import MooncakeTraceDatasetLoader
from tokenizers import Tokenizer as Model
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BLOCK = 16


def bytes_tokenizer(folder):
    """A tokenizer whose tokens are bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Model(models.BPE(vocab={c: i for i, c in enumerate([*letters, "<s>"])}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="<s>").save_pretrained(folder)
    return Tokenizer.from_pretrained(folder)


def read(name):
    with open(name) as f:
        return [json.loads(line) for line in f]


def loader(tokenizer, lines):
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False) as f:
        f.write("".join(json.dumps(line) + "\n" for line in lines))
    generator = PromptGenerator(prompts=None, prefix_prompts=None, tokenizer=tokenizer)
    return MooncakeTraceDatasetLoader(filename=f.name, prompt_generator=generator, default_block_size=BLOCK)


def record(tokenizer, lines):
    it = loader(tokenizer, lines)
    data = it.load_dataset()
    made = {}
    build = it.prompt_generator._build_token_sequence

    def note(n, ids, size):  # the tokens before they become text
        tokens = build(n, ids, size)
        made.setdefault((n, tuple(ids)), []).append(tokens)
        return tokens

    it.prompt_generator._build_token_sequence = note
    conversations = it.convert_to_conversations(data)
    numbers, out, fresh = {}, [], iter(range(-1, -(1 << 30), -1))
    for c in conversations:
        stream, traces = [], data[c.session_id]
        mode = str(c.context_mode) if c.context_mode else ""
        for i, (turn, trace) in enumerate(zip(c.turns, traces, strict=True)):
            row = {"session": trace.session_id or "", "turn": i, "timestamp": turn.timestamp, "delay": turn.delay, "output": turn.max_tokens or 0, "mode": mode}
            out.append(row)
            if mode:
                continue  # AIPerf sends the line's messages or payload and nothing else
            if trace.text_input is not None:
                (text,) = turn.texts
                raw = text.contents[0].encode()
                stream += [raw[k : k + 4] for k in range(0, len(raw), 4)]
            elif trace.hash_ids:
                stream += made[(trace.input_length, tuple(trace.hash_ids))].pop(0)[: len(trace.hash_ids) * BLOCK]
                stream += [next(fresh) for _ in range(trace.input_length - len(trace.hash_ids) * BLOCK)]
            else:
                stream += [next(fresh) for _ in range(trace.input_length)]
            row["input"] = len(stream)
            row["blocks"] = []
            for k in range(0, len(stream), BLOCK):
                whole = tuple(stream[: k + BLOCK])
                row["blocks"].append(numbers.setdefault(whole, len(numbers)))
            stream += [next(fresh) for _ in range(turn.max_tokens or 0)]
    return out


def taken(tokenizer, lines):
    try:
        it = loader(tokenizer, lines)
        it.convert_to_conversations(it.load_dataset())
        return True
    except Exception:  # noqa: BLE001 - whatever the loader raises, it does not take the lines
        return False


def main():
    rng.init(7)
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # also of the traces that the loader reads
        write(bytes_tokenizer(folder))


def write(tokenizer):
    # in this process: its worker processes would load the tokenizer by a name of the hub's
    hash_ids_synthesis.parallel_decode = lambda sequences, name, **options: [tokenizer.decode(s) for s in sequences]
    good, bad = read(sys.argv[1]), read(sys.argv[2])
    assert taken(tokenizer, good)
    refused = [not taken(tokenizer, line if isinstance(line, list) else [line]) for line in bad]
    out = {"aiperf": importlib.metadata.version("aiperf"), "block_tokens": BLOCK, "turns": record(tokenizer, good), "refused": refused}
    turns = ",\n".join(json.dumps(turn) for turn in out.pop("turns"))
    print(json.dumps(out)[:-1] + ', "turns": [\n' + turns + "\n]}")


if __name__ == "__main__":
    main()
