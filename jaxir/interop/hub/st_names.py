"""What sentence-transformers calls its files: to find them on the hub no model need be known."""

MODULES = "modules.json"
CONFIG = "config_sentence_transformers.json"
# Of a Transformer, by what it held before all were named as BERT's: the first that says anything is read.
_ARCHITECTURES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
TRANSFORMER_CONFIGS = tuple(f"sentence_{name}_config.json" for name in _ARCHITECTURES)
