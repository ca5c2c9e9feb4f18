import contextlib
import inspect
import re

import gin
import pytest

from jaxir import cli
from jaxir.cli import gin_config
from jaxir.core.choices import Rules
from jaxir.core.errors import UserError
from jaxir.core.values import Positive, Share
from jaxir.train import train
from jaxir.training.evaluators import corpus_search


@Rules(one_of=("steps", "epochs"))
def job(
    *,
    output_dir: str = "",
    steps: int | None = None,
    epochs: float | None = None,
    every: int = 1,
    rate: float = 0.1,
    names: list[str] = (),
    warmup: int = 0,
    share: Share = 0.5,
    scale: Positive | None = None,
) -> dict:
    """Does a job."""
    return {k: v for k, v in locals().items() if k != "output_dir"}


def taking(names):
    """Returns a command with these parameters; the command returns the values that it gets."""

    def command(**values):
        return values

    kind = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return command


RECIPE = """
STEPS = 400
RATE = %SLOW
SLOW = 0.5
job.steps = %STEPS
job.warmup = %STEPS
job.rate = %RATE
job.epochs = None
"""


@pytest.fixture
def bind(tmp_path):
    def bind(*flags: str, recipe: str = RECIPE):
        """Returns the arguments that the command line gives `job`, and the gin text that records them."""
        path = tmp_path / "recipe.gin"
        path.write_text(recipe)
        bindings = [f.removeprefix("--gin.") for f in flags if f.startswith("--gin.")]
        parser = cli.build_parser(job, prog="job", example="")
        given = vars(parser.parse_args([f for f in flags if not f.startswith("--gin.")]))
        bound, _ = gin_config.bind(job, [str(path)], bindings, given)
        return bound(), gin_config.operative_config()

    return bind


@pytest.fixture
def train_recipe(tmp_path):
    def write(body: str) -> str:
        head = ["from __gin__ import dynamic_registration", "from jaxir import train"]
        head += [f"from jaxir.data.sets import {module}" for module in ("msmarco", "texts")]
        (tmp_path / "recipe.gin").write_text("\n".join([*head, body]))
        return str(tmp_path / "recipe.gin")

    return write


def test_flag_sets_the_macro_and_everything_bound_to_it(bind):
    values, config = bind("--steps=30")
    assert (values["steps"], values["warmup"]) == (30, 30)
    assert [line for line in config.splitlines() if line.startswith("STEPS =")] == ["STEPS = 30"]
    values, config = bind("--rate=2")
    assert values["rate"] == 2.0 and "RATE = 2.0" in config


def test_recorded_config_has_all_but_the_output_directory_and_repeats_the_run(bind):
    values, config = bind("--steps=30", "--every=7", "--gin.SLOW=0.25", "--names=a,b", "--output_dir=there")
    assert bind(recipe=config)[0] == values
    assert (values["names"], values["rate"], values["every"]) == (["a", "b"], 0.25, 7)
    assert "job.every = 7" in config and "there" not in config
    values, config = bind("--steps=30", "--warmup=3")
    assert (values["steps"], values["warmup"]) == (30, 3)
    assert "STEPS = 30" in config and "job.steps = %STEPS" in config and "job.warmup = 3" in config


def test_typed_setting_replaces_its_alternative_in_a_file(bind):
    values, config = bind("--epochs=2")
    assert (values["steps"], values["epochs"], values["warmup"]) == (None, 2, 400)
    assert bind(recipe=config)[0] == values
    assert bind("--gin.job.epochs=2")[0]["steps"] is None
    recipe = "job.epochs = %EPOCHS\nEPOCHS = 3\njob.steps = %STEPS\nSTEPS = None\n"
    assert [bind(flag, recipe=recipe)[0]["epochs"] for flag in ("--steps=5", "--gin.STEPS=5")] == [None, None]
    assert bind(recipe=recipe)[0]["epochs"] == 3
    assert "job.epochs = None" in bind("--steps=5", recipe=recipe)[1]


