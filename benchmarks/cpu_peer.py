"""The other side of benchmarks/cpu.py: the same checkpoint and prompts in transformers' `glm5_next`, float32 on the CPU.

Runs under a Python of its own, which has torch and transformers: a job as JSON on stdin, the results as JSON on stdout.
"""

import json
import logging
import resource
import statistics
import sys
import time
import warnings

import torch
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText


def load(directory):
    config = AutoConfig.from_pretrained(directory)
    # The checkpoint has no vision part; transformers makes one all the same, so it is made small.
    vision = {"depth": 1, "hidden_size": 64, "num_heads": 1, "intermediate_size": 64, "projection_intermediate_size": 64}
    for name, value in vision.items():
        setattr(config.vision_config, name, value)
    config.vision_config.out_hidden_size = config.text_config.hidden_size
    return AutoModelForImageTextToText.from_pretrained(directory, config=config, dtype=torch.float32).eval()


def prefill(model, prompts):
    """Prompts of one length as one batch: seconds, the cache, and each one's next token [streams, 1]."""
    ids = torch.tensor(prompts)
    begun = time.perf_counter()
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    token = out.logits[:, -1].argmax(-1, keepdim=True)
    return time.perf_counter() - begun, out.cache, token


def decode(model, prompts, tokens):
    """Greedy replies of so many tokens: seconds of the steps after the first token, and the replies."""
    _, cache, token = prefill(model, prompts)
    reply = [token]
    begun = time.perf_counter()
    for _ in range(tokens - 1):
        out = model(input_ids=token, cache=cache, use_cache=True)
        cache, token = out.cache, out.logits[:, -1].argmax(-1, keepdim=True)
        reply.append(token)
    return time.perf_counter() - begun, torch.cat(reply, 1).tolist()


def main():
    job = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    if job["threads"]:
        torch.set_num_threads(job["threads"])
    model = load(job["model"])
    with torch.inference_mode():
        decode(model, [job["decode_prompts"][0]], 4)  # warms up
        rates = {}
        for prompt in job["prefill_prompts"]:
            times = [prefill(model, [prompt])[0] for _ in range(job["repeats"])]
            rates[str(len(prompt))] = len(prompt) / statistics.median(times)
        decoding, replies = {}, []
        for streams in job["streams"]:
            runs = [decode(model, job["decode_prompts"][:streams], job["decode_tokens"]) for _ in range(job["repeats"])]
            seconds = statistics.median(seconds for seconds, _ in runs)
            decoding[str(streams)] = streams * (job["decode_tokens"] - 1) / seconds
            replies = replies or runs[0][1][0]
    report = {
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "prefill_tokens_per_second": rates,
        "decode_tokens_per_second": decoding,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "reply": replies,
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
