import torch
from tiny_models import relative_error

from exllamav3.modules.context import ForwardContext
from exllamav3.modules.gated_delta_net import DeltaGeometry, GatedDeltaNet
from exllamav3.modules.module import DictSource

KEY = "model.layers.0.linear_attn"
SPLIT = DeltaGeometry(
    48, key_heads=2, value_heads=6, key_dim=8, value_dim=16, conv_kernel=4, grouped=False
)
GROUPED = DeltaGeometry(
    48, key_heads=2, value_heads=6, key_dim=8, value_dim=16, conv_kernel=4, grouped=True
)


def random(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def split_tensors():
    g = SPLIT
    weights = {
        "in_proj_qkv.weight": random(g.conv_channels, 48, seed=1, scale=0.2),
        "in_proj_z.weight": random(g.value_width, 48, seed=2, scale=0.2),
        "in_proj_b.weight": random(6, 48, seed=3, scale=0.2),
        "in_proj_a.weight": random(6, 48, seed=4, scale=0.2),
        "out_proj.weight": random(48, g.value_width, seed=5, scale=0.1),
        "norm.weight": random(16, seed=6),
        "A_log": random(6, seed=7),
        "dt_bias": random(6, seed=8),
        "conv1d.weight": random(g.conv_channels, 1, 4, seed=9),
    }
    return {f"{KEY}.{name}": tensor for name, tensor in weights.items()}


def grouped_tensors():
    """The same layer as Qwen3-Next stores it: rows ordered by key head."""
    tensors = split_tensors()
    qkv = tensors.pop(f"{KEY}.in_proj_qkv.weight")
    q, k, v = qkv.split([16, 16, 96])
    z = tensors.pop(f"{KEY}.in_proj_z.weight")
    b, a = tensors.pop(f"{KEY}.in_proj_b.weight"), tensors.pop(f"{KEY}.in_proj_a.weight")
    qkvz, ba = [], []
    for head in range(2):
        qkvz += [t.unflatten(0, (2, -1))[head] for t in (q, k, v, z)]
        ba += [t.unflatten(0, (2, -1))[head] for t in (b, a)]
    tensors[f"{KEY}.in_proj_qkvz.weight"] = torch.cat(qkvz)
    tensors[f"{KEY}.in_proj_ba.weight"] = torch.cat(ba)
    return tensors


def layer(geometry=SPLIT):
    net = GatedDeltaNet(KEY, 0, geometry, 1e-6)
    tensors = grouped_tensors() if geometry.grouped else split_tensors()
    net.load(DictSource(tensors), "cpu")
    return net


class States:
    """The smallest cache: conv and delta states of one layer."""

    def __init__(self, batch):
        self.conv = torch.zeros(batch, SPLIT.conv_channels, 3)
        self.delta = torch.zeros(batch, 6, 8, 16)

    def read_conv(self, layer, ctx):
        return self.conv

    def write_conv(self, layer, conv, ctx):
        self.conv = conv

    def delta_states(self, layer, ctx):
        rows = torch.arange(len(self.delta))
        return self.delta, rows, torch.zeros(len(rows), dtype=torch.bool)


def context(batch, seq, states, lengths=None):
    ctx = ForwardContext.uncached(batch, seq)
    ctx.cache = states
    ctx.new_lengths = None if lengths is None else torch.tensor(lengths)
    return ctx


def by_the_book(x):
    """The layer token by token in float64, written from its definition."""
    t = {name.removeprefix(f"{KEY}."): tensor.double() for name, tensor in split_tensors().items()}
    x = x.double()
    window = torch.zeros(SPLIT.conv_channels, 4, dtype=torch.float64)
    state = torch.zeros(6, 8, 16, dtype=torch.float64)
    rows = []
    for token in x:
        window = torch.cat([window[:, 1:], (t["in_proj_qkv.weight"] @ token)[:, None]], 1)
        mixed = (window * t["conv1d.weight"][:, 0]).sum(1)
        mixed = mixed * mixed.sigmoid()
        q, k, v = mixed[:16].view(2, 8), mixed[16:32].view(2, 8), mixed[32:].view(6, 16)
        q = q / (q.square().sum(1, keepdim=True) + 1e-6).sqrt() / 8**0.5
        k = k / (k.square().sum(1, keepdim=True) + 1e-6).sqrt()
        beta = (t["in_proj_b.weight"] @ token).sigmoid()
        rate = torch.log1p((t["in_proj_a.weight"] @ token + t["dt_bias"]).exp())
        decay = (-t["A_log"].exp() * rate).exp()
        z = (t["in_proj_z.weight"] @ token).view(6, 16)
        heads = []
        for h in range(6):
            s = decay[h] * state[h]
            s = s + torch.outer(k[h // 3], beta[h] * (v[h] - s.t() @ k[h // 3]))
            state[h] = s
            o = s.t() @ q[h // 3]
            o = o / (o.square().mean() + 1e-6).sqrt() * t["norm.weight"]
            heads.append(o * z[h] * z[h].sigmoid())
        rows.append(t["out_proj.weight"] @ torch.cat(heads))
    return torch.stack(rows)


def test_the_layer_does_what_its_definition_says():
    x = random(1, 9, 48, seed=20)
    y = layer().forward(x, ForwardContext.uncached(1, 9))
    assert relative_error(y[0], by_the_book(x[0])) < 1e-5


def test_both_storage_forms_are_the_same_layer():
    x = random(2, 7, 48, seed=21)
    ctx = ForwardContext.uncached(2, 7)
    torch.testing.assert_close(layer(GROUPED).forward(x, ctx), layer().forward(x, ctx))


def test_a_sequence_in_pieces_gives_what_it_gives_as_a_whole():
    x, net, states = random(2, 9, 48, seed=22), layer(), States(2)
    whole = net.forward(x, ForwardContext.uncached(2, 9))
    parts = []
    for part in x.split([4, 1, 1, 3], dim=1):
        parts.append(net.forward(part, context(2, part.shape[1], states)))
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_padding_on_the_right_leaves_no_trace_in_the_states():
    x, net = random(3, 6, 48, seed=23), layer()
    padded, lengths = States(3), [6, 2, 1]
    net.forward(x, context(3, 6, padded, lengths))
    for row, length in enumerate(lengths):
        alone = States(1)
        net.forward(x[row : row + 1, :length], context(1, length, alone))
        torch.testing.assert_close(padded.conv[row : row + 1], alone.conv)
        torch.testing.assert_close(padded.delta[row : row + 1], alone.delta)


def test_own_tensors_are_given_back_in_the_dtype_they_came_in():
    tensors = {name: tensor.bfloat16() for name, tensor in split_tensors().items()}
    net = GatedDeltaNet(KEY, 0, SPLIT, 1e-6)
    net.load(DictSource(tensors), "cpu")
    own = net.get_tensors()
    assert set(own) == {f"{KEY}.A_log", f"{KEY}.dt_bias", f"{KEY}.conv1d.weight"}
    assert all(torch.equal(own[name], tensors[name]) for name in own)
