"""Dion2: Muon of the momentum's largest rows, which alone lose what is applied of them; AdamW for the rest."""

from optgen.lang import (
    columns, flag, hyper, newton_schulz, nonneg, optimizer, policies, rows, shape_flag, sqrt, state, top_rows,
)  # fmt: skip

EXPRESS = (
    (8.156554524902461 / 1.02, -22.48329292557795 / 1.02**3, 15.878769915207462 / 1.02**5),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Polar Express (Amsel et al. 2025, arXiv:2505.16932) as Dion2's authors have it: of x / 1.02 in the first round."""


@optimizer(cite="Ahn et al. 2025, arXiv:2512.16928, algorithm 1, as the authors' code has it", matrix="heads")
def dion2(
    p, g, t,
    momentum_buffer=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg, when="not matrix or adamw"),
    *,
    lr=hyper(0.01, ge=0),
    fraction=hyper(0.25, gt=0, le=1, doc="the fraction of rows (or columns) that a step takes"),
    ef_decay=hyper(0.95, ge=0, lt=1, doc="the part of taken rows' momentum that stays"),
    betas=hyper((0.9, 0.95), ge=0, lt=1, doc="the betas of parameters that AdamW steps"),
    weight_decay=hyper(0.01, ge=0),
    eps=hyper(1e-8, gt=0),
    ns_coefficients=hyper(EXPRESS, series=True),
    ns_steps=hyper(5, ge=1, lt=100, rounds_of="ns_coefficients", whole=True),
    adamw=flag(False),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
):
    """Dion2: Muon of the momentum's largest rows, which alone lose what is applied of them; AdamW for the rest.

    A step takes a fraction of the rows of each matrix, or of its columns where there are fewer: those with the largest
    sums of magnitudes.  They are made orthogonal by themselves, and their momentum decays by ef_decay; that of the
    others grows until they are taken.  Groups with adamw=True (embeddings, the head) and vectors have AdamW, of the
    same lr.  `blocks` and ns_coefficients are those of Muon.
    """
    if adamw or not matrix:
        p, momentum_buffer, exp_avg_sq = policies.adamw_step(
            p, g, t, momentum_buffer, exp_avg_sq, lr, betas, eps, weight_decay
        )
        return p, momentum_buffer, exp_avg_sq
    full = momentum_buffer + g
    taken = top_rows(full, fraction)
    step = newton_schulz(taken, ns_steps, ns_coefficients, eps, part=fraction)
    momentum_buffer = full - (1 - ef_decay) * taken
    p = policies.decoupled(p, lr, weight_decay)
    p = p - lr * sqrt(rows(p) / columns(p)) * step
    return p, momentum_buffer, exp_avg_sq
