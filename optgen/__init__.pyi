"""The types of what `optgen` imports when it is asked for."""

from optgen import optim as optim
from optgen.by_name import list_rules as list_rules
from optgen.by_name import make as make
from optgen.cast import cast_model as cast_model
from optgen.cast import fp8_weights as fp8_weights
from optgen.driver.compile import compile as compile
from optgen.driver.diagnose import diagnose as diagnose
from optgen.embedding import StableEmbedding as StableEmbedding
from optgen.runtime.files import load_checkpoint as load_checkpoint
from optgen.runtime.files import save_checkpoint as save_checkpoint
from optgen.runtime.records.fp32_modules import keep_states_fp32 as keep_states_fp32
from optgen.runtime.sharpness import SAM as SAM

__version__: str
list = list_rules
