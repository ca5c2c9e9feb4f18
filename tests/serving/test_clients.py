"""Clients of other servers against `python -m jaxir.serve`: the code and commands of docs/clients.md."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.conftest import Server, running

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "clients.md"
PYTHON = ROOT / ".clients" / "bin" / "python"
NUMBER = re.compile(r"-?\d+\.\d+")
PYTHON_BLOCK = re.compile(
    r"^<!-- needs a server -->\n```python\n(.*?)^```\n\n```text\n(.*?)^```$", re.M | re.S
)
MORE_BLOCKS = [  # clients that the page only names, and what they print
    (
        """
import asyncio

from openai import AsyncOpenAI


async def embed(texts):
    client = AsyncOpenAI(base_url="http://localhost:8080/v1", api_key="none")
    requests = (client.embeddings.create(model="all-MiniLM-L6-v2", input=text) for text in texts)
    return [len(answer.data[0].embedding) for answer in await asyncio.gather(*requests)]


print(asyncio.run(embed(["one text", "another", "a third"])))
""",
        "[384, 384, 384]\n",
    ),
    (
        """
from langchain_openai import OpenAIEmbeddings

queries = OpenAIEmbeddings(
    base_url="http://localhost:8080/v1",
    api_key="none",
    model="all-MiniLM-L6-v2",
    check_embedding_ctx_length=False,
    model_kwargs={"extra_body": {"input_type": "query"}},
)
print(len(queries.embed_query("How do I sort a list?")))
""",
        "384\n",
    ),
    (
        """
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

tei = TextEmbeddingsInference(model_name="all-MiniLM-L6-v2", base_url="http://localhost:8080", timeout=60)
print([len(vector) for vector in tei.get_text_embedding_batch(["Sort a list.", "Join two arrays."])])
""",
        "[384, 384]\n",
    ),
    (
        """
from haystack_integrations.components.embedders.huggingface_api import HuggingFaceAPITextEmbedder

tei = HuggingFaceAPITextEmbedder(
    api_type="text_embeddings_inference", api_params={"url": "http://localhost:8080"}, normalize=True
)
print(len(tei.run("How do I sort a list?")["embedding"]))
""",
        "384\n",
    ),
]
SHELL_BLOCK = re.compile(r"^```sh\n(curl.*?)^```\n\n```text\n(.*?)^```$", re.M | re.S)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.exists(), reason="needs `make clients`")]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    flags = [
        "--model=st:sentence-transformers/all-MiniLM-L6-v2",
        f"--reranker=hf:{ROOT}/tests/golden/cross_bert",
    ]
    with running(tmp_path_factory.mktemp("clients"), *flags) as server:
        yield server
        assert "Traceback" not in server.log.read_text()


def outputs(blocks: list[str]) -> list[str]:
    """Returns what each block prints; they run in one process, which imports each library once."""
    done = subprocess.run(
        [PYTHON, ROOT / "tests" / "serving" / "clients" / "run_blocks.py"],
        input=json.dumps(blocks),
        capture_output=True,
        text=True,
        cwd=ROOT / "tests",  # a folder without packages that the clients could import instead of their own
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_same(printed: str, expected: str) -> None:
    """Compares two outputs; numbers may differ in the last digit."""
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", expected), printed
    numbers = [list(map(float, NUMBER.findall(text))) for text in (printed, expected)]
    assert numbers[0] == pytest.approx(numbers[1], abs=2e-3)


def test_clients_of_the_page_print_what_it_says(server):
    blocks = PYTHON_BLOCK.findall(PAGE.read_text())
    assert len(blocks) == 6
    blocks += MORE_BLOCKS
    codes = [code.replace("http://localhost:8080", server.url) for code, _ in blocks]
    for printed, (code, expected) in zip(outputs(codes), blocks, strict=True):
        assert "Traceback" not in printed, f"{code}\n{printed}"
        assert_same(printed, expected)


def test_curl_lines_print_what_the_page_says(server):
    ((commands, expected),) = SHELL_BLOCK.findall(PAGE.read_text())
    commands = commands.replace("127.0.0.1:8080", server.url.removeprefix("http://"))
    commands = commands.replace("curl ", "curl --silent --write-out '\\n' ")
    done = subprocess.run(["bash", "-c", commands], capture_output=True, text=True, check=True)
    assert_same(done.stdout, expected)


def test_openai_client_reads_errors_and_formats(server):
    code = f"""
import openai
client = openai.OpenAI(base_url="{server.url}/v1", api_key="none", max_retries=0)
make = client.embeddings.create
floats = make(model="m", input="a text", encoding_format="float").data[0].embedding
base64 = make(model="m", input="a text").data[0].embedding
print(max(abs(a - b) for a, b in zip(floats, base64)) < 1e-5)
many = make(model="m", input=[f"text {{n}}" for n in range(1000)])
print(len(many.data), many.data[999].index)
ids = {{"input": [[15339, 1917]], "model": "text-embedding-ada-002"}}
for wrong in (ids, {{"input": "a", "model": "m", "dimensions": 385}}):
    try:
        make(**wrong)
    except openai.BadRequestError as error:
        print(error.param, "|", error.body["message"])
try:
    client.chat.completions.create(model="m", messages=[])
except openai.NotFoundError as error:
    print(error.code, error.body["message"])
"""
    (printed,) = outputs([code])
    same, many, ids, dimensions, chat = printed.splitlines()
    assert (same, many) == ("True", "1000 999")
    assert ids.startswith("input.0 | input.0 has token ids that the tokenizer of") and "LangChain" in ids
    assert dimensions.startswith(
        "dimensions | dimensions is 385, but vectors of sentence-transformers/all-MiniLM"
    )
    assert chat.startswith("not_found /v1/chat/completions is not served: ")