TWICE = "is given twice, by {} and by {}; keep one of them"
UNUSED = "a macro a value, but nothing uses the macro"
ITSELF = "refers to itself ({}): set it to a value"
REFUSED = [
    # flags, lines of the recipe, and the error message
    ("--steps=30 --gin.STEPS=40", "", "steps " + TWICE.format("--steps", "--gin.STEPS")),
    ("--steps=30 --gin.job.steps=40", "", "steps " + TWICE.format("--steps", "--gin.job.steps")),
    ("--rate=1 --gin.SLOW=2", "", "rate " + TWICE.format("--rate", "--gin.SLOW")),
    ("--every=1 --gin.job.every=2", "", "every " + TWICE.format("--every", "--gin.job.every")),
    ("--every=1 --gin.EVERY=2", "", "every " + TWICE.format("--every", "--gin.EVERY")),
    ("", "STESP = 3", "STESP is set but nothing uses it; did you mean 'STEPS'?"),
    ("", "BATCHSIZE = 3", "BATCHSIZE is set but nothing uses it; did you mean 'BATCH_SIZE'?"),
    ("--gin.STEP=3", "", "STEP is set but nothing uses it; did you mean 'STEPS'?"),
    # A macro of gin/ that this recipe does not use.
    ("--gin.SAME_TOWER=3", "", "SAME_TOWER is set but nothing uses it"),
    ("", "default/SLO = 0.5", f"default/SLO gives {UNUSED}; did you mean 'SLOW'?"),
    ("", "job.names = %A\nA = %B\nB = %C\nC = %A", f"macro A {ITSELF.format('A -> B -> C -> A')}"),
    ("", "job.names = %A\nA = [1, (%B,)]\nB = {'x': %A}", f"macro A {ITSELF.format('A -> B -> A')}"),
    ("--gin.EVERY=often", "", "EVERY must be a whole number, not 'often'"),
    ("--gin.job.every=1.5", "", "job.every must be a whole number, not 1.5"),
    ("--gin.job.rate=1e999", "", "job.rate must be a number, not inf"),
    ("--gin.job.names=['a',3]", "", "job.names must be a list, each text, not ['a', 3]"),
    ("--gin.job.names=['a',%STEPS]", "", "job.names must be a list, each text, not ['a', 400]"),
    ("--gin.job.share=1.5", "", "job.share must be a number from 0 to 1, not 1.5"),
    ("--gin.job.scale=0", "", "job.scale must be a number above 0 or None, not 0"),
]


@pytest.mark.parametrize(("flags", "lines", "sentence"), REFUSED)
def test_refusals(bind, flags, lines, sentence):
    with pytest.raises(UserError) as raised:
        bind(*flags.split(), recipe=f"{RECIPE}{lines}\n")
    assert re.sub(r"^\S+recipe.gin:\d+: ", "", str(raised.value)) == sentence


def test_short_name_in_a_file_comes_after_bindings_and_before_what_is_typed(bind):
    recipe = "EVERY = 5\njob.every = 2\n"
    assert bind(recipe=recipe)[0]["every"] == 5
    for typed in ("--every=7", "--gin.EVERY=7", "--gin.job.every=7"):
        values, config = bind(typed, recipe=recipe)
        assert values["every"] == 7 and "job.every = 7" in config and "EVERY" not in config


def test_default_of_a_macro_yields_to_every_other_value(bind):
    piece = "default/STEPS = 9\njob.steps = %STEPS\n"
    assert bind(recipe=piece)[0]["steps"] == 9
    assert bind("--gin.STEPS=8", recipe=piece)[0]["steps"] == 8
    assert bind("--steps=7", recipe=piece)[0]["steps"] == 7
    assert bind(recipe=f"STEPS = 6\n{piece}")[0]["steps"] == 6
    assert "default/" not in bind(recipe=piece)[1]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("MARGIN = 3", "warning: MARGIN is set but nothing uses it"),
        ("SAME_TOWER = 'both'", "warning: SAME_TOWER is set but nothing uses it"),
        # gin/ has a macro MIN_STEPS, so this is only a warning; a misspelt STEPS would be an error.
        ("MIN_STEPS = 3", "warning: MIN_STEPS is set but nothing uses it; did you mean 'STEPS'?"),
    ],
)
def test_unused_macro_is_a_warning_and_not_recorded(bind, capsys, line, sentence):
    _, config = bind(recipe=f"{RECIPE}{line}\n")
    assert sentence in capsys.readouterr().err.splitlines()
    assert line.split()[0] not in config
    bind(recipe=config)
    assert not capsys.readouterr().err


