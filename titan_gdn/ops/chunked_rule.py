"""What all chunked delta rules have in common: the recurrence from chunk to chunk, forward and backward.

For each value head and chunk, with `S` the state that the chunk receives:

    u = (I + A)^-1 beta (v - recall S)        o = scale read S + P u        S <- forget S + write^T u

A rule provides the factors `recall`, `read` and `write`, made of its queries and keys, the decay `forget` of
the state over a chunk, and the matrices `A` and `P` of products inside a chunk (all in `Chunks`). It also
turns the gradients of these into gradients of its inputs.

Shape suffixes: N chunks, H key heads, R value heads per key head, C tokens of a chunk, D = 2C rows (queries
stacked on keys, because both are multiplied by the same matrix), K and V head dimensions, W = R*V columns of
states.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_gdn.ops.chunk_plan import CHUNK, Piece


class Chunks(NamedTuple):
    """The tensors of a block, and the products of its rows that do not depend on a state.

    Attributes:
        v_NHRCV: values.
        row_NHRD1: `scale` for the rows of o, `-beta` for the rows of u.
        reads_NHDK: `read`, from the queries, stacked on `recall`, from the keys.
        read_NHRD1: factor of their products with the state; None for 1.
        writes_NHCK: `write`.
        write_NHRC1: factor of the values that are written; None for 1.
        forget: `[N, H, K or 1, R or 1, 1]`, the decay of the state over the chunk.
        pairs_NHRDC: `P / scale` stacked on `A / beta`.
        scores_NHRCC: `P`.
        inverse_NHRCC: `(I + A)^-1`.
    """

    v_NHRCV: Tensor
    row_NHRD1: Tensor
    reads_NHDK: Tensor
    read_NHRD1: Tensor | None
    writes_NHCK: Tensor
    write_NHRC1: Tensor | None
    forget: Tensor
    pairs_NHRDC: Tensor
    scores_NHRCC: Tensor
    inverse_NHRCC: Tensor

    @classmethod
    def of_pairs(
        cls,
        pairs_NHRDC: Tensor,
        v_NHRCV: Tensor,
        beta_NHRC: Tensor,
        scale: float,
        *,
        reads_NHDK: Tensor,
        read_NHRD1: Tensor | None,
        writes_NHCK: Tensor,
        write_NHRC1: Tensor | None,
        forget: Tensor,
    ) -> "Chunks":
        """Compute the matrices and factors that follow from `pairs`; the other arguments are fields."""
        beta_NHRC1 = beta_NHRC.unsqueeze(-1)
        return cls(
            v_NHRCV=v_NHRCV,
            row_NHRD1=torch.cat([torch.full_like(beta_NHRC1, scale), -beta_NHRC1], 3),
            pairs_NHRDC=pairs_NHRDC,
            scores_NHRCC=pairs_NHRDC[..., :CHUNK, :] * scale,
            inverse_NHRCC=_invert(pairs_NHRDC[..., CHUNK:, :] * beta_NHRC1),
            reads_NHDK=reads_NHDK,
            read_NHRD1=read_NHRD1,
            writes_NHCK=writes_NHCK,
            write_NHRC1=write_NHRC1,
            forget=forget,
        )


class ChunkGradients(NamedTuple):
    """Gradients of a block's `Chunks`, from which a rule computes those of its inputs.

    Attributes:
        u_NHRCV: as in the forward pass.
        recalled_NHRDV: products of `reads` with the states, without the factor `read`.
        d_read_NHDW: gradients of those products.
        d_reads_NHDK: gradients of `reads`.
        d_kept_NHCW: gradients of the values that are written, with the factor `write`.
        d_writes_NHCK: gradients of `writes`.
        d_forget: `[N, H, K, R]`, gradients of the logarithm of `forget`.
        d_pairs_NHRDC: gradients of `pairs`.
        dv_NHRCV: gradients of `v`.
        dbeta_NHRC: gradients of `beta`.
    """

    u_NHRCV: Tensor
    recalled_NHRDV: Tensor
    d_read_NHDW: Tensor
    d_reads_NHDK: Tensor
    d_kept_NHCW: Tensor
    d_writes_NHCK: Tensor
    d_forget: Tensor
    d_pairs_NHRDC: Tensor
    dv_NHRCV: Tensor
    dbeta_NHRC: Tensor


def _invert(A_NHRCC: Tensor) -> Tensor:
    """`(I + A)^-1`, where `A` is what is below the diagonal."""
    one = torch.eye(CHUNK, dtype=A_NHRCC.dtype, device=A_NHRCC.device).expand_as(A_NHRCC)
    return torch.linalg.solve_triangular(A_NHRCC, one, upper=False, unitriangular=True)


def per_value_head(x_NHCW: Tensor, value_heads: int) -> Tensor:
    """View the columns of a product with states as `[N, H, R, C, V]`."""
    return x_NHCW.unflatten(-1, (value_heads, -1)).transpose(2, 3)


def columns(x_NHRCV: Tensor) -> Tensor:
    """The inverse of `per_value_head`: `[N, H, C, W]`."""
    return x_NHRCV.transpose(2, 3).flatten(-2)


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _add_product(state: Tensor, a_NHCK: Tensor, b_NHCW: Tensor) -> None:
    """`state += a^T b`, for states `[N, H, K, R, V]`."""
    state.flatten(0, 1).flatten(-2).baddbmm_(a_NHCK.flatten(0, 1).mT, b_NHCW.flatten(0, 1))


def chunks_forward(chunks: Chunks, pieces: list[Piece], state: Tensor, received: Tensor) -> Tensor:
    """Compute the output of a block, `[N, H, R, C, V]`.

    Updates `state` `[documents, H, K, R, V]` in place and writes the state that each chunk receives to
    `received` `[N, H, K, R, V]`.
    """
    R = chunks.v_NHRCV.shape[2]
    factor_NHRD1 = _times(chunks.row_NHRD1, chunks.read_NHRD1)
    read_NHRC1, recall_NHRC1 = factor_NHRD1.split(CHUNK, 3)
    reads_NHCK, recalls_NHCK = chunks.reads_NHDK.split(CHUNK, 2)
    u_NHRCV = torch.empty_like(chunks.v_NHRCV, memory_format=torch.contiguous_format)
    x_NHRCV = chunks.v_NHRCV * -chunks.row_NHRD1[..., CHUNK:, :]
    for piece in pieces:
        n = slice(piece.first, piece.last)
        running = state[piece.low : piece.high]
        received[n] = running
        recalled = per_value_head(recalls_NHCK[n] @ running.flatten(-2), R)
        x_NHRCV[n].addcmul_(recalled, recall_NHRC1[n])
        torch.matmul(chunks.inverse_NHRCC[n], x_NHRCV[n], out=u_NHRCV[n])
        running *= chunks.forget[n]
        kept = u_NHRCV[n] if chunks.write_NHRC1 is None else u_NHRCV[n] * chunks.write_NHRC1[n]
        _add_product(running, chunks.writes_NHCK[n], columns(kept))
    read = per_value_head(reads_NHCK @ received.flatten(-2), R)
    return (chunks.scores_NHRCC @ u_NHRCV).addcmul_(read, read_NHRC1)


def chunks_backward(
    chunks: Chunks, pieces: list[Piece], received: Tensor, d_state: Tensor, d_out_NHRCV: Tensor
) -> ChunkGradients:
    """Compute the gradients of a block and update `d_state` `[documents, H, K, R, V]` in place."""
    v, R = chunks.v_NHRCV, chunks.v_NHRCV.shape[2]
    beta_NHRC1 = -chunks.row_NHRD1[..., CHUNK:, :]
    # Recompute the forward pass of all chunks at once from the states that they received.
    recalled = per_value_head(chunks.reads_NHDK @ received.flatten(-2), R)
    recall_NHRC1 = None if chunks.read_NHRD1 is None else chunks.read_NHRD1[..., CHUNK:, :]
    error = v - _times(recalled[..., CHUNK:, :], recall_NHRC1)
    u = chunks.inverse_NHRCC @ (error * beta_NHRC1)

    # From here on the rows of o and of x are stacked: one product for both.
    d_rows = v.new_empty(*v.shape[:3], 2 * CHUNK, v.shape[-1])
    d_rows[..., :CHUNK, :] = d_out_NHRCV
    d_read, d_kept, d_after = _run_backward(chunks, pieces, d_state, d_rows)
    d_x = d_rows[..., CHUNK:, :]
    d_pairs = (d_rows @ u.mT).unflatten(3, (2, CHUNK)).tril_()
    d_pairs[:, :, :, 1].diagonal(dim1=-2, dim2=-1).zero_()
    dbeta = (d_x * error).sum(-1) - (d_pairs[:, :, :, 1] * chunks.pairs_NHRDC[..., CHUNK:, :]).sum(-1)
    kept_NHCW = columns(_times(u, chunks.write_NHRC1))
    return ChunkGradients(
        u_NHRCV=u,
        recalled_NHRDV=recalled,
        d_read_NHDW=d_read,
        d_reads_NHDK=d_read @ received.flatten(-2).mT,
        d_kept_NHCW=d_kept,
        d_writes_NHCK=kept_NHCW @ d_after.flatten(-2).mT,
        d_forget=(received * d_after).sum(-1) * chunks.forget.squeeze(-1),
        d_pairs_NHRDC=d_pairs.flatten(3, 4).mul_(chunks.row_NHRD1),
        dv_NHRCV=d_x * beta_NHRC1,
        dbeta_NHRC=dbeta,
    )


def _run_backward(
    chunks: Chunks, pieces: list[Piece], d_state: Tensor, d_rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the recurrence backward: update `d_state` in place and write the gradients of `x` to `d_rows`.

    Returns:
        The gradients of the products with the state, `[N, H, D, W]`, of the values that are written to it,
        `[N, H, C, W]`, and of the state that each chunk passes on, `[N, H, K, R, V]`.
    """
    writes_NHCK, write_NHRC1 = chunks.writes_NHCK, chunks.write_NHRC1
    d_o, d_x = d_rows.split(CHUNK, 3)
    count, heads, R, _, V = d_o.shape
    d_u = chunks.scores_NHRCC.mT @ d_o
    factor_NHRD1 = _times(chunks.row_NHRD1, chunks.read_NHRD1)
    d_read = d_o.new_empty(count, heads, 2 * CHUNK, R * V)
    d_read_NHRDV = per_value_head(d_read, R)
    torch.mul(d_o, factor_NHRD1[..., :CHUNK, :], out=d_read_NHRDV[..., :CHUNK, :])
    d_kept = d_o.new_empty(count, heads, CHUNK, R * V)
    d_after = d_o.new_empty(count, *d_state.shape[1:])
    for piece in reversed(pieces):
        n = slice(piece.first, piece.last)
        running = d_state[piece.low : piece.high]
        d_after[n] = running
        torch.matmul(writes_NHCK[n], running.flatten(-2), out=d_kept[n])
        d_kept_NHRCV = per_value_head(d_kept[n], R)
        d_u[n] += d_kept_NHRCV if write_NHRC1 is None else d_kept_NHRCV * write_NHRC1[n]
        d_x[n] = chunks.inverse_NHRCC[n].mT @ d_u[n]
        torch.mul(d_x[n], factor_NHRD1[n, ..., CHUNK:, :], out=d_read_NHRDV[n, ..., CHUNK:, :])
        running *= chunks.forget[n]
        _add_product(running, chunks.reads_NHDK[n], d_read[n])
    return d_read, d_kept, d_after
