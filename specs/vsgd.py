"""VSGD: gradients as noisy observations of a true one, which is inferred."""

from optgen.lang import hyper, nonneg, optimizer, sqrt, state, where
from optgen.lang.policies import decoupled


@optimizer(cite="Chen et al. 2024, arXiv:2404.06549", name="VSGD")
def vsgd(
    p, g, t,
    mug=state(),
    bg=state(nonneg),
    bhg=state(nonneg),
    *,
    lr=hyper(0.1, ge=0),
    ghattg=hyper(30.0, gt=0, doc="the prior ratio of the variances of noise and gradient"),
    ps=hyper(1e-8, gt=0, doc="the prior's strength"),
    tau1=hyper(0.81, gt=0, le=1, doc="the power of t by which the true gradient's rate is learnt"),
    tau2=hyper(0.9, gt=0, le=1, doc="the power of t by which the observed gradient's rate is learnt"),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
):
    """Adam's form: the mean of the true gradient over the root of its second moment, by variational inference.

    bg and bhg are rates of Gamma posteriors of the precisions of the true and the observed gradient; ps is the prior's
    strength and ghattg the ratio of the two variances in it.
    """
    shape, prior = 2 * ps + 1 + 1e-4, 2 * ps
    p = decoupled(p, lr, weight_decay)
    own = where(t > 1, bg / shape, prior / (shape - 1))
    noise = where(t > 1, bhg / shape, ghattg * prior / (shape - 1))
    last = mug
    mug = (noise * last + own * g) / (own + noise)
    variance = own * noise / (own + noise)
    share1, share2 = t ** (-tau1), t ** (-tau2)
    bg = (1 - share1) * bg + share1 * (prior + variance + (mug - last) ** 2)
    bhg = (1 - share2) * bhg + share2 * (ghattg * prior + variance + (g - mug) ** 2)
    p = p - lr * mug / (sqrt(mug * mug + variance) + eps)
    return p, mug, bg, bhg
