"""`Cache`: the memory of a model for the sequences it works on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from exllamav3.cache.batch import BoundCache
from exllamav3.cache.kv import KvLayer, PlainKvLayer
from exllamav3.cache.pages import PAGE_SIZE, PagePool, pages_for
from exllamav3.cache.placement import FixedBatch, Row, first_place, page_table
from exllamav3.cache.quantized import QuantizedKvLayer, check_cache_bits
from exllamav3.cache.recurrent import RecurrentLayer
from exllamav3.cache.sizes import spec_bytes
from exllamav3.errors import FormatError
from exllamav3.modules.context import KvSpec, RecurrentSpec


class HasCacheSpecs(Protocol):
    """What a cache needs of a model: what each of its layers stores.

    The model hears of the cache, so that a plan for several devices can leave room for it.
    """

    def cache_specs(self) -> list[KvSpec | RecurrentSpec]: ...

    def expect_cache(self, cache: Cache) -> None: ...


class Sequence:
    """A reservation in a cache for one sequence, made by `Cache.new_sequence`.

    Attributes:
        length: tokens stored so far. The caller of the model keeps it up to date.
        capacity: tokens that fit.
    """

    def __init__(self, row: Row) -> None:
        self.row = row
        self.length = 0
        self.capacity = len(row.pages) * PAGE_SIZE


class Cache:
    """Keys, values and recurrent states of up to `max_batch_size` sequences.

    Args:
        model: says what its layers store; it need not be loaded yet. Memory is taken when a layer
            first runs, on the device and in the dtype of its activations (float32 on the CPU,
            float16 on a GPU); with layers on several devices each has its own there.
        max_num_tokens: tokens of all sequences together, a multiple of 256.
        max_batch_size: how many sequences at a time.
        k_bits, v_bits: 2 to 8 to round keys and values and save memory, see `cache.quantized`;
            both or neither.

    Raises:
        FormatError: a size is not positive, `max_num_tokens` not a multiple of 256, or the bits
            are not 2 to 8.
    """

    def __init__(
        self,
        model: HasCacheSpecs,
        max_num_tokens: int,
        max_batch_size: int = 16,
        *,
        k_bits: int | None = None,
        v_bits: int | None = None,
    ) -> None:
        if max_num_tokens <= 0 or max_num_tokens % PAGE_SIZE:
            raise FormatError(
                f"Cache: max_num_tokens is {max_num_tokens}, expected a positive multiple of "
                f"{PAGE_SIZE}; use {max(1, pages_for(max_num_tokens)) * PAGE_SIZE}"
            )
        if max_batch_size <= 0:
            raise FormatError(f"Cache: max_batch_size is {max_batch_size}, expected at least 1")
        if (k_bits is None) != (v_bits is None):
            raise FormatError(f"Cache: k_bits is {k_bits}, v_bits {v_bits}; give both or neither")
        self._bits: tuple[int, int] | None = None
        if k_bits is not None and v_bits is not None:
            check_cache_bits("k_bits", k_bits)
            check_cache_bits("v_bits", v_bits)
            self._bits = (k_bits, v_bits)
        self.max_num_tokens = max_num_tokens
        self.max_batch_size = max_batch_size
        specs = model.cache_specs()
        self._kv_specs = {s.layer: s for s in specs if isinstance(s, KvSpec)}
        self._recurrent_specs = {s.layer: s for s in specs if isinstance(s, RecurrentSpec)}
        self._kv: dict[int, KvLayer] = {}
        self._recurrent: dict[int, RecurrentLayer] = {}
        self._pool = PagePool(max_num_tokens // PAGE_SIZE)
        self._free_slots = list(range(max_batch_size))
        self._rectangle: tuple[tuple[int, int], list[Sequence]] | None = None
        model.expect_cache(self)

    @property
    def free_tokens(self) -> int:
        """Tokens that no sequence has reserved."""
        return self._pool.free * PAGE_SIZE

    @property
    def size_bytes(self) -> int:
        """Memory taken so far."""
        kv = sum(layer.size_bytes for layer in self._kv.values())
        return kv + sum(layer.size_bytes for layer in self._recurrent.values())

    def pending_bytes(self, dtype: torch.dtype) -> dict[int, int]:
        """Memory that layers have not taken yet, by the number of the decoder layer.

        Args:
            dtype: of the activations to come.
        """
        specs: dict[int, KvSpec | RecurrentSpec] = {**self._kv_specs, **self._recurrent_specs}
        taken = {*self._kv, *self._recurrent}
        return {
            layer: spec_bytes(spec, self._pool.pages, self.max_batch_size, self._bits, dtype)
            for layer, spec in specs.items()
            if layer not in taken
        }

    def fits(self, tokens: int) -> bool:
        """Whether `new_sequence(tokens)` would succeed now."""
        return bool(self._free_slots) and pages_for(tokens) <= self._pool.free

    def new_sequence(self, tokens: int) -> Sequence:
        """Reserve room for a sequence of at most `tokens` tokens (rounded up to whole pages).

        Raises:
            FormatError: no slot or too few pages are free.
        """
        if not self._free_slots:
            raise FormatError(
                f"Cache: all {self.max_batch_size} sequences are in use; release one or raise "
                f"max_batch_size"
            )
        row = Row(tuple(self._pool.take(max(1, pages_for(tokens)))), self._free_slots.pop(0))
        pages = torch.tensor(row.pages)
        for layer in self._kv.values():
            # No trace of an earlier sequence: its NaN would survive any mask.
            layer.clear(pages)
        return Sequence(row)

    def release(self, sequence: Sequence) -> None:
        """Give the room of a sequence back; the handle must not be used afterwards."""
        assert sequence.row.slot is not None  # only block tables have none, and they are no handles
        self._pool.give_back(list(sequence.row.pages))
        self._free_slots.append(sequence.row.slot)

    def fixed_batch(
        self, sequences: list[Sequence], device: torch.device | str, read_tokens: int | None = None
    ) -> FixedBatch:
        """Prepare sequences for passes that a CUDA graph can be captured around.

        Pass the result as `params["sequences"]`, with `cache_seqlens` on the device. Such passes
        never look at a value: the caller keeps positions within the reservations.

        Args:
            sequences: handles from `new_sequence`.
            device: of the model.
            read_tokens: cached tokens that every pass attends over (the mask hides what is not
                there yet); no position may reach it. Default: all that the longest one reserves.

        Raises:
            FormatError: `read_tokens` is not between 1 and what the longest sequence reserves.
        """
        rows = tuple(sequence.row for sequence in sequences)
        slots = torch.tensor([row.slot for row in rows], dtype=torch.long, device=device)
        longest = max(sequence.capacity for sequence in sequences)
        read_tokens = longest if read_tokens is None else read_tokens
        if not 1 <= read_tokens <= longest:
            raise FormatError(
                f"Cache: read_tokens is {read_tokens}, expected 1 to {longest}, the reservation of "
                f"the longest sequence"
            )
        return FixedBatch(page_table(rows).to(device), slots, read_tokens, first_place(rows))

    def bind(self, params: Mapping[str, Any], batch: int) -> BoundCache:
        """The view for one forward pass; `modules.context.BindableCache` says when it is called.

        `params` describes the rows in one of three ways:

        - `sequences`: a list of handles from `new_sequence`, or a `fixed_batch` of them;
        - `batch_shape`: `(batch, max_len)`, rows of equal room, reserved on first use and kept
          until another shape is asked for; a row starts anew with a token at position 0;
        - `block_table`: int `(batch, pages)` page numbers that the caller manages (models without
          recurrent layers only).

        Raises:
            FormatError: none or several of them are given, or they do not describe `batch` rows.
        """
        given = [
            k for k in ("sequences", "batch_shape", "block_table") if params.get(k) is not None
        ]
        if len(given) != 1:
            raise FormatError(
                f"Cache: params hold {given or 'nothing'} to describe the rows of the batch, "
                f'expected exactly one of "sequences", "batch_shape" and "block_table"'
            )
        rows = self._rows(given[0], params[given[0]])
        count = len(rows.slots_B if isinstance(rows, FixedBatch) else rows)
        if count != batch:
            raise FormatError(
                f"Cache: {given[0]} describes {count} rows, the token ids have {batch}"
            )
        past = torch.as_tensor(params.get("cache_seqlens", params.get("past_len", 0)))
        past_B = past.long().expand(batch) if past.device.type == "cpu" else None
        return BoundCache(rows, past_B, self._kv_layer, self._recurrent_layer)

    def _rows(self, key: str, value: Any) -> list[Row] | FixedBatch:
        if key == "block_table":
            return self._table_rows(value)
        if isinstance(value, FixedBatch):
            return value
        return [s.row for s in (self._rectangular(*value) if key == "batch_shape" else value)]

    def _rectangular(self, batch: int, max_len: int) -> list[Sequence]:
        shape = (batch, pages_for(max_len))
        if self._rectangle is not None and self._rectangle[0] == shape:
            return self._rectangle[1]
        if self._rectangle is not None:
            for sequence in self._rectangle[1]:
                self.release(sequence)
            self._rectangle = None
        if batch > len(self._free_slots) or batch * shape[1] > self._pool.free:
            raise FormatError(
                f"Cache: batch_shape ({batch}, {max_len}) needs {batch} sequences and "
                f"{batch * shape[1] * PAGE_SIZE} tokens (each row in whole pages of {PAGE_SIZE}); "
                f"{len(self._free_slots)} sequences and {self.free_tokens} tokens are free"
            )
        self._rectangle = (shape, [self.new_sequence(max_len) for _ in range(batch)])
        return self._rectangle[1]

    def _table_rows(self, block_table: Tensor) -> list[Row]:
        table = block_table.tolist()
        if block_table.dim() != 2 or any(
            not 0 <= page < self._pool.pages for row in table for page in row
        ):
            raise FormatError(
                f"Cache: block_table has shape {tuple(block_table.shape)}, expected (batch, pages) "
                f"with page numbers from 0 to {self._pool.pages - 1}"
            )
        return [Row(tuple(row), None) for row in table]

    def _kv_layer(self, layer: int, like: Tensor) -> KvLayer:
        if layer not in self._kv:
            spec = self._kv_specs.get(layer)
            found = tuple(like.shape[2:])
            if spec is None or found != (spec.kv_heads, spec.head_dim):
                raise FormatError(
                    f"Cache: decoder layer {layer} stores keys of {found} (heads, head_dim), the "
                    f"cache was made for {spec}; make the cache from the model that runs"
                )
            with torch.inference_mode(False):  # else only inference mode could change it later
                self._kv[layer] = self._new_kv_layer(spec, like)
        _check_device(layer, self._kv[layer].device, like.device)
        return self._kv[layer]

    def _new_kv_layer(self, spec: KvSpec, like: Tensor) -> KvLayer:
        sizes = (self._pool.pages, spec.kv_heads, spec.head_dim)
        if self._bits is None:
            return PlainKvLayer(*sizes, like.dtype, like.device)
        return QuantizedKvLayer(*sizes, self._bits, like.dtype, like.device)

    def _recurrent_layer(self, layer: int, device: torch.device) -> RecurrentLayer:
        if layer not in self._recurrent:
            spec = self._recurrent_specs.get(layer)
            if spec is None:
                raise FormatError(
                    f"Cache: decoder layer {layer} has recurrent state, the cache was made for "
                    f"layers {sorted(self._recurrent_specs)}; make it from the model that runs"
                )
            with torch.inference_mode(False):  # else only inference mode could change it later
                self._recurrent[layer] = RecurrentLayer(self.max_batch_size, spec, device)
        _check_device(layer, self._recurrent[layer].delta.device, device)
        return self._recurrent[layer]


def _check_device(layer: int, kept: torch.device, wanted: torch.device) -> None:
    if kept != wanted:
        raise FormatError(
            f"Cache: the state of decoder layer {layer} is on {kept}, the layer now runs on "
            f"{wanted}; make a new cache after loading the model elsewhere"
        )
