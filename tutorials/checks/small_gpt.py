"""The small GPT of lesson 14, and the text that it learns: sums in words, made by rules."""

import random

import torch

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NUMBERS += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"]
ALPHABET = " .abcdefghijklmnopqrstuvwxyz"


def sums(count, seed):
    """Text of `count` sums, such as "three plus four is seven. "."""
    draw = random.Random(seed)
    pairs = [(draw.randrange(10), draw.randrange(10)) for _ in range(count)]
    return "".join(f"{NUMBERS[a]} plus {NUMBERS[b]} is {NUMBERS[a + b]}. " for a, b in pairs)


def encode(text):
    """The characters' numbers."""
    return torch.tensor([ALPHABET.index(character) for character in text])


class Block(torch.nn.Module):
    """Attention to the characters before, then a feed-forward network; each is added to its input."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.attention = torch.nn.LayerNorm(width), torch.nn.Linear(width, 3 * width)
        self.projection, self.norm_2 = torch.nn.Linear(width, width), torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        parts = self.attention(self.norm_1(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm_2(x))))


class SmallGPT(torch.nn.Module):
    """Predicts the next character of a text."""

    def __init__(self, depth=4, width=64, heads=4, longest=64):
        super().__init__()
        torch.manual_seed(0)  # the same on every rank
        self.characters = torch.nn.Embedding(len(ALPHABET), width)
        self.positions = torch.nn.Embedding(longest, width)
        self.blocks = torch.nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, len(ALPHABET))
        self.word_head = torch.nn.Linear(width, 16384)  # of an experiment that predicted whole words

    def forward(self, tokens):
        x = self.characters(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))
