"""Writes a Flower app that runs a method of this package: settings, three thin modules, and how to start it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from .. import __version__, registry, run
from ..cells import Cell
from ..errors import UserError
from . import settings

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{project}"
version = "1.0.0"
description = "{title} as a Flower app, by protofl"
license = "Apache-2.0"
dependencies = ["protofl[flower]>={version}"]

[tool.hatch.build.targets.wheel]
packages = ["app"]

[tool.flwr.app]
publisher = "protofl"

[tool.flwr.app.components]
serverapp = "app.server:app"
clientapp = "app.client:app"

# What `flwr run . protofl --run-config "out='a.safetensors' protocol.rounds=5"` changes for one run.
# out: the server's state after every round, in the folder where the SuperLink was started; NAME.jsonl: a line per round.
# wait: seconds for all clients to be there; timeout: seconds for one client's part of a round.
[tool.flwr.app.config]
"""

SERVER = '''"""The ServerApp."""

from protofl.flower.server import server_app

from . import data

app = server_app(data.test, __file__)
'''

CLIENT = '''"""The ClientApp."""

from protofl.flower.client import client_app

from . import data

app = client_app(data.train, __file__)
'''

DATA = '''"""Where the data come from: the one file to edit.

As exported, every node trains on the part of {dataset} that protofl gives to the client of its number.
"""

from protofl.flower.data import part, test_set


def train(context):
    """A node's own samples: x uint8 [n, {shape}], y [n] class ids from 0 to {last}.

    context.node_config: what the SuperNode's --node-config says. Replace the line by your loader; x is divided by
    data.scale of pyproject.toml, then normalised as the protocol says, so that raw images are right.
    """
    return part(context)


def test(context):
    """The server's samples, as above, by which the global model is measured after each round; None if it has none."""
    return test_set(context)
'''

README = """\
# {title} as a Flower app

`protofl flower export` wrote it: {clients} clients, {rounds} rounds. The settings are in [`pyproject.toml`](pyproject.toml);
the method is {code}.
Your data go into [`app/data.py`](app/data.py); as it is, it runs on {dataset} as protofl splits it.

On every machine, in an environment of its own:

```sh
pip install 'protofl[flower]'
```

The server, in a folder that may be written to:

```sh
flower-superlink --insecure --disable-runtime-dependency-installation
```

Every node, with its number K from 0 to {last}; on one machine every node needs a port of its own:

```sh
for K in {numbers}; do
  flower-supernode --insecure --superlink 127.0.0.1:8000 --port $((9094 + K)) \\
    --node-config "partition-id=$K num-partitions={clients}" &
done
```

Once, where the run is started from:

```sh
mkdir -p ~/.flwr && cat >> ~/.flwr/config.toml <<'END'

[superlink.protofl]
address = "127.0.0.1:8000"
insecure = true
END
```

Then, in this folder:

```sh
flwr run . protofl --stream
```

`{out}`, in the folder where the SuperLink was started, has the server's state after every round,
and the `.jsonl` file beside it a line per round. In Python:

```python
from pathlib import Path
from protofl import records

state, notes = records.unpack(Path("{out}").read_bytes())
state.shared, state.private  # what is broadcast, and what the server alone has
```

What a client remembers between rounds (personal parts, control variates, momenta) stays on its node: in the folder that
`memory="/some/folder"` of the --node-config names, else in the user's data folder, `run-ID/`. A SuperNode that is started anew
on the same folder goes on where it was. A node that dies, or does not answer within `timeout`, ends the run with a line that
names it. `--insecure` is for one machine or a private network; Flower's documentation has TLS and the authentication of nodes.
"""


def check(ready: run.Prepared) -> None:
    """Refuse what cannot be deployed."""
    method = ready.method
    for exchange in (method.first(), method.final()):
        name = getattr(exchange.program, "__name__", "") if exchange is not None else ""
        if exchange is not None and getattr(method, name, None) != exchange.program:
            raise UserError(f"{ready.cell.method.name}: the programs of its exchanges must be methods of its class")


def export(cell: Cell, out: Path) -> None:
    """Check a cell and write its app into the folder `out`, which must be new or empty; raises `UserError`."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"--out {out} is there and not empty: name a new folder")
    if cell.protocol.engine == "batched":
        raise UserError("engine=batched: a node is one client, leave the engine out")
    cell = Cell(cell.method, cell.protocol.replace(**settings.DEPLOYED), cell.data_dir)
    ready = run.prepare(cell)
    check(ready)
    path = cell.method.name
    name = Path(path).name if registry.is_path(path) else path
    p, classes = cell.protocol, len(ready.data.classes)
    tables = settings.tables(ready, name)
    told = {
        "title": ready.document["name"], "version": __version__, "dataset": ready.data.name, "clients": p.clients,
        "rounds": ready.protocol.rounds, "last": p.clients - 1, "out": tables[""]["out"],
        "code": "that of the installed protofl, on the server and on every node" if name == path else f"`app/{name}`",
        "numbers": " ".join(map(str, range(p.clients))), "project": _project(registry.label(path)),
    }  # fmt: skip
    files = {
        "pyproject.toml": PYPROJECT.format(**told) + toml(tables),
        "README.md": README.format(**told),
        "app/__init__.py": "",
        "app/server.py": SERVER,
        "app/client.py": CLIENT,
        "app/data.py": DATA.format(
            dataset=ready.data.name, shape=", ".join(map(str, ready.data.x_train.shape[1:])), last=classes - 1
        ),
    }
    for place, text in files.items():
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        (out / place).write_text(text, "utf-8")
    if name != path:
        shutil.copy(path, out / "app" / name)


def _project(label: str) -> str:
    """A name that Flower takes: letters, digits and hyphens, at most 32."""
    return "protofl-" + re.sub("[^A-Za-z0-9]+", "-", label)[:24].strip("-")


def toml(tables: dict[str, dict[str, Any]]) -> str:
    """Settings by table, as [tool.flwr.app.config] continues."""
    parts = []
    for name, entries in tables.items():
        lines = [f"{key} = {_value(v)}" for key, v in entries.items()]
        parts.append("\n".join(([f"[tool.flwr.app.config.{name}]"] if name else []) + lines) + "\n")
    return "\n".join(parts)


def _value(v: Any) -> str:
    return json.dumps(v, ensure_ascii=False) if isinstance(v, str | bool) else repr(v)
