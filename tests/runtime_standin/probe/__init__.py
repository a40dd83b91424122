from optgen.runtime import Field, Variant

SMALL_NUMEL = 0
VARIANTS = (
    Variant(
        function="probe",
        param="float32",
        fields=(
            Field("visits", "int32"),
            Field("stream", "int32"),
            Field("seen", "int32", per=8),
            Field("x0", "float32"),
        ),
        scalars=("two", "tenth"),
        host=lambda step, grad_scale, **hypers: (2.0, 0.1),
        block=8,
        init={"x0": "param"},
    ),
)
