"""Score statistics by their definition, row by row and key by key, in float64."""

import numpy as np

from iaj_kernels.score_stats.config import RowStats, Status


def statistics(
    z: np.ndarray,
    mask: np.ndarray,
    *,
    bias: float = 0.0,
    target: np.ndarray | None = None,
    degrees: tuple[float, ...] = (2, 4, 8, 16),
    cap: float = np.inf,
) -> RowStats:
    """Those of rows of scores `z[..., S]`; `mask` is true where a key is visible."""
    z, rows = np.asarray(z, np.float64), z.shape[:-1]
    if target is not None:
        target = np.broadcast_to(target, rows)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        results = [
            _row(
                z[row],
                mask[row] & (z[row] != -np.inf),
                np.float64(bias),
                None if target is None else int(target[row]),
                degrees,
                cap,
            )
            for row in np.ndindex(rows)
        ]
    fields = (np.array(x).reshape(rows + np.shape(x[0])) for x in zip(*results, strict=True))
    stats = RowStats(*fields)
    whole = {name: getattr(stats, name).astype(np.int32) for name in ("active", "argmax", "status")}
    return stats._replace(**whole)


def _row(z, kept, bias, target, degrees, cap) -> RowStats:
    keys = np.flatnonzero(kept)
    nothing = RowStats([np.inf] * len(degrees), [0.0] * len(degrees), 0, 0, 0, -1, 0, 0, 0)
    if not keys.size:
        return nothing._replace(status=Status.EMPTY)
    outside = target is not None and not 0 <= target < len(z)
    if outside or not all(z[j] + bias < np.inf for j in keys):
        return nothing._replace(status=Status.INVALID)
    top = next(j for j in keys if z[j] == z[keys].max())
    star = top if target is None else target
    distractors = [j for j in keys if j != star]
    z_star = z[star] if kept[star] else -np.inf
    row = nothing._replace(
        status=Status.DEAD,
        margin=z_star - max((z[j] for j in distractors), default=-np.inf),
        argmax=top,
        u_star=z_star + bias,
    )
    weights = {j: min(max(z[j] + bias, 0.0), cap) for j in keys}
    r_star = weights.get(star, 0.0)
    if r_star == 0:
        return row
    s_p = np.array([sum((weights[j] / r_star) ** p for j in distractors) for p in degrees])
    return row._replace(
        s_p=s_p,
        target_mass=1 / (1 + s_p),
        relative_margin=row.margin / row.u_star,
        active=sum(weights[j] > 0 for j in distractors),
        status=Status.SATURATED if row.u_star >= cap else Status.ACTIVE,
        r_star=r_star,
    )
