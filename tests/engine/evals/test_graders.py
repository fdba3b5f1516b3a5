"""The corpus of answer forms with the verdict each deserves: right answers count, and nothing is guessed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.errors import NotReadyError
from deepinfer_engine.evals import grade as grading
from deepinfer_engine.evals.choice import listed, shown_order
from deepinfer_engine.evals.extract import final_answer
from deepinfer_engine.evals.grade import check_gold, grade
from deepinfer_engine.evals.value import one_number

# (answer text, gold, verdict)
INTEGER = [
    # plain boxes
    (r"So \boxed{33}.", "33", "correct"),
    (r"So $\boxed{34}$.", "33", "wrong"),
    (r"\boxed{033}", "33", "correct"),
    (r"\boxed{33}", "033", "correct"),
    (r"\boxed{0}", "000", "correct"),
    (r"\boxed {42}", "42", "correct"),
    (r"\boxed{ 42 }", "42", "correct"),
    (r"\fbox{42}", "42", "correct"),
    (r"\boxed 7", "7", "correct"),
    (r"\boxed{42}.", "42", "correct"),
    (r"\[\boxed{42}\]", "42", "correct"),
    (r"\(\boxed{42}\)", "42", "correct"),
    (r"**\boxed{42}**", "42", "correct"),
    (r"\boxed{$42$}", "42", "correct"),
    (r"\boxed{42.}", "42", "correct"),
    (r"\boxed{{42}}", "42", "correct"),
    (r"\boxed{(42)}", "42", "correct"),
    (r"\boxed{\boxed{42}}", "42", "correct"),
    # an open box at the end, an empty one behind the answer
    (r"The result is \boxed{42", "42", "correct"),
    (r"The result is $\boxed{42$", "42", "correct"),
    ("The result is \\boxed{42\nand more text that goes on", "42", "unparsed"),
    (r"\boxed{42} and then \boxed{}", "42", "correct"),
    (r"\boxed{42} \boxed{ }", "42", "correct"),
    (r"\boxed{}", "42", "unparsed"),
    # markup by value
    (r"\boxed{\text{42}}", "42", "correct"),
    (r"\boxed{\mathbf{42}}", "42", "correct"),
    (r"\boxed{\mathrm{42}}", "42", "correct"),
    (r"\boxed{\textbf{42}}", "42", "correct"),
    (r"\boxed{\boldsymbol{42}}", "42", "correct"),
    (r"\boxed{\text{\textbf{42}}}", "42", "correct"),
    (r"\boxed{\displaystyle 42}", "42", "correct"),
    (r"\boxed{\left(42\right)}", "42", "correct"),
    (r"\boxed{\,42\,}", "42", "correct"),
    (r"\boxed{42\!}", "42", "correct"),
    (r"\boxed{\bf 42}", "42", "correct"),
    # value
    (r"\boxed{42.0}", "42", "correct"),
    (r"\boxed{42.000}", "42", "correct"),
    (r"\boxed{42.5}", "42", "wrong"),
    (r"\boxed{\dfrac{84}{2}}", "42", "correct"),
    (r"\boxed{\frac{84}{2}}", "42", "correct"),
    (r"\boxed{\tfrac{84}2}", "42", "correct"),
    (r"\boxed{\frac{42}{1}}", "42", "correct"),
    (r"\boxed{\frac{85}{2}}", "42", "wrong"),
    (r"\boxed{84/2}", "42", "correct"),
    (r"\boxed{\frac{42}{0}}", "42", "unparsed"),
    (r"\boxed{1{,}234}", "1234", "correct"),
    (r"\boxed{1,234}", "1234", "correct"),
    (r"\boxed{1\,234}", "1234", "correct"),
    (r"\boxed{+42}", "42", "correct"),
    (r"\boxed{-42}", "42", "wrong"),
    ("\\boxed{\u221242}", "-42", "correct"),
    ("\\boxed{\uff14\uff12}", "42", "correct"),
    ("\\boxed{\uff10\uff13\uff13}", "33", "correct"),
    ("\\boxed{4\u00b2}", "42", "unparsed"),
    ("\\boxed{\u0664\u0662}", "42", "unparsed"),
    # equations and units
    (r"\boxed{m+n=42}", "42", "correct"),
    (r"\boxed{x = 42}", "42", "correct"),
    (r"\boxed{a = 84/2 = 42}", "42", "correct"),
    (r"\boxed{N \equiv 42}", "42", "unparsed"),
    (r"\boxed{x > 42}", "42", "unparsed"),
    (r"\boxed{x \le y = 42}", "42", "unparsed"),
    (r"\boxed{41 = 42}", "42", "unparsed"),
    (r"\boxed{x=3, y=42}", "42", "unparsed"),
    (r"\boxed{204\text{ minutes}}", "204", "correct"),
    (r"\boxed{204 \text{ cm}^2}", "204", "correct"),
    (r"\boxed{204 minutes}", "204", "correct"),
    (r"\boxed{45^\circ}", "45", "correct"),
    (r"\boxed{45^{\circ}}", "45", "correct"),
    ("\\boxed{45\u00b0}", "45", "correct"),
    (r"\boxed{42 million}", "42", "unparsed"),
    (r"\boxed{42 mod 1000}", "42", "unparsed"),
    (r"\boxed{42\%}", "42", "unparsed"),
    # two numbers, expressions, prose
    (r"\boxed{4 2}", "42", "unparsed"),
    (r"\boxed{33, 34}", "33", "unparsed"),
    (r"\boxed{33 or 34}", "34", "unparsed"),
    (r"\boxed{33 \text{ or } 34}", "34", "unparsed"),
    (r"\boxed{33\text{ and }34}", "34", "unparsed"),
    (r"\boxed{\{33,34\}}", "33", "unparsed"),
    (r"\boxed{33} or \boxed{34}", "34", "unparsed"),
    (r"$\boxed{33}$, $\boxed{34}$", "34", "unparsed"),
    (r"\boxed{33} or \boxed{33}", "33", "correct"),
    (r"$\boxed{33} \text{ or } \boxed{34}$", "34", "unparsed"),
    (r"\boxed{33}. The rest is done. \boxed{34}", "34", "correct"),
    (r"\boxed{40+2}", "42", "unparsed"),
    (r"\boxed{2 \cdot 21}", "42", "unparsed"),
    (r"\boxed{42x}", "42", "unparsed"),
    (r"\boxed{4!}", "24", "unparsed"),
    (r"\boxed{2^5}", "32", "unparsed"),
    (r"\boxed{\sqrt{1764}}", "42", "unparsed"),
    (r"\boxed{\text{no solution}}", "42", "unparsed"),
    (r"\boxed{forty-two}", "42", "unparsed"),
    (r"\boxed{1,23}", "123", "unparsed"),
    (r"\boxed{0x2A}", "42", "unparsed"),
    (r"\boxed{4e1}", "40", "unparsed"),
    # the last box counts, thinking does not
    (r"First \boxed{12}. Checking again: \boxed{42}.", "42", "correct"),
    (r"First \boxed{42}. Checking again: \boxed{12}.", "42", "wrong"),
    (r"<think>\boxed{42}</think> I could not finish.", "42", "unparsed"),
    (r"<think>\boxed{41}</think> So \boxed{42}", "42", "correct"),
    (r"\boxed{41} </think> So \boxed{42}", "42", "correct"),
    (r"<think>\boxed{42} and so on", "42", "unparsed"),
    # answer lines
    ("Answer: 33", "33", "correct"),
    ("ANSWER: 33.", "33", "correct"),
    ("**Answer:** 33", "33", "correct"),
    ("**Final Answer: 33**", "33", "correct"),
    ("The answer is 33.", "33", "correct"),
    ("The final answer is $33$. I hope it is correct.", "33", "correct"),
    ("The answer is: 33", "33", "correct"),
    ("The answer = 33", "33", "correct"),
    ("Answer\uff1a33", "33", "correct"),
    ("\u7b54\u6848\uff1a33", "33", "correct"),
    ("The answer is 12. No: the answer is 33.", "33", "correct"),
    ("Answer: m+n = 33", "33", "correct"),
    ("Answer: 33 or 34", "33", "unparsed"),
    ("The answer is not 33", "33", "unparsed"),
    ("The answer is 33.5", "33", "wrong"),
    ("Answer:\n\nThat is hard to say.", "33", "unparsed"),
    # the whole text, and prose
    ("33", "33", "correct"),
    (" 033 \n", "33", "correct"),
    ("17+25=42", "42", "correct"),
    ("46-91=-45", "-45", "correct"),
    ("**42**", "42", "correct"),
    ("There are 42 of them.", "42", "unparsed"),
    ("We get 33, then 42", "42", "unparsed"),
    ("", "42", "unparsed"),
    ("   ", "42", "unparsed"),
    ("I do not know that. I can only add and subtract small numbers.", "42", "unparsed"),
]

NUMBER = [
    (r"\boxed{18}", "18", "correct"),
    (r"\boxed{\$18}", "18", "correct"),
    (r"\boxed{\$18.00}", "18", "correct"),
    ("#### 18", "18", "correct"),
    ("6 + 12 = 18\n#### 18", "18", "correct"),
    (r"\boxed{20\%}", "20", "correct"),
    (r"\boxed{70,000 dollars}", "70000", "correct"),
    (r"\boxed{2.5}", "2.50", "correct"),
    (r"\boxed{18 eggs and 4 hens}", "18", "unparsed"),
    ("\\boxed{\u20ac18}", "18", "correct"),
]

CHOICES = ("10 eV", "A strong acid", "5 A of current", "none of these")
CHOICE = [
    (r"\boxed{C}", "correct"),
    (r"\boxed{c}", "correct"),
    (r"\boxed{(C)}", "correct"),
    (r"\boxed{\text{C}}", "correct"),
    (r"\boxed{\textbf{(C)}}", "correct"),
    (r"\boxed{\mathrm{C}}", "correct"),
    (r"\boxed{C.}", "correct"),
    (r"\boxed{C) 5 A of current}", "correct"),
    (r"\boxed{\text{C: 5 A of current}}", "correct"),
    (r"\boxed{5 A of current}", "correct"),
    (r"\boxed{D}", "wrong"),
    (r"\boxed{10 eV}", "wrong"),
    (r"\boxed{A}", "wrong"),
    ("Answer: C", "correct"),
    ("**Answer: C**", "correct"),
    ("Answer: (c)", "correct"),
    ("The correct answer is (C).", "correct"),
    ("The answer is C.", "correct"),
    ("The answer is C because the others are too small.", "correct"),
    ("The answer is option C.", "correct"),
    ("The correct answer is **C**: 5 A of current.", "correct"),
    ("C", "correct"),
    ("(C)", "correct"),
    ("The answer is A strong acid.", "unparsed"),
    ("The answer is a guess.", "unparsed"),
    ("Answer: a", "unparsed"),
    (r"\boxed{A or C}", "unparsed"),
    (r"\boxed{B, C}", "unparsed"),
    (r"\boxed{C and D}", "unparsed"),
    (r"\boxed{C} or \boxed{D}", "unparsed"),
    ("The answer is C or D", "unparsed"),
    ("Answer: (C) or (D)", "unparsed"),
    ("Answer: C/D", "unparsed"),
    (r"\boxed{E}", "unparsed"),
    (r"\boxed{Carbon}", "unparsed"),
    ("A large current flows through it, I think.", "unparsed"),
    ("It is hard to decide between A and C.", "unparsed"),
]

JSON = [
    ('{"a": 1, "b": [2, 3]}', "correct"),
    ('{"b": [2, 3], "a": 1}', "correct"),
    ('```json\n{"a": 1, "b": [2, 3]}\n```', "correct"),
    ('{"a": 1, "b": [3, 2]}', "wrong"),
    ('{"a": "1", "b": [2, 3]}', "wrong"),
    ('{"a": 1}', "wrong"),
    ('Here it is: {"a": 1, "b": [2, 3]}', "unparsed"),
    ('{"a": 1, "a": 1, "b": [2, 3]}', "unparsed"),
    ('{"a": NaN}', "unparsed"),
    ("", "unparsed"),
]

MATH = [
    (r"\boxed{\frac{\pi}{2}}", r"\frac{\pi}{2}", "correct"),
    (r"\boxed{\dfrac{\pi}{2}}", r"\frac{\pi}{2}", "correct"),
    (r"\boxed{q - p}", "p - q", "wrong"),
    (r"\boxed{-q + p}", "p - q", "correct"),
    (r"\boxed{0.5}", r"\frac{1}{2}", "correct"),
    (r"\boxed{(3, \pi/2)}", r"\left( 3, \frac{\pi}{2} \right)", "correct"),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", "correct"),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", "correct"),
    (r"\boxed{x^2+2x+1}", r"(x+1)^2", "correct"),
    (r"\boxed{3}", "4", "wrong"),
    (r"\boxed{\text{I do not know}}", "4", "unparsed"),
    ("It may be four.", "4", "unparsed"),
]


def test_the_corpus_is_large_enough():
    assert len(INTEGER) + len(NUMBER) + len(CHOICE) + len(JSON) + len(MATH) >= 120
    assert len(INTEGER) >= 100


@pytest.mark.parametrize(("text", "gold", "verdict"), INTEGER)
def test_integer(text: str, gold: str, verdict: str):
    assert grade("integer", text, gold).outcome == verdict


@pytest.mark.parametrize(("text", "gold", "verdict"), NUMBER)
def test_number(text: str, gold: str, verdict: str):
    assert grade("number", text, gold).outcome == verdict


@pytest.mark.parametrize(("text", "verdict"), CHOICE)
def test_choice(text: str, verdict: str):
    assert grade("choice", text, "5 A of current", CHOICES, 2).outcome == verdict


@pytest.mark.parametrize(("text", "verdict"), JSON)
def test_json(text: str, verdict: str):
    assert grade("json", text, '{"a": 1, "b": [2, 3]}').outcome == verdict


@pytest.mark.parametrize(("text", "gold", "verdict"), MATH)
def test_math(text: str, gold: str, verdict: str):
    pytest.importorskip("math_verify", reason="math-verify is not installed (extra eval)")
    assert grade("math", text, gold).outcome == verdict


def test_math_without_its_library_is_refused_with_the_install_line(monkeypatch: pytest.MonkeyPatch):
    def absent(name: str):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(grading.importlib, "import_module", absent)
    with pytest.raises(NotReadyError) as caught:
        grading.require_grader("math")
    assert caught.value.exit_code == 3
    assert caught.value.hint == "pip install 'deepinfer-cli[eval]'"


@given(st.integers(-(10**6), 10**6), st.sampled_from(["{}", "${}$", "\\text{{{}}}", " {} ", "x={}", "**{}**", "{}."]))
def test_a_number_keeps_its_value_in_any_wrapping(number: int, wrapping: str):
    assert one_number(wrapping.format(number)) == number


@given(st.text(alphabet="0123456789{}\\$,.=/+-orandbx ()frac text^", max_size=30))
def test_no_text_breaks_the_extractor(text: str):
    for shape in (text, f"\\boxed{{{text}}}", f"Answer: {text}"):
        assert grade("integer", shape, "7").outcome in ("correct", "wrong", "unparsed")
        assert grade("choice", shape, "b", ("a", "b", "c", "d"), 1).outcome in ("correct", "wrong", "unparsed")


@given(st.integers(0, 999), st.integers(0, 999))
def test_two_different_numbers_are_never_an_answer(a: int, b: int):
    if a != b:
        for joint in (" or ", ", ", " ", " and ", "; ", "\\text{ or }", "\\quad "):
            assert one_number(f"{a}{joint}{b}") is None


def test_looping_models_cost_no_time_and_break_nothing():
    loops = (
        "\\boxed{" * 20_000 + "7" + "}" * 20_000,
        "The answer is " * 50_000 + "7",
        "\\boxed{" + "9" * 100_000 + "}",
        "Answer: " + "9" * 100_000,
        "\\boxed{" * 50_000,
        "{" * 100_000 + "\\boxed{7}",
    )
    started = time.monotonic()
    found = [grade("integer", text, "7").outcome for text in loops]
    assert found == ["unparsed", "correct", "unparsed", "unparsed", "unparsed", "correct"]
    assert all(grade("choice", text, "x", ("x", "y"), 0).outcome != "correct" for text in loops)
    assert grade("json", "[" * 100_000, "{}").outcome == "unparsed"
    assert grade("json", "9" * 100_000, "{}").outcome == "unparsed"
    assert time.monotonic() - started < 20


def test_box_goes_before_line_and_line_before_whole():
    assert final_answer("Answer: 1\n\\boxed{2}").how == "box"
    assert final_answer("2\nAnswer: 1").how == "line"
    assert final_answer("2").how == "whole"
    assert final_answer("It is two.\nPerhaps.").how == "none"


def test_gold_answers_that_nothing_can_meet_are_refused():
    assert check_gold("integer", "33") is None
    assert check_gold("integer", "1/2") == "is not an integer"
    assert check_gold("integer", "soon") == "is not a number"
    assert check_gold("number", "2.5") is None
    assert "JSON" in (check_gold("json", "{") or "")


def test_choices_are_shuffled_by_seed_and_question_only():
    orders = {shown_order("q1", 4, seed) for seed in range(200)}
    assert len(orders) == 24
    assert shown_order("q1", 4, 7) == shown_order("q1", 4, 7)
    first = [shown_order(f"q{i}", 4, 0).index(0) for i in range(2000)]
    assert all(400 < first.count(p) < 600 for p in range(4)), "the right choice must not favour a position"
    assert listed(["x", "y"]) == "(A) x\n(B) y"
