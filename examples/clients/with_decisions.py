"""Typed questions about a state, answered with probabilities from one pass each.

vllm serve examples/tiny/checkpoints/tiny-llada2
python examples/clients/with_decisions.py

The tiny model knows no answer. Its tokenizer has no token for "yes", so it is not asked yes or no.
"""

import json
import os
import urllib.request

URL = os.environ.get("URL", "http://localhost:8000")
QUESTIONS = {
    "route": {
        "type": "choice",
        "instructions": "Which team should answer?",
        "criteria": {"billing": "invoices and refunds", "shipping": "where a parcel is"},
    },
    "anger": {
        "type": "score",
        "instructions": "How angry is the customer?",
        "criteria": ["calm", "annoyed", "furious"],
    },
}


def decide(state: object, questions: dict) -> dict:
    """The answers of a server to questions about a state, by their names."""
    body = json.dumps({"state": state, "questions": questions}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{URL}/v1/systemone", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["answers"]


if __name__ == "__main__":
    answers = decide({"message": "Where is my parcel? I ask for the third time!"}, QUESTIONS)
    print("route:", answers["route"]["choice"], answers["route"]["probabilities"])
    print("anger:", round(answers["anger"]["score"], 2), answers["anger"]["probabilities"])
