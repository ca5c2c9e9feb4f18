"""Advice: the smallest changes that fit, as a command to type."""

import math
import re
import types

import pytest

from jaxir.core.errors import UserError
from jaxir.costs import targets
from jaxir.planning import advice
from jaxir.planning.typed import OF_RECIPES, Command
from jaxir.runtime.partitioning import MeshConfig


@pytest.mark.parametrize(
    ("typed", "changed"),
    [
        (["--topology=gpu:1xl4", "--prices=l4=1"], "--topology=gpu:2xl4 --remat=True"),
        (
            ["--topology", "gpu:1xl4", "--remat=none", "--steps=3"],
            "--steps=3 --topology=gpu:2xl4 --remat=True",
        ),
        (["--model=a b"], "'--model=a b' --topology=gpu:2xl4 --remat=True"),
    ],
)
def test_advice_changes_the_typed_command(typed, changed):
    command = Command(["python", "-m", "jaxir.plan", *typed], OF_RECIPES.flags)
    settings = {"topology": "gpu:2xl4", "remat": True, "prices": None}
    assert command.changed(settings) == f"python -m jaxir.plan {changed}"


@pytest.mark.parametrize(
    ("mesh", "machine", "macros"),
    [
        ({"fsdp": 16}, "v5e:4x4*2", {"slices": 2}),
        ({"fsdp": 16, "tensor": 4}, "gpu:8xh100", {"fsdp": 2}),
        ({"fsdp": 3, "tensor": 3}, "gpu:8xh100", {"fsdp": 1, "tensor": 1}),
        ({"data": 2, "fsdp": 4}, "v6e:4x4", {"data": -1}),
    ],
)
def test_mesh_for_other_chips_names_the_macros_to_change(mesh, machine, macros):
    target = targets.parse(machine)
    there = [
        types.SimpleNamespace(platform="tpu", slice_index=i % target.slices) for i in range(target.count)
    ]
    if target.chip.kind == "gpu":
        there = [types.SimpleNamespace(platform="cpu")] * target.count
    changes = " ".join(f"--{advice.MACROS[axis].lower()}={size}" for axis, size in macros.items())
    with pytest.raises(UserError, match=f"for {re.escape(machine)} set {changes} ") as raised:
        advice.build_mesh(MeshConfig(**mesh), there, target)
    assert all(f"MeshConfig.{axis}" in str(raised.value) for axis in macros)
    # The advised sizes are accepted.
    sizes = {"data": -1} | mesh | macros
    known = math.prod(size for size in sizes.values() if size != -1)
    assert target.count % known == 0 and (-1 in sizes.values() or known == target.count)
    assert sizes.get("slices", 1) == (target.slices if target.chip.kind == "tpu" else 1)


def test_advice_names_the_smallest_changes_that_are_enough():
    gib = 2**30
    setting = advice.Setting(fsdp=1, remat=False, chunks=1, batch_size=64)
    kept = {False: 16 * gib, "products": 9 * gib, True: 4 * gib}
    costs = advice.Costs(state=20 * gib, activations=kept, rest=gib, fixed=gib)
    target = targets.parse("v6e:2x2")

    def found(limit: float, without: str = "", **mesh: int) -> list[advice.Change]:
        can = OF_RECIPES.flags.keys() - {without}
        how = {"target": target, "mesh": MeshConfig(**mesh), "fsdp": [1, 2, 4], "divisor": 4, "can": can}
        return advice.suggest(setting, costs, limit=limit * gib, **how)

    assert costs.of(setting, setting) == 38 * gib
    assert found(32)[0] == ("fsdp=2", {"fsdp": 2}, 28 * gib)
    assert found(32)[1] == ("remat=True", {"remat": True}, 26 * gib)
    assert found(34)[1] == ("remat=products", {"remat": "products"}, 31 * gib)
    larger = {"topology": "v6e:2x4", "fsdp": 2}
    assert found(32)[-1][:2] == ("a slice of 8 chips, fsdp=2", larger)
    assert found(32, slices=2)[-1].settings == larger | {"slices": 1}
    assert found(32, data=4)[0].settings == {"fsdp": 2, "data": -1}
    assert [c.words for c in found(32, without="remat")][:2] == ["fsdp=2", "chunks=4"]
    # With little memory, a step fits only after several changes at once; no advice includes another advice.
    tight = found(9)
    assert tight[0].words.startswith("fsdp=4, chunks=")
    assert all("fsdp" in change.settings for change in tight)
    (other,) = found(0.1)  # advises another chip, with more memory
    assert other.settings == {"topology": "v5p:2x2x1", "prices": None}
