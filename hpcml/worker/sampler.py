"""What a round of a search tries: asked of optuna, which is told all that has ended.

Nothing of optuna is kept between two rounds. A study is made anew from the rounds before, so that
the run folder alone says what comes next, and the same history gives the same proposals.

Sources: J. Bergstra et al., Algorithms for Hyper-Parameter Optimization, NIPS 2011 (TPE);
N. Hansen and A. Ostermeier, Completely Derandomized Self-Adaptation in Evolution Strategies,
Evolutionary Computation 9 (2001) (CMA-ES); I. M. Sobol', On the distribution of points in a cube
and the approximate evaluation of integrals, USSR Comput. Math. Math. Phys. 7 (1967) (quasi-random).
"""

import hashlib
import json
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional


class Tried(NamedTuple):
    """A cell that has an end: its parameters, and its value of the metric.

    ``value`` is None where there is no finite one; then ``failed`` says whether the cell failed or
    was cancelled. One that ended well without such a value diverged.
    """

    params: "dict[str, Any]"
    value: Optional[float]
    failed: bool


class NoOptuna(Exception):
    """optuna, or what it needs for a sampler, cannot be imported; the message is for a person."""


def ask(search: "dict[str, Any]", history: "Sequence[Sequence[Tried]]") -> "list[dict[str, Any]]":
    """The parameters of the cells of the next round.

    Args:
        search: what the plan says of the search.
        history: the cells of each round before.

    Raises:
        NoOptuna: it is not installed here.
    """
    try:
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is called experimental there
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            return _ask(optuna, search, history)
    except ImportError as error:
        raise NoOptuna(f"{error}; pip install 'hpcml[search]'") from None


def _ask(
    optuna: Any, search: "dict[str, Any]", history: "Sequence[Sequence[Tried]]"
) -> "list[dict[str, Any]]":
    kind = search["sampler"]
    count = search["cells"][len(history)]
    space = _Space(optuna, search)
    study = optuna.create_study(
        direction="maximize" if search["mode"] == "max" else "minimize",
        sampler=_sampler(optuna, search, space, len(history) + 1),
    )
    for cells in history:
        attributes = {}
        if kind == "cmaes":
            # Its state lies in the trials: one more is asked for what those of this round had.
            probe = study.ask(space.distributions)
            attributes = study.trials[probe.number].system_attrs
            study.tell(probe, state=optuna.trial.TrialState.FAIL)
        for cell in cells:
            if kind == "qmc":
                study.ask(space.distributions)  # the next points of the sequence come after these
            else:
                study.add_trial(space.trial(cell, attributes))
    asked = [study.ask(space.distributions) for _ in range(count)]
    return [space.values(trial.params) for trial in asked]


class _Space:
    """The searched parameters as optuna has them. A choice is the place of a value in its list."""

    def __init__(self, optuna: Any, search: "dict[str, Any]") -> None:
        self._optuna = optuna
        self._params: dict[str, dict[str, Any]] = search["params"]
        self._cma = search["sampler"] == "cmaes"
        self._worst = -math.inf if search["mode"] == "max" else math.inf
        made = optuna.distributions
        self.distributions: dict[str, Any] = {}
        for name, distribution in self._params.items():
            ((kind, argument),) = distribution.items()
            if kind == "choice" and search["sampler"] == "qmc":
                self.distributions[name] = made.IntDistribution(0, len(argument) - 1)
            elif kind == "choice":
                places = tuple(range(len(argument)))
                self.distributions[name] = made.CategoricalDistribution(places)
            elif kind == "int":
                self.distributions[name] = made.IntDistribution(*map(int, argument))
            else:
                log = kind == "loguniform"
                self.distributions[name] = made.FloatDistribution(*map(float, argument), log=log)

    def values(self, params: "dict[str, Any]") -> "dict[str, Any]":
        """The values of the parameters, in the order of the search."""
        return {name: self._value(name, params[name]) for name in self._params}

    def trial(self, cell: Tried, attributes: "dict[str, Any]") -> Any:
        """What optuna is told of a cell."""
        states = self._optuna.trial.TrialState
        state, value = states.COMPLETE, cell.value
        if cell.failed:
            state = states.FAIL  # which counts as nothing
        elif value is None and self._cma:
            value = self._worst  # it goes by the order of a whole generation
        elif value is None:
            state = states.PRUNED  # which counts as bad
        return self._optuna.trial.create_trial(
            state=state,
            value=value,
            params={name: self._place(name, cell.params[name]) for name in self._params},
            distributions=self.distributions,
            system_attrs=attributes,
        )

    def _value(self, name: str, found: Any) -> Any:
        ((kind, argument),) = self._params[name].items()
        if kind == "choice":
            return argument[found]
        if kind == "int":
            return int(found)
        low, high = map(float, argument)
        # Readable, and told to optuna as it is tried.
        return min(max(float(f"{found:.9g}"), low), high)

    def _place(self, name: str, value: Any) -> Any:
        ((kind, argument),) = self._params[name].items()
        if kind != "choice":
            return value
        # By their text, since 1, 1.0 and true are equal.
        return [json.dumps(each) for each in argument].index(json.dumps(value))


def _sampler(optuna: Any, search: "dict[str, Any]", space: _Space, number: int) -> Any:
    """The sampler of a round."""
    samplers = optuna.samplers
    of_search, of_round = (_seed(search["seed"], part) for part in (0, number))
    if search["sampler"] == "random":
        return samplers.RandomSampler(seed=of_round)
    if search["sampler"] == "tpe":
        # From the second round on it goes by what it knows, and keeps apart what it asks at once.
        return samplers.TPESampler(seed=of_round, n_startup_trials=1, constant_liar=True)
    # The others go on from their own state.
    if search["sampler"] == "qmc":
        sampler = samplers.QMCSampler(scramble=True, seed=of_search)
    else:
        # A generation is a round, unless that is less than is usual (Hansen's 4 + 3 log n).
        usual = 4 + math.floor(3 * math.log(len(space.distributions)))
        size = max(search["cells"][0], usual)
        sampler = samplers.CmaEsSampler(seed=of_search, n_startup_trials=0, popsize=size)
    # Otherwise the first cells were drawn by chance, since nothing has ended yet.
    sampler.infer_relative_search_space = lambda study, trial: space.distributions
    return sampler


def _seed(seed: int, part: int) -> int:
    """A seed that numpy takes, of a part of a search."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{part}".encode()).digest()[:4], "big")
