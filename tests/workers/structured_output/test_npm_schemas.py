"""The schemas of zod 4, zod-to-json-schema and TypeBox, whose packages npm downloads; as in `test_library_schemas`."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.workers.structured_output.test_library_schemas import check

pytestmark = pytest.mark.slow

PACKAGES = ("zod@4.5.0", "zod-to-json-schema@3", "@sinclair/typebox@0.34")
PROGRAM = r"""
import {z} from "zod"; import * as z3 from "zod/v3"; import {zodToJsonSchema} from "zod-to-json-schema"
import {Type} from "@sinclair/typebox"
const all = (z) => ({
  email: z.string().email(), uuid: z.string().uuid(), url: z.string().url(),
  optional: z.object({a: z.string().optional()}),
  enumeration: z.enum(["a", "b"]), nullable: z.string().nullable(), tuple: z.tuple([z.string(), z.number()]),
  record: z.record(z.string(), z.number()), bounds: z.number().int().min(1).max(9), date: z.string().datetime(),
  discriminated: z.discriminatedUnion("k", [z.object({k: z.literal("a")}),
    z.object({k: z.literal("b"), n: z.number()})]),
})
const Node = z.object({value: z.number(), get children() { return z.array(Node) }})
const Old = z3.z.lazy(() => z3.z.object({value: z3.z.number(), children: z3.z.array(Old)}))
const four = {
  ...all(z), recursive: Node, duration: z.iso.duration(),
  base64: z.base64(), mac: z.mac(), hostname: z.hostname(),
}
const found = {}
for (const [name, schema] of Object.entries(four)) found["zod 4 " + name] = z.toJSONSchema(schema)
for (const [name, schema] of Object.entries({...all(z3.z), recursive: Old}))
  found["zod 3 " + name] = zodToJsonSchema(schema)
found["typebox recursive"] = Type.Recursive(This => Type.Object({id: Type.Integer(), nodes: Type.Array(This)}))
found["typebox union"] = Type.Union([Type.Literal("a"), Type.Object({x: Type.Optional(Type.Number())}), Type.Null()])
found["typebox tuple"] = Type.Tuple([Type.String(), Type.Boolean()])
console.log(JSON.stringify(found))
"""


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    folder: Path = tmp_path_factory.mktemp("npm")
    subprocess.run(["npm", "install", "--silent", *PACKAGES], cwd=folder, check=True)
    (folder / "schemas.mjs").write_text(PROGRAM)
    done = subprocess.run(["node", "schemas.mjs"], cwd=folder, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    draft = "http://json-schema.org/draft-07/schema#"  # TypeBox's, which it does not name
    return {name: {"$schema": draft} | schema for name, schema in found.items()}


def test_schemas_are_enforced(schemas: dict[str, Any]) -> None:
    refused = {
        name: keyword for name, schema in schemas.items() if (keyword := check(schema, name, least=0))
    }  # few random texts are emails
    assert len(schemas) > 25 and refused == {}
