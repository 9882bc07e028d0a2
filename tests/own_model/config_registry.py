from tests.own_model import flavors, model_registry
from titan_gdn.models.hybrid.config_registry import run_of


def trainer_config(flavor, **model):
    return run_of(model_registry(flavor, **model), flavors[flavor].run)
