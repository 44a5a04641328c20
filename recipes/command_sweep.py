"""Gradient descent with momentum on the Rosenbrock function: a program that a sweep can run.

It shows all that a program needs to live well in a batch job:

* it takes its parameters as arguments,
* it reports metrics with ``hpcml.report``,
* it keeps its state in a file and goes on from it,
* when it is asked to stop, it saves and ends with 75, "run me again".

Without hpcml it runs as well: ``python3 command_sweep.py --learning-rate 1e-3 --momentum 0.9``.
"""

import argparse
import json
import os
import signal
import sys

try:
    from hpcml import report
except ImportError:  # not in a job of hpcml

    def report(**metrics):
        print(metrics)


RUN_ME_AGAIN = 75
SAVE_EVERY = 1000
REPORT_EVERY = 100

# The state of a cell lies in its own folder, so that cells don't mix them up.
STATE_FILE = os.path.join(os.environ.get("HPCML_CELL_DIR", "."), "state.json")

# A scheduler announces the end of a job by a signal, hpcml also by a file.
STOP_FILE = os.environ.get("HPCML_STOP_FILE", "")
stop_signals = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda received, frame: stop_signals.append(received))


def asked_to_stop():
    return bool(stop_signals) or (STOP_FILE and os.path.exists(STOP_FILE))


def load():
    """Return the saved state, or where a new descent begins."""
    try:
        with open(STATE_FILE) as file:
            return json.load(file)
    except FileNotFoundError:
        return {"step": 0, "position": [-1.2, 1.0], "velocity": [0.0, 0.0]}


def save(state):
    """Write under another name and rename: a half-written state is never seen."""
    with open(STATE_FILE + ".new", "w") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(STATE_FILE + ".new", STATE_FILE)


def rosenbrock(x, y):
    """Return the function's value and its gradient; the minimum is 0 at (1, 1)."""
    valley = y - x * x
    return (1 - x) ** 2 + 100 * valley**2, (-2 * (1 - x) - 400 * x * valley, 200 * valley)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=20000)
    options = parser.parse_args()

    state = load()
    while state["step"] < options.steps:
        _, gradient = rosenbrock(*state["position"])
        # Far from the minimum the gradient is huge; steps of bounded length don't diverge.
        scale = options.learning_rate / max(1.0, *map(abs, gradient))
        for axis in (0, 1):
            state["velocity"][axis] *= options.momentum
            state["velocity"][axis] -= scale * gradient[axis]
            state["position"][axis] += state["velocity"][axis]
        state["step"] += 1
        if state["step"] % REPORT_EVERY == 0 or state["step"] == options.steps:
            loss, _ = rosenbrock(*state["position"])
            report(step=state["step"], total_steps=options.steps, loss=loss)
            if asked_to_stop():
                save(state)
                return RUN_ME_AGAIN
        if state["step"] % SAVE_EVERY == 0:
            save(state)
    return 0


if __name__ == "__main__":
    sys.exit(main())
