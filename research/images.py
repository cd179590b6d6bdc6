"""What a bounded memory costs a question about a picture that was shown long ago.

    python -m research.images train FOLDER --texts BOOK [BOOK ...]
    python -m research.images measure FOLDER --texts OTHER_BOOK

No vision model is at hand, so `train` makes one: a small encoder turns a picture of 16 x 16
patches, on which a number of four digits stands somewhere, into 256 embeddings that a language
model reads in the place of tokens. The encoder first learns to give the embedding of a digit where
a digit has its middle, and then, with the language model, to answer what the number in the picture
is after ever more text.

`measure` shows a picture and tells a number in words, goes on with a text, and asks for both. All
caches of a part have equal bytes, counted as in a 16-bit model.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx import optimizers
from mlx.utils import tree_flatten

import mlx_h2o
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits
from mlx_h2o.evaluate.facts import QUESTIONS, Fact
from mlx_h2o.evaluate.methods import FULL, OURS, WINDOW, Method, parse_method
from mlx_h2o.hosts import routing
from mlx_h2o.loading.load import EMBEDDED_MODEL

#: Digits of a number, 3 x 5 pixels each; each digit's middle lies a patch beside the last one's.
GLYPHS = (
    "111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001",
    "111100111001111", "111100111101111", "111001001001001", "111101111101111", "111101111001111",
)  # fmt: skip
COUNT, WIDTH, HEIGHT = 4, 3, 5
#: Pixels of a patch's side, and patches of a picture's side.
PATCH, SIDE = 4, 16
#: What asks for the picture's number, and what stands before and after a picture.
ASKED = "What is the number in the picture?"
#: Of measured prompts: tokens before the picture, those read at once, room for the answer.
LEAD, CHUNK, ROOM = 64, 128, 40
PINNED = ", picture pinned"
BEFORE, AFTER = "Picture:\n", "\n\n"
#: Factor on the product of what is seen with each digit's embedding, in the encoder's own training.
SHARP = 16
#: Stages of training: until this share of the time, the picture's side, tokens, prompts at once.
STAGES = ((0.35, 8, 176, 10), (0.75, 16, 384, 4), (1.0, 16, 1024, 2))


class Encoder(nn.Module):
    """The embeddings of a picture's patches, each with the patches around it."""

    def __init__(self, size: int, inner: int = 256):
        super().__init__()
        self.layers = [nn.Linear(9 * PATCH * PATCH, inner), nn.Linear(inner, inner)]
        self.out = nn.Linear(inner, size)

    def __call__(self, pixels: mx.array) -> mx.array:
        """`[B, n, size]` of pixels `[B, side, side, PATCH * PATCH]`."""
        padded, side = mx.pad(pixels, [(0, 0), (1, 1), (1, 1), (0, 0)]), pixels.shape[1]
        near = [padded[:, i : i + side, j : j + side] for i in range(3) for j in range(3)]
        x = mx.concatenate(near, axis=-1)
        for layer in self.layers:
            x = nn.relu(layer(x))
        out: mx.array = self.out(x)
        return out.reshape(x.shape[0], -1, out.shape[-1])


class Seeing(nn.Module):
    """A language model with an encoder of pictures."""

    def __init__(self, language: nn.Module):
        super().__init__()
        self.language = language
        self.encoder = Encoder(self.table(mx.array([0])).shape[-1])

    @property
    def parts(self) -> dict[str, nn.Module]:
        """Both, by the names of their files."""
        return {"encoder": self.encoder, "language": self.language}

    def table(self, tokens: mx.array) -> mx.array:
        """The embeddings of tokens."""
        of_tokens: mx.array = self.language.model.embed_tokens(tokens)
        return of_tokens

    def logits(self, hidden: mx.array) -> mx.array:
        """The logits of the language model's last states."""
        of_states: mx.array = self.language.model.embed_tokens.as_linear(hidden)
        return of_states

    def embeddings(self, tokens: mx.array, pixels: mx.array, at: int) -> mx.array:
        """Embeddings `[B, T, size]`, with the pictures in the place of the tokens from `at` on."""
        of_text, seen = self.table(tokens), self.encoder(pixels)
        end = at + seen.shape[1]
        return mx.concatenate([of_text[:, :at], seen.astype(of_text.dtype), of_text[:, end:]], 1)