def test_macro_that_a_flag_made_unused_is_no_warning(bind, capsys):
    recipe = "NAME = 'b'\njob.names = ['a', %NAME]\n"
    assert bind("--names=c", recipe=recipe)[0]["names"] == ["c"]
    assert not capsys.readouterr().err
    with pytest.raises(UserError, match="NAME is set but nothing reads it"):
        bind("--names=c", "--gin.NAME=d", recipe=recipe)


def test_macros_of_unread_parameters_need_no_value(tmp_path):
    recipe = tmp_path / "open.gin"
    lines = [f"{name} = %gin.REQUIRED" for name in ("default/DATA", "STEPS")]
    recipe.write_text("\n".join([*lines, "job.steps = %STEPS", "job.names = [%DATA]", "job.rate = 2.0"]))

    def arguments(only, flags=None, *typed):
        command = taking(only)
        return gin_config.bind(job, [str(recipe)], typed, flags or {}, command=command)[0]()

    assert arguments(["rate"]) == {"rate": 2.0}
    assert arguments(["steps", "rate"], {"steps": 3}) == {"rate": 2.0, "steps": 3}
    assert arguments(["rate", "elsewhere"], {"elsewhere": 7}) == {"rate": 2.0, "elsewhere": 7}
    assert arguments(["names"], None, "DATA=here") == {"names": ["here"]}
    assert arguments(["rate"], None, "DATA=typed in vain, but right") == {"rate": 2.0}
    for only, name in ((["steps"], "STEPS"), (["names", "rate"], "DATA")):
        with pytest.raises(UserError, match=f"^{name} must be set: --{name.lower()}=...$"):
            arguments(only)


