"""Train a model of transformers with its Trainer, sharing each sequence among processes, on the project's own docs.

    python examples/train_hf_cp.py                                                     one process
    torchrun --nproc-per-node 2 examples/train_hf_cp.py --model gpt_oss                on two
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_hf_cp.py --folder run  survives killed processes

The model is a tiny Mistral or gpt-oss with random weights: windows, and for gpt-oss also learned sinks and experts. The
lines that share a sequence are marked (1) to (3). A process that loses another raises RingError and ends, torchrun
restarts all processes, and the Trainer continues from the last checkpoint in --folder.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader, Dataset
from train_lm import join, over_ranks
from transformers.trainer_utils import get_last_checkpoint

from ringweave.integrations.transformers import ModelContext, context_parallel, patch

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=("mistral", "gpt_oss"), default="mistral")
    add("--tokens", type=int, default=1024, help="length of a sequence")
    add("--window", type=int, default=128, help="tokens that each token sees, itself included")
    add("--steps", type=int, default=20)
    add("--every", type=int, default=5, help="steps between checkpoints")
    add("--deadline", type=float, default=60.0, help="seconds after which a silent process counts as lost")
    add("--folder", type=Path, default=Path("train_hf_cp"), help="folder of checkpoints and metrics.jsonl")
    return parser.parse_args()


def model_of(args: argparse.Namespace) -> Any:
    """Return a tiny model with random weights."""
    torch.manual_seed(0)
    sizes = SIZES | {"sliding_window": args.window, "max_position_embeddings": args.tokens}
    if args.model == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes))
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **experts))


class Docs(Dataset):  # type: ignore[type-arg]
    """Pieces of the project's documentation as bytes."""

    def __init__(self, tokens: int):
        files = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
        data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self.pieces = data[: len(data) // tokens * tokens].long().view(-1, tokens)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[at], "labels": self.pieces[at]}


class SharedTrainer(transformers.Trainer):
    """A Trainer with processes that share sequences instead of taking one each.

    Args:
        context: Context that shards batches.
        options: Arguments of the Trainer.
    """

    def __init__(self, context: ModelContext, **options: Any):
        self.context = context
        super().__init__(**options)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """(2) Load the same pieces on every process; the collator keeps the process's tokens."""
        collate = self.context.collate(transformers.default_data_collator)
        return DataLoader(self.train_dataset, self.args.per_device_train_batch_size, collate_fn=collate)


class Metrics(transformers.TrainerCallback):
    """A line of JSON for each step: loss, most received bytes in the forward pass, bytes of gathering all K and V.

    Args:
        args: Parsed command line.
        model: Model that is trained.
        context: Context that shares the sequences.
    """

    def __init__(self, args: argparse.Namespace, model: Any, context: ModelContext):
        self.path = args.folder / "metrics.jsonl"
        shared = context.context(args.tokens)
        self.counters, self.received = shared.transport.counters, 0
        config = model.config
        row = 2 * config.num_key_value_heads * config.head_dim * 4
        self.gathered = (shared.size - 1) * shared.local * row * config.num_hidden_layers
        model.register_forward_pre_hook(lambda *_: self.counters.reset())
        model.register_forward_hook(self.read)

    def read(self, *_: object) -> None:
        """Read the counters after a forward pass."""
        self.received = sum(self.counters.received)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Write the line of a step; ``loss`` is the mean over processes, which is the mean over all tokens."""
        if "loss" not in logs:
            return
        most = int(over_ranks([self.received]).max())
        line = {"step": state.global_step, "loss": logs["loss"], "received": most, "gathered": self.gathered}
        if state.is_world_process_zero:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(*(f"{name} {value}" for name, value in line.items()), flush=True)


def main() -> None:
    """Train the model."""
    args = arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    mesh = join(None)
    model = patch(model_of(args))
    # (1) the processes that share a sequence; the Trainer adds DDP, which averages the gradients
    context = context_parallel(model, None if mesh is None else mesh["cp"], deadline=args.deadline)
    options = transformers.TrainingArguments(
        output_dir=str(args.folder), max_steps=args.steps, per_device_train_batch_size=1, learning_rate=2e-3,
        use_cpu=True, ddp_backend=None if mesh is None else "gloo", logging_steps=1, logging_nan_inf_filter=False,
        save_steps=args.every, save_total_limit=2, report_to=[], disable_tqdm=True, remove_unused_columns=False, seed=0,
        # (3) an expert without tokens on a process has no gradient there
        ddp_find_unused_parameters=args.model == "gpt_oss",
    )  # fmt: skip
    trainer = SharedTrainer(
        context, model=model, args=options, train_dataset=Docs(args.tokens),
        callbacks=[Metrics(args, model, context)],
    )  # fmt: skip
    last = get_last_checkpoint(str(args.folder))
    if last is not None and int(os.environ.get("RANK", 0)) == 0:
        print(f"continues from {Path(last).name}", flush=True)
    trainer.train(resume_from_checkpoint=last)
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
