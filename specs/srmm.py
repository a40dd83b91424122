"""SRMM: regularized majorization-minimization with a proximal surrogate."""

from optgen.lang import floor, hyper, optimizer, state, where


@optimizer(cite="Lyu 2022, arXiv:2201.01652", name="SRMM")
def srmm(
    p, g, t,
    mov_avg_grad=state(),
    *,
    lr=hyper(1e-2, ge=0),
    beta=hyper(0.5, ge=0, doc="the power by which newer gradients weigh less"),
    memory_length=hyper(100, ge=1, whole=True, doc="steps after which weights begin anew"),
):
    """SGD along an average of gradients whose newest weighs (t mod memory_length + 1)^-beta, the first one 1.

    The minimizer of the averaged surrogate is the average of the weights less lr times that of the gradients.  Since
    each weight is a minimizer, that average is the weight itself.
    """
    share = where(t > 1, (t - memory_length * floor(t / memory_length) + 1) ** (-beta), 1.0)
    mov_avg_grad = mov_avg_grad + share * (g - mov_avg_grad)
    p = p - lr * mov_avg_grad
    return p, mov_avg_grad
