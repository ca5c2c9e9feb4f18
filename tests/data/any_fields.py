"""Records with other fields than pairs have, and features that read these fields."""

from jaxir.core.features import Key, Numbers, Tokens

FEATURES = {
    "ids": Tokens("text", 8, prompt="say "),
    "key": Key("text"),
    "weight": Numbers("weight"),
    "other_ids": Tokens("others", 8, prompt="say ", count=2, among="text"),
    "other_key": Key("others", 2),
    "other_scores": Numbers("scores", 2),
}


def records(count=9):
    for i in range(count):
        others = [(f"o{i}-{j}", f"another {i} {j}") for j in range(2 + i % 3)]
        yield {
            "text": (f"t{i}", f"a text {i}"),
            "weight": i / 4,
            "others": others,
            "scores": [10.0 * i + j for j in range(len(others))],
            "unread": object(),
        }
