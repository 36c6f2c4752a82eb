"""A small decoder-only transformer with a KV cache. Plain torch; it knows nothing of pymux."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's custom


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the model."""

    vocabulary: int
    width: int = 384
    heads: int = 6
    layers: int = 6
    context: int = 16


class Block(nn.Module):
    """Attention and a feed-forward layer, with pre-normalisation."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        """Run the layer.

        Args:
            x: (batch, time, width).
            cache: (2, batch, heads, context, width / heads) of keys and values, written from
                `start` on and read up to there; None attends within `x` alone.
            start: position of the first of `x`.
        """
        batch, time, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        if cache is not None:
            cache[0, :, :, start : start + time] = k
            cache[1, :, :, start : start + time] = v
            k, v = cache[0, :, :, : start + time], cache[1, :, :, : start + time]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=time > 1)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Token ids to logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary)
        for name, p in self.named_parameters():
            if name.endswith("weight") and p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor, cache: list[Tensor] | None = None, start: int = 0) -> Tensor:
        """Return logits (batch, time, vocabulary) of token ids (batch, time)."""
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for i, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache[i], start)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def new_cache(self, batch: int) -> list[Tensor]:
        """Return an empty KV cache for `batch` sequences."""
        s = self.shape
        size = (2, batch, s.heads, s.context, s.width // s.heads)
        return [torch.zeros(size, device=self.head.weight.device) for _ in range(s.layers)]


def generate(
    model: Transformer,
    prompts: Tensor,
    cache: list[Tensor],
    steps: int,
    generator: torch.Generator,
    between: Callable[[], object] = lambda: None,
) -> Tensor:
    """Sample continuations.

    Args:
        model: the policy.
        prompts: token ids (batch, time).
        cache: of the same batch.
        steps: tokens to sample.
        generator: where randomness comes from; on the CPU.
        between: called before each token; here the device may be given away.

    Returns:
        Token ids (batch, time + steps).
    """
    tokens, new, start = prompts, prompts, 0
    with torch.no_grad():
        for _ in range(steps):
            between()
            logits = model(new, cache, start)[:, -1].float().cpu()
            start += new.shape[1]
            new = torch.multinomial(logits.softmax(-1), 1, generator=generator).to(prompts.device)
            tokens = torch.cat([tokens, new], 1)
    return tokens


def log_probabilities(model: Transformer, tokens: Tensor, prompt_length: int) -> Tensor:
    """Return the log probability (batch, answer time) of each answer token."""
    logits = model(tokens[:, :-1])[:, prompt_length - 1 :]
    target = tokens[:, prompt_length:]
    return logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
