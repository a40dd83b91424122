"""The wrappers: functions that make a rule of any rule.

from optgen.lang import cautious, ema
from specs.adamw import adamw

ema_cautious_adamw = ema(cautious(adamw))
"""

from __future__ import annotations

from optgen.base.errors import UserError
from optgen.lang.compose import wrapper
from optgen.lang.declare import flag, hyper, input, model_state, nonneg, scalar, shape_flag, state, tensor_state
from optgen.lang.optimizer import optimizer
from optgen.lang.policies import decayed
from optgen.lang.reductions import dot, mean, model_dot, model_norm, norm, row_mean, row_sum
from optgen.lang.values import clip, floor, maximum, minimum, sign, sqrt, where

# -- the gradient


@wrapper(cite="Pascanu et al. 2013, arXiv:1211.5063")
def clipped(
    rule, p, g, *,
    max_norm=hyper(1.0, gt=0, doc="the norm over all parameters that gradients are clipped to"),
):
    """A rule with gradients clipped by their norm over all parameters: g * min(1, max_norm / (norm + 1e-6)).

    clip_grad_norm_ does so, but here the gradients in memory stay as they are.
    """
    return rule(p, g * minimum(1.0, max_norm / (model_norm(g) + 1e-6)))


@wrapper(cite="Mikolov 2012, Statistical language models based on neural networks")
def clipped_value(
    rule, p, g, *,
    max_value=hyper(1.0, gt=0, doc="the largest magnitude of an element"),
):
    """A rule with every element of the gradients clipped to max_value, as clip_grad_value_ does."""
    return rule(p, clip(g, -max_value, max_value))


@wrapper(cite="Brock et al. 2021, arXiv:2102.06171", matrix="first")
def agc(
    rule, p, g, *,
    agc_clip=hyper(0.01, gt=0, doc="the largest norm of a gradient, relative to its weights'"),
    agc_eps=hyper(1e-3, gt=0, doc="the least norm of weights"),
    of_rows=shape_flag(lambda shape: len(shape) >= 2),
):  # fmt: skip
    """A rule with the gradient of each row, or of a vector, clipped to agc_clip times the norm of its weights (AGC).

    That norm counts as agc_eps at least.
    """
    size, of_weight = (sqrt(row_sum(x * x)) if of_rows else norm(x) for x in (g, p))
    return rule(p, g * minimum(1.0, agc_clip * maximum(of_weight, agc_eps) / maximum(size, 1e-6)))


@wrapper(cite="Wang et al. 2025, arXiv:2502.11034")
def adagc(
    rule, p, g, t, norm_avg=tensor_state(nonneg), *,
    agc_beta=hyper(0.98, ge=0, lt=1, doc="the decay of the average norm"),
    lambda_abs=hyper(1.0, gt=0, doc="the norm that gradients are clipped to at first"),
    lambda_rel=hyper(1.05, gt=0, doc="the largest norm, relative to the average"),
    agc_steps=hyper(100, ge=1, doc="steps before the average counts"),
):  # fmt: skip
    """A rule with each tensor's gradient clipped to lambda_rel times the average norm of its clipped ones (AdaGC).

    Before step agc_steps gradients are clipped to a norm of lambda_abs over all parameters instead, and norm_avg is the
    smallest so far.
    """
    size, begins = norm(g), t < agc_steps
    early = minimum(lambda_abs / (model_norm(g) + 1e-8), 1.0)
    late = minimum(lambda_rel * maximum(norm_avg, 1e-8) / maximum(size, 1e-8), 1.0)
    factor = where(begins, early, late)
    smallest = minimum(where(t > 1, norm_avg, factor * size), factor * size)
    norm_avg = where(begins, smallest, agc_beta * norm_avg + (1 - agc_beta) * factor * size)
    return rule(p, factor * g), norm_avg


