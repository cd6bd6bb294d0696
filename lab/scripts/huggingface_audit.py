"""Which masks the models of transformers really have: `ringweave_audit` over every model_type that uses its interface.

    python lab/scripts/huggingface_audit.py                   # all, into huggingface-audit.md, or --out FILE
    python lab/scripts/huggingface_audit.py llama gemma3      # these, on the terminal
    python lab/scripts/huggingface_audit.py --log seen.jsonl  # resume from the file, and append to it

Each model is tiny, has random weights, runs in its own process with a time limit, and is called with each
implementation in each case. `JUDGED` has a sentence with the reason for each known difference.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import re
import resource
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import huggingface_models as models
import torch
import transformers

from ringweave_audit import html_report, model_zoo

CASES = ("unpadded", "left", "right", "packed", "cached")
_SECONDS, _MEMORY, _WEIGHTS = 120, 6 * 2**30, 30_000_000
MARKS = {"agrees": "+", "differs": "D", "raises": "x", "no promise": "?", "not a call": "."}
#: Words of cases that were not examined.
UNEXAMINED = ("raises", "no promise", "not a call")
#: Reasons for differences and errors: (reason, pattern of the line, pattern of the model type); the first match counts.
JUDGED: tuple[tuple[str, str, str], ...] = (
    (
        "packing is ignored", r"cosmos3.*|qwen.*(vl|omni).*|glm(4v|_ocr|_image|5_next).*|paddleocr.*|.*_vl.*",
        "Promised: positions have three axes, and documents are found in a fourth row of them; ids of one axis are not "
        "read.",
    ),
    (
        "packing is ignored", ".*",
        "Finding: position ids are not handed on to the mask function, so that packed documents attend each other.",
    ),
    (
        r"instead of KeyPadding|pairs missing", "aimv2.*|videoprism_text_model",
        "Finding: without `attention_mask` tokens see all others, with one, though it hide nothing, only earlier ones.",
    ),
    (
        "future visible", "doge",
        "Finding: its mask is made of numbers alone, and the BlockMask of flex_attention is left out: every token sees "
        "the future.",
    ),
    (
        "SlidingWindow|pairs extra", "moshi.*|qwen3_omni_moe.*|qwen3_vl_moe.*",
        "Finding: `sliding_window` is no part of the mask, so that a prompt sees everything, but of the cache, so that "
        "what is generated sees a window.",
    ),
    (
        "SlidingWindow|pairs missing", "minimax",
        "Finding: `sliding_window` is the mask of layers that `layer_types` calls full attention.",
    ),
    (
        "pairs missing", "eomt.*",
        "Promised: in the last blocks a query of a segment attends where its mask of the block before lies.",
    ),
    (
        "attends Segments", "pixtral",
        "Promised: the images of a batch lie in one row, and do not see each other.",
    ),
    (
        "future visible", "blt_global_transformer",
        "Promised: the model that it is a part of makes its mask; alone and eager it has none.",
    ),
    (
        "this is ~Full", "nemotron_asr_streaming.*",
        "Finding: eager takes the logical not of a mask of numbers, 0 where a pair is allowed: nothing is attended, "
        "and the output is NaN.",
    ),
    (
        "whole tiles", "nemotron_asr_streaming.*",
        "Promised: chunks, of an entry of the configuration that is its own.",
    ),
    (
        "future visible", "phi4_multimodal.*",
        "Finding: a layer of images says that it is causal, and its mask that it is not: sdpa without padding believes "
        "the first, the others the second.",
    ),
    (
        "self_attn|(mlp|attention)_input", "inkling2.*",
        "Promised: sinks are computed for each query, and `attention_input` and `mlp_input` attend layers, not tokens.",
    ),
    (
        "SlidingWindow|pairs missing", "t5gemma2.*",
        "Promised: a window is so wide in all, to both sides; a decoder's layer attends its own keys and its encoder's "
        "in one call.",
    ),
    (
        "self_attn", "deepseek_v4.*",
        "Not known: layers attend compressed keys beside those of a window, whose places no configuration tells.",
    ),
    ("no attention call was seen", ".*", "Not seen: this class computes it itself, without the interface."),
    ("does not support an attention implementation", ".*", "The model does not offer it."),
    ("sinks cannot be run on CPU with flex", ".*", "Learned sinks need a GPU there."),
    (
        "UnsupportedError: attention mask|mask: got a use of|ShapeError: attention mask", ".*",
        "ringweave refuses: the model reads its mask, or chooses keys by content.",
    ),
    ("layer: got DogeAttention", ".*", "ringweave refuses: the model reads its mask, or chooses keys by content."),
    ("KeyError: 'ringweave'", ".*", "The model has a list of implementations of its own."),
    (
        "IndexError: index . is out of bounds for dimension 0 with size 1", ".*t5.*",
        "Finding: the position bias has one batch element, and is indexed by those of the batch; not by the audit.",
    ),
    ("vision_start_token_id", "qwen.*_thinker", "The model reads an entry that its configuration does not have."),
    ("sink_logits: got", "inkling2.*", "ringweave refuses: sinks are computed for each query."),
    ("v heads: got", ".*", "ringweave refuses: keys and values have other numbers of heads."),
    ("expected Tensor as element", "t5gemma2.*", "The model joins two masks, which a pattern is not."),
    ("The size of tensor a", "nemotron3.*|unlimited_ocr.*", "Eager fails in the tiny model, sdpa does not."),
    ("uses cache of its own", ".*", "The model has a cache of its own."),
)  # fmt: skip
COUNTED = ("examined", "agree", "differ", "not examined")
LATE = "no time was left"
Seen = dict[str, Any]


def fed(tiny: models.Tiny) -> models.Inputs:
    """Return the first batch that the model takes with its own attention; decoders get shorter texts than encoders."""
    config = models.small(tiny, _WEIGHTS)
    model, why = tiny.made(models.peer_of(tiny.kind), gain=1.0).eval(), ""
    for inputs in models.feeds(tiny.kind, config):
        if "decoder_input_ids" in inputs:
            inputs["decoder_input_ids"] = inputs["decoder_input_ids"][:, :8]
        try:
            with torch.no_grad():
                model(**inputs)
        except Exception as error:  # noqa: BLE001  (of a model that was made too small in some way)
            why = why or models.said(error)
        else:
            return inputs
    raise models.UntriedError(why or "takes what is not known here")


def status(result: model_zoo.Result) -> str:
    """Return the status of a case, one of MARKS."""
    if result.audit is None:
        return "raises" if result.failed else "not a call"
    return {True: "agrees", False: "differs", None: "no promise"}[result.agrees]


def seen(name: str) -> Seen:
    """Return a model type's results as (implementation, case, status, lines), or the reason why it was not tried."""
    why = ""
    try:
        for tiny in models.tinies(models.class_of(name)):
            try:
                inputs = fed(tiny)
                break
            except Exception as error:  # noqa: BLE001  (whatever a model raises)
                why = why or (str(error) if isinstance(error, models.UntriedError) else models.said(error))
        else:
            return {"name": name, "untried": why}
    except models.UntriedError as error:
        return {"name": name, "untried": str(error)}
    target = model_zoo.Target(name, lambda way: tiny.made(way or "eager", gain=1.0).eval(), inputs)
    found = model_zoo.run(target, model_zoo.IMPLEMENTATIONS, CASES)
    return {
        "name": name, "class": tiny.kind.__name__, "fed": [x for x in inputs if x != "decoder_input_ids"],
        "results": [[each.implementation, each.case, status(each), html_report.lines(each)] for each in found],
    }  # fmt: skip


