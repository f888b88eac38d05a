"""A llama.cpp server with one slot, which hands over what it is sent line by line.

    llama_server.py MODEL SLOT_DIRECTORY [PARAMETER=JSON...]

Each line of standard input is `{"path": ..., "body": ...}`; the answer is one line of JSON. Without
a path it is the server's address.
"""

import json
import os
import sys
import urllib.error
import urllib.request

from xllamacpp import CommonParams, Server


def main() -> None:
    # The engine's log goes to standard error; standard output is for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    parameters = CommonParams()
    parameters.model.path, slots, *others = sys.argv[1:]
    # The engine puts a file's name right behind it.
    parameters.slot_save_path = os.path.join(slots, "")
    parameters.n_ctx = 2048
    parameters.n_parallel = 1
    parameters.warmup = False
    parameters.cpuparams.n_threads = 2
    for other in others:
        name, value = other.split("=", 1)
        setattr(parameters, name, json.loads(value))
    server = Server(parameters)
    for line in sys.stdin:
        question = json.loads(line)
        if question["path"] is None:
            print(json.dumps(server.listening_address), file=answers, flush=True)
            continue
        request = urllib.request.Request(
            server.listening_address + question["path"],
            json.dumps(question["body"]).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            answer = json.load(urllib.request.urlopen(request))
        except urllib.error.HTTPError as error:
            answer = {"error": error.code, "text": error.read().decode()}
        print(json.dumps(answer), file=answers, flush=True)


main()
