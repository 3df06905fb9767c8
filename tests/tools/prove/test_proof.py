"""A script trains the same on 1, 2 and 4 ranks, and each planted mistake is named, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import RunError
from paceline.spec.job import Program
from paceline.tools.prove import proof as proofs
from paceline.tools.prove.local_runner import Script
from paceline.tools.prove.proof import Proof
from paceline.tools.prove.records import CaseRecords, plan_cases
from paceline.tools.prove.samples import SampleComparison
from tests.forked_ranks import Ranks
from tests.tools.prove.forked_runner import ForkedRunner

STEPS = 12


class Prove:
    """`prove("train.py", "dropout")` runs a proof of a script with these arguments."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder

    def __call__(
        self,
        script: str,
        *args: str,
        counts: tuple[int, ...] = (1, 2),
        steps: int = STEPS,
        interrupt: bool = False,
        without: tuple[str, ...] = (),
        batch_arg: str | None = None,
    ) -> Proof:
        cases = plan_cases(counts, ["fork"], steps=steps, interrupt=interrupt)
        cases = [replace(each, without=without) for each in cases]
        runner = ForkedRunner(self.ranks, self.folder, Script(Program(script, args), batch_arg))
        return proofs.prove(cases, runner, tolerance=None)


@pytest.fixture
def prove(ranks: Ranks, tmp_path: Path) -> Prove:
    return Prove(ranks, tmp_path)


def causes(proof: Proof) -> list[str]:
    return [cause.name for cause in proof.causes]


def test_a_script_trains_the_same_on_any_number_of_ranks(prove: Prove) -> None:
    proof = prove("train.py", "keyed augmentation", counts=(1, 2, 4), interrupt=True)
    assert proof.holds
    assert not proof.causes
    assert not proof.skipped
    losses = proof.cases[0].losses
    assert len(losses) == STEPS
    assert losses[STEPS] < losses[1], "it must learn, or equal losses mean nothing"
    assert [each.name for each in proof.comparisons] == [
        "2 ranks",
        "4 ranks",
        "2 ranks, interrupted",
    ]
    for each in proof.comparisons[:2]:
        assert each.limit == 1e-6
        assert each.loss < 1e-6
        assert each.weights is not None
        assert each.weights < 1e-6
    again = proof.comparisons[2]
    assert (again.limit, again.loss, again.weights, again.against) == (0.0, 0.0, 0.0, "2 ranks")
    assert 0 < proof.cases[3].stopped_after < STEPS


def test_single_precision_has_a_tolerance_of_its_own(prove: Prove) -> None:
    proof = prove("train.py", "", "float32", counts=(1, 2, 4))
    assert proof.holds
    assert [each.limit for each in proof.comparisons] == [1e-4, 1e-4]
    assert all(
        each.weights is not None and max(each.loss, each.weights) < 1e-4
        for each in proof.comparisons
    )
    assert max(each.loss for each in proof.comparisons) > 0


@pytest.mark.parametrize(
    ("mistake", "cause", "evidence"),
    [
        ("batchnorm", "BatchNorm", "each sample normalized by itself"),
        ("dropout", "dropout", "dropout turned off"),
        ("augmentation", "samples whose values depend on the ranks", "has the same samples"),
        ("sum", "an unscaled sum", "2 times smaller"),
        pytest.param(
            "sum in a warm-up", "an unscaled sum", "2 times smaller", marks=pytest.mark.slow
        ),
        ("all data on each rank", "a wrong sampler", "all 2 ranks have the same 8 samples"),
        pytest.param(
            "stream on each rank",
            "a wrong sampler",
            "all 2 ranks have the same 8 samples",
            marks=pytest.mark.slow,
        ),
        ("own shuffle", "a wrong sampler", "draws from all of the data by itself"),
        ("whole batch on each rank", "the batch size", "32 samples with 2 ranks and 16 with 1"),
        (
            "weighting",
            "a loss that depends on the split of the batch",
            "no common factor explains it",
        ),
        ("rate", "the learning rate", "0.2 with 2 ranks and 0.1 with 1 rank"),
        pytest.param(
            "rate in a warm-up",
            "the learning rate",
            "2e-09 with 2 ranks and 1e-09 with 1 rank",
            marks=pytest.mark.slow,
        ),
        ("initial weights", "initial weights", "Before the first step"),
        ("seed", "no fixed seed", "torch has a different seed in each of them"),
    ],
)
def test_a_planted_mistake_is_named_and_nothing_else(
    prove: Prove, mistake: str, cause: str, evidence: str
) -> None:
    proof = prove("train.py", mistake)
    assert not proof.holds
    assert causes(proof) == [cause]
    assert evidence in proof.causes[0].evidence


