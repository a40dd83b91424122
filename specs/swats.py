"""SWATS: Adam, which changes to SGD once the rate of that is known."""

from optgen.lang import hyper, model_dot, model_state, nonneg, optimizer, sqrt, state, where
from optgen.lang.policies import l2


@optimizer(cite="Keskar & Socher 2017, arXiv:1712.07628, algorithm 1", name="SWATS")
def swats(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    rate_avg=model_state(),
    sgd_rate=model_state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-9, gt=0, doc="added to Adam's divisor, and the difference of rates at which SGD begins"),
    weight_decay=hyper(0.0, ge=0),
):
    """The rate is Adam's step squared over its product with the gradient, summed over the model, and averaged.

    Where the two differ by less than eps the momentum begins anew, and the average is SGD's rate from the next step on.
    eps is that of Adam's divisor too, as in the paper.
    """
    beta1, beta2 = betas
    g = l2(g, p, weight_decay)
    adam = sgd_rate <= 0
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    update = lr * sqrt(1 - beta2**t) / (1 - beta1**t) * exp_avg / (sqrt(exp_avg_sq) + eps)
    along = model_dot(update, g)
    meets = where(along > 0, along, where(along < 0, along, 1.0))
    rate = model_dot(update, update) / meets
    counts = adam & ((along > 0) | (along < 0))
    rate_avg = where(counts, beta2 * rate_avg + (1 - beta2) * rate, rate_avg)
    average = rate_avg / (1 - beta2**t)
    changes = counts & (t > 1) & (average > 0) & (abs(average - rate) < eps)
    p = p - where(adam, update, sgd_rate * exp_avg)
    exp_avg = where(changes, 0.0, exp_avg)
    sgd_rate = where(changes, average, sgd_rate)
    return p, exp_avg, exp_avg_sq, rate_avg, sgd_rate