def test_gin_file_that_includes_itself_is_refused(bind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gin").write_text("include 'b.gin'\njob.every = 2\n")
    (tmp_path / "b.gin").write_text('# a piece\ninclude "./a.gin"\n')
    with pytest.raises(UserError, match=r"^b.gin includes a.gin, which includes it"):
        bind(recipe="include 'a.gin'\n")
    (tmp_path / "b.gin").write_text("job.warmup = 7\n")
    # Including a file twice is not a cycle.
    assert bind(recipe="include 'a.gin'\ninclude 'b.gin'\n")[0]["warmup"] == 7


@pytest.mark.parametrize(
    ("more", "fits"),
    [
        ("", False),
        ("train.train.data = @texts.Texts()", True),
        ("train.train.data = @here/msmarco.MsMarcoPairs()\nhere/msmarco.MsMarcoPairs.split = 'dev'", True),
        ("train.train.data = @mixture.Mixture()\nmixture.Mixture.sources = [@msmarco.MsMarcoTriples()]", 0),
    ],
)
def test_values_are_checked_where_they_are_read(train_recipe, more, fits):
    """A value is not checked if another file replaces the binding, or if a scoped binding overrides it."""
    path = train_recipe(f"""
from jaxir.data.batches import mixture
SPLIT = None
train.train.data = @msmarco.MsMarcoPairs()
msmarco.MsMarcoPairs.directory = "there"
msmarco.MsMarcoPairs.split = %SPLIT
msmarco.MsMarcoTriples.split = %SPLIT
texts.Texts.path = "there"
{more}
""")
    refusal = pytest.raises(UserError, match=r"^SPLIT must be text, not None$")
    with contextlib.nullcontext() if fits else refusal:
        gin_config.bind(train, [path], [], {})


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("msmarco.MsMarcoPairs.split=dev", "; it reads here/MsMarcoPairs.split"),
        ("texts.Texts.path=there", ""),
        ("here/msmarco.MsMarcoPairs.split=train", None),
        # An unscoped setting applies within the scope, too.
        ("msmarco.MsMarcoPairs.directory=elsewhere", None),
        ("kept.Kept.of=dev", None),  # accepted, because a user's code may make this object itself
    ],
)
def test_typed_setting_of_an_unused_object_is_refused(train_recipe, tmp_path, monkeypatch, typed, sentence):
    (tmp_path / "kept.py").write_text(
        "import gin\n@gin.configurable\nclass Kept:\n  def __init__(self, of): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    scoped = '@here/msmarco.MsMarcoPairs()\nhere/msmarco.MsMarcoPairs.split = "dev"'
    path = train_recipe(f"import kept\ntrain.train.data = {scoped}\n")
    if sentence is None:
        gin_config.bind(train, [path], [typed], {})
        return
    name = ".".join(typed.partition("=")[0].split(".")[1:])
    with pytest.raises(UserError, match=f"^{name} is set but nothing reads it: .* no such object{sentence}$"):
        gin_config.bind(train, [path], [typed], {})


@pytest.mark.parametrize(
    ("files", "typed", "what"),
    [
        (["gin/objectives/margin.gin"], "TEMPERATURE=0.02", "in_batch_softmax.temperature"),
        (["gin/objectives/bce.gin"], "BLOCK_SIZE=64", "in_batch_softmax.block_size"),
        (["gin/evaluators/sts.gin", "gin/evaluators/search.gin"], "STS=dev.tsv", "STS.path"),
    ],
)
def test_typed_macro_of_an_unused_object_is_refused(files, typed, what):
    files, needed = ["gin/pairs.gin", *files], ["DATA=x"]
    needed += ["DEV_COLLECTION=y"] if len(files) > 2 else []
    sentence = f"^{typed.partition('=')[0]} is set but nothing reads it: .* it belongs to {what}$"
    with pytest.raises(UserError, match=sentence):
        gin_config.bind(train, files, [*needed, typed], {})
    with pytest.raises(UserError, match=sentence):  # the form in which plan and prepare call `bind`
        gin_config.bind(train, files, [*needed, typed], {}, command=taking(["model", "data"]))
    gin_config.bind(train, files, needed, {})  # an unused object's required settings need no value
    assert "%gin.REQUIRED" not in gin_config.operative_config()


def test_class_instead_of_an_object_is_refused(train_recipe):
    with pytest.raises(UserError, match=r"train.data must be an object, @NAME\(\) in gin .*, not @Texts$"):
        gin_config.bind(train, [train_recipe("train.train.data = @texts.Texts\n")], [], {})


def test_recorded_config_keeps_the_order_of_a_sums_parts(tmp_path):
    """A part's place in the sum decides its random numbers and its initial parameters."""
    files = ["gin/unsupervised.gin", "gin/objectives/multi_task.gin"]
    gin_config.bind(train, files, ["TEXT=texts.txt"], {"output_dir": "run"})
    again = tmp_path / "config.gin"
    again.write_text(gin_config.operative_config())
    for given, bindings in ((files, ["TEXT=texts.txt"]), ([str(again)], [])):
        gin_config.bind(train, given, bindings, {"output_dir": "run"})
        assert list(gin.get_bindings(train)["objective"].parts) == ["contrastive", "autoencoder"]


def test_config_of_a_run_from_before_modules_moved_still_binds(tmp_path):
    earlier = tmp_path / "config.gin"
    lines = ["from __gin__ import dynamic_registration", "from jaxir.data import pair_sources"]
    lines += ["from jaxir.evaluators import search", "from jaxir import partitioning"]
    lines += ["from jaxir import train", "from jaxir.training import optimizers"]
    lines += ["train.train.evaluators = [@search.Search()]", "search.Search.dataset = 'folder'"]
    earlier.write_text("\n".join(lines))
    bound = gin_config.bind(train, [str(earlier)], [], {}, command=taking(["evaluators"]))[0]()
    assert bound["evaluators"] == [corpus_search.Search(dataset="folder")]