@wrapper(cite="Kumar et al. 2025, arXiv:2504.02507")
def zclip(
    rule, p, g, counted=model_state(nonneg), norm_mean=model_state(nonneg), norm_var=model_state(nonneg), *,
    zclip_alpha=hyper(0.97, ge=0, lt=1, doc="the decay of the norm's mean and variance"),
    z_thresh=hyper(2.5, gt=0, doc="the deviations above which a norm is an outlier"),
    zclip_steps=hyper(25, ge=1, doc="steps that only measure"),
):  # fmt: skip
    """A rule with gradients clipped where their norm z over all parameters is an outlier (ZClip).

    A norm more than z_thresh deviations above the mean becomes mean + z_thresh^2 / z deviations.  Mean and variance are
    those of the first zclip_steps norms, which are not clipped, and then averages of the clipped norms.
    """
    size = model_norm(g)
    counted = minimum(counted + 1, zclip_steps + 1)
    first = counted <= zclip_steps
    deviation = sqrt(norm_var)
    z = (size - norm_mean) / (deviation + 1e-6)
    outlier = norm_mean + z_thresh * z_thresh / maximum(z, z_thresh) * deviation
    kept = where(first, size, where(z > z_thresh, outlier, size))
    share = where(first, 1 / counted, 1 - zclip_alpha)
    gap = kept - norm_mean
    norm_mean = norm_mean + share * gap
    norm_var = (1 - share) * norm_var + share * where(first, gap, kept - norm_mean) * (kept - norm_mean)
    return rule(p, g * minimum(1.0, kept / (size + 1e-6))), counted, norm_mean, norm_var


@wrapper(cite="Yuan et al. 2024, arXiv:2411.10438, approximate", needs=("betas or momentum",))
def mars(
    rule, p, g, t, last_grad=state(), *,
    gamma=hyper(0.025, ge=0, doc="the weight of the gradient's change"),
):
    """A rule of c = g + gamma * beta / (1 - beta) * (g - last g), shortened to length 1 where it is longer (MARS).

    beta is the first of the rule's betas, or its momentum.
    """
    beta = rule.option("betas or momentum")
    change = where(t > 1, g - last_grad, 0.0)
    c = g + gamma * beta / (1 - beta) * change
    return rule(p, c / maximum(norm(c), 1.0)), g


@wrapper(cite="Prieto et al. 2025, arXiv:2501.04697")
def orthograd(rule, p, g):
    """A rule along the gradient's part at right angles to the weight, stretched to the gradient's own length.

    A part below 1e-5 of the gradient is rounding noise and counts as none.
    """
    radial = dot(p, g) / (dot(p, p) + 1e-30)
    tangent = g - radial * p
    g_norm, tangent_norm = norm(g), norm(tangent)
    return rule(p, where(tangent_norm > 1e-5 * g_norm, g_norm / tangent_norm, 0.0) * tangent)


@wrapper(cite="Yong et al. 2020, arXiv:2004.01461", matrix="first")
def centralized(rule, p, g, *, of_rows=shape_flag(lambda shape: len(shape) >= 2)):
    """A rule of gradients less the mean of their row, which is the weights of an output (gradient centralization).

    Vectors have no rows.
    """
    return rule(p, g - row_mean(g) if of_rows else g)


@wrapper(cite="Huang et al. 2025, arXiv:2501.06842", needs=("exp_avg_sq", "lr"))
def spam_reset(
    rule, p, g, t, *,
    spam_threshold=hyper(5000.0, gt=0, doc="the square, in units of the second moment, that is clipped"),
    spam_k=hyper(500, ge=1, doc="steps between two resets"),
    spam_warmup=hyper(150, ge=1, doc="steps over which the rate rises after a reset"),
    spam_after=hyper(20, ge=1, doc="steps after a reset without clipping"),
):  # fmt: skip
    """A rule that begins anew every spam_k steps, with spikes of the gradient clipped (SPAM).

    An element whose square is above spam_threshold times exp_avg_sq gets that size, but for the first spam_after steps.
    After each new beginning the learning rate rises for spam_warmup steps as 3 x^2 - 2 x^3, within .01 of the paper's
    half cosine; at first it does not.
    States that do not start at a number stay.
    """
    since = t - spam_k * floor((t - 1) / spam_k)
    anew = (since <= 1) & (t > 1)
    for s in rule.spec.kept:
        x = rule.states[s.name]
        if isinstance(s.init, float) and rule.spec.holds(s.when, rule.options):
            rule.states[s.name] = where(anew, s.init, x)
    limit = sqrt(spam_threshold * rule.states["exp_avg_sq"])
    g = where((since > spam_after) & (abs(g) > limit), sign(g) * limit, g)
    rises = where(t > spam_k, minimum(since / spam_warmup, 1.0), 1.0)
    wave = rises * rises * (3 - 2 * rises)
    return rule(p, g, t=since, lr=rule.options["lr"] * wave)