def picture(number: str, side: int, rng: np.random.Generator) -> tuple[np.ndarray, list[int]]:
    """A picture's pixels `[side, side, PATCH * PATCH]`, and the patch of each digit's middle."""
    whole = side * PATCH
    pixels = rng.normal(rng.uniform(-0.5, 0.5), 0.2, (whole, whole))
    left = int(rng.integers(whole - PATCH * (COUNT - 1) - WIDTH + 1))
    top = int(rng.integers(whole - HEIGHT + 1))
    middles = []
    for i, digit in enumerate(number):
        dots = np.array([int(dot) for dot in GLYPHS[int(digit)]]).reshape(5, 3)
        x = left + PATCH * i
        pixels[top : top + HEIGHT, x : x + WIDTH] += 2 * dots
        middles.append((top + HEIGHT // 2) // PATCH * side + (x + WIDTH // 2) // PATCH)
    patches = pixels.reshape(side, PATCH, side, PATCH).swapaxes(1, 2)
    return patches.reshape(side, side, -1).astype(np.float32), middles


@dataclass(frozen=True)
class Batch:
    """Prompts with a picture each, side by side.

    Attributes:
        tokens: `[B, T]`; where the picture is, they stand for nothing.
        pixels: The pictures.
        at: Where the pictures begin.
        end: Where they end.
        kinds: `[B, T]`: 0 where nothing is to be foretold, then prose, and answers about pictures
            and about texts.
    """

    tokens: mx.array
    pixels: mx.array
    at: int
    end: int
    kinds: mx.array


NOTHING, PROSE, SEEN, TOLD = range(4)


class Prompts:
    """Prompts with a picture, a number told in words, and questions for both."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], seed: int):
        self.tokenizer, self.form = tokenizer, QUESTIONS
        self.rng, self.draws = random.Random(seed), np.random.default_rng(seed)
        self.pieces = [piece for text in texts for piece in text.split("\n\n") if piece.strip()]
        self.encoded: dict[int, list[int]] = {}
        self.before, self.after = self.encode(BEFORE), self.encode(AFTER)
        bos = tokenizer.bos_token_id
        self.first = [] if bos is None else [bos]

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def prose(self, room: int) -> list[int]:
        """Exactly so many tokens of consecutive paragraphs."""
        i, tokens = self.rng.randrange(len(self.pieces)), list[int]()
        while len(tokens) < room:
            i = (i + 1) % len(self.pieces)
            if i not in self.encoded:
                self.encoded[i] = self.encode(self.pieces[i].strip() + "\n\n")
            tokens += self.encoded[i]
        return tokens[len(tokens) - room :]

    def seen(self) -> Fact:
        """The fact that a picture shows: there is no statement of it in words."""
        number = "".join(self.rng.choice("0123456789") for _ in range(COUNT))
        return Fact("", ASKED, number)

    def told(self) -> Fact:
        """A number that is told in words."""
        while True:
            fact = self.form.fact(self.rng)
            if fact.answer.isdigit():
                return fact

    def question_and_answer(self, fact: Fact) -> tuple[list[int], list[int]]:
        """Their tokens."""
        asking = self.encode(self.form.asking.format(fact.question))
        return asking, self.encode(f" {fact.answer}{self.form.ending}")

    def story(self, told: Fact, at: int, patches: int, length: int, soon: bool) -> list[int]:
        """Tokens: prose, a picture from `at` on, prose, and in one of them what is told.

        Args:
            told: What is told, beside the picture if `soon`, else anywhere.
            at: Where the picture begins.
            patches: Tokens of the picture.
            length: Tokens in all.
            soon: Whether it is told in the last tokens before the picture, or the first after it.
        """
        statement = self.encode(told.statement + "\n\n")
        lead = at - len(self.first) - len(self.before)
        rest = length - at - patches - len(self.after)
        first = self.rng.random() < 0.5 and lead >= len(statement)
        room = (lead if first else rest) - len(statement)
        place = (room if first else 0) if soon else self.rng.randint(0, room)
        with_it = [*self.prose(place), *statement, *self.prose(room - place)]
        parts = (with_it, self.prose(rest)) if first else (self.prose(lead), with_it)
        shown = [*self.before, *[0] * patches, *self.after]
        return [*self.first, *parts[0], *shown, *parts[1]]

    def batch(self, side: int, length: int, count: int) -> Batch:
        """Prompts to learn from, with both questions answered at the end."""
        least = len(self.first) + len(self.before)
        patches = side * side
        at = least + self.rng.randrange(1 + min(200, (length - patches) // 3))
        rows, kinds, pictures = [], [], []
        for _ in range(count):
            seen, told = self.seen(), self.told()
            asked = [(SEEN, seen), (TOLD, told)]
            self.rng.shuffle(asked)
            tail, of_tail = list[int](), list[int]()
            for kind, fact in asked:
                question, answer = self.question_and_answer(fact)
                tail += question + answer
                of_tail += [NOTHING] * len(question) + [kind] * len(answer)
            row = self.story(told, at, patches, length - len(tail), soon=False)
            of_row = [PROSE] * len(row)
            of_row[at : at + patches] = [NOTHING] * patches
            rows.append(row + tail)
            kinds.append(of_row + of_tail)
            pictures.append(picture(seen.answer, side, self.draws)[0])
        return Batch(
            mx.array(rows), mx.array(np.stack(pictures)), at, at + patches, mx.array(kinds)
        )


def align(model: Seeing, prompts: Prompts, steps: int) -> None:
    """Teach the encoder a digit's embedding at the digit's middle, and a line's end elsewhere."""
    digits = [prompts.encode(digit)[-1] for digit in "0123456789"]
    targets = model.table(mx.array([*digits, prompts.encode("\n")[-1]])).astype(mx.float32)
    scale, unit = targets.var(), targets / mx.linalg.norm(targets, axis=-1, keepdims=True)
    optimizer = optimizers.AdamW(4e-3, weight_decay=0.0)

    def loss_of(encoder: Encoder, pixels: mx.array, wanted: mx.array) -> tuple[mx.array, mx.array]:
        seen, shown = encoder(pixels), wanted < 10
        logits = SHARP * seen @ unit.T
        off = ((seen - targets[wanted]) ** 2).mean(-1) / scale
        off = off + nn.losses.cross_entropy(logits, wanted)
        hits = (logits.argmax(-1) == wanted) * shown
        loss = (off * shown).sum() / shown.sum() + (off * ~shown).sum() / (~shown).sum()
        return loss, hits.sum() / shown.sum()

    step_of = nn.value_and_grad(model.encoder, loss_of)
    for step in range(steps):
        pixels, wanted = [], []
        for _ in range(32):
            number = prompts.seen().answer
            drawn, middles = picture(number, SIDE // 2, prompts.draws)
            row = [10] * (SIDE // 2) ** 2
            for middle, digit in zip(middles, number, strict=True):
                row[middle] = int(digit)
            pixels.append(drawn)
            wanted.append(row)
        arrays = mx.array(np.stack(pixels)), mx.array(wanted)
        (loss, hits), gradients = step_of(model.encoder, *arrays)
        optimizer.learning_rate = 4e-3 * min(1, (step + 1) / 20, 2 * (1 - step / steps))
        optimizer.update(model.encoder, gradients)
        mx.eval(loss, model.encoder.parameters(), optimizer.state)
        if step % 50 == 49:
            print(f"align {step + 1}: {hits.item():.0%} of digits", file=sys.stderr, flush=True)


def losses(model: Seeing, batch: Batch) -> tuple[mx.array, mx.array]:
    """What is minimised, and for each kind the share of tokens that are foretold."""
    h = model.embeddings(batch.tokens, batch.pixels, batch.at)
    hidden = model.language.model(batch.tokens, None, h)[:, batch.end : -1]
    logits = model.logits(hidden).astype(mx.float32)
    right, kinds = batch.tokens[:, batch.end + 1 :], batch.kinds[:, batch.end + 1 :]
    nats = nn.losses.cross_entropy(logits, right)
    hits = logits.argmax(-1) == right
    of_kinds = [kinds == kind for kind in (PROSE, SEEN, TOLD)]
    prose, seen, told = ((nats * of).sum() / of.sum() for of in of_kinds)
    return prose + seen + told, mx.stack([(hits * of).sum() / of.sum() for of in of_kinds])


def train(
    model: Seeing,
    prompts: Prompts,
    minutes: float,
    folder: Path,
    stages: Sequence[tuple[float, int, int, int]],
    rate: float,
) -> None:
    """Train by the clock, and save now and then."""
    rates = {"encoder": 1e-3, "language": rate}
    parts = {name: optimizers.AdamW(rate, weight_decay=0.0) for name, rate in rates.items()}
    step_of = nn.value_and_grad(model, losses)
    began, saved, step, recent = time.monotonic(), 0.0, 0, list[list[float]]()
    while (share := (time.monotonic() - began) / (60 * minutes)) < 1:
        _, side, length, count = next(s for s in stages if share < s[0] or s is stages[-1])
        (loss, hits), gradients = step_of(model, prompts.batch(side, length, count))
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        step += 1
        for name, optimizer in parts.items():
            left = min(1, (step + 1) / 50, max(0.05, 2 * (1 - share)))
            optimizer.learning_rate = rates[name] * left
            optimizer.update(getattr(model, name), gradients[name])
        mx.eval(loss, hits, model.trainable_parameters(), [o.state for o in parts.values()])
        recent.append(cast(list[float], hits.tolist()))
        if step % 25 == 0:
            prose, seen, told = np.mean(recent, axis=0)
            recent.clear()
            print(
                f"step {step}, {60 * minutes * share:.0f} s, {length} tokens: loss "
                f"{loss.item():.2f}; tokens foretold: prose {prose:.0%}, pictures {seen:.0%}, "
                f"texts {told:.0%}", file=sys.stderr, flush=True,
            )  # fmt: skip
        if time.monotonic() - saved > 60 or share > 0.99:
            save(model, folder)
            saved = time.monotonic()
    save(model, folder)


def save(model: Seeing, folder: Path) -> None:
    """Save the encoder and the language model."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in model.parts.items():
        weights = cast(dict[str, mx.array], dict(tree_flatten(part.parameters())))
        mx.save_safetensors(str(folder / f"{name}.new.safetensors"), weights)
        (folder / f"{name}.new.safetensors").replace(folder / f"{name}.safetensors")


@dataclass(frozen=True)
class Case:
    """A prompt to measure with, and its two questions.

    Attributes:
        embeddings: `[1, T, size]` of the story.
        tokens: `[1, T]`.
        asked: For the picture and for the text, the question's tokens and the answer's.
    """

    embeddings: mx.array
    tokens: mx.array
    asked: tuple[tuple[list[int], list[int]], ...]


def cases(model: Seeing, prompts: Prompts, distance: int, count: int) -> list[Case]:
    """Prompts with a picture, and a text beside it, `distance` tokens before the questions."""
    made, patches = [], SIDE * SIDE
    for _ in range(count):
        seen, told = prompts.seen(), prompts.told()
        pixels = mx.array(picture(seen.answer, SIDE, prompts.draws)[0][None])
        end = LEAD + patches + len(prompts.after)
        row = mx.array([prompts.story(told, LEAD, patches, end + distance, soon=True)])
        embeddings = model.embeddings(row, pixels, LEAD)
        mx.eval(embeddings)
        asked = tuple(prompts.question_and_answer(fact) for fact in (seen, told))
        made.append(Case(embeddings, row, asked))
    return made


def answered(model: Seeing, case: Case, cache: list[Any]) -> list[bool]:
    """Read a story through a cache, and see which of its two questions are answered right."""
    language = model.language
    for i in range(0, case.tokens.shape[1], CHUNK):
        rows = slice(i, i + CHUNK)
        mx.eval(language.model(case.tokens[:, rows], cache, case.embeddings[:, rows]))
    right = []
    for question, answer in case.asked:
        again, known = copy.deepcopy(cache), True
        for token in answer:
            logits = language(mx.array([question]), cache=again)[0, -1]
            known &= logits.argmax().item() == token
            question = [token]
        right.append(known)
    return right


def caches_of(parts: Sequence[int]) -> Iterator[Method]:
    """The caches that are compared; pins are added to those whose names say so."""
    yield Method(FULL)
    own, even = parse_method(OURS), parse_method(f"{OURS}:budgets=uniform")
    h2o = replace(parse_method("h2o:remainder=false"), label="H2O")
    for part in parts:
        for method, label in (
            (Method(WINDOW), WINDOW),
            (h2o, "H2O"),
            (even, f"{OURS}, even slots"),
            (even, f"{OURS}, even slots{PINNED}"),
            (own, f"{OURS}, a text's profile"),
            (own, f"{OURS}, a text's profile{PINNED}"),
        ):
            yield replace(method, label=label, share=1 / part)


def measure(
    model: Seeing,
    prompts: Prompts,
    distances: Sequence[int],
    parts: Sequence[int],
    count: int,
    only: Sequence[str],
) -> None:
    """Print a table: for each cache and distance the pictures and texts answered right."""
    by_distance = {distance: cases(model, prompts, distance, count) for distance in distances}
    columns = " | ".join(f"{d:,}: pictures | texts" for d in distances)
    print(f"| of the bytes | cache | KV bytes | {columns} |")
    print("|---|---|" + "---:|" * (2 * len(distances) + 1), flush=True)
    span = (LEAD, LEAD + SIDE * SIDE)
    for method in caches_of(parts):
        if only and method.label not in only:
            continue
        label, pinned = method.label.removesuffix(PINNED), method.label.endswith(PINNED)
        if method.policy is None:
            made = method
        else:
            settings = (*method.settings, *([("pins", (span,))] if pinned else []))
            made = replace(method, settings=settings)
        figures, nbytes = list[str](), 0
        for distance, of_distance in by_distance.items():
            right, context = list[list[bool]](), of_distance[0].tokens.shape[1] + ROOM
            for i, case in enumerate(of_distance):
                try:
                    cache = made.make(model.language, context)
                except ValueError:  # more pins than slots
                    break
                right.append(answered(model, case, cache))
                nbytes = bytes_in_16_bits(cache)
                print(f"{method.name}, {distance}: {i + 1} of {count}", file=sys.stderr, flush=True)
            figures += [f"{sum(known)}" for known in zip(*right, strict=True)] or ["too few"] * 2
        part = method.size or "all"
        print(
            f"| {part} | {label}{PINNED * pinned} | {nbytes:,} | {' | '.join(figures)} |",
            flush=True,
        )


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("what", choices=("train", "measure"))
    made.add_argument(
        "folder",
        type=Path,
        help="of the trained weights; training goes on from those that are there",
    )
    made.add_argument("--texts", type=Path, nargs="+", required=True)
    made.add_argument("--minutes", type=float, default=30, help="of training")
    made.add_argument("--tokens", type=int, help="of all prompts, instead of ever longer ones")
    made.add_argument("--rate", type=float, default=1e-3, help="of the language model's learning")
    made.add_argument("--align", type=int, default=1200, help="steps of the encoder's own training")
    made.add_argument("--prompts", type=int, default=12)
    made.add_argument("--distances", type=int, nargs="+", default=[500, 1200])
    made.add_argument("--only", nargs="+", default=[], help="caches, by name")
    made.add_argument("--parts", type=int, nargs="+", default=[4, 8, 16], help="of the bytes")
    return made


def main() -> None:
    """Parse and run; the table is Markdown."""
    args = parser().parse_args()
    mx.random.seed(0)
    routing.install()
    language, tokenizer = mlx_h2o.load(EMBEDDED_MODEL)
    language.set_dtype(mx.float32)
    model, texts = Seeing(language), [path.read_text() for path in args.texts]
    prompts = Prompts(tokenizer, texts, seed=args.what == "measure")
    for name, part in model.parts.items():
        if (file := args.folder / f"{name}.safetensors").exists():
            part.load_weights(str(file))
    if args.what == "train":
        align(model, prompts, args.align)
        stages = [(1.0, SIDE, args.tokens, 2)] if args.tokens else STAGES
        train(model, prompts, args.minutes, args.folder, stages, args.rate)
        return
    measure(model, prompts, args.distances, args.parts, args.prompts, args.only)


if __name__ == "__main__":
    main()
