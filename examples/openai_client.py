"""Streams an answer from a running server with OpenAI's client: `aerie serve` in one terminal, this in another.

pip install openai
python examples/openai_client.py [URL]
"""

import sys

from openai import OpenAI

if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    question = "Mia has 3 boxes with 12 pens each. How many pens does she have?"
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=120,
        temperature=0,
        stream=True,
        extra_body={"speculative": True},  # the default; False decodes this request plainly
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
