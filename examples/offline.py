"""Answers two questions in this process, with the embedded pair, without Ray and HTTP: `python examples/offline.py`."""

from aerie import LLM, SamplingParams

QUESTIONS = ("Hello!", "Mia has 3 boxes with 12 pens each. How many pens does she have?")

if __name__ == "__main__":
    with LLM("eagle", tensor_parallel_size=1) as llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        for result in llm.chat(conversations, SamplingParams(max_tokens=120, temperature=0.0)):
            answer = result.outputs[0]
            print(f"{answer.text}\n    ({len(answer.token_ids)} tokens, {answer.acceptance_length:.2f} a round)")
