"""GPUs that compute nothing: whole passes of a model on two devices, on any machine.

torch's fake tensors have a shape, a dtype and a device, and an operator refuses those of two
devices, as it would on GPUs. So a pass that comes through has each tensor where its layer is.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

import exllamav3.cache.batch
import exllamav3.model.devices
import exllamav3_ext
from exllamav3.codec.tensor import Exl3Tensor
from exllamav3.ops.status import require_device


@contextmanager
def fake_gpus(monkeypatch, *free_bytes):
    """Let there be GPUs with that much free memory, and every tensor made inside be a fake one."""
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: False
    )  # or fake tensors would take some
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free_bytes))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        exllamav3.model.devices, "free_bytes", lambda device: free_bytes[device.index]
    )
    # Without native code the references serve every device.
    monkeypatch.setattr(exllamav3_ext, "native_missing_reason", "a test of placement")
    monkeypatch.setattr(Exl3Tensor, "from_tensors", _outside(Exl3Tensor.from_tensors))
    monkeypatch.setattr(exllamav3.cache.batch, "place", _place(exllamav3.cache.batch.place))
    require_device.cache_clear()
    try:
        with ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(_Methods())
            yield
    finally:
        require_device.cache_clear()


def _outside(function):
    """A function that looks at values, and is given real tensors."""

    def call(*arguments):
        with unset_fake_temporarily():
            return function(*arguments)

    return call


def _place(place):
    """`cache.placement.place`, which looks at values on the host, of sequences that begin."""

    def call(rows, past_B, ctx):
        with unset_fake_temporarily():
            shape = torch.empty(ctx.positions.shape)
            past_B = torch.zeros(len(rows), dtype=torch.long)
            found = place(rows, past_B, SimpleNamespace(positions=shape, new_lengths=None))
        return replace(
            found, places_N=_like(found.places_N, ctx), pages_BP=_like(found.pages_BP, ctx)
        )

    return call


def _like(x, ctx):
    return torch.empty(x.shape, dtype=x.dtype, device=ctx.positions.device)


class _Methods(TorchFunctionMode):
    """Calls that would ask a CPU build for CUDA: for a device guard, or to hold known values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.tensor and "device" in (kwargs or {}):
            with unset_fake_temporarily():
                real = torch.tensor(*args, dtype=kwargs.get("dtype"))
            return torch.empty(real.shape, dtype=real.dtype, device=kwargs["device"])
        if func is torch.Tensor.to and not isinstance(args[0], FakeTensor):
            args = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:])
        if func is torch.Tensor.__getitem__:
            return _subscript(*args)
        if func is torch.Tensor.__setitem__:
            x, index, value = args
            assert isinstance(index, torch.Tensor)
            return x.index_put_((index,), value)
        if func is torch.Tensor.copy_:  # may cross devices
            assert args[0].shape == args[1].shape
            return args[0]
        if func is torch.Tensor.contiguous:
            return args[0].clone(memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))


def _subscript(x, index):
    index = index if isinstance(index, tuple) else (index,)
    if ... in index:
        at = index.index(...)
        missing = x.dim() - sum(i is not None for i in index) + 1
        index = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
    dim = 0
    for i in index:
        if i is None:
            x = x.unsqueeze(dim)
        elif isinstance(i, int):
            x = x.select(dim, i)
            continue
        elif isinstance(i, torch.Tensor):
            x = torch.ops.aten.index.Tensor(x, [*[None] * dim, i])
        elif i != slice(None):
            x = torch.ops.aten.slice.Tensor(x, dim, i.start, i.stop, i.step or 1)
        dim += 1
    return x
