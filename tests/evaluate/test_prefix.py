"""Shared prefixes: every sequence is covered exactly, and MMLU costs what it should."""

from hypothesis import given, settings
from hypothesis import strategies as st

from linear_core.evaluate.offline import read_rows
from linear_core.evaluate.prefix import num_tokens, plan, shared_length

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), min_size=1, max_size=20)


def paths(nodes, before=()):
    """(row, the tokens on the way to where it ends) of every row."""
    for node in nodes:
        assert node.start == len(before) and node.tokens
        here = (*before, *node.tokens)
        yield from ((row, here) for row in node.rows)
        yield from paths(node.children, here)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(SEQUENCES, st.sampled_from([1, 3, 10**6]))
def test_the_trees_spell_every_sequence_once(sequences, min_saving):
    trees = plan(sequences, min_saving=min_saving)
    assert sorted(paths(trees)) == sorted(enumerate(sequences))
    every_prefix = {s[:n] for s in sequences for n in range(1, len(s) + 1)}
    assert len(every_prefix) <= num_tokens(trees) <= sum(map(len, sequences))
    if min_saving == 1:
        assert num_tokens(trees) == len(every_prefix)


def test_shared_length():
    assert shared_length((1, 2, 3), (1, 2, 4, 5)) == 2
    assert shared_length((1, 2), (1, 2, 4)) == 2
    assert shared_length((3,), (1,)) == 0


def test_full_mmlu_forwards_at_most_1_6_million_tokens(data_folder, smollm2):
    """14,042 five-shot prompts, 10.1M tokens in full (issue 5). Tokenisation only."""
    tokenizer = smollm2[1]
    letters = "ABCD"

    def question(row):
        choices = "".join(f"\n{letter}. {choice}" for letter, choice in zip(letters, row["choices"]))
        return f"{row['question'].strip()}{choices}\nAnswer:"

    shots = {}
    for row in read_rows(data_folder / "mmlu_dev.jsonl.gz"):
        shots.setdefault(row["subject"], []).append(f"{question(row)} {letters[row['answer']]}")
    heads = {
        subject: "The following are multiple choice questions (with answers) about "
        f"{subject.replace('_', ' ')}.\n\n" + "\n\n".join(examples)
        for subject, examples in shots.items()
    }
    rows = read_rows(data_folder / "mmlu_test.jsonl.gz")
    tails = [f"\n\n{question(row)}" for row in rows]
    head_tokens = {subject: tokenizer(head)["input_ids"] for subject, head in heads.items()}
    sequences = [(*head_tokens[row["subject"]], *tail) for row, tail in zip(rows, tokenizer(tails)["input_ids"])]
    for i in range(0, len(rows), 500):  # head and tail may be tokenised apart: this tokenizer never joins them
        assert tuple(tokenizer(heads[rows[i]["subject"]] + tails[i])["input_ids"]) == sequences[i]
    assert len(sequences) == 14_042 and sum(map(len, sequences)) > 10_000_000
    assert num_tokens(plan(sequences)) <= 1_600_000
