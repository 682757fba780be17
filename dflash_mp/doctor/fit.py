"""Whether a configuration fits this machine's memory: each GPU, the host, the window, and the largest row that would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dflash_mp.addresses import is_of_this_host
from dflash_mp.config import RunConfig
from dflash_mp.doctor.devices import Gpu
from dflash_mp.doctor.finding import Finding, gib, green, red, yellow
from dflash_mp.doctor.memory import Memory, drafter_memory, feeder_memory
from dflash_mp.doctor.target_size import TargetSize
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.stream.feeder_peers import MOST_SLOTS
from dflash_mp.stream.layout import FLOAT_TYPES, RowLayout
from dflash_mp.stream.memory_limits import left
from dflash_mp.stream.plan import DataPlan, StreamPlan, TargetInfo

_CONTEXT = 1 << 30  # CUDA context, NCCL's buffers, libraries' workspaces
_FRAGMENTATION = 1.05
_STEP = 64  # tokens


@dataclass(frozen=True)
class Plans:
    """What `config` makes of the target `size` here: shapes and sizes, before anything is loaded."""

    config: RunConfig
    size: TargetSize
    on_gpu: bool  # the drafters
    feeds: bool = True  # feeders run on this host
    trains: bool = True  # drafters do

    @property
    def shape(self) -> DrafterShape:
        return DrafterShape.from_config(self.config.drafter, self.size.info)

    @property
    def drafters(self) -> int:
        """On this host, at most."""
        return self.config.train.drafters if self.config.gpus is None else self.config.gpus - 1

    @property
    def feeders(self) -> int:
        """Of the run, at most."""
        return len(self.config.feeder_endpoints()) if self.config.gpus is None else self.config.gpus - 1

    @cached_property
    def feeders_here(self) -> list[int]:
        """The numbers of those on this host: at its addresses, or all where none is its own and it feeds all the same."""
        if self.config.gpus is not None:
            return list(range(self.feeders))
        endpoints = self.config.feeder_endpoints()
        own = [number for number, endpoint in enumerate(endpoints) if is_of_this_host(endpoint)]
        return own or list(range(len(endpoints)))

    def row(self, row_tokens: int | None = None) -> RowLayout:
        """A row on the stream."""
        config = self.config
        info = replace(
            self.size.info,
            last_hidden=config.train.objective == "distill",
            wire_dtype=config.stream.wire_dtype,
        )
        return RowLayout.of(_plan(info, row_tokens or config.data.row_tokens))

    def row_bytes(self, row_tokens: int | None = None) -> int:
        """Bytes of a row on the stream."""
        return self.row(row_tokens).nbytes

    def drafter(self, row_tokens: int | None = None) -> Memory:
        """Of a rank."""
        train = self.config.train
        bf16 = train.precision in ("bf16", "fp8") or (train.precision == "auto" and self.on_gpu)
        return drafter_memory(
            self.shape,
            train,
            self.row(row_tokens),
            width=2 if bf16 else 4,
            tied=self.size.info.tied_head,
            compiled=self.on_gpu if train.compile is None else train.compile,
        )

    def feeder(self, row_tokens: int | None = None) -> Memory:
        """Of a feeder, or of each of the processes that share its target."""
        info = self.size.info
        whole = info.vocab_size * info.hidden_size * (1 if info.tied_head else 2)
        share = whole + max(0, self.size.parameters - whole) // self.config.feed.tensor_parallel
        return feeder_memory(info, min(share, self.size.parameters), row_tokens or self.config.data.row_tokens)


def check_fit(plans: Plans, gpus: Sequence[Gpu]) -> list[Finding]:
    """The target in numbers, every GPU that has a part to play, the host, the window and the largest row."""
    info, shape, config = plans.size.info, plans.shape, plans.config
    parameters = f"{plans.size.parameters / 1e6:,.1f} M parameters in " if plans.size.parameters else ""
    target = (
        f"{info.name}: {parameters}{info.dtype}, {info.num_layers} layers, taps "
        f"{', '.join(map(str, info.layer_ids))}; the drafter has {shape.parameter_count() / 1e6:,.1f} M"
    )
    findings = [green("target", target)]
    placed = _placement(plans, gpus)
    findings += _alike([(index, _gpu(index, placed[index], gpus)) for index in sorted(placed)])
    for name, here, memory in (("drafter", plans.trains, plans.drafter()), ("feeder", plans.feeds, plans.feeder())):
        if here and not placed:
            findings.append(green(name, f"{gib(memory.nbytes)} of host memory at the peak", memory.lines()))
    findings.append(_host(plans, gpus))
    if plans.trains:
        findings.append(_window(config, plans.row_bytes()))
    return [*findings, *_largest_row(plans, placed, gpus)]


def largest_row(plans: Plans, memory_of: str, budget: int) -> int:
    """The longest row, in multiples of 64 tokens, whose drafter or feeder stays within `budget` bytes; 0 if none does."""
    low, high = 0, max(1, plans.size.info.max_positions // _STEP)
    while low < high:
        middle = (low + high + 1) // 2
        memory = plans.drafter(middle * _STEP) if memory_of == "drafter" else plans.feeder(middle * _STEP)
        low, high = (middle, high) if _needs(memory) <= budget else (low, middle - 1)
    return low * _STEP


def _placement(plans: Plans, gpus: Sequence[Gpu]) -> dict[int, list[tuple[str, Memory]]]:
    """Who is on which GPU."""
    placed: dict[int, list[tuple[str, Memory]]] = {}
    config = plans.config
    if plans.on_gpu and plans.trains:
        for rank in range(1 if config.gpus is not None else config.train.drafters):
            placed.setdefault(rank, []).append((f"drafter {rank}", plans.drafter()))
    numbers = plans.feeders_here if config.gpus is None else [0]
    for number in numbers if plans.feeds else ():
        for device in config.feeder_devices(number):
            kind, _, index = ("cuda" if device == "auto" and gpus else device).partition(":")
            if kind == "cuda":
                where = 1 if config.gpus is not None else int(index or 0)
                placed.setdefault(where, []).append((f"feeder {number}", plans.feeder()))
    return placed


def _alike(found: list[tuple[int, Finding]]) -> list[Finding]:
    """One line for all GPUs of which the same is to be said."""
    indices: dict[Finding, list[int]] = {}
    for index, finding in found:
        indices.setdefault(finding, []).append(index)
    return [replace(finding, about=f"memory, cuda:{', '.join(map(str, which))}") for finding, which in indices.items()]


def _gpu(index: int, parts: list[tuple[str, Memory]], gpus: Sequence[Gpu]) -> Finding:
    who = " and ".join(f"a {name.split()[0]}" for name, _ in parts)
    about, needed = "memory", sum(_needs(memory) for _, memory in parts)
    gpu = next((gpu for gpu in gpus if gpu.index == index), None)
    details = tuple(line for _, memory in parts for line in memory.lines())
    details += (f"{gib(_CONTEXT):>10}  for each process: CUDA, NCCL, and {_FRAGMENTATION - 1:.0%} for fragmentation",)
    if gpu is None:
        return replace(
            red(
                about, f"there is no cuda:{index}, which {who} would use", "correct train.drafters and feed.devices", 2
            ),
            details=details,
        )
    text = f"{who} need{'s' if len(parts) == 1 else ''} {gib(needed)} at the peak; {gpu.name} has {gib(gpu.free)} free of {gib(gpu.total)}"
    if needed > gpu.total:
        return replace(red(about, text, _remedy(parts)), details=details)
    if needed > gpu.free:
        return replace(
            red(about, text, f"free the GPU ({'; '.join(gpu.users) or 'something uses it'}), or: {_remedy(parts)}"),
            details=details,
        )
    if needed > 0.9 * gpu.free:
        return replace(yellow(about, f"{text}: it may just fit", _remedy(parts)), details=details)
    return green(about, text, details)


def _remedy(parts: list[tuple[str, Memory]]) -> str:
    if len(parts) > 1:
        return "give feeders GPUs of their own (feed.devices: drafters take cuda:0 and up)"
    if parts[0][0].startswith("drafter"):
        return "lower train.micro_batch_rows, set train.gradient_checkpointing, lower train.anchors_per_row, or fewer drafter.layers"
    return "use a larger GPU, target.dtype bfloat16, or a smaller data.row_tokens"


def _host(plans: Plans, gpus: Sequence[Gpu]) -> Finding:
    """Memory of the host at the start, when every feeder loads the target and every rank makes its weights in fp32."""
    config, p = plans.config, plans.shape.parameter_count()
    one_feeder = min(config.feed.memory_mib * 2**20, MOST_SLOTS * plans.drafters * plans.row_bytes())
    feeder_load = FLOAT_TYPES[plans.size.info.dtype].itemsize * plans.size.parameters
    on_cpu = config.target.device == "cpu" or not gpus
    feeder_load = plans.feeder().nbytes if on_cpu else feeder_load
    frozen = plans.drafter().resident[-2].nbytes
    rank_load = 4 * p + frozen if plans.on_gpu else plans.drafter().nbytes
    window = int(config.stream.window_mib * 2**20)
    feeders = len(plans.feeders_here)
    feeder_load *= config.feed.tensor_parallel
    of_feeders = int(feeders * (feeder_load + one_feeder)) if plans.feeds else 0
    of_drafters = int(plans.drafters * (rank_load + window)) if plans.trains else 0
    needed = of_feeders + of_drafters if config.gpus is None else max(of_feeders, of_drafters)
    details = tuple(
        f"{gib(nbytes):>10}  for each of {count} {name}"
        for here, nbytes, count, name in (
            (
                plans.feeds,
                feeder_load + one_feeder,
                feeders,
                "feeders: the target as it is loaded, and slots for rows",
            ),
            (
                plans.trains,
                rank_load + window,
                plans.drafters,
                "drafters: weights as they are made, embedding, head, window",
            ),
        )
        if here
    )
    limits = left()
    who, available = min(limits, key=lambda limit: limit[1]) if limits else ("the machine", needed)
    text = f"{gib(needed)} at the start; {who} has {gib(available)} left"
    if needed > available:
        return replace(
            yellow(
                "host memory of a run",
                text,
                "start feeders one after the other by hand, or use a host with more memory",
            ),
            details=details,
        )
    return green("host memory of a run", text, details)


def _window(config: RunConfig, row_bytes: int) -> Finding:
    held = config.train.micro_batch_rows
    needed = (held + 1) * row_bytes / 2**20
    text = f"stream.window_mib {config.stream.window_mib:g} holds {int(config.stream.window_mib * 2**20) // row_bytes} rows of {gib(row_bytes)}"
    if config.stream.window_mib < needed:
        return red(
            "window", f"{text}; {held + 1} are needed", f"set stream.window_mib to at least {needed + 0.01:.2f}", 5
        )
    if config.stream.window_mib < needed + row_bytes / 2**20:
        return yellow(
            "window",
            f"{text}: nothing is asked for ahead of the row under way",
            f"set it to {needed + row_bytes / 2**20:.0f}",
        )
    return green("window", text)


def _largest_row(plans: Plans, placed: dict[int, list[tuple[str, Memory]]], gpus: Sequence[Gpu]) -> list[Finding]:
    free = {gpu.index: gpu.free for gpu in gpus}
    found: dict[str, int] = {}
    for index, parts in placed.items():
        if index in free and len(parts) == 1:
            kind = parts[0][0].split()[0]
            tokens = largest_row(plans, kind, free[index])
            found[kind] = min(tokens, found.get(kind, tokens))
    if not found:
        return []
    least = min(found.values())
    text = ", ".join(f"{tokens:,} tokens on a {kind}'s GPU" for kind, tokens in sorted(found.items()))
    text += f" (the target takes {plans.size.info.max_positions:,}); configured: {plans.config.data.row_tokens:,}"
    window = (plans.config.train.micro_batch_rows + 1) * plans.row_bytes(max(least, _STEP)) / 2**20
    return [green("largest row that fits", text, (f"a row of {least:,} tokens needs stream.window_mib {window:.0f}",))]


def _needs(memory: Memory) -> int:
    return int(_FRAGMENTATION * memory.nbytes) + _CONTEXT


def _plan(info: TargetInfo, row_tokens: int) -> StreamPlan:
    return StreamPlan(DataPlan("", 0, row_tokens, 0, 0, "", "", "default"), info)
