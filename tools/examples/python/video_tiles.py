"""Attention of a video in 3-D tiles: each tile attends to the tiles next to it in time, height and width, and to the tiles that
it likes best; tiles at the video's edges are not full. As FlexAttention's BlockMask, which diffusers' back end takes, too.
Without a GPU the CPU reference computes it.

    python3 tools/examples/python/video_tiles.py
"""

import math

import flashjit
import torch
from flashjit.flex_attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask


class Tiles:
    """A video of frames x height x width tokens, cut into tiles of at most `tile`, each padded to as many rows.

    rows: for each row of the padded sequence its token, or -1. sizes: the tokens of each tile. at: each tile's place [tiles, 3].
    """

    def __init__(self, video, tile, device="cpu"):
        self.block, counts = math.prod(tile), [math.ceil(v / t) for v, t in zip(video, tile)]
        padded = [n * t for n, t in zip(counts, tile)]
        place = torch.stack(torch.meshgrid(*map(torch.arange, padded), indexing="ij"), -1)
        token = (place[..., 0] * video[1] + place[..., 1]) * video[2] + place[..., 2]
        token[(place >= torch.tensor(video)).any(-1)] = -1
        split = [part for pair in zip(counts, tile) for part in pair]
        token = token.reshape(split).permute(0, 2, 4, 1, 3, 5).reshape(-1, self.block)
        token = token.gather(
            1, (token < 0).int().argsort(dim=1, stable=True)
        )  # a tile's tokens first, then its padding
        self.rows, self.sizes = token.flatten().to(device), (token >= 0).sum(1).to(device)
        self.at = torch.cartesian_prod(*map(torch.arange, counts)).reshape(-1, 3).to(device)

    def put(self, x):
        """[..., tokens, dim] -> [..., rows, dim], zeros where there is no token."""
        return x[..., self.rows.clamp(min=0), :] * (self.rows >= 0)[:, None]

    def take(self, x):
        """The inverse of put()."""
        there = self.rows >= 0
        return x[..., there.nonzero().flatten()[self.rows[there].argsort()], :]

    def near(self, reach):
        """[tiles, tiles]: those at most `reach` tiles away, in each of the three directions."""
        return ((self.at[:, None] - self.at).abs() <= torch.tensor(reach, device=self.at.device)).all(-1)

    def liked(self, q, k, count):
        """[batch, heads, tiles, tiles]: the `count` tiles whose mean keys are most like a tile's mean query."""
        mean = lambda x: x.unflatten(-2, (-1, self.block)).sum(-2) / self.sizes[:, None]
        scores = mean(q) @ mean(k).transpose(-1, -2)
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(count).indices, True)

    def mask(self, attends):
        """The BlockMask of tiles that attend: full tiles as a whole, of others the tokens that are there."""
        sizes, block = self.sizes, self.block
        whole = attends & (sizes == block)
        listed = lambda blocks: (
            blocks.sum(-1, dtype=torch.int32),
            blocks.int().argsort(dim=-1, descending=True, stable=True).int(),
        )
        return BlockMask.from_kv_blocks(
            *listed(attends & ~whole),
            *listed(whole),
            BLOCK_SIZE=(block, block),
            mask_mod=lambda b, h, q_idx, kv_idx: kv_idx % block < sizes[kv_idx // block],
            seq_lengths=(len(self.rows), len(self.rows)),
        )


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    video, batch, heads, dim = (5, 6, 10), 1, 2, 32
    tiles = Tiles(video, (2, 4, 4), device)
    torch.manual_seed(0)
    q, k, v = (tiles.put(torch.randn(batch, heads, math.prod(video), dim, device=device)) for _ in range(3))
    attends = tiles.near((1, 0, 1)) | tiles.liked(q, k, 2)
    out = tiles.take(flex_attention(q, k, v, block_mask=tiles.mask(attends)))

    # The same with the whole matrix in memory.
    keep = attends.repeat_interleave(tiles.block, -1).repeat_interleave(tiles.block, -2) & (tiles.rows >= 0)
    scores = (q @ k.transpose(2, 3) / dim**0.5).masked_fill(~keep, -torch.inf)
    torch.testing.assert_close(out, tiles.take(torch.softmax(scores, 3) @ v), atol=1e-3, rtol=1e-3)
    print(
        f"flashjit {flashjit.version()} on {device}: the same as the matrix written out, where {attends.float().mean():.0%} of the "
        f"tiles attend, of {tiles.sizes.min()} to {tiles.sizes.max()} tokens"
    )


if __name__ == "__main__":
    main()