def _child(name: str, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    pipe.send(seen(name))


def apart(name: str) -> Seen:
    """Run :func:`seen` in its own process; a hang or a crash becomes a result."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, theirs))
    process.start()
    theirs.close()
    try:
        if ours.poll(_SECONDS):
            return ours.recv()  # type: ignore[no-any-return]
        return {"name": name, "untried": f"took more than {_SECONDS} s"}
    except EOFError:
        process.join()
        return {"name": name, "untried": f"its process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def main() -> None:
    """Audit the models and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types; all by default")
    parser.add_argument("--log", type=Path, help="file of outcomes, a line each; those that it has are not tried again")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=30, help="after which no other model is begun")
    parser.add_argument("--out", type=Path, default=Path("huggingface-audit.md"), help="the table of all types")
    arguments = parser.parse_args()
    log, end = arguments.log, time.monotonic() + 60 * arguments.minutes
    known = [json.loads(each) for each in log.read_text("utf-8").splitlines()] if log and log.exists() else []
    done = {each["name"]: each for each in known}
    names = arguments.names or list(models.users())
    # importing takes a third of a model's time: once here rather than in each process
    importlib.import_module("torch._inductor.compile_fx")

    def one(name: str) -> Seen:
        return apart(name) if time.monotonic() < end else {"name": name, "untried": LATE}

    with ThreadPoolExecutor(arguments.processes) as pool:
        for future in as_completed([pool.submit(one, name) for name in names if name not in done]):
            each = future.result()
            done[each["name"]] = each
            if each.get("untried") == LATE:
                continue
            if log:
                with log.open("a", encoding="utf-8") as file:
                    print(json.dumps(each), file=file)
            print(line(each), flush=True)
    if not arguments.names:
        text = document([done[name] for name in names])
        arguments.out.write_text(text, "utf-8")
        if "not judged" in text:
            raise SystemExit(f"{arguments.out} has differences without a judgement")


def line(each: Seen) -> str:
    """Return the line of a model type."""
    return f"{each['name']}: " + (f"not tried: {each['untried']}" if "untried" in each else " ".join(cells(each)))


