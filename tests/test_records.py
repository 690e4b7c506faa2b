"""The store: what is written comes back, half-written things are noticed, nothing finished is lost."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from protofl import records
from protofl.errors import UserError
from protofl.records import RunFolder, State
from protofl.tree import Rows, Tree, nbytes

names = st.text("abcxyz019._-", min_size=1, max_size=6)
shapes = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool]))
    return (torch.arange(math.prod(shape := draw(shapes))).view(shape) - draw(st.integers(0, 9)) / 3).to(dtype)


leaves = tensors() | st.integers(1, 3).map(lambda k: Rows(torch.randn(k, 2), torch.arange(k) % 2 == 0))
trees = st.recursive(
    st.dictionaries(names, leaves, max_size=3).map(Tree),
    lambda inner: st.dictionaries(names, leaves | inner, max_size=3).map(Tree), max_leaves=8,
)  # fmt: skip


@given(trees)
@settings(max_examples=60, deadline=None)
def test_a_tree_comes_back(tree: Tree) -> None:
    again, notes = records.unpack(records.pack(tree, {"round": 3}))
    assert notes == {"round": 3}
    (a, sa), (b, sb) = pytree.tree_flatten(tree), pytree.tree_flatten(again)
    assert sa == sb and [*tree] == [*again]
    assert all(p.dtype == q.dtype and torch.equal(p, q) for p, q in zip(a, b))
    assert nbytes(tree) == nbytes(again)


def test_views_and_shared_memory_come_back_apart() -> None:
    base = torch.arange(6.0).view(2, 3)
    again, _ = records.unpack(records.pack(Tree(a=base.T, b=base[0], c=base), {}))
    assert torch.equal(again.a, base.T) and torch.equal(again.b, base[0])


def test_other_things_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="/a/b"):
        records.pack(Tree(a=Tree(b=3)), {})


def filled(path: Path, rounds: int = 3) -> RunFolder:
    folder = RunFolder(path)
    folder.open({"digest": "d"})
    memory = folder.memory()
    for t in range(rounds):
        memory.round = t
        memory.put(t % 2, Tree(own=Tree(v=torch.tensor(float(t)))))
        folder.append({"round": t, "gm": t / 10})
        folder.save_state(State(t + 1, Tree(w=torch.tensor([float(t)])), Tree(), [0], dict(memory.files)))
    return folder


def test_the_last_two_states_and_their_clients_are_kept(tmp_path: Path) -> None:
    folder = filled(tmp_path / "run", 5)
    assert [s.round for s in folder.states()] == [5, 4]
    assert float(folder.states()[0].shared.w) == 4
    assert len(list((tmp_path / "run/state/clients").iterdir())) == 3
    memory = folder.memory(folder.states()[1].clients)
    assert float(memory.get(0).own.v) == 2 and memory.get(7) is None  # type: ignore[union-attr]
    folder.close()


def test_what_states_need_is_forgotten_with_them(tmp_path: Path) -> None:
    """Else a run of many clients grows by a list of files in every round."""
    folder = filled(tmp_path / "run", 6)
    assert len(folder.used) == 2
    folder.close()


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete client", "stray"])
def test_a_damaged_state_is_passed_over(tmp_path: Path, damage: str) -> None:
    folder = filled(tmp_path / "run")
    folder.close()
    newest = next((tmp_path / "run/state").glob("round-00003-*"))
    if damage == "truncate":
        newest.write_bytes(newest.read_bytes()[:-5])
    elif damage == "flip":
        content = bytearray(newest.read_bytes())
        content[-1] ^= 1
        newest.write_bytes(bytes(content))
    elif damage == "delete client":
        next((tmp_path / "run/state/clients").glob("c00000-r00003-*")).unlink()
    else:
        for name in (
            "round-00009.bak",
            "round-00009-0123456789abcdef.safetensors.tmp",
            "round-9-zz.safetensors",
        ):
            (newest.parent / name).write_bytes(b"x")
    assert RunFolder(tmp_path / "run").states()[0].round == (3 if damage == "stray" else 2)


def test_rows_after_the_state_are_played_again(tmp_path: Path) -> None:
    folder = filled(tmp_path / "run")
    folder.append({"round": 3, "gm": 0.9})
    with open(tmp_path / "run/rounds.jsonl", "a") as f:
        f.write('{"round": 4, "g')
    assert [r["round"] for r in folder.rows()] == [0, 1, 2, 3]
    folder.keep_rows_before(2)
    assert [r["round"] for r in folder.rows()] == [0, 1]
    folder.close()


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "run")
    first.open({})
    with pytest.raises(UserError, match="another process"):
        RunFolder(tmp_path / "run").open({})
    first.close()
    again = RunFolder(tmp_path / "run")
    again.open({})
    again.close()


def test_json_is_strict(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        records.write_json(tmp_path / "x.json", {"a": float("nan")})
    assert not list(tmp_path.iterdir())
    assert records.read_json(tmp_path / "missing.json") is None


def test_environment_names_versions() -> None:
    told = records.environment()
    assert told["torch"] and told["numpy"] and told["python"] and told["cpus"]
    json.dumps(told, allow_nan=False)