# -- the step


@wrapper(cite="Liang et al. 2024, arXiv:2411.16085, algorithm 2")
def cautious(rule, p, g):
    """A rule masked by the agreement of its step and the gradient; the rest grows by the inverse of its share.

    It grows at most 1000 times.
    """
    before, step = rule.split(p, g)
    agrees = where(sign(step) * sign(g) > 0, 1.0, 0.0)
    return before - agrees / maximum(mean(agrees), 1e-3) * step


@wrapper(cite="Cao, Li & Song 2024, arXiv:2412.17107")
def grams(rule, p, g):
    """A rule whose step has the gradient's sign: each weight moves against it, as far as the step would (Grams)."""
    before, step = rule.split(p, g)
    return before - sign(g) * abs(step)


@wrapper(cite="Chen et al. 2025, arXiv:2510.12402", needs=("weight_decay",))
def cautious_decay(rule, p, g):
    """A rule whose decoupled weight decay spares the weights that it points against the step for."""
    before, step = rule.split(p, g)
    if before is p:
        what = f"cautious_decay is for decoupled weight decay, and {rule.spec.name} has none"
        raise UserError("E113", loc=rule.spec.loc, what=what, hint="adamw has, sgd and the default of adam have not")
    return decayed(p, where(sign(step) * sign(p) >= 0, before, p)) - step


@wrapper(cite="Wen et al. 2026, arXiv:2606.16899", needs=("lr",))
def hyperball(rule, p, g, t, radius=tensor_state(nonneg), *, on_sphere=shape_flag(lambda shape: len(shape) >= 2)):
    """A rule that keeps the norm R of a matrix: p = R normalize(p - lr R normalize(step)) (Hyperball).

    R is the norm before the first step.  Vectors take the rule's own step.  A matrix of zeros stays one.
    """
    if not on_sphere:
        return rule(p, g), radius
    radius = where(t > 1, radius, norm(p))
    before, step = rule.split(p, g)
    length = maximum(norm(step), 1e-12)
    far = rule.options["lr"] * radius / length
    # The norm of what moved, of sums that are known before anything moves: two passes over memory, not three.
    square = dot(before, before) - 2 * far * dot(before, step) + far * far * length * length
    return radius / sqrt(maximum(square, 1e-24)) * (before - far * step), radius


# -- the weights


@wrapper(cite="Zhang et al. 2019, arXiv:1907.08610")
def lookahead(
    rule, p, g, slow=state(init="param"), *,
    lookahead_k=hyper(5, ge=1, doc="steps between two steps of the slow weights"),
    alpha=hyper(0.5, ge=0, le=1, doc="the part of the way to the weights that the slow ones go"),
    sync=flag(every="lookahead_k"),
):  # fmt: skip
    """Lookahead around a rule: every lookahead_k steps slow weights go alpha of the way to p, and p begins again there.

    The slow weights are a state, stored under the plan's format for states that start as the weight; the steps in
    between neither read nor write it.  (Algorithm 1.)
    """
    p = rule(p, g)
    if sync:
        slow = slow + alpha * (p - slow)
        p = slow
    return p, slow


@wrapper(cite="Kallusky et al. 2025, arXiv:2510.15830")
def snoo(
    rule, p, g, slow=state(init="param"), outer_momentum=state(), *,
    snoo_k=hyper(20, ge=1, doc="steps between two steps of the slow weights"),
    snoo_rate=hyper(0.8, ge=0, doc="their learning rate"),
    snoo_mu=hyper(0.5, ge=0, lt=1, doc="the decay of their momentum"),
    sync=flag(every="snoo_k"),
):  # fmt: skip
    """SNOO around a rule: every snoo_k steps slow weights take a step of Nesterov's momentum, and p begins again there.

    The step's gradient is their distance from p.
    """
    p = rule(p, g)
    if sync:
        outer_momentum = snoo_mu * outer_momentum + (slow - p)
        slow = slow - snoo_rate * (slow - p + snoo_mu * outer_momentum)
        p = slow
    return p, slow, outer_momentum