def cells(each: Seen) -> list[str]:
    """Return a mark for each case of each implementation."""
    marks = {(way, case): MARKS[word] for way, case, word, _ in each["results"]}
    return [
        marks.get((way, "build")) or "".join(marks[way, case] for case in CASES) for way in model_zoo.IMPLEMENTATIONS
    ]


def judged(name: str, said: str) -> str:
    """Return the reason for a difference or an error."""
    for text, types, why in JUDGED:
        if re.search(text, said) and re.fullmatch(types, name):
            return why
    return "**not judged**: " + re.sub(r"\d+", "N", said)[:120]


def found(rows: Iterable[Seen], word: str) -> dict[str, dict[str, list[tuple[str, str]]]]:
    """Return the differences, or the errors, by reason: for each model type its implementations and cases."""
    by_reason: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for each in rows:
        for way, case, outcome, lines in each["results"]:
            for said in lines if outcome == word else ():
                # layers that agree are listed with those that do not
                if ": agrees with" not in said:
                    reason = by_reason.setdefault(judged(each["name"], said), {})
                    reason.setdefault(each["name"], []).append((way, case))
    return dict(sorted(by_reason.items(), key=lambda item: -len(item[1])))


def listed(reasons: dict[str, dict[str, list[tuple[str, str]]]]) -> Iterable[str]:
    """Return the rows of a table of reasons."""
    for why, types in reasons.items():
        where = {place for places in types.values() for place in places}
        ways = [way for way in model_zoo.IMPLEMENTATIONS if any(way == place[0] for place in where)]
        cases = [case for case in ("build", *CASES) if any(case == place[1] for place in where)]
        ways = ["all"] if len(ways) == len(model_zoo.IMPLEMENTATIONS) else ways
        yield f"| {why} | {', '.join(ways)} | {', '.join(cases)} | {len(types)}: {', '.join(types)} |"


def four(words: list[str]) -> str:
    """Return the four counts of a cell."""
    agreed, differing = words.count("agrees"), words.count("differs")
    unexamined = sum(words.count(word) for word in UNEXAMINED)
    return f"{agreed + differing} / {agreed} / {differing} / {unexamined}"


def document(rows: list[Seen]) -> str:
    """Return the page."""
    tried = [each for each in rows if "untried" not in each]
    late = [each["name"] for each in rows if each.get("untried") == LATE]
    unmade = [each["name"] for each in rows if "untried" in each and each["untried"] != LATE]
    counts = []
    for way in model_zoo.IMPLEMENTATIONS:
        words = [(case, word) for each in tried for which, case, word, _ in each["results"] if which == way]
        numbers = (four([word for which, word in words if which == case]) for case in CASES)
        counts.append(f"| {way} | {' | '.join(numbers)} | {words.count(('build', 'raises'))} |")
    different = found(tried, "differs")
    marks = ", ".join(f"`{mark}` {word}" for word, mark in MARKS.items())
    lines = [
        "# Which masks Hugging Face models really have", "",
        f"transformers {transformers.__version__}, torch {torch.__version__}: [`ringweave_audit`](audit.md) of",
        f"{len(tried)} of the {len(rows)} model types that call attention through the library's interface, tiny, with",
        "random weights: each pair that a layer attends, found by value, against what configuration and inputs say.",
        "`python lab/scripts/huggingface_audit.py` makes this page.", "",
        "Cases: *unpadded*; *left* and *right* padding of one row of two, by `attention_mask`; two documents *packed*",
        "by `position_ids`, without a cache, where a model is causal and takes them; three more tokens over a *cache*.",
        "Queries of padding may attend whatever they like. What would be compiled runs as it is written. Promised are",
        "causality, and each layer's window or chunk; no more is known of a model here.", "",
        f"Cells: {' / '.join(COUNTED)}.", "",
        f"| implementation | {' | '.join(CASES)} | not offered |", f"|---|{'---:|' * (len(CASES) + 1)}", *counts, "",
        f"{len(set().union(*different.values()))} types differ somewhere.", "",
        "## What differs", "",
        "| what it comes from | implementation | case | model types |", "|---|---|---|---|", *listed(different), "",
        "## What raises", "",
        "| why | implementation | case | model types |", "|---|---|---|---|", *listed(found(tried, "raises")), "",
        "## Every model type", "",
        f"A mark for each case, in the order {', '.join(CASES)}: {marks}.", "One mark alone: it is not offered.", "",
        f"| model type | {' | '.join(model_zoo.IMPLEMENTATIONS)} |", f"|---|{'---|' * len(model_zoo.IMPLEMENTATIONS)}",
        *(f"| {each['name']} | {' | '.join(f'`{cell}`' for cell in cells(each))} |" for each in tried), "",
        f"Not made or fed by the script, {len(unmade)}: {', '.join(unmade)}.", "",
    ]  # fmt: skip
    if late:
        lines += [f"Not reached in the time that was given, {len(late)}: {', '.join(late)}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
