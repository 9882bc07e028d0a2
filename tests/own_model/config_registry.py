from functools import partial

from tests.own_model import flavors, model_registry
from titan_gdn.models.hybrid import trainer_config_of

trainer_config = partial(trainer_config_of, flavors, model_registry)