def average_with(p, ema_average, ema_keep):
    """The average of the weights up to p."""
    return p + ema_keep * (ema_average - p)


@wrapper(cite="Polyak & Juditsky 1992, SIAM J. Control Optim. 30", evaluate=average_with)
def ema(
    rule, p, g, t, ema_average=state(init="param"), ema_keep=scalar(0.0), *,
    ema_decay=hyper(0.999, ge=0, lt=1, doc="the decay of the average of weights"),
    ema_start=hyper(0, ge=0, doc="the step after which it begins"),
):  # fmt: skip
    """A rule whose model is evaluated with an exponential average of its weights.

    The first weights averaged are those after step ema_start + 1.  They are taken in when the next step begins, or the
    model is evaluated, and so as they are then: clipped, masked or set since.
    """
    ema_average = average_with(p, ema_average, ema_keep)
    return rule(p, g), ema_average, where(t > ema_start + 1, ema_decay, 0.0)


@wrapper(cite="Izmailov et al. 2018, arXiv:1803.05407", evaluate=average_with)
def averaged(
    rule, p, g, t, ema_average=state(init="param"), ema_keep=scalar(0.0), *,
    average_start=hyper(0, ge=0, doc="the step after which weights are averaged"),
):  # fmt: skip
    """A rule whose model is evaluated with the mean of its weights after step average_start, taken in as by `ema`."""
    ema_average = average_with(p, ema_average, ema_keep)
    return rule(p, g), ema_average, 1 - 1 / maximum(t - average_start, 1.0)


def _primal(rule, p, g, offset, c, beta, **changed):
    """(y, z - y) after a step of the rule from z, where x goes c of the way to z and y = beta x + (1 - beta) z."""
    z = p + offset
    before, step = rule.split(z, g, **changed)
    change = -step if before is z else before - z - step
    return p + c * offset + (1 - beta * (1 - c)) * change, (1 - c) * (offset + beta * change)


def schedule_free_weights(p, z_offset, *, sf_beta):
    """x from y and z - y."""
    return p + (1 - 1 / sf_beta) * z_offset


@wrapper(cite="Defazio et al. 2024, arXiv:2405.15682", needs=("lr",), evaluate=schedule_free_weights)
def schedule_free(
    rule, p, g, t, z_offset=state(), weight_sum=scalar(0.0), lr_max=scalar(0.0), *,
    sf_beta=hyper(0.9, gt=0, lt=1, doc="the interpolation of gradients' place"),
    warmup_steps=hyper(0, ge=0, doc="steps over which the rate rises"),
    r=hyper(0.0, ge=0, doc="the power of t that weighs the average"),
    weight_lr_power=hyper(2.0, ge=0, doc="the power of the largest rate that weighs the average"),
):  # fmt: skip
    """Schedule-Free around a rule: no decay of the learning rate; a model is evaluated with an average of its weights.

    The rule steps from z, whose distance from p is the state.  Momentum of its own stays: betas=(0.0, ...) is none.
    """
    rate = rule.options["lr"] * minimum(1.0, t / maximum(warmup_steps, 1.0))
    lr_max = maximum(lr_max, rate)
    weight = t**r * lr_max**weight_lr_power
    weight_sum = weight_sum + weight
    p, z_offset = _primal(rule, p, g, z_offset, weight / maximum(weight_sum, 1e-300), sf_beta, lr=rate)
    return p, z_offset, weight_sum, lr_max


def gpa_weights(p, z_offset, *, mu_y):
    """x from y and z - y."""
    return p + (1 - 1 / mu_y) * z_offset


@wrapper(cite="Defazio et al. 2025, arXiv:2512.17131", evaluate=gpa_weights)
def gpa(
    rule, p, g, z_offset=state(), *,
    mu_x=hyper(0.99, ge=0, lt=1, doc="the decay of the average of weights"),
    mu_y=hyper(0.9, gt=0, lt=1, doc="the interpolation of gradients' place"),
):
    """Generalized primal averaging around a rule, whose gradients are taken at y = mu_y x + (1 - mu_y) z.

    The rule steps from z; x, the weights to evaluate with, keep mu_x of themselves and take the rest of z.
    """
    return _primal(rule, p, g, z_offset, 1 - mu_x, mu_y)


