"""Draws the picture of a chat in the README, from a real conversation: `python benchmarks/chat_picture.py`.

The drafter's own tokens are green, the target's are plain, as they came; the figures are those of this machine.
"""

from __future__ import annotations

import io
from pathlib import Path

from common import arguments, load_pair
from rich.console import Console
from rich.text import Text

from localspec.cli.answers import figures
from localspec.pair import Pair

OUT = Path(__file__).resolve().parents[1] / "docs" / "chat.svg"
QUESTIONS = (
    "Write a Python function that says whether a word is a palindrome.",
    "Now the same function with a docstring and a type hint.",
)


def draw(pair: Pair, predict: int) -> Console:
    """The conversation on a console that remembers what it was shown."""
    console = Console(record=True, width=92, file=io.StringIO(), force_terminal=True, highlight=False)
    chat = pair.chat()
    console.print("$ localspec chat", style="bold")
    for question in QUESTIONS:
        console.print(f"> {question}", style="bold cyan")
        answer, stream = Text(), chat.stream(question, max_tokens=predict)
        for chunk in stream:
            answer.append(chunk.text, "green" if chunk.n_accepted else "")
        console.print(answer)
        console.print(figures(stream.result.stats), style="dim")
    return console


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("-n", "--predict", type=int, default=160, help="tokens an answer")
    args = parser.parse_args()
    with load_pair(args) as pair:
        pair.generate(QUESTIONS[0], max_tokens=args.predict)  # the machine is known before anything is shown
        draw(pair, args.predict).save_svg(str(OUT), title="localspec chat")
    print(OUT)


if __name__ == "__main__":
    main()