@pytest.mark.parametrize(
    ("what", "cause", "evidence"),
    [
        pytest.param("lstm", ["dropout"], "dropout turned off", marks=pytest.mark.slow),
        pytest.param("attention", ["dropout"], "dropout turned off", marks=pytest.mark.slow),
        pytest.param(
            "attention weights", ["dropout"], "dropout turned off", marks=pytest.mark.slow
        ),
        (
            "function, evaluation mode",
            ["dropout"],
            "The ranks get the same samples, with the same values.",
        ),
        ("noise", ["random numbers in the forward pass"], "the script draws random numbers"),
        (
            "batch mean",
            ["samples whose values depend on the ranks"],
            "16 of 16 reach the model with different values",
        ),
        ("clipping", ["unknown"], "The gradients of step 1 differ"),
        ("summed", ["gradients that are summed over the ranks"], "The losses agree"),
        pytest.param(
            "changed gradients",
            ["unknown"],
            "The gradients of step 1 differ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "rate",
            ["the learning rate"],
            "in step 4 is 0.1 with 2 ranks and 0.05 with 1 rank",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "rate , zero start", ["the learning rate"], "in step 4", marks=pytest.mark.slow
        ),
        pytest.param("sum , table", ["an unscaled sum"], "2 times smaller", marks=pytest.mark.slow),
        pytest.param("rate , table", ["the learning rate"], "in step 4", marks=pytest.mark.slow),
        pytest.param(
            "noise, sum",
            ["random numbers in the forward pass"],
            "the same samples",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "sum , evaluation mode",
            ["an unscaled sum"],
            "equal weights and samples",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "no average",
            ["gradients that are not averaged"],
            "gradients of different norms",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_only_what_the_records_show_is_named(
    prove: Prove, what: str, cause: list[str], evidence: str
) -> None:
    proof = prove("loop.py", what, steps=6)
    assert not proof.holds
    assert causes(proof) == cause
    assert evidence in proof.causes[0].evidence


@pytest.mark.parametrize(
    "what",
    [
        "",
        "padding",
        "careless evaluation",
        "own data",
        pytest.param("evaluation mode", marks=pytest.mark.slow),
        pytest.param("zero start", marks=pytest.mark.slow),
    ],
)
def test_an_unusual_script_that_is_right_is_proved_with_its_samples(
    prove: Prove, what: str
) -> None:
    proof = prove("loop.py", what, steps=6)
    assert proof.holds
    found = SampleComparison(proof.cases[0], proof.cases[1]).compare()
    assert found.cause is None
    assert found.knows_values
    assert proof.cases[0].of_ranks(1, "rows") == [16]


def test_samples_that_were_not_recorded_are_not_called_equal(
    prove: Prove, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = CaseRecords.of_ranks
    known = ("losses",)
    monkeypatch.setattr(
        CaseRecords,
        "of_ranks",
        lambda self, step, key: read(self, step, key) if key in known else None,
    )
    (cause,) = prove("loop.py", "sum", steps=4).causes
    assert cause.name == "unknown"
    assert "Which samples the ranks get was not recorded" in cause.evidence
    assert "The gradients of step 1 differ" in cause.evidence


def test_two_causes_are_both_named(prove: Prove) -> None:
    proof = prove("train.py", "batchnorm and dropout")
    assert causes(proof) == ["dropout", "BatchNorm"]


def test_a_third_cause_is_named_besides_dropout_and_batchnorm(prove: Prove) -> None:
    proof = prove("train.py", "sum with batchnorm and dropout")
    assert causes(proof) == ["dropout", "BatchNorm", "an unscaled sum"]


def test_a_bias_before_a_normalization_has_no_gradient_that_could_differ(prove: Prove) -> None:
    """Adam makes steps of full size of the rounding that it gets instead."""
    proof = prove("train.py", "Adam, instances", "float32")
    assert proof.holds, proof.comparisons
    assert proof.cases[0].first.end["noise"] == ["1.bias"]
    assert "no gradient but rounding, so not compared: 1.bias" in proof.facts()


def test_state_that_is_not_saved_breaks_the_resume(prove: Prove) -> None:
    proof = prove("train.py", "resume", interrupt=True)
    assert [each.agrees for each in proof.comparisons] == [True, False]
    assert causes(proof) == ["the resume"]


def test_an_average_of_weights_that_is_not_saved_breaks_the_resume(prove: Prove) -> None:
    proof = prove("train.py", "lost average", interrupt=True)
    assert [each.agrees for each in proof.comparisons] == [True, False]
    assert proof.comparisons[1].weights == 0
    assert causes(proof) == ["the resume"]
    assert "differ at the end" in proof.causes[0].evidence


def test_statistics_of_batchnorm_survive_an_interruption(prove: Prove) -> None:
    proof = prove("train.py", "batchnorm", counts=(2,), interrupt=True)
    assert proof.holds, proof.comparisons
    assert proof.cases[0].first.end["modules"]


@pytest.mark.parametrize("what", ["dropout", pytest.param("batchnorm", marks=pytest.mark.slow)])
def test_the_rest_of_a_model_can_be_proved(prove: Prove, what: str) -> None:
    proof = prove("train.py", what, without=(what,))
    assert proof.holds
    assert f"without {what}" in proof.facts()


def test_tails_and_micro_steps_agree(prove: Prove) -> None:
    assert prove("train.py", "tail", steps=15).holds


def test_a_plain_script_is_compared_by_the_losses_of_all_ranks(prove: Prove) -> None:
    """It prints the loss of rank 0's own samples, which differs in any case."""
    proof = prove(
        "ddp.py", "--batch-size", "16", batch_arg="--batch-size", counts=(1, 2, 4), interrupt=True
    )
    assert proof.holds
    assert proof.skipped == {
        "2 ranks, interrupted": "the script does not use paceline.session, which saves and resumes"
    }
    assert len(proof.cases[0].losses) == STEPS, "it ends after as many steps as asked for"
    assert all(each.weights is not None and each.weights < 1e-6 for each in proof.comparisons)


@pytest.mark.parametrize(
    ("args", "batch_arg", "cause"),
    [
        (("--batch-size", "16"), None, "the batch size"),
        (
            ("--batch-size", "16", "--mistake", "no average"),
            "--batch-size",
            "gradients that are not averaged",
        ),
    ],
)
def test_a_mistake_of_a_plain_script_is_named(
    prove: Prove, args: tuple[str, ...], batch_arg: str | None, cause: str
) -> None:
    assert causes(prove("ddp.py", *args, batch_arg=batch_arg)) == [cause]


@pytest.mark.parametrize(
    ("mistake", "note", "cause"),
    [
        (
            "no average",
            "the 2 ranks end with 2 different sets of weights",
            "gradients that are not averaged",
        ),
        ("same samples", "different samples than with 1 rank from step 1 on", "a wrong sampler"),
    ],
)
def test_ranks_and_samples_are_judged_though_weights_hardly_move(
    prove: Prove, mistake: str, note: str, cause: str
) -> None:
    proof = prove(
        "ddp.py",
        "--batch-size",
        "16",
        "--lr",
        "1e-9",
        "--mistake",
        mistake,
        batch_arg="--batch-size",
    )
    (found,) = proof.comparisons
    assert found.weights is not None
    assert found.weights < found.limit
    assert (found.note, causes(proof)) == (note, [cause])


def test_a_sharded_model_that_ends_early_is_compared_with_its_weights(prove: Prove) -> None:
    proof = prove("train.py", "fsdp", counts=(2, 1), steps=100)
    assert proof.holds
    assert proof.comparisons[0].weights is not None


def test_a_script_that_shows_no_loss_gets_a_clear_error(prove: Prove) -> None:
    with pytest.raises(RunError, match="shows no loss"):
        prove("ddp.py", "--mistake", "logs nothing")


def test_a_proof_that_compares_nothing_is_an_error(prove: Prove) -> None:
    with pytest.raises(RunError, match="nothing to compare"):
        prove("ddp.py", "--batch-size", "16", batch_arg="--batch-size", counts=(1,), interrupt=True)