def nesterov_weights(p, change_avg, *, ahead):
    """The weights without what they are ahead."""
    return p - ahead * change_avg


@wrapper(cite="modded-nanogpt, record 46 of track 3", evaluate=nesterov_weights)
def ema_nesterov(
    rule, p, g, change_avg=state(), went=scalar(0.0), *,
    ahead=hyper(0.3, ge=0, doc="how far ahead gradients are taken, in average changes"),
    ahead_beta=hyper(0.99, ge=0, lt=1, doc="the decay of the average change"),
):  # fmt: skip
    """A rule whose gradients are taken `ahead` times an average of its changes further on (EMA-Nesterov)."""
    start = p - went * change_avg
    new = rule(start, g)
    change_avg = ahead_beta * change_avg + (1 - ahead_beta) * (new - start)
    return new + ahead * change_avg, change_avg, ahead


# -- two gradients

@optimizer(cite="Foret et al. 2021, arXiv:2010.01412")
def uphill(
    p, g, *,
    rho=hyper(0.05, ge=0, doc="the length of the first step, up the gradient"),
):
    """Weights that go rho along the gradient of all parameters, if its norm is a number."""
    size = model_norm(g)
    p = where(size < 3e38, p + rho * g / (size + 1e-12), p)
    return p


@optimizer(cite="Kwon et al. 2021, arXiv:2102.11600")
def adaptive_uphill(
    p, g, *,
    rho=hyper(0.5, ge=0, doc="the length of the first step, up the gradient"),
):
    """Weights that go rho along the gradient of all parameters, each by its square."""
    size = model_norm(p * g)
    p = where(size < 3e38, p + rho * p * p * g / (size + 1e-12), p)
    return p


@wrapper(cite="Foret et al. 2021, arXiv:2010.01412", ascent=uphill)
def sam(rule, p, g):
    """A rule of the gradient at weights that have been moved uphill by rho (SAM)."""
    return rule(p, g)


@wrapper(cite="Kwon et al. 2021, arXiv:2102.11600", ascent=adaptive_uphill)
def asam(rule, p, g):
    """A rule of the gradient at weights that have been moved uphill, each by its size (ASAM)."""
    return rule(p, g)


@wrapper(cite="Zhuang et al. 2022, arXiv:2203.08065", ascent=uphill)
def gsam(
    rule, p, g, first_grad=input(), *,
    alpha=hyper(0.4, ge=0, le=1, doc="the weight of the first gradient's other part"),
):
    """A rule of SAM's second gradient, less alpha of the first one's part at right angles to it (GSAM)."""
    along = model_dot(first_grad, g) / (model_dot(g, g) + 1e-12)
    return rule(p, where(abs(along) < 3e38, g - alpha * (first_grad - along * g), g))


# -- the learning rate


@wrapper(cite="Hägele et al. 2024, arXiv:2405.18392", needs=("lr",))
def warmed_up(
    rule, p, g, t, *,
    warmup_steps=hyper(1000, ge=0, doc="steps over which rates rise"),
    total_steps=hyper(0, ge=0, doc="the steps of the run"),
    cooldown_steps=hyper(0, ge=0, doc="last steps, over which rates fall to 0"),
):  # fmt: skip
    """A rule with learning rates that rise for warmup_steps and fall to 0 in the last cooldown_steps of total_steps.

    All that are called lr, end in _lr or are scheduled have the factor.  Without cooldown_steps they do not fall.
    """
    falls = clip((total_steps + 1 - t) / maximum(cooldown_steps, 1.0), 0.0, 1.0)
    factor = minimum(1.0, t / maximum(warmup_steps, 1.0)) * where(cooldown_steps > 0, falls, 1.0)
    rates = [h.name for h in rule.spec.hypers if h.name == "lr" or h.name.endswith("_lr") or h.scheduled]
    return rule(p, g, **{name: factor * rule.options[name] for name in rates})


__all__ = [
    "adagc", "agc", "asam", "averaged", "cautious", "cautious_decay", "centralized", "clipped", "clipped_value", "ema",
    "ema_nesterov", "gpa", "grams", "gsam", "hyperball", "lookahead", "mars", "orthograd", "sam", "schedule_free",
    "snoo", "spam_reset", "warmed_up", "zclip",
]  # fmt: skip
