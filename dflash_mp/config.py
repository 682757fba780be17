"""The one schema: every option of every command is a field here, and nowhere else.

Unknown keys, wrong types and combinations that cannot work are pydantic's `ValidationError`, which `config_file.load_config` turns into a
`ConfigError` naming the key.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_Beta = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, allow_inf_nan=False)


class TargetConfig(_Section):
    """The frozen model whose decoding the drafter will speed up."""

    path: str = Field(description="Hugging Face directory, hub id, or a .gguf file")
    revision: str | None = Field(None, description="hub revision")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on a CPU, bfloat16 on CUDA"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    attention: Literal["auto", "packed", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto",
        description="of a feeder's rows: packed keeps documents apart without a dense mask, the others are transformers' own; "
        "auto: packed on CUDA where the model allows it, else sdpa where that has all the model needs, else eager",
    )
    taps: int = Field(5, ge=1, description="number of tapped layers when layer_ids is not given")
    layer_ids: list[int] | None = Field(
        None, description="tapped decoder layers, 0-based; default: the method's formula"
    )
    mask_token: str | int | None = Field(
        None, description="mask token (text or id); default: the tokenizer's, or a known spare one"
    )
    trust_remote_code: bool = Field(False, description="run the target's own Python code from its repository")


class SourceConfig(_Section):
    """One source of documents."""

    path: str = Field(
        description=".jsonl, .jsonl.gz, .parquet, a directory of those, or hf:NAME for a Hugging Face data set"
    )
    subset: str | None = Field(None, description="Hugging Face data set: configuration name")
    split: str = Field("train", description="Hugging Face data set: split")
    format: Literal["auto", "messages", "sharegpt", "pairs", "text"] = Field("auto", description="shape of a record")
    limit: int | None = Field(None, ge=1, description="use the first N records only")


class DataConfig(_Section):
    """The prepared dataset and how `dflash-mp prepare` makes it."""

    path: Path = Field(description="directory of the prepared dataset")
    sources: list[SourceConfig] = Field(default_factory=list, description="documents to prepare")
    row_tokens: int = Field(2048, ge=32, description="tokens of a row; documents are packed into rows")
    max_document_tokens: int | None = Field(None, ge=16, description="cut documents here; default: row_tokens")
    min_supervised_tokens: int = Field(32, ge=2, description="drop documents with fewer supervised tokens")
    held_out: float = Field(0.02, ge=0.0, lt=1.0, description="share of documents kept apart for evaluation")
    unfinished: Literal["keep", "drop"] = Field(
        "keep", description="answers cut when generated (finish_reason: length): keep, the end unsupervised, or drop"
    )
    thinking: Literal["default", "on", "off"] = Field(
        "default", description="enable_thinking given to the chat template"
    )
    shard_tokens: int = Field(1 << 24, ge=1024, description="tokens per shard file; bounds the memory of prepare")

    @model_validator(mode="after")
    def _documents_fit(self) -> DataConfig:
        if self.max_document_tokens is not None and self.max_document_tokens > self.row_tokens:
            raise ValueError(
                f"max_document_tokens ({self.max_document_tokens}) exceeds row_tokens ({self.row_tokens}): a document must fit a row"
            )
        return self


class FeedConfig(_Section):
    """The feeders: processes that run the target and serve rows."""

    count: int = Field(
        1,
        ge=0,
        description="feeders, when no endpoints are given; else one for each endpoint. 0: all are in stream.feeders_file",
    )
    endpoints: list[str] = Field(
        default_factory=list, description="ipc:// or tcp:// addresses, one per feeder; default: ipc, by run"
    )
    devices: list[str] = Field(
        default_factory=list,
        description="device of each feeder, with tensor_parallel the devices of the first, of the second …; "
        "default: target.device for all, with tensor_parallel and CUDA cuda:0 and up",
    )
    tensor_parallel: int = Field(
        1, ge=1, description="processes of one feeder, on a device each, that share the target's layers"
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of a feeder; default: PyTorch's choice, no more than it has cores"
    )
    compile: bool | None = Field(
        None,
        description="torch.compile the target's layers, on CUDA with a row as one CUDA graph; default: on CUDA only",
    )
    memory_mib: float = Field(
        8192, gt=0, description="most memory of rows that a feeder holds; two or three per drafter are used"
    )
    insecure_no_auth: bool = Field(
        False, description="allow addresses that other hosts can reach, though nothing authenticates who connects"
    )
    stats_seconds: float = Field(10.0, gt=0, description="seconds between a feeder's status lines")


class StreamConfig(_Section):
    """How a drafter takes rows from feeders. Sizes in MiB, times in seconds."""

    window_mib: float = Field(256, gt=0, description="bytes of rows held or asked for ahead, per rank")
    wire_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="hidden states on their way: auto: as the target computes them; fp8: a byte each, with a scale for each token and tap. "
        "The same on both sides, and for the whole run",
    )
    connect_seconds: float = Field(120, gt=0, description="longest wait for a feeder, which loads and compiles first")
    row_seconds: float = Field(300, gt=0, description="longest wait for one row before the rank gives up")
    silent_seconds: float = Field(15, gt=0, description="a feeder that answers nothing for so long is taken for dead")
    keys: Path | None = Field(
        None,
        description="directory of keys (`dflash-mp keygen`); with it, tcp is encrypted and only listed drafters get in",
    )
    feeders_file: Path | None = Field(
        None, description="addresses of more feeders, one a line; drafters read it again when it changes"
    )


class DrafterConfig(_Section):
    """Shape of the drafter. What is left out is taken from the target."""

    layers: int = Field(5, ge=1, description="decoder layers")
    block_size: int = Field(16, ge=2, description="tokens of a block, the anchor included")
    intermediate_size: int | None = Field(None, ge=1, description="MLP width")
    heads: int | None = Field(None, ge=1, description="attention heads")
    kv_heads: int | None = Field(None, ge=1, description="key/value heads")
    head_dim: int | None = Field(None, ge=2, description="size of a head")


class TrainConfig(_Section):
    """The optimisation."""

    steps: int = Field(ge=1, description="optimizer steps")
    rows_per_step: int = Field(8, ge=1, description="rows of an optimizer step over all ranks (the global batch)")
    micro_batch_rows: int = Field(1, ge=1, description="rows in one forward pass of a rank")
    anchors_per_row: int = Field(512, ge=1, description="blocks trained in each row")
    objective: Literal["decay", "dpace", "distill"] = Field(
        "dpace",
        description="dpace: D-PACE, cross-entropy with weights by the chance to get so far; decay: later slots weighing less; "
        "distill: the target's own distribution, with decay's weights",
    )
    dpace_alpha: float = Field(
        0.5, gt=0, le=1, description="dpace: a slot's chance counts as (1 − alpha)·chance + alpha"
    )
    loss_gamma: float | None = Field(
        None,
        gt=0,
        description="decay, distill: decay of the weights over slots; default by block size: 16→7, 10→5, 8→4",
    )
    learning_rate: float = Field(6e-4, gt=0, description="peak")
    min_learning_rate_ratio: float = Field(0.0, ge=0, le=1, description="final learning rate over peak")
    schedule: Literal["cosine", "wsd"] = Field(
        "wsd", description="after the warm-up: stable, then a cosine decay (wsd); or cosine all along"
    )
    warmup_ratio: float = Field(0.04, ge=0, lt=1, description="share of steps spent warming up")
    decay_ratio: float = Field(0.2, gt=0, le=1, description="wsd: share of steps spent decaying")
    weight_decay: float = Field(0.0, ge=0, description="AdamW; on matrices, not on norms")
    betas: tuple[_Beta, _Beta] = Field((0.9, 0.95), description="AdamW")
    eps: float = Field(1e-8, gt=0, description="AdamW")
    clip: float = Field(1.0, gt=0, description="largest gradient norm")
    precision: Literal["auto", "fp32", "bf16", "fp8"] = Field(
        "auto",
        description="compute; masters are fp32. auto: fp32 on a CPU, bf16 on CUDA; "
        "fp8: bf16, but the products of the layers and of the head in e4m3 (CUDA, compute capability 8.9 and up)",
    )
    attention: Literal["auto", "flex", "sdpa"] = Field("auto", description="auto: flex on CUDA, sdpa on a CPU")
    compile: bool | None = Field(None, description="torch.compile the drafter's layers; default: on CUDA only")
    gradient_checkpointing: bool = Field(False, description="recompute layers in the backward pass to save memory")
    deterministic: bool = Field(False, description="deterministic kernels on CUDA")
    device: str = Field("auto", description="auto, cpu or cuda; a rank uses cuda:LOCAL_RANK")
    threads: int | None = Field(None, ge=1, description="CPU threads of a rank; default: cores over local ranks")
    checkpoint_every: int = Field(500, ge=1, description="steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1, description="checkpoints kept")
    log_every: int = Field(10, ge=1, description="steps between log lines")
    held_out_every: int = Field(200, ge=0, description="steps between held-out losses; 0: only at the end")
    held_out_rows: int = Field(16, ge=0, description="held-out rows in each of those")
    wandb_project: str | None = Field(None, description="log to this Weights & Biases project, too (extra `wandb`)")
    mlflow_experiment: str | None = Field(
        None, description="log to this MLflow experiment, too, at MLFLOW_TRACKING_URI (extra `mlflow`)"
    )
    drafters: int = Field(1, ge=1, description="drafter processes that `run` starts on this machine")


class EvalConfig(_Section):
    """Speculative decoding with the trained drafter."""

    prompts: list[str] = Field(
        default_factory=list, description="files of prompts, and held_out for the held-out share; default: held_out"
    )
    limit: int = Field(32, ge=1, description="prompts per data set")
    max_new_tokens: int = Field(256, ge=1, description="longest answer")
    temperature: float = Field(0.0, ge=0, description="0: greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="1: off")
    top_k: int = Field(0, ge=0, description="0: off")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")


class MetricsConfig(_Section):
    """What a run tells while it goes on: figures for Prometheus and `dflash-mp top`, from every feeder and every rank."""

    address: str = Field(
        "127.0.0.1",
        description="address to listen on; 0.0.0.0 for all of the host: whoever reaches it may read, nobody is asked for a name",
    )
    feeder_port: int | None = Field(
        17400, ge=1, le=65535, description="port of feeder 0; feeder i takes this plus i; null: none"
    )
    rank_port: int | None = Field(
        17500, ge=1, le=65535, description="port of rank 0; rank r takes this plus r; null: none"
    )


class RunConfig(_Section):
    """Everything about a run."""

    run_dir: Path = Field(description="logs, metrics and checkpoints of the run")
    seed: int = Field(0, ge=0, lt=1 << 63, description="order of rows, anchors and initial weights")
    gpus: int | None = Field(
        None,
        ge=2,
        description="GPUs of this machine that `run` shares out itself between feeders and drafters, after measuring both; "
        "in place of feed.count, feed.endpoints, feed.devices and train.drafters. "
        "Where target.device and train.device are both cpu: processes",
    )
    target: TargetConfig
    data: DataConfig
    feed: FeedConfig = FeedConfig()
    stream: StreamConfig = StreamConfig()
    drafter: DrafterConfig = DrafterConfig()
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        if self.drafter.block_size > self.data.row_tokens:
            raise ValueError(
                f"drafter.block_size ({self.drafter.block_size}) exceeds data.row_tokens ({self.data.row_tokens}): no block fits a row"
            )
        if self.gpus is not None:
            said = [f"feed.{key}" for key in ("count", "endpoints", "devices") if key in self.feed.model_fields_set]
            said += ["train.drafters"] if "drafters" in self.train.model_fields_set else []
            if said:
                raise ValueError(f"gpus leaves the split to `run`, but {' and '.join(said)} set it; drop either")
        if self.stream.keys is not None and self.feed.insecure_no_auth:
            raise ValueError("stream.keys and feed.insecure_no_auth contradict each other; drop one")
        feeders, said_by = len(self.feed.endpoints), "feed.endpoints"
        if not feeders:
            feeders, said_by = self.feed.count, "feed.count"
        ways = self.feed.tensor_parallel
        if self.gpus is not None and ways > 1:
            raise ValueError("gpus counts on feeders of one GPU, but feed.tensor_parallel is set; drop either")
        if self.feed.devices and len(self.feed.devices) != feeders * ways:
            each = "one each" if ways == 1 else f"{ways} each (feed.tensor_parallel)"
            raise ValueError(
                f"feed.devices names {len(self.feed.devices)} devices for {feeders} feeders ({said_by}); give {each}"
            )
        for index in range(feeders):
            names = ["cuda:0" if name == "cuda" else name for name in self.feeder_devices(index) if "cuda" in name]
            if len(set(names)) < len(names):
                raise ValueError(
                    f"feed.tensor_parallel ({ways}) needs a device for each process, but feeder {index} has "
                    f"{' and '.join(names)}; name {ways} in feed.devices, or set target.device: auto for cuda:0 and up"
                )
        return self

    def feeder_devices(self, index: int) -> list[str]:
        """The devices of feeder `index`, `feed.tensor_parallel` of them."""
        ways = self.feed.tensor_parallel
        first = index * ways
        if self.feed.devices:
            return self.feed.devices[first : first + ways]
        if ways > 1 and self.target.device in ("auto", "cuda"):
            return [f"cuda:{first + i}" for i in range(ways)]
        return [self.target.device] * ways

    def feeder_endpoints(self) -> list[str]:
        """Addresses of the feeders: `feed.endpoints`, or one ipc socket per feeder in a directory of this user and run."""
        if self.feed.endpoints:
            return list(self.feed.endpoints)
        base = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/dflash-mp-{os.getuid()}"
        run = hashlib.sha256(str(self.run_dir.absolute()).encode()).hexdigest()[:12]
        return [f"ipc://{base}/dflash-mp-{run}/feeder-{i}.sock" for i in range(self.feed.count)]
