"""AdaShift: Adam whose second moment is of gradients that are keep_num steps old."""

from optgen.lang import amax, flag, hyper, maximum, nonneg, optimizer, sqrt, state, tensor_state, where


@optimizer(cite="Zhou et al. 2019, arXiv:1810.00143", name="AdaShift")
def adashift(
    p, g, t,
    past1=state(), past2=state(), past3=state(), past4=state(), past5=state(),
    past6=state(), past7=state(), past8=state(), past9=state(), past10=state(),
    exp_avg_sq=state(nonneg, when="not reduce_max"),
    exp_avg_max=tensor_state(nonneg, when="reduce_max"),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1, doc="the weight of older gradients, and the decay of the average of squares"),
    keep_num=hyper(10, ge=1, le=10, whole=True, doc="the number of gradients that are kept"),
    eps=hyper(1e-10, gt=0),
    reduce_max=flag(True, doc="one second moment per tensor, of the largest square"),
):  # fmt: skip
    """The mean of the last keep_num gradients, weighted by powers of beta1, over the root of the one before them.

    Of that one reduce_max takes the largest square of a tensor.  The first keep_num steps fill the queue and move
    nothing.
    """
    beta1, beta2 = betas
    past = [past1, past2, past3, past4, past5, past6, past7, past8, past9, past10]
    mean, total, oldest = g, 1.0, past1
    for k, x in enumerate(past[:-1], 1):
        weight = where(keep_num > k, beta1**k, 0.0)
        mean, total, oldest = mean + weight * x, total + weight, where(keep_num > k, past[k], oldest)
    full = t > keep_num
    share = where(full, 1 - beta2, 0.0)
    if reduce_max:
        exp_avg_max = (1 - share) * exp_avg_max + share * amax(abs(oldest)) ** 2
    else:
        exp_avg_sq = (1 - share) * exp_avg_sq + share * oldest * oldest
    second = (exp_avg_max if reduce_max else exp_avg_sq) / (1 - beta2 ** maximum(t - keep_num, 1.0))
    p = where(full, p - lr / total * mean / (sqrt(second) + eps), p)
    past1, past2, past3, past4, past5, past6, past7, past8, past9, past10 = g, *past[:-1]
    return (
        p, past1, past2, past3, past4, past5, past6, past7, past8, past9, past10, exp_avg_sq, exp_avg_max,
    )  # fmt: skip
