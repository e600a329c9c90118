"""Messages are in standard English: cause, consequence, fix.

A message is any text of three words or more in the source of the package that
is not a docstring: of an error, a warning, a note, a report or progress.
"""

import ast
from collections.abc import Iterator
import pathlib
import re

import optax_lossscale as ols

PACKAGE = pathlib.Path(ols.__file__).parent
_START = r"(?:^|[.:!?]\s+)"
# Each pattern, and words that have it.
PATTERNS = {
  r"\b[Tt](?:old|ells?|elling)\b": "the user is told.",
  _START + r"Of (?!course)": "is mapped. Of a mapped state,",
  _START
  + r"What (?!(?:is|are|does|do|to|can|should)\b.*\?)": "What was exported is",
  r"\bwhat (?:it|they|is|was|are|were|has|have|had|runs|holds)\b": "what is in",
  r"\b[Ss](?:tands?|tood|tanding)\b": "stands around",
  r"\b[Bb]esides?\b": "beside the gradients.",
  r"\bby (?:itself|themselves)\b": "clips by itself",
  r"\bof (?:its|their|your|our) own\b": "a type of its own",
  r"\b(?:[Cc]omes?|[Cc]ame|[Cc]oming) (?:down|out|back|up)\b": "comes down",
  r"\b(?:is|are|was|were|with|of|as) such\b(?! as)|\bsuch[.,;:]": "of such",
  r"\b(?:[Nn]o|[Ss]ome|[Aa]ny|[Ee]very)body\b|\b[Ww]hoever\b": "before anybody",
  r"\bbut for\b": "equal but for one array",
  r"\b(?:[Aa]new|once more|again and again|for ever)\b": "compiles anew",
  r"\b(?:without a word|in silence)\b": "skipped without a word",
  r"\b(?:is|are|was|were) (?:asked|given|handed)\b": "is given",
  r"\b[Hh]and over\b": "to hand over",
  r"\b(?:go|goes|went|going|gone) on\b": "to go on from",
  r"\bas (?:it|they) (?:is|are|was|were|stands?|stood)\b": "as it is written",
  r"\bin half\b(?! precision)": "run in half",
  r"\b[Ff](?:loors?|urthest)\b|\b[Cc]eilings?\b": "above the floor 1",
  r"\bthe very\b": "the very arrays",
  r"\b[Pp]roducts?\b": "no products in f",
  r"\bplaces?\b(?! of)": "no single place",
  r"\b[Rr]ead past\b|\b[Ll]ooked at\b": "not looked at.",
}


def find_messages(source: str) -> Iterator[tuple[int, str]]:
  """Yields the line and text of each message in a module.

  A value that is inserted into a text reads as ``{}``.
  """
  tree = ast.parse(source)
  expressions = [x for x in ast.walk(tree) if isinstance(x, ast.Expr)]
  docstrings = {node.value for node in expressions}
  todo: list[ast.AST] = [tree]
  while todo:
    node = todo.pop()
    if node in docstrings and isinstance(node, ast.Constant):
      continue
    text = get_text(node)
    if text is None:
      todo += ast.iter_child_nodes(node)
      continue
    if len(text.split()) >= 3:
      yield getattr(node, "lineno", 0), text
    # An inserted value may be a text, too.
    todo += [x for x in ast.walk(node) if isinstance(x, ast.FormattedValue)]


def get_text(node: ast.AST) -> str | None:
  """Returns the text of a string, an f-string or a sum; None of all else."""
  match node:
    case ast.Constant(value=str(text)):
      return text
    case ast.JoinedStr(values=values):
      return "".join(get_text(value) or "{}" for value in values)
    case ast.BinOp(left=left, op=ast.Add(), right=right):
      texts = get_text(left), get_text(right)
      return None if None in texts else "".join(map(str, texts))
  return None


def find_faults(text: str) -> list[str]:
  found = [re.search(pattern, text) for pattern in PATTERNS]
  return [match.group().strip() for match in found if match]


def test_no_message_has_a_discouraged_pattern():
  faults, count = [], 0
  for path in sorted(PACKAGE.rglob("*.py")):
    name = path.relative_to(PACKAGE).as_posix()
    for line, text in find_messages(path.read_text(encoding="utf-8")):
      faults += [f"{name}:{line}: {x!r} in {text!r}" for x in find_faults(text)]
      count += 1
  assert not faults, "\n".join(faults)
  assert count > 150


def test_each_pattern_is_found_in_a_planted_message():
  for pattern, message in PATTERNS.items():
    assert re.search(pattern, message).group().strip() in find_faults(message)


def test_all_messages_are_read_and_no_docstrings():
  source = '''
def f(x):
  """A docstring of several words."""
  raise ValueError(
    "x must be a number,"
    f" got x = {x!r} {'or a nested text' if x else ''}." + " Pass a number."
  )
'''
  assert sorted(find_messages(source)) == [
    (5, "x must be a number, got x = {} {}. Pass a number."),
    (6, "or a nested text"),
  ]
